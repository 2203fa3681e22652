"""What cannot be converted is refused in one line that names file and tensor; nothing is left.

Not covered: full disks and killed processes (test_limits.py), several processes
(test_processes.py).
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.models import INDEX, convert, make, nothing_left, set_config

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "hf", "qwen2")


@pytest.fixture(scope="module")
def megatron(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("megatron") / "m"
    assert convert("hf-to-megatron", model, out, "--tp", 2) == 0
    return out


def _copy(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def _told(capsys, *words: object) -> str:
    capsys.readouterr()
    assert convert(*words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    return told


def _changed(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _split(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _missing_shard(folder: Path) -> None:
    _split(folder)
    (folder / "b.safetensors").unlink()


def _wrong_index(folder: Path) -> None:
    _split(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.norm"] = "a.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def _integers(tensors: dict) -> None:
    tensors[NAME] = tensors[NAME].to(torch.int32)


def _reshaped(tensors: dict) -> None:
    tensors[NAME] = tensors[NAME][:-1].clone()


def _extra(tensors: dict) -> None:
    tensors["model.layers.7.foo"] = torch.zeros(3)


def _other_tokenizer(folder: Path) -> None:
    vocab = {"a": 0, "far": 307}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def _added_token(folder: Path) -> None:
    added = [{"id": 400, "content": "<far>"}]
    told = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(told))


def _bytes_behind(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x" * 100)


def _gap(folder: Path) -> None:
    """Four bytes before the tensor that comes last, and the offsets that say so."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    places = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    last = max(places)
    begin = last[0]
    last[:] = [at + 4 for at in last]
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + body[:begin] + bytes(4) + body[begin:]
    )


