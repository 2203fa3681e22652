"""Versions and manifests are their content. The digests themselves are tests/reshard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.contracts.hashes import bytes_hash, canonical_json, contract_hash, file_hash, short_id
from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest

A = TensorEntry("a.weight", (2, 3), "float32", 11)
B = TensorEntry("b.weight", (4,), "float32", 22)
VERSION = PolicyVersion("run", 3, 0, "sha256:w", "sha256:t", "sha256:m")


def test_a_manifest_does_not_depend_on_the_order_it_was_gathered_in() -> None:
    assert WeightManifest((A, B)).hash == WeightManifest((B, A)).hash
    assert WeightManifest((B, A)).tensors == (A, B)
    assert WeightManifest((A, B)).differences(WeightManifest((B, A))) == []


@pytest.mark.parametrize(
    "change", [{"digest": 12}, {"dtype": "bfloat16"}, {"shape": (3, 2)}, {"name": "c.weight"}]
)
def test_any_change_of_a_tensor_changes_the_hash(change) -> None:
    assert WeightManifest((A, B)).hash != WeightManifest((replace(A, **change), B)).hash


def test_differences_name_the_tensors() -> None:
    lines = WeightManifest((A, B)).differences(
        WeightManifest((replace(A, digest=0xFF), replace(B, name="c.weight")))
    )
    assert lines == [
        "a.weight: float32[2, 3] digest 0xb against float32[2, 3] digest 0xff",
        "b.weight: missing",
        "c.weight: unexpected",
    ]


def test_a_tensor_has_one_owner() -> None:
    with pytest.raises(ValueError, match=r"twice: \['a.weight'\]"):
        WeightManifest((A, B, replace(A, digest=1)))


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"optimizer_step": 4},
        {"update_attempt": 1},
        {"weight_manifest_hash": "sha256:x"},
        {"tokenizer_hash": "sha256:x"},
        {"model_config_hash": "sha256:x"},
        {"role": "critic"},
    ],
)
def test_a_versions_id_is_all_of_its_content(change) -> None:
    assert replace(VERSION).id == VERSION.id and len(VERSION.id) == 12
    assert replace(VERSION, **change).id != VERSION.id


def test_an_incomplete_version_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokenizer_hash"):
        replace(VERSION, tokenizer_hash="")
    with pytest.raises(ValueError, match="negative"):
        replace(VERSION, update_attempt=-1)


def test_hashes_are_canonical(tmp_path) -> None:
    assert canonical_json({"b": 1, "a": [1.5, None]}) == '{"a":[1.5,null],"b":1}'
    assert contract_hash({"b": 1, "a": 2}) == contract_hash({"a": 2, "b": 1})
    with pytest.raises(ValueError):
        canonical_json(float("nan"))
    # sha256 of "{}" and blake3 of nothing, as published.
    assert contract_hash({}).startswith("sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e83")
    assert bytes_hash([]).startswith("blake3:af1349b9f5f9a1a6a0404dea36dcc949")
    assert short_id("sha256:44136fa355b3678a") == "44136fa355b3"
    (tmp_path / "f").write_bytes(b"abc")
    assert file_hash(tmp_path / "f") == bytes_hash([b"a", b"bc"])
