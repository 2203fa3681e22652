"""Files of columns: the format that other tools read, its two hashes, whole or not there at all.

The oracle of the format is the safetensors library, of the hashes blake3 over the file's bytes.
Not covered: power loss between fsync and the disk's own cache.
"""

from __future__ import annotations

import errno
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import safe_open
from safetensors.numpy import load_file

from megarl.contracts.hashes import bytes_hash, file_hash
from megarl.experience.columns import (
    SealError,
    encode_columns,
    read_columns,
    read_lines,
    read_part,
    write_columns,
    write_lines,
    write_whole,
)

DTYPES = ("bool", "int8", "int32", "int64", "float32", "float64")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    columns=st.dictionaries(
        st.sampled_from(["a", "b.c", "started", "finished", "reward.seconds", "x/ü"]),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=2, min_side=0))
        ),
    ),
    words=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_the_library_reads_what_was_written(tmp_path_factory, columns, words) -> None:
    path = tmp_path_factory.mktemp("columns") / "x.safetensors"
    part = write_columns(path, "any", 3, columns, words)
    for told in (load_file(path), read_columns(path.parent, part)[0]):
        assert told.keys() == columns.keys()
        for name, array in columns.items():
            assert told[name].dtype == array.dtype and told[name].shape == array.shape
            assert told[name].tobytes() == array.tobytes()
    with safe_open(path, "numpy") as file:
        assert file.metadata().keys() == {"megarl"}
    assert read_columns(path.parent, part)[1] == {"kind": "any", "index": 3} | words
    assert part.blake3 == file_hash(path) and part.bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o444


def _columns(clock: float = 0.0, value: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "draw_index": np.array([4, 5], np.int32),
        "response_offsets": np.array([0, 2, 5]),
        "value": np.array([value, 2.0], np.float32),
        "started": np.array([clock, 1.0]),
        "finished": np.array([2.0, clock]),
    }


def test_a_clock_changes_the_bytes_and_not_the_content() -> None:
    one, other = (encode_columns("x", "k", 0, _columns(clock), {}).part for clock in (0.0, 9.0))
    assert one.content == other.content and one.blake3 != other.blake3
    assert (one.rows, one.tokens) == (2, 5)
    changed = {
        encode_columns("x", "k", 0, _columns(value=3.0), {}).part.content,
        encode_columns("x", "k", 1, _columns(), {}).part.content,
        encode_columns("x", "k", 0, _columns(), {"word": 1}).part.content,
        encode_columns("x", "k", 0, _columns() | {"more": np.zeros(0)}, {}).part.content,
        one.content,
    }
    assert len(changed) == 5


def test_the_content_is_the_file_up_to_its_clocks() -> None:
    encoded = encode_columns("x", "k", 0, _columns(), {})
    body = b"".join(encoded.chunks)
    assert encoded.part.content == bytes_hash([body[: -4 * 8]])
    assert bytes(encoded.copied().chunks[0]) == body


def test_any_order_and_layout_of_the_same_numbers_is_one_file() -> None:
    columns = _columns()
    backwards = {name: columns[name][::-1].copy()[::-1] for name in reversed(columns)}
    big = columns | {"value": columns["value"].astype(">f4")}
    expected = encode_columns("x", "k", 0, columns, {}).part
    assert encode_columns("x", "k", 0, backwards, {}).part == expected
    assert encode_columns("x", "k", 0, big, {}).part == expected


@pytest.mark.parametrize(
    "columns, words, message",
    [
        ({"half": np.zeros(2, np.float16)}, {}, "column half is float16; stored are bool, int8"),
        ({"text": np.array(["a"])}, {}, "column text is <U1"),
        ({}, {"x": float("nan")}, "not JSON compliant"),
    ],
)
def test_what_cannot_be_stored_is_named(columns, words, message) -> None:
    with pytest.raises(ValueError, match=message):
        encode_columns("x", "k", 0, columns, words)


def test_a_part_is_what_its_manifest_says(tmp_path: Path) -> None:
    part = write_columns(tmp_path / "x", "k", 0, _columns(), {})
    for field, value in (("kind", "other"), ("index", 1), ("rows", 3), ("tokens", 1)):
        with pytest.raises(SealError, match=rf"{tmp_path}/x: its {field} is .*, the manifest says"):
            read_columns(tmp_path, replace(part, **{field: value}))
    with pytest.raises(SealError, match="/x: its content is blake3:"):
        read_columns(tmp_path, replace(part, content="blake3:0"))


def test_what_is_no_file_of_columns_is_refused(tmp_path: Path) -> None:
    part = write_lines(tmp_path / "x", "k", 0, [{"a": 1}, "ü\u2028"])
    assert read_lines(tmp_path, part) == [{"a": 1}, "ü\u2028"]
    with pytest.raises(SealError, match="/x: not a file of sealed columns"):
        read_columns(tmp_path, part)
    with pytest.raises(SealError, match="/x: 2 lines, 3 were sealed"):
        read_lines(tmp_path, replace(part, rows=3))
    with pytest.raises(SealError, match="/x: not JSON lines"):
        columns = write_columns(tmp_path / "x", "k", 0, _columns(), {})
        read_lines(tmp_path, columns)


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    killed = tmp_path / "x.tmp"
    killed.write_bytes(b"of a killed writer")
    killed.chmod(0o444)
    write_whole(path, b"abc", np.arange(3, dtype=np.uint8))
    assert path.read_bytes() == b"abc\0\1\2" and not killed.exists()
    killed.mkdir()
    with pytest.raises(OSError, match=str(path)) as caught:
        write_whole(path, b"new")
    assert caught.value.errno == errno.EISDIR and path.read_bytes() == b"abc\0\1\2"


def test_a_part_lies_in_its_folder(tmp_path: Path) -> None:
    part = write_lines(tmp_path / "x", "k", 0, [])
    (tmp_path / "inner").mkdir()
    with pytest.raises(SealError, match=r"lists '\.\./x', which is no file of it"):
        read_part(tmp_path / "inner", replace(part, file="../x"))


def test_large_chunks_are_written_as_they_are(tmp_path: Path) -> None:
    chunk = np.random.default_rng(1).integers(0, 256, 3_000_001).astype(np.uint8)
    write_whole(tmp_path / "x", b"head", chunk, chunk)
    told = hashlib.sha256((tmp_path / "x").read_bytes()).digest()
    assert told == hashlib.sha256(b"head" + 2 * chunk.tobytes()).digest()
