"""Where two recipes would compute different updates from the same sealed facts.

Most keys cannot: rewards, prompts and samples are sealed; layout, packing and memory only move
roundings; display and retention compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.recipe.schema import Recipe

UPDATE_KEYS = (
    "algorithm",
    "actor.lr",
    "actor.lr_schedule",
    "actor.lr_warmup_steps",
    "actor.min_lr",
    "actor.betas",
    "actor.eps",
    "actor.weight_decay",
    "actor.clip_grad",
    "actor.max_skipped_steps",
    "model.dtype",
    "rollout.dtype",
    "rollout.temperature",
    "rollout.group_size",
    "rollout.prompts_per_iteration",
    "rollout.max_response_tokens",
)
"""Keys and whole sections that an update from sealed facts, or the digest of its weights, reads."""


NOT_UPDATE_KEYS = ("algorithm.dynamic_sampling",)
"""Within those sections: what only generation reads."""


def update_differences(recipe: Recipe, ran: Recipe) -> dict[str, tuple[Any, Any]]:
    """Key → (the recipe's value, the run's), for keys that change what an update computes."""
    mine, theirs = dict(_flat(recipe)), dict(_flat(ran))
    keys = [key for key in mine | theirs if _counts(key)]
    if recipe.actor.lr_schedule != "constant":
        keys.append("run.iterations")  # the length of the decay
    return {
        key: (mine.get(key), theirs.get(key)) for key in keys if mine.get(key) != theirs.get(key)
    }


def _counts(key: str) -> bool:
    def within(names: tuple[str, ...]) -> bool:
        return any(key == name or key.startswith(name + ".") for name in names)

    return within(UPDATE_KEYS) and not within(NOT_UPDATE_KEYS)


def _flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    def walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for part, value in tree.items():
            if isinstance(value, dict):
                yield from walk(value, (*path, part))
            else:
                yield ".".join((*path, part)), value

    return walk(recipe.model_dump(mode="json"), ())
