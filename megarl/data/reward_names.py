"""Reward names: those that rows have against those that scorers are meant for (`only`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.prompts import PromptSet
from megarl.data.refusals import PromptError
from megarl.recipe.learning import ScorerSection

MOST_NAMES = 20
"""In a line for people."""


def check_rewards(prompts: PromptSet, section: Any, *, held_out: bool = False) -> None:
    """Raise `PromptError` where no scorer says anything of a row, naming the first such row.

    `section` is the recipe's `reward`. A row to train on needs a scorer of a weight other than 0, a
    held-out row any scorer. Where scorers are meant for some reward names (`only`), a name that
    the recipe or a row gives must be one of these: mistyped, it would silently be scored by the
    others alone.
    """
    listed = {name for scorer in section.scorers for name in scorer.only}
    known = f"names in `only` are {', '.join(sorted(listed)) or 'none'}"
    fine: set[tuple[bool, str]] = set()
    for row, prompt in enumerate(prompts.rows):
        named = bool(prompts.named) and prompts.named[prompts.source_of_row[row]]
        if (named, prompt.reward) in fine:
            continue
        where = f"{prompts.place(row)}: the row's reward name {prompt.reward!r}"
        scorers = [scorer for scorer in section.scorers if scorer.scores(prompt.reward)]
        if not held_out and scorers and not any(scorer.weight for scorer in scorers):
            raise PromptError(f"{where} is scored by scorers of weight 0 only; give one a weight")
        if not scorers:
            raise PromptError(
                f"{where} is scored by no scorer of reward.scorers; {known}; add it to one, or set "
                "the source's `reward`"
            )
        if named and listed and prompt.reward not in listed:
            raise PromptError(
                f"{where} is in no scorer's `only`, so that only the scorers for all rows would "
                f"score it; {known}; correct the name or add it to a scorer"
            )
        fine.add((named, prompt.reward))


def check_only(
    train: PromptSet, held_out: PromptSet | None, scorers: Sequence[ScorerSection]
) -> None:
    """Raise `PromptError` for a name in the `only` of reward.scorers that no row has: mistyped, it
    would silently take the scorer away. Names that only held-out rows have are fine."""
    rows = [*train.rows, *(held_out.rows if held_out else ())]
    files = "data.train" if held_out is None else "data.train or data.eval"
    _check_only("reward.scorers", scorers, {row.reward for row in rows}, files)


def check_probes(held_out: PromptSet, probes: Sequence[ScorerSection]) -> None:
    """The same of eval.probes, which score held-out rows alone."""
    _check_only("eval.probes", probes, {row.reward for row in held_out.rows}, "data.eval")


def _check_only(key: str, scorers: Sequence[ScorerSection], there: set[str], files: str) -> None:
    for index, scorer in enumerate(scorers):
        for name in scorer.only:
            if name not in there:
                raise PromptError(
                    f"{key}.{index}.only: no usable row of {files} has the reward name {name!r}; "
                    f"rows have {_listed(there)}; correct the name or leave it out"
                )


def _listed(names: set[str]) -> str:
    first = sorted(names)[:MOST_NAMES]
    more = len(names) - len(first)
    return ", ".join(map(repr, first)) + (f" and {more} more" if more else "")
