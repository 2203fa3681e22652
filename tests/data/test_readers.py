"""Files of prompts: JSON Lines plain and compressed, Parquet, and what is none of these.

Every bad file is a real one, made by the library that writes its kind. Not covered: encrypted
Parquet, and disks that fail while they are read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from megarl.data.readers import read_rows
from megarl.data.refusals import PromptError, Refused
from megarl.recipe.data import SourceSection

ROWS = [{"prompt": f"What is {n}?", "answer": str(n), "id": n} for n in range(500)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LIMIT = 1 << 20


def source(path: Path, **keys: Any) -> SourceSection:
    return SourceSection(
        **{"path": str(path), "name": "s", "prompt_key": "prompt", "answer_key": "answer"} | keys
    )


def read(path: Path, limit: int = LIMIT, **keys: Any) -> list:
    return list(read_rows(source(path, **keys), limit))


def says(path: Path, limit: int = LIMIT, **keys: Any) -> str:
    with pytest.raises(PromptError) as caught:
        read(path, limit, **keys)
    told = str(caught.value)
    assert "\n" not in told and str(path) in told
    return told


def two_frames(text: bytes) -> bytes:
    """As `cat a.zst b.zst` and pzstd write: frames in a row, also ones to be skipped."""
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    half = text.index(b"\n", len(text) // 2) - 3  # within a line
    return skipped + zstandard.compress(text[:half]) + zstandard.compress(text[half:])


@pytest.mark.parametrize(
    "packed",
    [
        bytes,
        gzip.compress,
        lambda text: gzip.compress(text[:999]) + gzip.compress(text[999:]) + bytes(512),
        zstandard.compress,
        two_frames,
    ],
)
def test_lines_are_the_same_however_they_are_compressed_and_named(tmp_path, packed):
    path = tmp_path / "rows.dat"
    path.write_bytes(packed(TEXT))
    rows = read(path)
    assert [number for number, _ in rows] == list(range(1, 501))
    assert [json.loads(line) for _, line in rows] == ROWS


def test_blank_lines_count_but_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n  \t\n\n{"a": 2}')
    assert read(path) == [(2, b'{"a": 1}\r\n'), (5, b'{"a": 2}')]


def most_memory(path: Path) -> tuple[list, int]:
    """Rows, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        return read(path), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused_between_rows(rows: list, size: int) -> None:
    (before, first), (number, refused), (after, last) = rows[-3:]
    assert (before, number, after) == (500, 501, 502)
    assert json.loads(first) == ROWS[-1] and last == b"{}\n"
    assert isinstance(refused, Refused) and refused.kind == "too_large"
    assert refused.why == f"a row of {size} bytes, data.max_row_bytes is {LIMIT}"


def test_a_line_beyond_the_limit_is_refused_unread_and_reading_goes_on(tmp_path):
    """A line of 200 MB (a hole in the file), with a limit of 1 MiB."""
    path, text = tmp_path / "rows.jsonl", TEXT + b" " * 70_000
    with open(path, "wb") as file:
        file.write(text)
        file.seek(200_000_000)
        file.write(b"\n{}\n")
    rows, peak = most_memory(path)
    refused_between_rows(rows, 200_000_001 - len(TEXT))
    assert peak < 4 << 20


@pytest.mark.parametrize(("packed", "bound"), [(gzip.compress, 6), (zstandard.compress, 20)])
def test_so_is_one_that_is_small_while_compressed(tmp_path, packed, bound):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(packed(TEXT + b"x" * 50_000_000 + b"\n{}\n"))
    rows, peak = most_memory(path)
    refused_between_rows(rows, 50_000_001)
    assert peak < bound << 20


def test_a_line_of_just_the_limit_passes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 100 + b"\n" + b"x" * 101 + b"\n" + b"x" * 100)
    kinds = [refused.kind if isinstance(refused, Refused) else "" for _, refused in read(path, 100)]
    assert kinds == ["", "too_large", ""]
    path.write_bytes(b"x" * 101)
    assert [refused.kind for _, refused in read(path, 100)] == ["too_large"]


