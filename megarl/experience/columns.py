"""Columns of numbers as one safetensors file: written whole or not at all, read with every check.

Text goes into the file's metadata as JSON. A file has two hashes: of its bytes, which finds any
change, and of its content without what clocks said, by which two runs can be compared. Clock
columns come last in the file, so that one pass over the bytes gives both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load

from megarl.contracts.hashes import bytes_hash, canonical_json

CLOCK_COLUMNS = frozenset({"started", "finished", "reward.seconds"})
"""What a clock said: in the file, in no hash of its content."""
UNFINISHED = ".tmp"
READ_ONLY = 0o444

_METADATA = "megarl"
_DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "float64": "F64",
}
_HEADER_ALIGNMENT = 8


class SealError(ValueError):
    """A sealed file that is missing, torn, changed or of something else; names file and field."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a sealed iteration, as its manifest lists it."""

    file: str
    kind: str
    """`rollout`, `scored`, `prompts`, `drawn`, `selection` or `derived` (`parts.py`)."""
    index: int
    """Which replica (rollout) or data-parallel part (scored, derived) wrote it; 0 for others."""
    rows: int
    """Samples, or lines."""
    tokens: int
    """Response tokens of these samples; 0 for a part without columns over them."""
    bytes: int
    blake3: str
    """Of the file's bytes."""
    content: str
    """Of its bytes up to `CLOCK_COLUMNS`: the header and every other column."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part's bytes before they are written. `chunks` may be views of the columns."""

    part: Part
    chunks: tuple[bytes | np.ndarray, ...]

    def copied(self) -> Encoded:
        """With bytes of its own."""
        return Encoded(self.part, (b"".join(self.chunks),))

    def write(self, folder: Path) -> Part:
        """Raises `OSError` naming the file, as the file system does."""
        write_whole(folder / self.part.file, *self.chunks)
        return self.part


def encode_columns(
    file: str, kind: str, index: int, columns: Mapping[str, np.ndarray], metadata: Mapping
) -> Encoded:
    """`columns` and JSON-able `metadata` as a safetensors file, hashed, no column copied.

    `draw_index`, where there is one, gives the number of rows, `response_offsets` the tokens.
    Raises `ValueError` for a dtype that is not stored here and for metadata that is not JSON.
    """
    laid_out = _LaidOut.of(kind, index, columns, metadata)
    return Encoded(laid_out.part(file, *laid_out.hashes()), laid_out.chunks)


def encode_lines(file: str, kind: str, index: int, lines: Sequence[Any]) -> Encoded:
    """One canonical JSON value a line. Raises `ValueError` for a value that is not JSON."""
    body = "".join(canonical_json(line) + "\n" for line in lines).encode()
    hashed = bytes_hash([body])
    return Encoded(Part(file, kind, index, len(lines), 0, len(body), hashed, hashed), (body,))


def write_columns(
    path: Path, kind: str, index: int, columns: Mapping[str, np.ndarray], metadata: Mapping
) -> Part:
    """As `encode_columns`, written to `path` by `write_whole` and hashed meanwhile."""
    laid_out = _LaidOut.of(kind, index, columns, metadata)
    with ThreadPoolExecutor(1) as beside:  # neither holds the interpreter's lock for long
        hashes = beside.submit(laid_out.hashes)
        write_whole(path, *laid_out.chunks)
        return laid_out.part(path.name, *hashes.result())


def write_lines(path: Path, kind: str, index: int, lines: Sequence[Any]) -> Part:
    """`encode_lines`, written to `path` by `write_whole`."""
    return encode_lines(path.name, kind, index, lines).write(path.parent)


def write_whole(path: Path, *chunks: bytes | np.ndarray) -> None:
    """The file appears under its name only when all of it is on the disk; then it is read-only.

    Raises `OSError` naming `path`; what was written so far is then gone.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.unlink(missing_ok=True)  # a killed writer's may be read-only already
        try:
            with open(unfinished, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), READ_ONLY)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:  # a failing write does not say which file it was
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """The folder's own entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_part(folder: Path, part: Part) -> bytes:
    """The bytes of a part; raises `SealError` unless they are those that were sealed."""
    if Path(part.file).name != part.file:
        raise SealError(f"{folder}: the manifest lists {part.file!r}, which is no file of it")
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
    safetensors, or one that is another part than its manifest says."""
    path = folder / part.file
    body = read_part(folder, part)
    try:
        columns = load(body)
        start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:start])
        metadata = json.loads(header.pop("__metadata__")[_METADATA])
        clocks = [header[name]["data_offsets"][0] for name in CLOCK_COLUMNS & header.keys()]
        steady = start + min(clocks) if clocks else len(body)
        told = {"kind": metadata["kind"], "index": metadata["index"]}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SealError(f"{path}: not a file of sealed columns: {error!r}") from error
    told["content"] = bytes_hash([memoryview(body)[:steady]])
    told["rows"] = len(columns["draw_index"]) if "draw_index" in columns else 0
    offsets = columns.get("response_offsets", np.zeros(1, dtype=np.int64))
    told["tokens"] = int(offsets[-1]) if offsets.size else 0
    for field, value in told.items():
        if value != getattr(part, field):
            raise SealError(
                f"{path}: its {field} is {value}, the manifest says {getattr(part, field)}"
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


@dataclass(frozen=True)
class _LaidOut:
    """A safetensors file in pieces: the header and every column but the clocks', then those."""

    kind: str
    index: int
    arrays: dict[str, np.ndarray]
    steady: tuple[bytes | np.ndarray, ...]
    clocks: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, kind: str, index: int, columns: Mapping[str, np.ndarray], metadata: Mapping
    ) -> _LaidOut:
        told = canonical_json({"kind": kind, "index": index} | dict(metadata))
        arrays = {name: _little_endian(name, columns[name]) for name in _file_order(columns)}
        header = {"__metadata__": {_METADATA: told}} | _described(arrays)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        data = {name: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}
        steady = (data[name] for name in data if name not in CLOCK_COLUMNS)
        clocks = (data[name] for name in data if name in CLOCK_COLUMNS)
        return cls(kind, index, arrays, (head, *steady), tuple(clocks))

    @property
    def chunks(self) -> tuple[bytes | np.ndarray, ...]:
        return self.steady + self.clocks

    def hashes(self) -> tuple[str, str]:
        """`bytes_hash` of the steady pieces alone, and of all of them; in one pass."""
        hasher = blake3()
        for chunk in self.steady:
            hasher.update(chunk)
        content = hasher.hexdigest()
        for chunk in self.clocks:
            hasher.update(chunk)
        return "blake3:" + content, "blake3:" + hasher.hexdigest()

    def part(self, file: str, content: str, whole: str) -> Part:
        arrays = self.arrays
        return Part(
            file=file,
            kind=self.kind,
            index=self.index,
            rows=len(arrays["draw_index"]) if "draw_index" in arrays else 0,
            tokens=int(arrays["response_offsets"][-1]) if "response_offsets" in arrays else 0,
            bytes=sum(map(len, self.chunks)),
            blake3=whole,
            content=content,
        )


def _file_order(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Wide elements first, so that columns lie aligned; clocks last."""
    return sorted(columns, key=lambda n: (n in CLOCK_COLUMNS, -columns[n].dtype.itemsize, n))


def _little_endian(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"column {name} is {array.dtype}; stored are {', '.join(_DTYPES)}")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _described(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The header's entries: where each column lies behind the header."""
    entries, start = {}, 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    return entries
