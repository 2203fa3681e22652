"""The safetensors files of an HF folder: read with every check, written tensor by tensor.

Headers are read here rather than by the library so that a truncated or missing file is told by
file and tensor name before anything is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megarl.reshard.families.config import FolderError, read_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors dtype → torch's name."""
STORED_AS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MOST_FILE_BYTES = 5 * 10**9
"""Weights beyond this go into several files with an index."""
MOST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints carry and the config determines."""
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""What makes a folder of weights usable, copied as it is where the source folder has it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies."""

    name: str
    path: Path
    dtype: str
    """safetensors' name: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]
    offset: int
    """Where its elements begin in the file, in bytes."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, by name, from their headers.

    Raises `FolderError` naming file and tensor: no weights, a shard that is missing, truncated or
    not safetensors, an index entry that its shard does not hold, a tensor that no index names.
    """
    folder = Path(folder)
    index = folder / INDEX
    if (folder / SINGLE).is_file() and not index.is_file():
        return _header(folder / SINGLE)
    if not index.is_file():
        found = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {found[0]} is a pickle: save it as safetensors first" if found else ""
        if any(folder.glob("*.distcp")):
            hint = "; a torch_dist folder: convert it, tools/convert_ckpt.py megatron-to-hf"
        raise FolderError(f"{folder}: neither {SINGLE} nor {INDEX}{hint}")
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    held = {file: _shard(folder, file, weight_map) for file in files}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise FolderError(f"{index}: names {name} in {file}, which does not hold it")
    stray = [
        f"{name} in {file}"
        for file, tensors in held.items()
        for name in tensors
        if weight_map.get(name) != file
    ]
    if stray:
        raise FolderError(f"{index}: does not name {stray[0]} (and {len(stray) - 1} more)")
    return {name: held[file][name] for name, file in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file within the folder."""
    try:
        told = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{index}: not JSON: {error}") from error
    weight_map = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FolderError(f"{index}: no readable weight_map: it must be tensor → file")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise FolderError(f"{index}: no readable weight_map: {name} is in {file!r}, no file")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise FolderError(f"{index}: places {name} in {file}, outside of its folder")
    return weight_map


