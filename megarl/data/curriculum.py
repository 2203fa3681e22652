"""A curriculum of the recipe's own: a function says which prompts may be drawn, from how they went.

    data.curriculum: my_package.my_module:keep

    def keep(prompt: Prompt, seen: Seen, iteration: int) -> bool: ...

It is asked on every rank when a prompt's turn comes, once an iteration, and must answer alike
everywhere: it follows from its three arguments alone. A prompt that it refuses is passed over until
its turn in the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.algorithms.own import code_hash, load_own
from megarl.contracts.errors import InputError
from megarl.contracts.records import Prompt
from megarl.data.table import SampleTable
from megarl.rewards.score import penalised
from megarl.rewards.scorer import said

KEY = "data.curriculum"


class CurriculumError(InputError):
    """A curriculum that cannot be used; one line that names the function."""

    told_by_all = True


@dataclass(frozen=True, slots=True)
class Seen:
    """How one prompt went so far, over the whole run. Rewards are totals as the scorers gave them,
    before overlong shaping; responses that could not be scored are in none of them."""

    draws: int = 0
    """Iterations that drew it."""
    scored: int = 0
    """Its responses with a score."""
    mean_reward: float | None = None
    """Of all these; None where there is none."""
    last_reward: float | None = None
    """Mean of those of the last iteration that had any; None where there is none."""


@dataclass(slots=True)
class _Tally:
    draws: int = 0
    scored: int = 0
    total: float = 0.0
    last: float | None = None


_COLUMNS = ("draws", "scored", "total", "last")


class PromptHistory:
    """How the prompts that were drawn went; the same on every rank, since it counts on the global
    table in canonical order."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    @property
    def known(self) -> int:
        """Prompts that were drawn at least once."""
        return len(self._tallies)

    def seen(self, prompt_id: str) -> Seen:
        tally = self._tallies.get(prompt_id)
        if tally is None:
            return Seen()
        mean = tally.total / tally.scored if tally.scored else None
        return Seen(tally.draws, tally.scored, mean, tally.last)

    def note(self, table: SampleTable, prompts: Sequence[Prompt]) -> None:
        """Count one iteration; `prompts` by draw index.

        A response that got the declared penalty for want of a score counts as one without.
        """
        scores = table.scores
        rows = np.flatnonzero(scores.ok & ~penalised(scores))
        draws = table.draw_index[rows]
        counts = np.bincount(draws, minlength=len(prompts)).tolist()
        sums = np.bincount(draws, weights=scores.total[rows], minlength=len(prompts)).tolist()
        for prompt, count, total in zip(prompts, counts, sums, strict=True):
            tally = self._tallies.setdefault(prompt.prompt_id, _Tally())
            tally.draws += 1
            tally.scored += count
            tally.total += total
            if count:
                tally.last = total / count

    @property
    def state(self) -> dict[str, Any]:
        """In columns; plain JSON, from which the very same numbers come back."""
        ids = sorted(self._tallies)
        columns = {
            name: [getattr(self._tallies[prompt_id], name) for prompt_id in ids]
            for name in _COLUMNS
        }
        return {"prompt_ids": ids, **columns}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count on where the history with `state` stopped; an empty one: from nothing."""
        ids = state.get("prompt_ids", [])
        columns = [state.get(name, []) for name in _COLUMNS]
        self._tallies = {
            prompt_id: _Tally(*values) for prompt_id, *values in zip(ids, *columns, strict=True)
        }


class Curriculum:
    """The recipe's function and what it is asked about."""

    def __init__(self, name: str) -> None:
        """Raises `InputError` when `name` (`import.path:function`) cannot be imported, is no
        function or has no source."""
        self.name = name
        self._function = load_own(KEY, name)
        self.code_hash = code_hash(KEY, name)
        """Of the source of its module: part of what a run must go on with."""
        self.history = PromptHistory()
        self._iteration = 0
        self._answers: dict[str, bool] = {}
        """Of this iteration: it is asked once about a prompt."""

    @staticmethod
    def of(name: str | None) -> Curriculum | None:
        """None where the recipe names none. Raises as the class does."""
        return None if name is None else Curriculum(name)

    def begin(self, iteration: int) -> None:
        self._iteration, self._answers = iteration, {}

    def keeps(self, prompt: Prompt) -> bool:
        """Whether `prompt` may be drawn in this iteration.

        Raises `CurriculumError` where the function raises or answers neither True nor False.
        """
        answer = self._answers.get(prompt.prompt_id)
        if answer is None:
            answer = self._ask(prompt, self.history.seen(prompt.prompt_id), self._iteration)
            self._answers[prompt.prompt_id] = answer
        return answer

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Ask about each of `prompts` as one that was never drawn, before anything slow begins.

        Raises `CurriculumError` as `keeps` does, and where a second answer is another one.
        """
        for prompt in prompts:
            if self._ask(prompt, Seen(), 0) is not self._ask(prompt, Seen(), 0):
                raise CurriculumError(
                    f"{KEY}: {self.name} answers otherwise when asked again about prompt "
                    f"{prompt.prompt_id}: a run could not be resumed; keep no state, use no time "
                    "or random numbers"
                )

    def _ask(self, prompt: Prompt, seen: Seen, iteration: int) -> bool:
        try:
            answer = self._function(prompt, seen, iteration)
        except Exception as error:  # foreign code may raise anything
            where = self._where(prompt, iteration)
            raise CurriculumError(f"{where}, raised {said(error)}") from error
        if not isinstance(answer, bool):
            raise CurriculumError(
                f"{self._where(prompt, iteration)}, answered {answer!r:.60}; answer True (it may "
                "be drawn) or False"
            )
        return answer

    def _where(self, prompt: Prompt, iteration: int) -> str:
        return f"{KEY}: {self.name}, asked about prompt {prompt.prompt_id} in iteration {iteration}"
