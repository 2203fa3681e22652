"""The unit tests of a row, as the scorer `code` reads them, and how an outcome is compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STDIN, CALL = "stdin", "call"
FORM = (
    '{"style": "stdin", "cases": [{"input": "…", "output": "…"}]} or '
    '{"style": "call", "function": "f", "cases": [{"args": […], "kwargs": {…}, "output": …}]}'
)


@dataclass(frozen=True, slots=True)
class Case:
    """What a program is given, and what it should say."""

    wanted: Any
    """Text in style `stdin`, a JSON value in style `call`."""
    text: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class UnitTests:
    function: str
    """Name of the function that is called; empty in style `stdin`."""
    cases: tuple[Case, ...]


def read_tests(answer: str, metadata: Mapping[str, Any], key: str) -> UnitTests:
    """The tests of a row: its other key `key`, as JSON text or as the object itself, or its answer.

    Raises `ValueError` that names what is wrong.
    """
    value: Any = metadata.get(key)
    where = f"the row's {key}" if value is not None else "the row's answer"
    if value is None:
        if not answer.strip():
            raise ValueError(f"no tests: the row has neither {key} nor an answer; form: {FORM}")
        value = answer
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON ({error}); form: {FORM}") from error
    return _tests(value, where)


def _tests(value: Any, where: str) -> UnitTests:
    _keys(value, where, {"style", "function", "cases"}, {"style", "cases"})
    style, function, cases = value["style"], value.get("function"), value["cases"]
    if style not in (STDIN, CALL):
        raise ValueError(f"{where}: style is {style!r}, not {STDIN} or {CALL}")
    if style == CALL and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError(f"{where}: style {CALL} needs the name of a function, not {function!r}")
    if style == STDIN and function is not None:
        raise ValueError(f"{where}: style {STDIN} calls no function, yet one is named")
    if not isinstance(cases, list) or not cases:
        raise ValueError(f"{where}: cases is no list of at least one case")
    read = _called if style == CALL else _read
    return UnitTests(
        function if style == CALL else "",
        tuple(read(case, f"{where}: cases[{index}]") for index, case in enumerate(cases)),
    )


def _read(case: Any, where: str) -> Case:
    _keys(case, where, {"input", "output"}, {"input", "output"})
    for name in ("input", "output"):
        if not isinstance(case[name], str):
            raise ValueError(f"{where}: {name} is a {type(case[name]).__name__}, not a text")
    return Case(case["output"], text=case["input"])


def _called(case: Any, where: str) -> Case:
    _keys(case, where, {"args", "kwargs", "output"}, {"output"})
    args, kwargs = case.get("args", []), case.get("kwargs", {})
    if not isinstance(args, list):
        raise ValueError(f"{where}: args is a {type(args).__name__}, not a list")
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise ValueError(f"{where}: kwargs is no object of names")
    return Case(case["output"], args=tuple(args), kwargs=kwargs)


def _keys(value: Any, where: str, known: set[str], needed: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, not an object; form: {FORM}")
    if missing := needed - value.keys():
        raise ValueError(f"{where} has no {' and no '.join(sorted(missing))}; form: {FORM}")
    if unknown := value.keys() - known:
        raise ValueError(f"{where} has {sorted(map(str, unknown))[0]}, which is not in {FORM}")


def same_text(found: str, wanted: str) -> bool:
    """Line by line, without white space at the ends of lines and empty lines at the end."""
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_value(found: Any, wanted: Any, tolerance: float) -> bool:
    """Plain JSON values. `1` is `1.0` and a tuple is a list, but `true` is not `1`.

    Numbers of which one is a float may differ by `tolerance`, absolutely or relative to the larger;
    NaN is NaN.
    """
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return found == wanted or _close(found, wanted, tolerance)
    if isinstance(found, list) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(
            same_value(*pair, tolerance) for pair in zip(found, wanted, strict=True)
        )
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            same_value(found[key], wanted[key], tolerance) for key in wanted
        )
    return type(found) is type(wanted) and found == wanted


def _close(found: float, wanted: float, tolerance: float) -> bool:
    if not (isinstance(found, float) or isinstance(wanted, float)):
        return False
    try:
        both_nan = math.isnan(found) and math.isnan(wanted)
        return both_nan or math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float holds
        return False
