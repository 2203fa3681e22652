"""Where two recipes part: in what an update computes from sealed facts, or in what a run computes.

Most keys do not change an update from sealed facts: rewards, prompts and samples are sealed;
layout, packing and memory only move roundings; display and retention compute nothing. A run that
is resumed still draws, generates and scores: there most keys count.
"""

from __future__ import annotations

import json
from typing import Any

from megarl.recipe.roles import LAYOUT_KEYS
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
    "actor.router",
    "actor.router_aux_loss",
    "actor.replay_routing",
    "critic",
    "model.dtype",
    "rollout.dtype",
    "rollout.temperature",
    "rollout.group_size",
    "rollout.prompts_per_iteration",
    "rollout.max_response_tokens",
)
"""Keys and whole sections that an update from sealed facts, or the digest of its weights, reads."""


_CRITIC_ROUNDINGS = (
    "critic.tokens_per_micro_batch",
    "critic.recompute",
    "critic.offload",
    *(f"critic.{key}" for key in LAYOUT_KEYS),
)
"""Layout, packing and memory of the critic."""

NOT_UPDATE_KEYS = ("algorithm.dynamic_sampling", "critic.path", *_CRITIC_ROUNDINGS)
"""Within those sections: what only generation reads, and what moves roundings alone. The weights
that a critic begins from are compared by digest."""


FREE_ON_RESUME = (
    # What the run is called, where it lies, what is shown and kept of it: no number depends on it.
    "run",
    "observe",
    "experience",
    "checkpoint",
    "resume",
    # Evaluation and the parity check read the run and change nothing of it.
    "eval",
    "parity",
    # Layout, packing, memory and speed: the same sums in another order.
    "world",
    "actor.tp",
    "actor.pp",
    "actor.stage_layers",
    "actor.virtual_stages",
    "actor.ep",
    "actor.expert_tp",
    "actor.sequence_parallel",
    "actor.offload",
    "actor.tokens_per_micro_batch",
    "actor.recompute",
    "actor.logprob_chunk_tokens",
    *_CRITIC_ROUNDINGS,
    "reference.offload",
    "rollout.tp",
    "rollout.ep",
    "rollout.verify_every",
    "rollout.max_total_tokens",
    "rollout.max_running_requests",
    "rollout.chunked_prefill_tokens",
    "rollout.release",
    "rollout.bucket_bytes",
    "reward.workers",
    "reward.max_pending",
    "reward.concurrency",
    # Held-out prompts are compared with the training prompts, which stay what they are.
    "data.max_overlap",
    "data.overlap_words",
    "data.max_ngram_overlap",
    # Paths: what lies there is compared by content, wherever it was moved.
    "model.path",
    "data.train",
    "data.eval",
    "critic.path",
    "reference.path",
)
"""Keys and whole sections that may change when a run is resumed; any other key counts as changing
the maths or the data. `run.iterations` is free only where the learning rate does not depend on it.
"""


def update_differences(recipe: Recipe, ran: Recipe) -> dict[str, tuple[Any, Any]]:
    """Key → (the recipe's value, the run's), for keys that change what an update computes."""
    mine, theirs = recipe.flat(), ran.flat()
    keys = [key for key in mine if _within(key, UPDATE_KEYS) and not _within(key, NOT_UPDATE_KEYS)]
    if recipe.actor.lr_schedule != "constant" or recipe.critic_section.lr_schedule != "constant":
        keys.append("run.iterations")  # the length of the decay
    return {key: (mine[key], theirs[key]) for key in keys if mine[key] != theirs[key]}


def resume_differences(recipe: Recipe, stored: Recipe) -> dict[str, tuple[Any, Any]]:
    """Key → (old, new): what a run of `stored` may not take from `recipe` without being told.

    Values are plain JSON data, lists and mappings whole. Contents behind
    paths (tokenizer, model, data, scorers' versions) are not looked at.
    """
    new, old = recipe.flat(), stored.flat()
    sections = (recipe.actor, stored.actor, recipe.critic_section, stored.critic_section)
    decays = {section.lr_schedule for section in sections} != {"constant"}
    counted = [key for key in new if not _within(key, FREE_ON_RESUME)]
    if decays:
        counted.append("run.iterations")  # the length of the decay
    # As text, for Python takes 1, 1.0 and true for the same and a scorer's option need not.
    return {key: (old[key], new[key]) for key in counted if _text(old[key]) != _text(new[key])}


def _within(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
