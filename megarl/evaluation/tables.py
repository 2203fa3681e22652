"""An evaluation's numbers as a person reads them in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GAP = "  "
NONE = "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first = row[0].ljust(widths[0])
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(GAP.join([first, *cells]).rstrip())
    return lines


def evaluation_lines(told: Mapping[str, Any]) -> list[str]:
    """One evaluation (`Evaluated.told`): a row for each source, and one of all."""
    parts = dict(told["sources"]) if len(told["sources"]) > 1 else {}
    rows = [["", *heads_of(told["all"])]]
    rows += [[name, *_cells(numbers)] for name, numbers in (parts | {"all": told["all"]}).items()]
    lines = table(rows)
    percent = f"{100 * told['confidence']:g}"
    return [*lines, f"[low, high]: {percent} % interval over prompts like these"]


def comparison_lines(tolds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Several evaluations of the same prompts, a row each, over all sources."""
    rows = [["", *heads_of(tolds[0]["all"])]]
    rows += [[told["label"], *_cells(told["all"])] for told in tolds]
    return table(rows)


def heads_of(numbers: Mapping[str, Any]) -> list[str]:
    """Column heads of what these numbers hold."""
    heads = ["prompts", "greedy"]
    if "sampled" in numbers:
        heads += ["sampled", *(f"pass@{k}" for k in numbers["pass_at"])]
    heads += [f"{name} (probe)" for name in numbers["greedy"]["probes"]]
    return [*heads, "tokens", "cut off", "unscored", "lost"]


def _cells(numbers: Mapping[str, Any]) -> list[str]:
    greedy = numbers["greedy"]
    cells = [str(numbers["prompts"]), interval_text(greedy["accuracy"])]
    modes = [greedy]
    if "sampled" in numbers:
        modes.append(numbers["sampled"])
        cells.append(interval_text(numbers["sampled"]["accuracy"]))
        cells += [_pass_text(told) for told in numbers["pass_at"].values()]
    cells += [_probe_text(told) for told in greedy["probes"].values()]
    cells.append(_number(greedy["length"], ".1f"))
    cells.append(_number(greedy["truncated"], ".0%"))
    return [*cells, *(str(sum(mode[key] for mode in modes)) for key in ("unscored", "lost"))]


def interval_text(told: Mapping[str, Any] | None) -> str:
    """`0.417 [0.245, 0.612]`; a dash where nothing was measured."""
    if told is None:
        return NONE
    if told["low"] is None:
        return f"{told['value']:.3f}"
    return f"{told['value']:.3f} [{told['low']:.3f}, {told['high']:.3f}]"


def _pass_text(told: Mapping[str, Any]) -> str:
    left_out = f" ({told['left_out']} left out)" if told["left_out"] else ""
    return interval_text(told["chance"]) + left_out


def _probe_text(told: Mapping[str, Any]) -> str:
    unscored = f" ({told['unscored']} unscored)" if told["unscored"] else ""
    return interval_text(told["mean"]) + unscored


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
