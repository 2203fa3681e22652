"""What a file of prompts is, told from its first bytes; its name says nothing."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.data.refusals import PromptError

HEAD = 1 << 16
"""Bytes that are looked at."""

LINES, GZIP, ZSTD, PARQUET = "lines", "gzip", "zstd", "parquet"

_READ = (
    (b"\x1f\x8b", GZIP),
    (b"\x28\xb5\x2f\xfd", ZSTD),
    *((bytes([0x50 + low]) + b"\x2a\x4d\x18", ZSTD) for low in range(16)),  # frames to be skipped
    (b"PAR1", PARQUET),
)

_UNPACK = "unpack it and name the file in it"
_EXPORT = "write its rows as JSON Lines or Parquet"
_RECODE = "save it as UTF-8"
_REFUSED = (
    (b"PARE", "an encrypted Parquet file", "decrypt it"),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"PK\x05\x06", "an empty zip archive", _EXPORT),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"BZh", "bzip2", "unpack it, or compress it with gzip or zstd"),
    (b"\xfd7zXZ\x00", "xz", "unpack it, or compress it with gzip or zstd"),
    (b"\x04\x22\x4d\x18", "lz4", "unpack it, or compress it with gzip or zstd"),
    (b"ARROW1", "an Arrow IPC file", _EXPORT),
    (b"\xff\xff\xff\xff", "an Arrow stream (a saved `datasets` folder has such)", _EXPORT),
    (b"FEA1", "a Feather file", _EXPORT),
    (b"ORC", "an ORC file", _EXPORT),
    (b"Obj\x01", "an Avro file", _EXPORT),
    (b"\x89HDF", "an HDF5 file", _EXPORT),
    (b"\x93NUMPY", "a numpy array", _EXPORT),
    (b"SQLite format 3", "a SQLite database", _EXPORT),
    (b"%PDF", "a PDF", _EXPORT),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself: git lfs pull"),
    (b"<!DOCTYPE html", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
    (b"\x00\x00\xfe\xff", "UTF-32", _RECODE),
    (b"\xff\xfe\x00\x00", "UTF-32", _RECODE),
    (b"\xff\xfe", "UTF-16", _RECODE),
    (b"\xfe\xff", "UTF-16", _RECODE),
)
"""First bytes, what they begin, what to do about it."""


def format_of(path: Path) -> str:
    """`lines`, `gzip`, `zstd` or `parquet`.

    Raises `PromptError` for a path that is no file with something in it, for one that may not be
    read, and for another format.
    """
    try:
        if path.is_dir():
            raise PromptError(_folder(path))
        if path.exists() and not path.is_file():
            raise PromptError(f"{path} is no file (a pipe or a device); write its rows to a file")
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        raise PromptError(
            f"{path} does not exist; set data.train or data.eval to a JSONL or Parquet file"
        ) from None
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}; check its mode") from error
    if not head:
        raise PromptError(f"{path} is empty (0 bytes); was it written to its end?")
    for magic, kind in _READ:
        if head.startswith(magic):
            return kind
    check_text(path, head)
    return LINES


def check_text(path: Path, head: bytes, packed: str = "") -> None:
    """Raise `PromptError` unless `head` may begin JSON Lines; `packed` is how it was compressed."""
    inside = f"{packed} of " if packed else ""
    found = _told_by_bytes(head, bool(packed))
    if found is not None:
        what, todo = found
        raise PromptError(f"{path} is {inside}{what}, not JSON Lines or Parquet; {todo}")
    found = _told_by_text(head, len(head) < HEAD)
    if found is not None:
        what, todo = found
        raise PromptError(f"{path} looks like {inside}{what}, not JSON Lines; {todo}")


def _folder(path: Path) -> str:
    """What to say of a folder: the files in it that could be meant."""
    ends = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")
    names = sorted(file.name for file in path.iterdir() if file.name.endswith(ends))
    if not names:
        return f"{path} is a folder without JSONL or Parquet files; name a file"
    shown = ", ".join(str(path / name) for name in names[:5])
    more = f" and {len(names) - 5} more" * (len(names) > 5)
    return f"{path} is a folder; name a file in it, or several as a list of sources: {shown}{more}"


def _told_by_bytes(head: bytes, packed: bool) -> tuple[str, str] | None:
    for magic, what, todo in _REFUSED:
        if head.startswith(magic):
            return what, todo
    for magic, kind in _READ if packed else ():
        if head.startswith(magic):
            return kind, f"{_UNPACK}; only JSON Lines are read from compressed files"
    if head[257:262] == b"ustar":
        return "a tar archive", _UNPACK
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        return "a Python pickle", _EXPORT
    zeros = head.count(b"\x00")
    if zeros:
        # Text of mostly Latin letters in wide characters: the zeros stand at fixed places.
        if head[1:2] == b"\x00" or head[:1] == b"\x00":
            width = 4 if zeros > len(head) * 0.6 else 2
            if zeros > len(head) * (0.6 if width == 4 else 0.3):
                return f"UTF-{width * 8}", _RECODE
        return "a binary file (it has zero bytes)", _EXPORT
    return None


def _told_by_text(head: bytes, whole: bool) -> tuple[str, str] | None:
    """JSON over several lines or a table of values; `whole`: nothing follows `head`."""
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    array = "JSON (one array)", "convert it: jq -c '.[]' FILE > FILE.jsonl"
    if not lines or (len(lines) == 1 and not whole):  # the line is longer than what is looked at
        return array if lines and lines[0].lstrip().startswith(b"[") else None
    first, second = lines[0].strip(), lines[1].strip() if len(lines) > 1 else b""
    state = _json_state(first)
    if first.startswith(b"[") and not (state == "whole" and second.startswith(b"{")):
        return array
    if first.startswith(b"{") and state == "cut" and second and not second.startswith(b"{"):
        return "JSON over several lines", "convert it: jq -c . FILE > FILE.jsonl"
    for mark, name in ((b",", "CSV"), (b"\t", "TSV"), (b";", "CSV")):
        if first[:1] in b"{[" or state == "whole" or second[:1] == b"{" or mark not in first:
            continue
        dialect = ", delimiter='\\t'" if mark == b"\t" else ""
        dialect = ", delimiter=';'" if mark == b";" else dialect
        return f"{name} (it begins {first[:40].decode('utf-8', 'replace')!r})", (
            'convert it: python -c "import csv, json, sys; [print(json.dumps(row)) for row in '
            f'csv.DictReader(sys.stdin{dialect})]" < FILE > FILE.jsonl'
        )
    return None


def _json_state(line: bytes) -> str:
    """`whole` JSON, JSON that is `cut` off by the end of the line, or `none`."""
    text = line.decode("utf-8", "replace")
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return "cut" if error.pos >= len(text) or text[error.pos :].strip() == "" else "none"
    except (ValueError, RecursionError):
        return "none"
    return "whole"
