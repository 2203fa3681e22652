"""A report for people on the prompts of a recipe, as `sets.py` reads and checks them.

Behind `python -m megarl.data`. Needs no ranks and loads no model, no trainer and no generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from megarl.data.prompts import PromptSet
from megarl.data.sets import Sets
from megarl.data.streams import Turns
from megarl.recipe import Recipe
from megarl.recipe.learning import ScorerSection

_SHOWN_NAMES = 10
"""Reward names of a source that the report lists."""
_SHOWN_PIECES = 2000
"""Tokens of the prompt that is shown."""


def report(recipe: Recipe, sets: Sets) -> Iterator[str]:
    """Line by line: each source, what the sets have in common, and the first prompt as it runs."""
    yield from _set_lines("data.train", recipe, sets.train, recipe.reward.scorers, drawn=True)
    if sets.held_out is None:
        yield "data.eval: none"
    else:
        scorers = (*recipe.reward.scorers, *recipe.eval.probes)
        yield from _set_lines("data.eval", recipe, sets.held_out, scorers, drawn=False)
        yield from _overlap_lines(sets.held_out)
    yield from _first_prompt(sets)


def _set_lines(
    key: str, recipe: Recipe, prompts: PromptSet, scorers: tuple[ScorerSection, ...], drawn: bool
) -> Iterator[str]:
    repeated = f", {prompts.duplicates} with the text of an earlier one"
    yield f"{key}: {len(prompts)} prompts{repeated}; template {recipe.data.template}"
    for index, name in enumerate(prompts.sources):
        rows = np.flatnonzero(prompts.source_of_row == index)
        yield f"  {name}: {prompts.files[index]}"
        yield from _refused_lines(prompts, index, len(rows))
        lengths = [len(prompts.rows[row].token_ids) for row in rows]
        yield (
            f"    tokens   min {min(lengths)}, median {np.median(lengths):g}, max {max(lengths)}; "
            f"data.max_prompt_tokens is {recipe.data.max_prompt_tokens}"
        )
        yield from _reward_lines([prompts.rows[row].reward for row in rows], scorers)
        if drawn:
            yield f"    drawn    {_drawn(recipe, prompts, index, len(rows))}"


def _refused_lines(prompts: PromptSet, index: int, usable: int) -> Iterator[str]:
    tally = prompts.tallies[index]
    yield f"    rows     {usable} usable, {tally.kinds.total()} refused"
    for kind, count in tally.kinds.most_common():
        places = [where.rpartition(":")[2] for where, _ in tally.first[kind]]
        more = " …" * (count > len(places))
        yield f"    refused  {kind} {count}: rows {', '.join(places)}{more}"
        yield f"             {tally.first[kind][0].why}"


def _reward_lines(rewards: list[str], scorers: tuple[ScorerSection, ...]) -> Iterator[str]:
    counts = Counter(rewards)
    for name, count in counts.most_common(_SHOWN_NAMES):
        titles = [
            scorer.title if scorer.weight else f"{scorer.title} (weight 0)"
            for scorer in scorers
            if scorer.scores(name)
        ]
        yield f"    reward   {name} ({count} rows): scored by {', '.join(titles)}"
    if len(counts) > _SHOWN_NAMES:
        yield f"    reward   and {len(counts) - _SHOWN_NAMES} more names"


def _drawn(recipe: Recipe, prompts: PromptSet, index: int, rows: int) -> str:
    """What an iteration draws of a source."""
    wanted = recipe.rollout.prompts_per_iteration
    if prompts.weights is None:
        share, weight = rows / len(prompts), "no weights"
    else:
        share = float(Turns(prompts.weights).share(index))
        weight = f"weight {prompts.weights[index]:g}, {share:.1%} of the prompts"
    epochs = wanted * share / rows
    return (
        f"{weight}: {wanted * share:.4g} of {wanted} prompts an iteration, {epochs:.3g} epochs; "
        f"{epochs * recipe.run.iterations:.3g} epochs in {recipe.run.iterations} iterations"
    )


def _overlap_lines(held_out: PromptSet) -> Iterator[str]:
    overlap = held_out.overlap
    assert overlap is not None
    yield f"overlap: {overlap.exact} of {overlap.held_out} held-out prompts are training prompts"
    if overlap.words:
        yield (
            f"         {overlap.ngram} of {overlap.held_out} share {overlap.words} words in a row "
            "(or all of fewer) with one"
        )


def _first_prompt(sets: Sets) -> Iterator[str]:
    """Token by token, so that special ones are seen by name."""
    ids = sets.train.rows[0].token_ids
    cut = f", the first {_SHOWN_PIECES} of them" * (len(ids) > _SHOWN_PIECES)
    yield f"first prompt, as it runs ({len(ids)} tokens{cut}): {sets.train.place(0)}"
    text = "".join(sets.tokens.pieces(ids[:_SHOWN_PIECES]))
    for line in text.split("\n"):
        yield f"  | {line}"