def _shard(folder: Path, file: str, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    if not (folder / file).is_file():
        lost = next(name for name, place in weight_map.items() if place == file)
        raise FolderError(f"{folder / file}: missing; {INDEX} places {lost} in it")
    return _header(folder / file)


def _header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise FolderError(f"{path}: truncated or not safetensors: {size} bytes, no header")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise FolderError(f"{path}: not safetensors: {error}") from error
    if not isinstance(header, dict):
        raise FolderError(f"{path}: not safetensors: its header is no object")
    header.pop("__metadata__", None)
    tensors = {}
    ends = []
    for name, entry in header.items():
        if not _is_entry(entry):
            raise FolderError(f"{path}: not safetensors: its header says of {name}: {entry!r}")
        begin, end = (8 + length + at for at in entry["data_offsets"])
        ends.append((begin, end, name))
        if end > size:
            raise FolderError(f"{path}: truncated: {name} ends at byte {end}, the file at {size}")
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if dtype in BYTES and end - begin != BYTES[dtype] * prod(shape):
            raise FolderError(
                f"{path}: damaged: {name} {dtype}{list(shape)} has {end - begin} bytes"
            )
        tensors[name] = StoredTensor(name, path, dtype, shape, begin)
    _refuse_gaps(path, 8 + length, sorted(ends), size)
    return tensors


def _is_entry(entry: Any) -> bool:
    """Whether it tells a tensor's dtype, shape and first and last byte."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    numbers = [*shape, *offsets]
    return all(type(at) is int and at >= 0 for at in numbers) and offsets[0] <= offsets[1]


def _refuse_gaps(path: Path, at: int, ends: Sequence[tuple[int, int, str]], size: int) -> None:
    """The tensors, (first byte, byte behind, name), fill the file from byte `at` on, as safetensors
    itself asks."""
    for begin, end, name in ends:
        if begin != at:
            how = "overlap of two tensors" if begin < at else "gap between tensors"
            raise FolderError(f"{path}: damaged: {how}: {name} begins at byte {begin}, not {at}")
        at = end
    if at != size:
        raise FolderError(f"{path}: damaged: {size - at} bytes after the last tensor")


class FolderWriter:
    """Writes an HF folder tensor by tensor, under another name until it is whole.

    The first error is kept, what follows is not written, and `finish` returns it: the caller goes
    on taking part in its collectives meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str | Mapping[str, str],
        most_file_bytes: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`dtype`: safetensors' name for the dtype of every tensor, or of each; `most_file_bytes`:
        weights beyond this go into another file (default: `MOST_FILE_BYTES`); `config`: what
        config.json says otherwise than the source's."""
        self.folder, self.dtype, self.config = folder, dtype, config
        self.most = MOST_FILE_BYTES if most_file_bytes is None else most_file_bytes
        self.partial = folder.with_name(f".{folder.name}.partial")
        self.error = ""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, list[str]] = {}
        self.file: BinaryIO | None = None
        self.to_come: list[tuple[str, str]] = []
        """First tensor and name of the files that are not begun yet, the next one last."""

    def refusal(self) -> str:
        return f"{self.folder}: exists; name another folder" if self.folder.exists() else ""

    def fail(self, error: str) -> None:
        self.error = self.error or f"{self.folder}: not written: {error}"

    def begin(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """`tensors`: name and shape of everything that `add` will be given, in that order."""
        groups: list[list[str]] = [[]]
        self.shapes = dict(tensors)
        size = 0
        for name, _ in tensors:
            if groups[-1] and size + self._bytes(name) > self.most:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += self._bytes(name)
        count = len(groups)
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        self.files = dict(zip([SINGLE] if count == 1 else names, groups, strict=True))
        self.to_come = [(held[0], file) for file, held in reversed(self.files.items())]
        try:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        except OSError as error:
            self.fail(str(error))

    def add(self, name: str, rows: Tensor) -> None:
        """The next tensor, or its next rows: bytes behind those before, in the dtype they are to
        have. A new file begins with its header."""
        if self.error:
            return
        try:
            if self.to_come and self.to_come[-1][0] == name:
                self._close()
                _, file = self.to_come.pop()
                self.file = (self.partial / file).open("wb")
                self.file.write(self._file_header(self.files[file]))
            self.file.write(rows.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
        except OSError as error:
            self.fail(f"{name}: {error}")

    def finish(
        self, source: Path, companions: Sequence[str], also: Mapping[str, str] | None = None
    ) -> str:
        """Index, config, companion files and `also` (name → text), then the rename. Returns the
        error, or nothing."""
        try:
            self._close()
            if not self.error:
                self._write_index()
                (self.partial / "config.json").write_text(self.config_of(source))
                for name in companions:
                    if (source / name).is_file():
                        shutil.copyfile(source / name, self.partial / name)
                for name, text in (also or {}).items():
                    (self.partial / name).write_text(text)
                if stored_tensors(self.partial).keys() != self.shapes.keys():
                    self.fail("the files do not hold every tensor")
            if not self.error:
                os.rename(self.partial, self.folder)
        except (OSError, FolderError) as error:
            self.fail(str(error))
        if self.error:
            self.discard()
        return self.error

    def discard(self) -> None:
        """Remove what was written."""
        if self.file is not None:
            # What cannot be flushed goes anyway.
            with suppress(OSError):
                self.file.close()
            self.file = None
        shutil.rmtree(self.partial, ignore_errors=True)

    def _dtype(self, name: str) -> str:
        return self.dtype if isinstance(self.dtype, str) else self.dtype[name]

    def _bytes(self, name: str) -> int:
        return BYTES[self._dtype(name)] * prod(self.shapes[name])

    def _file_header(self, names: Sequence[str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            end = at + self._bytes(name)
            entries[name] = {
                "dtype": self._dtype(name),
                "shape": list(self.shapes[name]),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        # safetensors wants the data aligned to 8 bytes and lets the header end in spaces.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _close(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def _write_index(self) -> None:
        if list(self.files) == [SINGLE]:
            return
        index = {
            "metadata": {"total_size": sum(map(self._bytes, self.shapes))},
            "weight_map": {name: file for file, names in self.files.items() for name in names},
        }
        (self.partial / INDEX).write_text(json.dumps(index, indent=2))

    def config_of(self, source: Path) -> str:
        """The text of the source's config with the dtype that is written: of most elements."""
        elements: dict[str, int] = {}
        for name, shape in self.shapes.items():
            dtype = self._dtype(name)
            elements[dtype] = elements.get(dtype, 0) + prod(shape)
        most = max(elements, key=elements.__getitem__)
        return config_text(source, DTYPES[most], self.config)


def config_text(source: Path, dtype: str, changes: Mapping[str, Any] | None = None) -> str:
    """The config.json of the folder `source` with `changes`, and weights of `dtype`, torch's
    name."""
    config = read_config(source) | dict(changes or {})
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return json.dumps(config | dict.fromkeys(keys, dtype), indent=2) + "\n"
