"""Text for a person's terminal: nothing that a model wrote may steer it."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

PLAIN_WIDTH = 100
"""Columns where the output is no terminal."""
NARROWEST = 40


def shown(text: str, *, lines: bool = False) -> str:
    """`text` with every character that is not printable told as an escape such as `\\x1b`.

    Control and format characters, bidirectional marks and lone surrogates among them would move
    the cursor, hide or reorder text. With `lines` line feeds stay.
    """
    return "".join(
        char
        if char.isprintable() or (lines and char == "\n")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def number(value: float | None, digits: int = 6) -> str:
    """Shortest of `digits` significant digits, integers whole; a dash where there is no number."""
    if value is None or math.isnan(value):
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.{digits}g}"


def none_if_nan(value: Any) -> float | None:
    """A Python float for JSON, which has no NaN."""
    value = float(value)
    return value if math.isfinite(value) else None


def table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of right-aligned columns; the first row of `cells` has the headings."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[f"{c:>{w}}" for c, w in zip(row, widths, strict=True)] for row in cells]
    return ["  ".join(line) for line in lines]


def has_width() -> bool:
    """Whether the output has a width of its own: a terminal's, or one that was asked for."""
    return sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))


def width() -> int:
    """Columns of the terminal, or `PLAIN_WIDTH` where the output is none."""
    if has_width():
        return max(NARROWEST, shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns)
    return PLAIN_WIDTH


def iteration_range(text: str, known: list[int]) -> list[int]:
    """`3`, `2-5`, `2-` or `-5` → those of `known`; raises `ValueError` in one line."""
    match = re.fullmatch(r"(\d*)(-?)(\d*)", text.strip())
    if match is None or not (match[1] or match[3]):
        raise ValueError(f"iterations {text!r}: write 3, 2-5, 2- or -5")
    first = int(match[1]) if match[1] else 0
    last = int(match[3]) if match[3] else (first if not match[2] else sys.maxsize)
    chosen = [number for number in known if first <= number <= last]
    if not chosen:
        told = ranges(known) or "none"
        raise ValueError(f"iterations {text!r}: none of these is sealed; sealed are {told}")
    return chosen


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2, 5`."""
    told: list[list[int]] = []
    for value in numbers:
        if told and told[-1][1] + 1 == value:
            told[-1][1] = value
        else:
            told.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in told)
