"""Append-only JSON lines: whole ones count, a torn last one never did.

Not covered: what a power failure leaves of lines that the operating system had, but not the disk.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.contracts.lines import LinesError, LinesWriter, read_json_lines


def _write(path: Path, *lines: dict) -> None:
    writer = LinesWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()


def test_lines_come_back_in_order_and_another_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "made" / "lines.jsonl"
    _write(path, {"b": 1, "a": [None, "☃"]}, {})
    _write(path, {"c": 0.1})
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"b": 1, "a": [None, "☃"]}, {}, {"c": 0.1}]
    assert read_json_lines(path) == ([{"b": 1, "a": [None, "☃"]}, {}, {"c": 0.1}], False)


def test_a_line_is_there_for_others_before_the_writer_closes(tmp_path: Path) -> None:
    writer = LinesWriter(tmp_path / "lines")
    writer.write({"n": 1})
    assert read_json_lines(tmp_path / "lines") == ([{"n": 1}], False)
    writer.close()
    writer.close()


@pytest.mark.parametrize("torn", ['{"n": 2', '{"n": 2}', '{"n": "' + "x" * 200_000])
def test_a_torn_last_line_is_left_out_and_cut_off_before_the_next(tmp_path: Path, torn) -> None:
    """Also one that is valid JSON, for it may be the beginning of a longer number or word."""
    path = tmp_path / "lines"
    _write(path, {"n": 1})
    with open(path, "a") as file:
        file.write(torn)
    assert read_json_lines(path) == ([{"n": 1}], True)
    _write(path, {"n": 3})
    assert read_json_lines(path) == ([{"n": 1}, {"n": 3}], False)


def test_a_file_of_one_torn_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"n"')
    assert read_json_lines(tmp_path / "lines") == ([], True)
    _write(tmp_path / "lines", {"n": 1})
    assert read_json_lines(tmp_path / "lines") == ([{"n": 1}], False)


@pytest.mark.parametrize("broken", ["{", "[1]", "", "null", '{"n": 1} {"n": 2}'])
def test_a_broken_line_that_is_not_the_last_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / "lines").write_text('{"n": 0}\n' + broken + '\n{"n": 2}\n')
    with pytest.raises(LinesError, match="lines:2: not"):
        read_json_lines(tmp_path / "lines")


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    writer = LinesWriter(tmp_path / "lines")
    with pytest.raises(ValueError):
        writer.write({"loss": float("nan")})
    writer.close()
    assert read_json_lines(tmp_path / "lines") == ([], False)
    with pytest.raises(LinesError, match="missing: No such file"):
        read_json_lines(tmp_path / "missing")
