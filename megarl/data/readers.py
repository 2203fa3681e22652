"""Rows of a file of prompts, one at a time: JSON Lines, plain or compressed, and Parquet.

A file is never held whole: of JSON Lines at most one line up to `data.max_row_bytes`, of Parquet
one batch of rows. What is wrong with one row is that row's `Refused`; what is wrong with the file
(cut off, damaged, a column that cannot be a prompt) is one `PromptError`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megarl.data.formats import GZIP, HEAD, LINES, PARQUET, ZSTD, check_text, format_of
from megarl.data.refusals import PromptError, Refused
from megarl.recipe.data import SourceSection

Row = tuple[int, "bytes | dict[str, Any] | Refused"]
"""Number from 1 (of the line, or of Parquet's row), and the line, the row, or why not."""

_AT_ONCE = {GZIP: 1 << 10, ZSTD: 1 << 8}
"""Bytes that are unpacked at once: one of gzip becomes 1 KiB at most, four of zstd 128 KiB."""
_LARGEST_WINDOW = 2**31
"""What `zstd --ultra --long=31` asks for."""
_BUFFER = 1 << 16


def read_rows(source: SourceSection, max_bytes: int) -> Iterator[Row]:
    """Every row of `source` that is not blank, in order.

    Raises `PromptError` for a file that is missing, of another format, cut off or damaged (after
    the rows before the damage), and for a Parquet column that cannot be what it is named for.
    """
    path = Path(source.path)
    kind = format_of(path)
    if kind == PARQUET:
        from megarl.data.parquet import read_parquet

        yield from read_parquet(source)
        return
    if kind != LINES:
        check_text(path, _head(path, kind), kind)
    number = 0
    try:
        with _opened(path, kind) as stream:
            for number, line in _lines(stream, max_bytes):
                yield number, line
    except EOFError:
        raise PromptError(
            f"{path}: cut off {_after(number)}: its {kind} stream has no end; copy it again"
        ) from None
    except _Damaged as error:
        raise PromptError(
            f"{path}: damaged {_after(number)}: {kind}: {error}; copy it again"
        ) from error
    except OSError as error:
        raise PromptError(f"{path}: cannot be read {_after(number)}: {error}") from error


def _after(number: int) -> str:
    """Where the reading of lines ended: `number` is the last that was whole."""
    return f"after line {number}" if number else "before its first line ended"


def _lines(stream: BinaryIO, max_bytes: int) -> Iterator[Row]:
    """Lines without their break; of a longer one than `max_bytes` only that it is too large."""
    number = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        ended = line.endswith(b"\n")
        if ended or len(line) <= max_bytes:
            if line.strip():
                yield number, line
            continue
        size = len(line)
        while (rest := stream.readline(_BUFFER)) and not rest.endswith(b"\n"):
            size += len(rest)
        size += len(rest)
        yield number, too_large(size, max_bytes)


def too_large(size: int, max_bytes: int) -> Refused:
    """Of a row of so many bytes."""
    return Refused("too_large", f"a row of {size} bytes, data.max_row_bytes is {max_bytes}")


def _head(path: Path, kind: str) -> bytes:
    """The first bytes inside a compressed file, as far as it can be unpacked."""
    head = b""
    try:
        with _opened(path, kind) as stream:
            while len(head) < HEAD and (more := stream.read1(HEAD - len(head))):
                head += more
    except (OSError, EOFError, _Damaged):
        pass  # reading the lines tells it, and where
    return head


def _opened(path: Path, kind: str) -> BinaryIO:
    """A buffered stream of what `path` holds. Raises `OSError`."""
    if kind == LINES:
        return open(path, "rb", buffering=_BUFFER)
    return io.BufferedReader(_Unpacked(path, kind), _BUFFER)


class _Damaged(Exception):
    """A compressed stream that cannot be unpacked."""


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, part after part: gzip's members, zstd's frames.

    Python's gzip keeps what it has read to itself when a file was cut off, and zstandard's
    `stream_reader` ends such a file as if it were whole. Here every byte up to the cut comes,
    then an `EOFError`.
    """

    def __init__(self, path: Path, kind: str) -> None:
        """Raises `OSError`."""
        self._new: Callable[[], Any]
        if kind == GZIP:
            self._new, self._error = partial(zlib.decompressobj, wbits=31), zlib.error
        else:
            import zstandard

            unpacker = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
            self._new, self._error = unpacker.decompressobj, zstandard.ZstdError
        self._padded = kind == GZIP  # zeros may follow, as on tapes
        self._chunk = _AT_ONCE[kind]
        self._file = open(path, "rb", buffering=_BUFFER)  # noqa: SIM115 - `close` closes it
        self._part: Any = None
        self._left = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, target: Any) -> int:
        """Raises `EOFError` where the last part has no end, `_Damaged` for bytes that are none."""
        while not self._ready:
            chunk = self._left or self._file.read(self._chunk)
            if not chunk:
                if self._part is not None:
                    raise EOFError
                return 0
            self._ready = memoryview(self._unpack(chunk))
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self, chunk: bytes) -> bytes:
        self._left = b""
        if self._part is None:
            if self._padded and not (chunk := chunk.lstrip(b"\0")):
                return b""
            self._part = self._new()
        try:
            data = self._part.decompress(chunk)
        except self._error as error:
            raise _Damaged(" ".join(str(error).split())) from error
        if self._part.eof:
            self._left, self._part = self._part.unused_data, None
        return data
