"""Append-only files of JSON lines, the form of a run's records.

A line counts once its line break is there: what a process that died left behind it is *torn*, was
never acted upon, and is cut off before the next line is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16


class LinesError(ValueError):
    """A line that is no JSON object, or a file that cannot be read; names file and line."""


class LinesWriter:
    """Appends JSON objects to one file, each handed to the operating system at once.

    One write a line, so that threads do not mix theirs.
    """

    def __init__(self, path: Path) -> None:
        """Raises `OSError` as the file system does."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - lives with the run
        self._file.truncate(_whole_bytes(self._file))

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a number that is not finite: JSON has none."""
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        """On the disk when this returns; a second call does nothing."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a file, line by line, and whether a torn last line was left out.

    Raises `LinesError` naming the line for a broken one that is not the last.
    """
    try:
        body = path.read_bytes()
    except OSError as error:
        raise LinesError(f"{path}: {error.strerror}") from error
    lines = body.split(b"\n")
    torn = lines.pop() != b""
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise LinesError(f"{path}:{number}: not JSON: {line[:60]!r}") from error
        if not isinstance(value, dict):
            raise LinesError(f"{path}:{number}: not a JSON object: {line[:60]!r}")
        values.append(value)
    return values, torn


def _whole_bytes(file: Any) -> int:
    """Bytes up to and with the last line break."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
