"""The commands that docs/evaluation.md and the help show, read as they stand.

Not covered: that they run; `tests/launch/test_evaluate.py` runs the like.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megarl.evaluation.arguments import USAGE, split
from megarl.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8") + USAGE
COMMANDS = [
    shlex.split(line)
    for line in TEXT.replace("\\\n", "").splitlines()
    if line.startswith(("    python -m megarl.evaluate ", "    torchrun ", "  python -m megarl.ev"))
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_can_be_read(command: list[str]) -> None:
    arguments = command[command.index("megarl.evaluate") + 1 :]
    assert arguments
    plain, _, _, _ = split(arguments)
    load_recipe(ROOT / "recipes" / "quickstart.yaml", plain[1:])


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 8
