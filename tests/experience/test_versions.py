"""`versions.jsonl`: written by its log, read back, and every way in which a line can lie.

Not covered: that the digests are those of the live weights (tests/reshard, tests/launch).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest
from megarl.experience.versions import VERSIONS_FILE, VersionLog, Versions, VersionsError

MANIFEST = WeightManifest(
    (
        TensorEntry("model.norm.weight", (4,), "float32", 2**64 - 1),
        TensorEntry("lm_head.weight", (2, 4), "bfloat16", 0),
    )
)
NEXT = WeightManifest((replace(MANIFEST.tensors[0], digest=7), MANIFEST.tensors[1]))
FIRST = PolicyVersion("run", 0, 0, MANIFEST.hash, "sha256:t", "sha256:m")
SECOND = replace(FIRST, optimizer_step=2, weight_manifest_hash=NEXT.hash)
REFERENCE = replace(FIRST, role="reference")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Committed, loaded, committed with all steps skipped, committed and loaded again."""
    log = VersionLog(tmp_path)
    log.committed(0, FIRST, MANIFEST)
    log.committed(0, REFERENCE, MANIFEST)
    log.loaded(0, FIRST, MANIFEST, replicas=2)
    log.committed(0, FIRST, MANIFEST)
    log.loaded(1, FIRST, MANIFEST, replicas=2)
    log.committed(1, SECOND, NEXT)
    log.loaded(1, SECOND, NEXT, replicas=2)
    log.close()
    return tmp_path


def test_the_lines_are_as_declared(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / VERSIONS_FILE).read_text().splitlines()]
    tensors = [
        ["lm_head.weight", [2, 4], "bfloat16", "0x0"],
        ["model.norm.weight", [4], "float32", "0xffffffffffffffff"],
    ]
    assert lines[0] == {
        "kind": "version",
        "id": FIRST.id,
        "iteration": 0,
        "run_id": "run",
        "optimizer_step": 0,
        "update_attempt": 0,
        "weight_manifest_hash": MANIFEST.hash,
        "tokenizer_hash": "sha256:t",
        "model_config_hash": "sha256:m",
        "role": "actor",
        "tensors": tensors,
    }
    assert lines[2] == {
        "kind": "loaded",
        "id": FIRST.id,
        "iteration": 0,
        "side": "rollout",
        "weight_manifest_hash": MANIFEST.hash,
        "tensors": tensors,
        "replicas": 2,
    }


def test_an_id_resolves_to_its_version_and_weights(folder: Path) -> None:
    versions = Versions.read(folder)
    assert list(versions.committed) == [FIRST.id, REFERENCE.id, SECOND.id]
    first = versions.resolve(FIRST.id)
    assert (first.version, first.manifest) == (FIRST, MANIFEST)
    assert (first.iterations, first.lines) == ((0, 0), (1, 4))
    assert versions.resolve(SECOND.id).manifest == NEXT
    assert [(loaded.id, loaded.iteration) for loaded in versions.loaded] == [
        (FIRST.id, 0),
        (FIRST.id, 1),
        (SECOND.id, 1),
    ]
    assert versions.loaded[2].manifest == NEXT and versions.loaded[2].replicas == 2
    assert not versions.torn


def test_an_unknown_id_is_refused(folder: Path) -> None:
    with pytest.raises(VersionsError, match=f"{VERSIONS_FILE}: no version 'abc'"):
        Versions.read(folder).resolve("abc")
    with pytest.raises(VersionsError, match="No such file"):
        Versions.read(folder / "elsewhere")


def test_other_ranks_write_nothing_and_other_weights_are_refused(tmp_path: Path) -> None:
    log = VersionLog(None)
    log.committed(0, FIRST, MANIFEST)
    log.loaded(0, FIRST, MANIFEST, 1)
    log.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(VersionsError, match=r"actor@0.0 .* is not of the weights sha256:"):
        log.committed(0, FIRST, NEXT)


def test_a_torn_last_line_is_left_out(folder: Path) -> None:
    path = folder / VERSIONS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    versions = Versions.read(folder)
    assert versions.torn and len(versions.loaded) == 2


def _set(number: int, **changes) -> Callable[[list[dict]], None]:
    return lambda lines: lines[number - 1].update(changes)


def _digest(number: int, digest: str) -> Callable[[list[dict]], None]:
    def change(lines: list[dict]) -> None:
        lines[number - 1]["tensors"][0][3] = digest

    return change


def _other_weights_loaded(lines: list[dict]) -> None:
    lines[2] |= {key: lines[6][key] for key in ("tensors", "weight_manifest_hash")}


@pytest.mark.parametrize(
    "corrupt, told",
    [
        (_set(1, optimizer_step=1), f":1: id {FIRST.id}, but its own fields hash to "),
        (_set(1, id="0" * 12), ":1: id 000000000000, but its own fields hash to " + FIRST.id),
        (_set(6, run_id="other"), f":6: id {SECOND.id}, but its own fields hash to "),
        (_set(4, tokenizer_hash="x"), f":4: version {FIRST.id} has another tokenizer_hash than in"),
        (_digest(4, "0x1"), f":4: version {FIRST.id} has another tensors than in line 1"),
        (_digest(1, "0x1"), f":1: version {FIRST.id}: its tensors hash to sha256:"),
        (_digest(3, "0x1"), f":3: version {FIRST.id}: its tensors hash to sha256:"),
        (_set(6, weight_manifest_hash="sha256:w"), f":6: id {SECOND.id}, but its own fields"),
        (_other_weights_loaded, f":3: the generator did not hold version {FIRST.id}: lm_head"),
        (_set(3, id="abc"), ":3: version abc was loaded before it was committed"),
        (lambda lines: lines.pop(5), f":6: version {SECOND.id} was loaded before it was committed"),
        (_set(2, kind="checkpoint"), ":2: kind 'checkpoint', not version or loaded"),
        (lambda lines: lines[1].pop("role"), ":2: the line has no 'role'"),
        (lambda lines: lines[2].pop("tensors"), ":3: the line has no 'tensors'"),
        (_set(6, tensors=[["a", [1], "float32"]]), ":6: not enough values"),
        (_digest(6, "many"), ":6: invalid literal"),
        (_set(2, optimizer_step="0"), ":2: "),
    ],
)
def test_a_line_that_lies_is_named(folder: Path, corrupt: Callable, told: str) -> None:
    path = folder / VERSIONS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    corrupt(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(VersionsError) as error:
        Versions.read(folder)
    assert told in str(error.value)