# files that are none


def parquet_bytes() -> bytes:
    body = io.BytesIO()
    parquet.write_table(pa.table({"a": [1]}), body)
    return body.getvalue()


def tar_bytes(mode: str = "w") -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode=mode) as archive:
        member = tarfile.TarInfo("rows.jsonl")
        member.size = len(TEXT)
        archive.addfile(member, io.BytesIO(TEXT))
    return body.getvalue()


def zip_bytes() -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        archive.writestr("rows.jsonl", TEXT)
    return body.getvalue()


def arrow_bytes(make: Callable) -> bytes:
    body = io.BytesIO()
    with make(body, pa.schema([("a", pa.int64())])) as writer:
        writer.write_table(pa.table({"a": [1]}))
    return body.getvalue()


def array_bytes() -> bytes:
    body = io.BytesIO()
    np.save(body, np.arange(3))
    return body.getvalue()


CSV = b"prompt,answer\nWhat is 1?,1\n"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is empty \(0 bytes\)"),
    "zip": (zip_bytes(), "is a zip archive, not JSON Lines or Parquet; unpack it and name the"),
    "tar": (tar_bytes(), "is a tar archive, not .*; unpack it"),
    "tar.gz": (tar_bytes("w:gz"), "is gzip of a tar archive, .*; unpack it"),
    "bz2": (tar_bytes("w:bz2"), "is bzip2, .*; unpack it, or compress it with gzip or zstd"),
    "xz": (tar_bytes("w:xz"), "is xz, .*; unpack it"),
    "pickle": (pickle.dumps(ROWS), "is a Python pickle, .*; write its rows as JSON Lines"),
    "utf-16": (TEXT.decode().encode("utf-16"), "is UTF-16, .*; save it as UTF-8"),
    "utf-16 unmarked": (TEXT.decode().encode("utf-16-le"), "is UTF-16, .*; save it as UTF-8"),
    "utf-32": (TEXT.decode().encode("utf-32"), "is UTF-32, .*; save it as UTF-8"),
    "utf-32 unmarked": (TEXT.decode().encode("utf-32-be"), "is UTF-32, .*; save it as UTF-8"),
    "arrow": (arrow_bytes(pa.ipc.new_file), "is an Arrow IPC file"),
    "stream": (arrow_bytes(pa.ipc.new_stream), "is an Arrow stream .*; write its rows"),
    "npy": (array_bytes(), "is a numpy array"),
    "gz in gz": (gzip.compress(gzip.compress(TEXT)), "is gzip of gzip, .*; unpack it"),
    "parquet.gz": (gzip.compress(parquet_bytes()), "is gzip of parquet, .*; only JSON Lines are"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS .* lfs pull"),
    "html": (b"<!DOCTYPE html><html>404</html>", "is a web page, .*download the file itself"),
    "binary": (b"\x7fELF" + b"\x00\x01" * 99, r"is a binary file \(it has zero bytes\)"),
    "array": (json.dumps(ROWS).encode(), r"looks like JSON \(one array\), .*jq -c '\.\[\]' FILE"),
    "small array": (b'[{"prompt": 1}]', r"looks like JSON \(one array\)"),
    "pretty array": (json.dumps(ROWS, indent=2).encode(), r"looks like JSON \(one array\)"),
    "array of lines": (b'[{"a": 1},\n{"a": 2}]\n', r"looks like JSON \(one array\)"),
    "array.gz": (gzip.compress(json.dumps(ROWS).encode()), "looks like gzip of JSON"),
    "document": (json.dumps({"data": ROWS}, indent=1).encode(), r"over several lines.*jq -c \."),
    "csv": (CSV, r"looks like CSV \(it begins 'prompt,answer'\), .*csv\.DictReader\(sys\.stdin\)"),
    "csv.zst": (zstandard.compress(CSV), "looks like zstd of CSV"),
    "tsv": (CSV.replace(b",", b"\t"), r"looks like TSV .*delimiter='\\t'"),
    "semicolons": (CSV.replace(b",", b";"), "looks like CSV .*delimiter=';'"),
    "latin csv": ("Grüße,x\nä,1\n".encode("latin-1"), "looks like CSV"),
}


