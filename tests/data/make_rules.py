"""The part of a recipe that plans and credit read, for tests; its algorithm is the real section."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megarl.recipe.algorithm import AlgorithmSection


def make_rules(
    *,
    group_size: int,
    prompts: int,
    tokens: int = 64,
    longest: int = 64,
    minibatches: int = 1,
    **algorithm: Any,
) -> SimpleNamespace:
    """`tokens` of a micro-batch, `longest` response; other keys are the algorithm's."""
    return SimpleNamespace(
        algorithm=AlgorithmSection(minibatches=minibatches, **algorithm),
        rollout=SimpleNamespace(
            group_size=group_size, prompts_per_iteration=prompts, max_response_tokens=longest
        ),
        actor=SimpleNamespace(tokens_per_micro_batch=tokens),
        critic=SimpleNamespace(tokens_per_micro_batch=None),
    )
