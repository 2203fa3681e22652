"""What an evaluation leaves: every generation, and the numbers with what made them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.world import World

UNFINISHED = ".tmp"
LINES_AT_ONCE = 256
"""Generations that the ranks pass to rank 0 in one step, for no rank holds all but that one."""


def gather_lines(world: World, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks' lines on rank 0, none on the others. Collective."""
    kept: list[dict[str, Any]] = []
    for start in range(0, max(world.gather(len(lines))), LINES_AT_ONCE):
        for part in world.to_main(list(lines[start : start + LINES_AT_ONCE])):
            kept += part
    return kept


def write_generations(
    file: Path, head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> None:
    """One JSON object a line, `head` first in each; by mode, prompt and candidate. The file appears
    when it is whole."""
    ordered = sorted(lines, key=lambda line: (line["mode"], line["prompt_id"], line["candidate"]))
    text = (json.dumps({**head, **line}, ensure_ascii=False) + "\n" for line in ordered)
    _write(file, text)


def write_numbers(file: Path, told: Mapping[str, Any]) -> None:
    """Indented JSON; the file appears when it is whole."""
    _write(file, [json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n"])


def _write(file: Path, parts: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_name(file.name + UNFINISHED)
    with open(whole, "w", encoding="utf-8") as out:
        out.writelines(parts)
    whole.replace(file)
