"""Model folders for the tests of conversions, and what is in them by safetensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.convert.cli import main
from tests.models.support import NAMES, write_hf_model

FAMILIES = tuple(NAMES)
MOE = ("mixtral", "qwen3_moe")
INDEX = "model.safetensors.index.json"


def make(folder: Path, family: str, dtype: torch.dtype = torch.float32, **numbers: Any) -> Path:
    """A random model of `family` with a tokenizer's files, of `dtype`."""
    write_hf_model(folder, family, **numbers)
    if dtype != torch.float32:
        path = folder / "model.safetensors"
        cast = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(cast, path, metadata={"format": "pt"})
        set_config(folder, dtype=str(dtype).removeprefix("torch."))
    vocab = {f"t{number}": number for number in range(300)}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    told = {"version": "1.0", "added_tokens": [], "model": words}
    told["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, by the library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and a[name].reshape(-1).view(torch.uint8).equal(b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def convert(*words: object) -> int:
    return main([str(word) for word in words])


def nothing_left(folder: Path) -> bool:
    """Neither the output, nor what was written of it, nor the lock that it was written under."""
    also = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "lock"))
    return not any(path.exists() for path in (folder, *also))
