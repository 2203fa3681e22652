"""All that `data` of a recipe names, read and checked as a run does at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.contracts.tokens import Tokens
from megarl.data.curriculum import Curriculum
from megarl.data.cursor import PromptCursor
from megarl.data.overlap import overlap_of
from megarl.data.prompts import Progress, PromptSet
from megarl.data.reward_names import check_only, check_probes, check_rewards
from megarl.recipe import Recipe


@dataclass(frozen=True)
class Sets:
    """A recipe's prompts, in order for a run."""

    tokens: Tokens
    train: PromptSet
    held_out: PromptSet | None
    curriculum: Curriculum | None
    cursor: PromptCursor


def read_sets(
    recipe: Recipe,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> Sets:
    """Everything of `data`, with all checks that a run makes of it at its start, in their order.

    `warn` is told the notes on each set when it is read. Raises what a run raises: `TokensError`,
    `PromptError`, `CurriculumError`.
    """
    section = recipe.data
    tokens = Tokens.load(Path(recipe.model.path))
    train = PromptSet.load(section.training, tokens, section, progress=progress)
    _tell(train, warn)
    check_rewards(train, recipe.reward)
    held_out = None
    if section.eval is not None:
        held_out = PromptSet.load(section.held_out, tokens, section, progress=progress)
        _tell(held_out, warn)
        check_rewards(held_out, recipe.reward, held_out=True)
        check_probes(held_out, recipe.eval.probes)
        overlap = overlap_of(train, held_out, section.overlap_words)
        overlap.check(section)
        held_out = replace(held_out, overlap=overlap)
        for note in overlap.notes():
            warn(note)
    check_only(train, held_out, recipe.reward.scorers)
    curriculum = Curriculum.of(section.curriculum)
    wanted = recipe.rollout.prompts_per_iteration
    cursor = PromptCursor(train, recipe.seed, wanted, curriculum)
    return Sets(tokens, train, held_out, curriculum, cursor)


def _tell(prompts: PromptSet, warn: Callable[[str], None]) -> None:
    for note in prompts.notes(refused=False):  # who asks to be warned reports refusals itself
        warn(note)
