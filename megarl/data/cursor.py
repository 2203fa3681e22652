"""Which prompts are drawn next: an endless order of all rows, gone through once an epoch.

Every epoch is a shuffle of its own. A row is drawn at most once an iteration: a row that comes up
again in the same one steps back and is the first of the next iteration, so that each row still
comes once an epoch. What is drawn follows from the cursor's state alone, which says what was
consumed, so a run that continues draws what an uninterrupted one would.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from megarl.contracts.records import Prompt
from megarl.data.prompts import PromptError, PromptSet


class PromptCursor:
    """Draws the rows of one prompt set, iteration by iteration; the same on every rank.

    Example: rows a … e, three an iteration, epochs `d b a e c` and `e a d c b`: the draws are
    `d b a`, `e c a` (e has just come and steps back), `e d c`, …
    """

    def __init__(self, prompts: PromptSet, seed: int, per_iteration: int) -> None:
        """Raises `PromptError` when one iteration wants more prompts than there are."""
        if per_iteration > len(prompts):
            raise PromptError(
                f"rollout.prompts_per_iteration is {per_iteration}, but there are only "
                f"{len(prompts)} usable prompts; a row is drawn at most once an iteration"
            )
        self._rows = prompts.rows
        self._row_of = {prompt.prompt_id: row for row, prompt in enumerate(prompts.rows)}
        self._seed = seed
        self._fingerprint = prompts.fingerprint
        self._position = 0
        """Rows of the endless order that were passed: drawn, stepped back or excluded."""
        self._back: list[int] = []
        """Passed rows that stepped back, in order; they come before what follows `_position`."""
        self._drawn: set[int] = set()
        """Rows of the iteration that goes on."""
        self._epoch, self._order = 0, self._shuffle(0)

    @property
    def rows(self) -> tuple[Prompt, ...]:
        """All that may be drawn, in the order of the file."""
        return self._rows

    @property
    def state(self) -> dict[str, Any]:
        """What was consumed, between two iterations; plain JSON."""
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "position": self._position,
            "back": list(self._back),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the cursor with `state` stopped.

        Raises `PromptError` when that one went through other rows or in another order.
        """
        for key in ("fingerprint", "seed"):
            mine = self.state[key]
            if state.get(key) != mine:
                raise PromptError(
                    f"the run to continue drew its prompts with {key} {state.get(key)!r}, this one "
                    f"has {mine!r}: the order would differ; resume with the same data and recipe"
                )
        self._position, self._back = int(state["position"]), list(state["back"])
        self._drawn = set()

    @property
    def epoch(self) -> float:
        """How many times the rows have been gone through."""
        return (self._position - len(self._back)) / len(self._rows)

    def begin(self) -> None:
        """An iteration begins: every row may be drawn again."""
        self._drawn = set()

    def draw(self, count: int, excluded: Collection[str] = ()) -> tuple[Prompt, ...]:
        """The next `count` prompts, none of which this iteration has drawn.

        `excluded` are prompt ids that are passed over and never drawn again. Fewer come, perhaps
        none, when fewer are left to this iteration.
        """
        barred = {self._row_of[prompt_id] for prompt_id in excluded}
        count = min(count, len(self._rows) - len(self._drawn | barred))
        chosen: list[int] = []
        waiting, self._back = self._back, []
        while len(chosen) < count:
            row = waiting.pop(0) if waiting else self._next()
            if row in self._drawn:
                self._back.append(row)
            elif row not in barred:
                self._drawn.add(row)
                chosen.append(row)
        self._back += waiting
        return tuple(self._rows[row] for row in chosen)

    def _next(self) -> int:
        epoch, at = divmod(self._position, len(self._rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffle(epoch)
        self._position += 1
        return int(self._order[at])

    def _shuffle(self, epoch: int) -> np.ndarray:
        """int64 [rows]. Integer mixing of our own: the same on every machine and numpy version."""
        rows = np.arange(len(self._rows), dtype=np.uint64)
        with np.errstate(over="ignore"):
            stream = _mix(_mix(np.array([self._seed % 2**64], np.uint64)) + np.uint64(epoch))
            keys = _mix(stream + rows * np.uint64(0x9E3779B97F4A7C15))
        return np.argsort(keys, kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 → uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
