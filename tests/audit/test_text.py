"""What reaches a terminal, ranges and numbers: the small parts of the audit's output.

Not covered: how a terminal draws wide characters.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.audit.choose import Choice, within
from megarl.audit.text import iteration_range, number, ranges, shown, table
from megarl.contracts.tokens import Tokens
from tests.contracts.tokenizer_folders import metaspace_folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 80", "so 80"),
        ("naïve 数学 −", "naïve 数学 −"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x08\x7f", "a\\rb\\x08\\x7f"),
        ("\x9b2J", "\\x9b2J"),
        ("evil\u202etxt", "evil\\u202etxt"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("half \ud83d", "half \\ud83d"),
        ("two\nlines", "two\\nlines"),
    ],
)
def test_nothing_that_could_steer_a_terminal_is_left(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_line_feeds_stay_where_lines_are_wanted() -> None:
    assert shown("two\nlines\r\n", lines=True) == "two\nlines\\r\n"


@pytest.mark.parametrize(
    ("bound", "value", "expected"),
    [
        (">=0.5", 0.5, True),
        (">0.5", 0.5, False),
        ("<=1", 1.0, True),
        ("<-1", -2.0, True),
        ("1", 1.0, True),
        ("=1", 0.99, False),
        ("== 1", 1.0, True),
        ("!=1", 0.0, True),
        ("0.2..0.8", 0.8, True),
        ("0.2..0.8", 0.81, False),
        ("..0", -5.0, True),
        ("-1..", -1.5, False),
        ("none", None, True),
        ("none", 0.0, False),
        ("<1", None, False),
        ("!=1", None, False),
    ],
)
def test_ranges_take_a_number_or_not(bound: str, value: float | None, expected: bool) -> None:
    assert within(bound, value) is expected


@pytest.mark.parametrize("bound", ["", ">", "abc", ">=x", "1..x", "nan", "1 2"])
def test_a_range_that_cannot_be_read_is_refused(bound: str) -> None:
    with pytest.raises(ValueError, match="write >=0.5, <10"):
        Choice(reward=[bound])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3]), ("2-5", [3, 5]), ("5-", [5, 9]), ("-3", [0, 3]), ("0-", [0, 3, 5, 9])],
)
def test_iterations_by_number_and_range(text: str, expected: list[int]) -> None:
    assert iteration_range(text, [0, 3, 5, 9]) == expected


@pytest.mark.parametrize("text", ["", "-", "x", "1-2-3", "7", "10-"])
def test_iterations_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="iterations"):
        iteration_range(text, [0, 3, 5, 9])


def test_numbers_are_short_and_absence_is_a_dash() -> None:
    assert [number(value) for value in (None, float("nan"), 0.5, 12345678, 1 / 3)] == [
        "-",
        "-",
        "0.5",
        "12345678",
        "0.333333",
    ]
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert table([["a", "long"], ["100", "1"]]) == ["  a  long", "100     1"]


def test_pieces_are_what_each_id_adds_to_the_text(tmp_path: Path) -> None:
    tokens = Tokens.load(metaspace_folder(tmp_path / "metaspace"))
    ids = tokens.encode("The answer is: 42")
    pieces = tokens.pieces([*ids, tokens.eos_ids[0], tokens.vocab_size + 3])
    assert "".join(pieces[: len(ids)]).strip() == tokens.decode(ids)
    assert any(piece.startswith(" ") for piece in pieces[1 : len(ids)])
    assert pieces[-2].startswith("<") and pieces[-1] == f"⟨id {tokens.vocab_size + 3}⟩"