@pytest.mark.parametrize("name", BAD)
def test_another_kind_of_file_is_told_with_what_to_do(tmp_path, name):
    body, expected = BAD[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(body)
    told = says(path)
    assert re.search(expected, told), told


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", \n{"a": 1}\n',  # a row cut off, and another
        b'[1, 2]\n{"a": 1}\n',  # a row that is no object
        b'oops, a log line\n{"a": 1}\n',
        b"x" * 70_000 + b'\n{"a": 1}\n',
        b'\xef\xbb\xbf{"a": 1}\n',
        '{"a": "Grüße"}\n'.encode("latin-1"),
    ],
)
def test_a_bad_first_row_makes_no_bad_file(tmp_path, body):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(body)
    assert len(read(path)) == body.count(b"\n")


def test_what_is_no_file_is_told_with_what_could_be_meant(tmp_path):
    assert "does not exist; set data.train or data.eval" in says(tmp_path / "nowhere.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "is a folder without JSONL or Parquet files" in says(folder)
    for name in ("b.jsonl", "a.parquet", "readme.md", *(f"c{n}.jsonl.gz" for n in range(5))):
        (folder / name).write_text("x")
    told = says(folder)
    assert f"sources: {folder}/a.parquet, {folder}/b.jsonl, {folder}/c0.jsonl.gz" in told
    assert "and 2 more" in told and "readme" not in told
    os.mkfifo(tmp_path / "pipe")
    assert "is no file (a pipe or a device)" in says(tmp_path / "pipe")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_file_that_may_not_be_read_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TEXT)
    path.chmod(0)
    with as_nobody():
        assert "cannot be read: Permission denied; check its mode" in says(path)


# files that are damaged


def after(lines: int) -> str:
    return f"after line {lines}" if lines else "before its first line ended"


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 1.0])
def test_gzip_that_was_cut_off_is_told_with_the_last_line(tmp_path, share):
    """How far the lines go is zlib's own word. With 1.0 only the checksum is cut."""
    body = gzip.compress(TEXT)
    cut = body[: int(len(body) * share) - 4]
    (tmp_path / "rows.jsonl.gz").write_bytes(cut)
    lines = zlib.decompressobj(wbits=31).decompress(cut).count(b"\n")
    told = says(tmp_path / "rows.jsonl.gz")
    assert f": cut off {after(lines)}: its gzip stream has no end" in told


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_zstd_that_was_cut_off_is_told(tmp_path, share):
    """Frames of their own for every 50 lines: the lines of whole frames are there."""
    step = 50
    lines = TEXT.splitlines(keepends=True)
    frames = [zstandard.compress(b"".join(lines[at : at + step])) for at in range(0, 500, step)]
    cut = int(sum(map(len, frames)) * share)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"".join(frames)[:cut])
    whole = sum(1 for n in range(1, 11) if sum(map(len, frames[:n])) <= cut)
    told = says(tmp_path / "rows.jsonl.zst")
    assert f": cut off {after(whole * step)}: its zstd stream has no end" in told


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_bytes_that_were_changed_are_told(tmp_path, pack):
    path = tmp_path / "rows.jsonl"
    body = pack(TEXT)
    path.write_bytes(body + b"something else")
    assert "damaged after line 500" in says(path)
    path.write_bytes(body[:40] + bytes(255 - byte for byte in body[40:60]) + body[60:])
    told = says(path)
    assert "damaged before its first line ended" in told and "copy it again" in told
