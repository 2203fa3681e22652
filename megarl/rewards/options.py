"""Checks of the built-in scorers' options: each raises `ValueError` of one line that names it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection


def check_word(name: str, value: object, known: Collection[str]) -> None:
    """One of the words `known`."""
    if not isinstance(value, str) or value not in known:
        words = list(known)
        raise ValueError(
            f"{name} must be {', '.join(words[:-1])}{' or ' * (len(words) > 1)}{words[-1]}, "
            f"not {_shown(value)}"
        )


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {_shown(value)}")


def check_text(name: str, value: object, *, empty: bool = False) -> None:
    """A text; `empty`: it may be an empty one."""
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{name} must be a text, not {_shown(value)}")


def check_number(name: str, value: object, least: float) -> None:
    """A finite number from `least`; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_in(value, least):
        raise ValueError(f"{name} must be a number of at least {least}, not {_shown(value)}")


def check_whole(name: str, value: object, least: int, what: str = "whole number") -> None:
    """A whole number from `least`; 2.0 is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a {what} from {least}, not {_shown(value)}")


def compiled(name: str, value: object, groups: int | None = None) -> re.Pattern[str]:
    """A regular expression, with so many groups where that is said."""
    check_text(name, value, empty=True)
    assert isinstance(value, str)
    try:
        expression = re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        why = f"is no regular expression: {error}"
        raise ValueError(f"{name} {_shown(value)} {why}") from error
    if groups is not None and expression.groups != groups:
        raise ValueError(
            f"{name} {_shown(value)} has {expression.groups} groups; exactly one must hold the "
            "answer (write the others as (?:…))"
        )
    return expression


def _is_in(value: float, least: float) -> bool:
    return value >= least and not (isinstance(value, float) and math.isinf(value))


def _shown(value: object) -> str:
    """In one line, cut where it is long."""
    said = repr(value)
    return said if len(said) <= 200 else said[:199] + "…"
