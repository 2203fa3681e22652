"""Columns of numbers as one safetensors file: written whole or not at all, read with every check.

Text goes into the file's metadata as JSON. A file has two hashes: of its bytes, which finds any
change, and of its content without what clocks said, by which two runs can be compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megarl.contracts.hashes import bytes_hash, canonical_json

CLOCK_COLUMNS = frozenset({"started", "finished", "reward.seconds"})
"""What a clock said: in the file, in no hash of its content."""
UNFINISHED = ".tmp"
READ_ONLY = 0o444


class SealError(ValueError):
    """A sealed file that is missing, torn, changed or of something else; names file and field."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a sealed iteration, as its manifest lists it."""

    file: str
    kind: str
    """`rollout`, `scored`, `prompts`, `selection` or `derived` (`parts.py`)."""
    index: int
    """Which replica (rollout) or data-parallel part (scored, derived) wrote it; 0 for others."""
    rows: int
    bytes: int
    blake3: str
    """Of the file's bytes."""
    content: str
    """Of its columns and metadata without `CLOCK_COLUMNS`."""


def write_columns(
    path: Path, kind: str, index: int, columns: Mapping[str, np.ndarray], metadata: Mapping
) -> Part:
    """Write `columns` and JSON-able `metadata` to `path`, fsync'd, renamed into place, read-only.

    Columns are stored under their names in sorted order; `draw_index`, where there is one, gives
    the number of rows. Raises `OSError` as the file system does.
    """
    columns = {name: np.ascontiguousarray(columns[name]) for name in sorted(columns)}
    told = canonical_json({"kind": kind, "index": index} | dict(metadata))
    body = save(columns, {"megarl": told})
    rows = len(columns["draw_index"]) if "draw_index" in columns else 0
    return _write(path, kind, index, rows, body, content_hash(columns, told))


def write_lines(path: Path, kind: str, index: int, lines: list[Any]) -> Part:
    """One canonical JSON value a line, else as `write_columns`."""
    body = "".join(canonical_json(line) + "\n" for line in lines).encode("utf-8")
    return _write(path, kind, index, len(lines), body, bytes_hash([body]))


def content_hash(columns: Mapping[str, np.ndarray], told: str) -> str:
    """Over names, dtypes, shapes and values of all columns but the clock's, and the metadata."""
    chunks = [told.encode()]
    for name in sorted(columns):
        if name not in CLOCK_COLUMNS:
            array = columns[name]
            chunks += [f"\n{name} {array.dtype} {array.shape}\n".encode(), array.data.cast("B")]
    return bytes_hash(chunks)


def _write(path: Path, kind: str, index: int, rows: int, body: bytes, content: str) -> Part:
    write_whole(path, body)
    return Part(path.name, kind, index, rows, len(body), bytes_hash([body]), content)


def write_whole(path: Path, body: bytes) -> None:
    """The file appears under its name only when all of it is on the disk; then it is read-only."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with open(unfinished, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), READ_ONLY)
    unfinished.rename(path)


def sync_folder(folder: Path) -> None:
    """The folder's own entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_part(folder: Path, part: Part) -> bytes:
    """The bytes of a part; raises `SealError` unless they are those that were sealed."""
    path = folder / part.file
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SealError(f"{path}: {error.strerror}; the manifest lists it") from error
    if len(body) != part.bytes:
        raise SealError(f"{path}: {len(body)} bytes, {part.bytes} were sealed")
    if bytes_hash([body]) != part.blake3:
        raise SealError(f"{path}: its bytes are not those that were sealed (blake3 differs)")
    return body


def read_columns(folder: Path, part: Part) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(columns, metadata) of a part; raises `SealError` for changed bytes, a file that is not
    safetensors, or one that says it is another part."""
    path = folder / part.file
    body = read_part(folder, part)
    try:
        columns = load(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        metadata = json.loads(header["__metadata__"]["megarl"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise SealError(f"{path}: not a file of sealed columns: {error}") from error
    if (metadata["kind"], metadata["index"]) != (part.kind, part.index):
        raise SealError(
            f"{path}: says it is {metadata['kind']} {metadata['index']}, the manifest lists it as "
            f"{part.kind} {part.index}"
        )
    return columns, metadata


def read_lines(folder: Path, part: Part) -> list[Any]:
    """The JSON values of a part written by `write_lines`; raises `SealError`."""
    body = read_part(folder, part)
    try:
        lines = [json.loads(line) for line in body.decode("utf-8").splitlines()]
    except ValueError as error:
        raise SealError(f"{folder / part.file}: not JSON lines: {error}") from error
    if len(lines) != part.rows:
        raise SealError(f"{folder / part.file}: {len(lines)} lines, {part.rows} were sealed")
    return lines
