"""Samples, groups and statistics as pages for a terminal, or plain text where there is none."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megarl.audit import text
from megarl.audit.choose import Row
from megarl.audit.text import number, shown

CANDIDATE_WIDTH = 34
"""Columns of a response in a group, at least."""


def open_console() -> Console:
    """On standard output: styles only in a terminal (or with FORCE_COLOR), never markup."""
    return Console(file=sys.stdout, width=text.width(), highlight=False, markup=False, emoji=False)


def _print(console: Console, page: Any) -> None:
    """Styled in a terminal; elsewhere lines without the spaces that would fill them."""
    if console.is_terminal:
        console.print(page)
        return
    with console.capture() as told:
        console.print(page)
    print("\n".join(line.rstrip() for line in told.get().removesuffix("\n").split("\n")))


def print_samples(console: Console, rows: Iterable[Row], most: int | None) -> None:
    """One after the other; of a response `most` characters (None: all)."""
    for row in rows:
        head = Text(shown(row.sample_id), style="bold")
        head.append("  " + _facts(row), style=_style(row))
        _print(console, head)
        _print_prompt(console, row)
        _print(console, Padding(_response(row, most), (0, 0, 0, 2)))
        _print(console, Padding(Text(_why(row), style="dim"), (0, 0, 1, 2)))


def print_groups(
    console: Console, groups: Iterable[Sequence[Row]], wanted: set[str], most: int | None
) -> None:
    """Each group's prompt, then its responses side by side; in a group of which only some ids are
    `wanted`, these are marked."""
    for rows in groups:
        marked = {row.sample_id for row in rows} & wanted
        marked = marked if len(marked) < len(rows) else set()
        rewards = [row.reward for row in rows if row.reward is not None]
        told = f"  {len(rows)} samples"
        if rewards:
            told += f", reward mean {number(float(np.mean(rewards)), 4)}"
            told += f", {number(min(rewards), 4)} to {number(max(rewards), 4)}"
        _print(console, Text(shown(rows[0].group_id), style="bold") + Text(told))
        _print_prompt(console, rows[0])
        across = max(1, min(len(rows), console.width // CANDIDATE_WIDTH))
        for start in range(0, len(rows), across):
            _print(console, _side_by_side(rows[start : start + across], marked, most))
        print()


def _side_by_side(rows: Sequence[Row], wanted: set[str], most: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    for row in rows:
        mark = "> " if row.sample_id in wanted else "  "
        head = Text(f"{mark}{row.candidate}  {_reward(row)}", style=_style(row))
        table.add_column(head, ratio=1, overflow="fold")
    table.add_row(*(_response(row, most) for row in rows))
    table.add_row(*(Text(_facts(row, reward=False), style="dim") for row in rows))
    table.add_row(*(Text(_why(row), style="dim") for row in rows))
    return table


def _print_prompt(console: Console, row: Row) -> None:
    prompt = Text(shown(row.prompt["text"], lines=True))
    prompt.append(f"  [answer {shown(row.prompt['answer'])}]", style="dim")
    _print(console, Padding(prompt, (0, 0, 0, 2)))


def _response(row: Row, most: int | None) -> Text:
    """Behind a bar, so that nothing in it can be taken for ours."""
    whole = shown(row.text, lines=True)
    cut = whole if most is None else whole[:most]
    told = Text("\n".join("│ " + line for line in cut.split("\n")))
    if len(cut) < len(whole):
        told.append(f"\n… {len(whole) - len(cut)} characters more (--chars all)", style="dim")
    return told


def _reward(row: Row) -> str:
    return f"reward {number(row.reward)}" if row.reward is not None else row.status


def _facts(row: Row, *, reward: bool = True) -> str:
    told = [_reward(row)] if reward else []
    told += [f"{row.tokens} tokens", row.end_reason, row.verdict or "not derived"]
    if row.advantage is not None:
        told.append(f"advantage {row.advantage:+.4g}")
    return "  ".join(told)


def _why(row: Row) -> str:
    parts = [f"{shown(name)} {number(value, 4)}" for name, value in row.components.items()]
    return "  ".join(parts + ([shown(row.detail)] if row.detail else []))


def _style(row: Row) -> str:
    if row.reward is None:
        return "yellow"
    return "green" if row.reward > 0 else "red"


def statistics(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one iteration's rows; a number is None where nothing has it."""
    rewards = np.array([row.reward for row in rows if row.reward is not None])
    lengths = np.array([row.tokens for row in rows])
    groups: dict[str, set[float | None]] = {}
    for row in rows:
        groups.setdefault(row.group_id, set()).add(row.reward)
    gaps = [row.gap for row in rows if row.gap is not None]
    some = len(rewards) > 0
    return {
        "iteration": rows[0].iteration,
        "samples": len(rows),
        "trained": sum(row.verdict == "trained" for row in rows),
        "groups": len(groups),
        "groups_equal": sum(len(values) == 1 for values in groups.values()),
        "unscored": len(rows) - len(rewards),
        "reward_mean": float(rewards.mean()) if some else None,
        "reward_min": float(rewards.min()) if some else None,
        "reward_max": float(rewards.max()) if some else None,
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": sum(row.end == "truncated" for row in rows),
        "gap_max": max(gaps) if gaps else None,
    }


_SHORT = {
    "groups_equal": "equal",
    "reward_mean": "reward",
    "reward_min": "min",
    "reward_max": "max",
    "length_mean": "length",
    "length_max": "longest",
    "truncated": "cut",
    "gap_max": "gap",
}


_LEFT_OUT = ("reward_min", "reward_max", "groups_equal", "length_max", "unscored", "gap_max")
_LEFT_OUT += ("truncated", "groups", "length_mean")
"""Columns that a narrow terminal can do without, in this order."""


def print_statistics(lines: Sequence[dict[str, Any]]) -> None:
    """One line an iteration; the last column is the largest |old − rollout| log-prob. Columns that
    a narrow terminal has no room for are left out, and named."""
    left_out: list[str] = []
    room = text.width() if text.has_width() else sys.maxsize
    while True:
        names = [name for name in lines[0] if name not in left_out]
        heads = [_SHORT.get(name, name) for name in names]
        told = text.table([heads, *([number(line[name], 4) for name in names] for line in lines)])
        if len(told[0]) <= room or len(left_out) == len(_LEFT_OUT):
            break
        left_out.append(_LEFT_OUT[len(left_out)])
    print("\n".join(told))
    if left_out:
        words = ", ".join(_SHORT.get(name, name) for name in left_out)
        print("\n".join(textwrap.wrap(f"no room for {words}; --json has them", room)))