def _header_of_words(folder: Path) -> None:
    text = json.dumps({NAME: {"dtype": "F32", "shape": "wide"}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def _shard_elsewhere(folder: Path, place: object) -> None:
    _split(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NAME] = place
    (folder / INDEX).write_text(json.dumps(index))


HF_FAULTS = {
    "bytes behind": (_bytes_behind, ("100 bytes after the last tensor",)),
    "gap": (_gap, ("damaged: gap between tensors",)),
    "header of words": (_header_of_words, ("not safetensors", NAME)),
    "shard above": (
        lambda f: _shard_elsewhere(f, "../a.safetensors"),
        (f"places {NAME} in ../a.safetensors", "outside of its folder"),
    ),
    "absolute shard": (lambda f: _shard_elsewhere(f, "/a.safetensors"), ("outside of its folder",)),
    "shard that is a number": (lambda f: _shard_elsewhere(f, 7), ("weight_map", "in 7, no file")),
    "missing shard": (_missing_shard, ("b.safetensors: missing", "places model.")),
    "index names what no shard holds": (_wrong_index, ("model.layers.9.norm", INDEX)),
    "truncated": (_truncated, ("model.safetensors: truncated",)),
    "missing tensor": (lambda f: _changed(f, lambda t: t.pop(NAME)), (f"no file holds {NAME}",)),
    "extra tensor": (lambda f: _changed(f, _extra), ("model.layers.7.foo", "does not have")),
    "other shape": (lambda f: _changed(f, _reshaped), (NAME, "[95, 64]", "[96, 64]")),
    "no float": (lambda f: _changed(f, _integers), (NAME, "I32", "F32")),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "unknown family": (lambda f: set_config(f, model_type="gptx"), ("gptx",)),
    "tokenizer of more tokens": (_other_tokenizer, ("'far' has id 307", "vocab_size 307")),
    "added token": (_added_token, ("'<far>' has id 400",)),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("neither model.safetensors",)),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_a_faulty_hf_folder(model, tmp_path, capsys, fault: str) -> None:
    spoil, parts = HF_FAULTS[fault]
    folder = _copy(model, tmp_path / "hf")
    spoil(folder)
    told = _told(capsys, "hf-to-megatron", folder, tmp_path / "m")
    assert all(part in told for part in parts), told
    assert nothing_left(tmp_path / "m")


def test_an_output_of_a_tied_model_that_is_not_the_embedding(tmp_path, capsys) -> None:
    folder = make(tmp_path / "hf", "llama", tied=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    _changed(folder, lambda tensors: tensors.update({"lm_head.weight": other}))
    told = _told(capsys, "hf-to-megatron", folder, tmp_path / "m")
    assert "lm_head.weight differs from model.embed_tokens.weight" in told


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _lost_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def _short_file(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-5000])


def _changed_element(folder: Path) -> None:
    from megarl.convert.stored import TorchDistSource
    from megarl.reshard.families import read_spec

    source = TorchDistSource(folder, read_spec(folder), folder)
    wanted = torch.empty(1, 64)
    source.read(NAME, 5, 0, wanted)
    for path in folder.glob("*.distcp"):
        at = path.read_bytes().find(wanted.numpy().tobytes())
        if at >= 0:
            _flip(path, at + 7)
            return
    raise AssertionError("the row is in no file")


def _no_zip(folder: Path) -> None:
    _flip(folder / "__0_0.distcp", 0)


def _evil_index(folder: Path) -> None:
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def _lost_tensor(folder: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    del index.state_dict_metadata["decoder.final_layernorm.weight"]
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _other_manifest(folder: Path) -> None:
    told = json.loads((folder / "manifest.json").read_text())
    told["tensors"][0][3] = "0x1"
    (folder / "manifest.json").write_text(json.dumps(told))


MEGATRON_FAULTS = {
    "lost file": (_lost_file, ("__1_0.distcp: is missing", "a part of ")),
    "short file": (_short_file, ("__0_0.distcp: ends at byte",)),
    "changed element": (_changed_element, (NAME, "manifest.json records")),
    "no zip": (_no_zip, ("__0_0.distcp: damaged at bytes", "reads no tensor there")),
    "an index that runs code": (_evil_index, (".metadata: not readable", "builtins.print")),
    "no index": (lambda f: (f / ".metadata").unlink(), (".metadata: missing",)),
    "lost tensor": (_lost_tensor, ("no tensor decoder.final_layernorm.weight",)),
    "other manifest": (_other_manifest, ("manifest.json: not a manifest", "hash to")),
    "other config": (
        lambda f: set_config(f, num_hidden_layers=3),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight is [2, 64]", "[3, 64]"),
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ("no config.json", "--hf-files")),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_a_faulty_torch_dist_folder(megatron, tmp_path, capsys, fault: str) -> None:
    spoil, parts = MEGATRON_FAULTS[fault]
    folder = _copy(megatron, tmp_path / "m")
    spoil(folder)
    for command in ("megatron-to-hf", "reshard"):
        told = _told(capsys, command, folder, tmp_path / "out")
        assert all(part in told for part in parts), told
        assert nothing_left(tmp_path / "out")


LAYOUTS = {
    "kv heads": (["--tp", 4], ("kv heads", "--tp=4")),
    "layers": (["--pp", 3], ("layers", "--pp=3")),
    "stage layers": (["--pp", 2, "--stage-layers", 1, 2], ("--stage-layers",)),
    "virtual": (["--virtual-stages", 2], ("--virtual-stages=2",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_the_model_does_not_take(model, tmp_path, capsys, layout: str) -> None:
    words, parts = LAYOUTS[layout]
    told = _told(capsys, "hf-to-megatron", model, tmp_path / "m", *words)
    assert all(part in told for part in parts), told
    assert nothing_left(tmp_path / "m")


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf", "reshard"])
def test_an_output_that_exists_stays_as_it_is(
    model, megatron, tmp_path, capsys, command: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    source = model if command == "hf-to-megatron" else megatron
    assert "out: exists" in _told(capsys, command, source, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_what_a_killed_conversion_left_is_replaced(model, tmp_path) -> None:
    partial = tmp_path / ".m.partial"
    partial.mkdir()
    (partial / "__9_0.distcp").write_bytes(b"half")
    assert convert("hf-to-megatron", model, tmp_path / "m") == 0
    assert not partial.exists() and not (tmp_path / "m" / "__9_0.distcp").exists()


def test_paths_of_another_kind(model, megatron, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert "no such path" in _told(capsys, "inspect", tmp_path / "nowhere")
    assert "reshard" in _told(capsys, "hf-to-megatron", megatron, out)
    told = _told(capsys, "megatron-to-hf", model, out)
    assert "not megatron's format; hf-to-megatron" in told
    assert "hf-to-megatron" in _told(capsys, "reshard", model, out)
    (tmp_path / "notes").mkdir()
    assert "neither Hugging Face" in _told(capsys, "inspect", tmp_path / "notes")
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"GGUF but not really")
    assert "x.gguf" in _told(capsys, "hf-to-megatron", broken, out)
    broken.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    assert "x.gguf: not decoded; it is damaged or truncated" in _told(
        capsys, "hf-to-megatron", broken, out
    )
    assert "needs a Hugging Face folder" in _told(capsys, "verify", megatron, megatron, "--logits")
