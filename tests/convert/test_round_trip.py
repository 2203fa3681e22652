"""HF → megatron → HF gives the bytes that were there; layouts, dtypes, companions, manifests.

The oracle of equality is safetensors itself. Not covered: that megatron reads what is written
(test_megatron.py), damage and refusals (test_refusals.py).
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.convert.manifest import read_manifest
from tests.convert.models import (
    FAMILIES,
    INDEX,
    MOE,
    convert,
    make,
    nothing_left,
    same_bytes,
    tensors_in,
)

LAYOUTS = ([], ["--tp", 2], ["--tp", 2, "--pp", 2], ["--pp", 2, "--stage-layers", 1, 3])
EXPERT_LAYOUTS = ([], ["--tp", 2, "--ep", 2], ["--ep", 4, "--expert-tp", 1])
BF16 = torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_bytes_come_back(tmp_path, family: str, dtype: torch.dtype) -> None:
    source = make(tmp_path / "hf", family, dtype, num_hidden_layers=4)
    for number, layout in enumerate(EXPERT_LAYOUTS if family in MOE else LAYOUTS):
        out, back = tmp_path / f"m{number}", tmp_path / f"b{number}"
        assert convert("hf-to-megatron", source, out, *layout) == 0
        assert convert("megatron-to-hf", out, back) == 0
        assert same_bytes(tensors_in(source), tensors_in(back))
        assert json.loads((back / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (back / name).read_bytes() == (source / name).read_bytes()
        manifests = [read_manifest(folder)[1] for folder in (out, back)]
        assert manifests[0].hash == manifests[1].hash
        assert convert("verify", source, out) == convert("verify", back, out) == 0


def test_many_files_in_and_out(tmp_path) -> None:
    source = make(tmp_path / "hf", "qwen2", tied=True)
    tensors = tensors_in(source)
    names = sorted(tensors)
    half = len(names) // 2
    (source / "model.safetensors").unlink()
    weight_map = {}
    for file, part in (("a.safetensors", names[:half]), ("b.safetensors", names[half:])):
        save_file({name: tensors[name] for name in part}, source / file)
        weight_map |= dict.fromkeys(part, file)
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert convert("hf-to-megatron", source, tmp_path / "m", "--tp", 2) == 0
    assert convert("megatron-to-hf", tmp_path / "m", tmp_path / "b", "--max-file-bytes", 40000) == 0
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 3
    assert (tmp_path / "b" / INDEX).is_file()
    assert same_bytes(tensors, tensors_in(tmp_path / "b"))


def test_a_tied_copy_and_derived_buffers_are_left_out(tmp_path) -> None:
    source = make(tmp_path / "hf", "llama", tied=True)
    tensors = load_file(source / "model.safetensors")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    copy["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    save_file(tensors | copy, source / "model.safetensors")
    assert convert("hf-to-megatron", source, tmp_path / "m") == 0
    assert convert("megatron-to-hf", tmp_path / "m", tmp_path / "b") == 0
    assert same_bytes(tensors, tensors_in(tmp_path / "b"))


def test_a_cast_is_torchs_and_told(tmp_path) -> None:
    source = make(tmp_path / "hf", "llama")
    out = tmp_path / "m"
    assert convert("hf-to-megatron", source, out, "--tp", 2, "--dtype", "bfloat16") == 0
    fields, manifest = read_manifest(out)
    assert fields["cast"] == ["float32 to bfloat16"]
    assert {entry.dtype for entry in manifest.tensors} == {"bfloat16"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert("megatron-to-hf", out, tmp_path / "b") == 0
    cast = {name: tensor.to(BF16) for name, tensor in tensors_in(source).items()}
    assert same_bytes(cast, tensors_in(tmp_path / "b"))
    assert convert("verify", source, out) == 1
    assert convert("verify", source, out, "--dtype", "bfloat16") == 0
    assert convert("megatron-to-hf", out, tmp_path / "w", "--dtype", "float32") == 0
    wide = {name: tensor.float() for name, tensor in cast.items()}
    assert same_bytes(wide, tensors_in(tmp_path / "w"))


def test_reshard_keeps_every_tensor_and_cuts_the_files(tmp_path, capsys) -> None:
    source = make(tmp_path / "hf", "qwen3", num_hidden_layers=4)
    assert convert("hf-to-megatron", source, tmp_path / "a", "--tp", 2) == 0
    assert convert("reshard", tmp_path / "a", tmp_path / "b", "--pp", 2, "--virtual-stages", 2) == 0
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 2
    assert convert("verify", tmp_path / "a", tmp_path / "b") == 0
    capsys.readouterr()
    assert convert("inspect", tmp_path / "b", "--json", "--tensors") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"] | {"ranks": 2, "pp": 2, "virtual_stages": 2} == facts["layout"]
    told = {name: (tuple(shape), dtype) for name, shape, dtype, _ in facts["tensors"]}
    assert told == {
        name: (tuple(tensor.shape), "float32") for name, tensor in tensors_in(source).items()
    }
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors_in(source).values())
    assert facts["weight_manifest_hash"] == read_manifest(tmp_path / "a")[1].hash


def test_verify_names_every_tensor_that_differs(tmp_path, capsys) -> None:
    a = make(tmp_path / "a", "llama")
    b = make(tmp_path / "b", "llama")
    tensors = load_file(b / "model.safetensors")
    changed = ("model.norm.weight", "model.layers.1.mlp.down_proj.weight")
    for name in changed:
        tensors[name].view(-1)[3] += 1
    save_file(tensors, b / "model.safetensors")
    assert convert("verify", a, b) == 1
    told = capsys.readouterr().out
    assert all(f"{name}: 0x" in told for name in changed)
    assert f"2 of {len(tensors)} tensors differ" in told


def test_models_of_mixed_dtypes_are_refused_unless_cast(tmp_path, capsys) -> None:
    source = make(tmp_path / "hf", "llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(BF16)
    save_file(tensors, source / "model.safetensors")
    assert convert("hf-to-megatron", source, tmp_path / "m") == 2
    told = capsys.readouterr().err
    assert "model.norm.weight is bfloat16" in told and "--dtype" in told
    assert nothing_left(tmp_path / "m")
    assert convert("hf-to-megatron", source, tmp_path / "m", "--dtype", "bfloat16") == 0


def test_a_value_head_comes_along(tmp_path) -> None:
    source = make(tmp_path / "hf", "qwen2", task="TokenClassification")
    assert "score.weight" in tensors_in(source)
    assert convert("hf-to-megatron", source, tmp_path / "m", "--tp", 2) == 0
    assert convert("megatron-to-hf", tmp_path / "m", tmp_path / "b") == 0
    assert same_bytes(tensors_in(source), tensors_in(tmp_path / "b"))
