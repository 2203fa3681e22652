"""A config's numbers: `verify` names those that differ, a folder is held to those it was written
with, weights to the dtype they fit in.

Not covered: a training checkpoint that a run wrote (test_megatron.py); here its position is.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.models import convert, make, nothing_left, set_config

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.fixture(scope="module")
def megatron(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("megatron") / "m"
    assert convert("hf-to-megatron", model, out, "--dtype", "bfloat16") == 0
    return out


def _with(folder: Path, copy: Path, **numbers: object) -> Path:
    shutil.copytree(folder, copy)
    set_config(copy, **numbers)
    return copy


def _told(capsys, *words: object) -> str:
    capsys.readouterr()
    assert convert(*words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    return told


@pytest.mark.parametrize("more", [(), ("--logits",)])
@pytest.mark.parametrize("changed", [False, True])
def test_verify_names_every_number_that_differs(
    model, tmp_path, capsys, more: tuple, changed: bool
) -> None:
    other = _with(model, tmp_path / "b", rms_norm_eps=1e-3, max_position_embeddings=77)
    tensors = load_file(other / "model.safetensors")
    if changed:
        tensors[NAME][3, 4] += 1
        save_file(tensors, other / "model.safetensors")
    eps = json.loads((model / "config.json").read_text())["rms_norm_eps"]
    assert convert("verify", model, other, *more) == 1
    told = capsys.readouterr().out
    assert f"rms_norm_eps {eps} against 0.001\n" in told
    assert "max_position_embeddings" in told and "against 77\n" in told
    assert "2 numbers of the config differ" in told
    assert (f"1 of {len(tensors)} tensors differ" in told) == changed


def test_verify_of_experts_names_how_many_a_token_goes_to(tmp_path, capsys) -> None:
    source = make(tmp_path / "a", "qwen3_moe")
    other = _with(source, tmp_path / "b", num_experts_per_tok=1, norm_topk_prob=False)
    assert convert("verify", source, other) == 1
    told = capsys.readouterr().out
    assert "num_experts_per_tok 2 against 1\n" in told
    assert "norm_topk_prob True against False\n" in told


@pytest.mark.parametrize("command", ["megatron-to-hf", "reshard", "inspect"])
def test_a_config_changed_under_its_manifest(megatron, tmp_path, capsys, command: str) -> None:
    out = () if command == "inspect" else (tmp_path / "out",)
    eps = _with(megatron, tmp_path / "eps", rms_norm_eps=1e-3)
    told = _told(capsys, command, eps, *out)
    assert "rms_norm_eps 0.001" in told and "manifest.json has rms_norm_eps" in told
    # What megarl does not compute with is in the hash alone.
    token = _with(megatron, tmp_path / "token", eos_token_id=9)
    told = _told(capsys, command, token, *out)
    assert "config.json: not the one that" in told and "remove manifest.json" in told
    (token / "manifest.json").unlink()
    assert convert(command, token, *out) == 0


def test_hf_files_of_another_model(model, megatron, tmp_path, capsys) -> None:
    files, out = _with(model, tmp_path / "files", rms_norm_eps=1e-3), tmp_path / "out"
    bare = Path(shutil.copytree(megatron, tmp_path / "bare"))
    (bare / "manifest.json").unlink()
    for folder, where in ((megatron, "manifest.json has"), (bare, "bare/config.json has")):
        told = _told(capsys, "megatron-to-hf", folder, out, "--hf-files", files)
        assert "rms_norm_eps 0.001" in told and where in told
        assert nothing_left(out)
    set_config(files, rms_norm_eps=json.loads((model / "config.json").read_text())["rms_norm_eps"])
    assert convert("megatron-to-hf", bare, out, "--hf-files", files) == 0
    assert "no record to be held against" in capsys.readouterr().out
    told = _told(capsys, "inspect", bare, "--hf-files", files / "config.json")
    assert "no folder; name the folder that config.json is in" in told


def test_a_position_of_another_model(model, megatron, tmp_path, monkeypatch, capsys) -> None:
    from megarl.checkpoint.model_fit import numbers_of
    from megarl.convert import opening
    from megarl.reshard.families import read_spec

    numbers = numbers_of(read_spec(model)) | {"rope_theta": 77.0}
    folder = tmp_path / "iter_000001"
    shutil.copytree(megatron, folder / "actor")
    told = {"recipe": {"model": {"path": str(model)}}, "tensor_digests": {}, "model": numbers}
    (folder / "position.json").write_text(json.dumps(told))
    # Only whether it is whole is passed over; what it says is read from the file.
    monkeypatch.setattr(opening, "read_commit", lambda _: None)
    assert "position.json has rope_theta 77.0" in _told(capsys, "inspect", folder)
    # Its part alone would pass every check by.
    told = _told(capsys, "megatron-to-hf", folder / "actor", tmp_path / "out")
    assert f"actor: a checkpoint's part; name the checkpoint, {folder}" in told


MALFORMED = {
    "empty": ({}, "its format is None"),
    "hash": ({"config_hash": 7}, "its config_hash is 7"),
    "layout": ({"layout": "wide"}, 'its layout is "wide"'),
    "tensor": ({"tensors": [["a", "b", 3]]}, 'its tensors have ["a", "b", 3]'),
    "digest": ({"tensors": [["a", [1], "float32", "zz"]]}, "zz"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_manifest(megatron, tmp_path, capsys, fault: str) -> None:
    fields, part = MALFORMED[fault]
    folder = Path(shutil.copytree(megatron, tmp_path / "m"))
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(told | fields if fields else {}))
    said = _told(capsys, "inspect", folder)
    assert "manifest.json: not a manifest" in said and part in said


def test_a_cast_that_would_be_infinite(model, tmp_path, capsys) -> None:
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    tensors = load_file(source / "model.safetensors")
    tensors[NAME][2, 3] = -70000.0
    save_file(tensors, source / "model.safetensors")
    words = ("hf-to-megatron", source, tmp_path / "m")
    told = _told(capsys, *words, "--dtype", "float16")
    assert f"{NAME} has values such as -70000" in told and "65504" in told
    assert nothing_left(tmp_path / "m")
    assert NAME in _told(capsys, "verify", source, source, "--dtype", "float16")
    # What is infinite already stays so; bfloat16 reaches as far as float32.
    tensors[NAME][2, 3] = math.inf
    save_file(tensors, source / "model.safetensors")
    assert convert(*words, "--dtype", "float16") == 0
    assert convert("hf-to-megatron", model, tmp_path / "b", "--dtype", "bfloat16") == 0


def test_weights_that_are_no_numbers_have_no_log_probabilities(model, tmp_path, capsys) -> None:
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][5] = torch.nan
    save_file(tensors, source / "model.safetensors")
    told = _told(capsys, "verify", source, source, "--logits")
    assert "model.norm.weight holds values that are not finite" in told
