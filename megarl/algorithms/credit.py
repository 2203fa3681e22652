"""Credit: from sealed facts to what the loss needs. Pure, and recomputable from the experience.

Statistics run over the *global* table of samples in canonical order, in float64; a rank then takes
its own rows. An outcome reward credits every action token of its response alike (GRPO,
arXiv:2402.03300, section 4.1.2).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megarl.algorithms.advantages import grpo_advantages, per_token
from megarl.contracts.records import Derived, Experience
from megarl.data.table import SampleTable


class CreditSettings(Protocol):
    """The `algorithm` section of the recipe, as far as credit reads it."""

    normalize_std: bool
    advantage_eps: float


def credit(
    experience: Experience,
    recipe_hash: str,
    table: SampleTable,
    trained: np.ndarray,
    settings: CreditSettings,
) -> tuple[Derived, np.ndarray]:
    """Advantages of this rank's tokens, and of all N samples (float64, NaN where not trained).

    `trained` bool [N] says which rows of the global table enter statistics and updates.
    """
    advantages = grpo_advantages(
        table.scores.total,
        table.draw_index,
        trained,
        normalize_std=settings.normalize_std,
        eps=settings.advantage_eps,
    )
    samples = experience.samples
    own = table.rows_of(samples.draw_index, samples.candidate)
    tokens = per_token(advantages[own], samples.response_lengths)
    derived = Derived(
        experience_hash=experience.hash,
        recipe_hash=recipe_hash,
        advantages=np.where(samples.action_mask, tokens, np.float32(0)),
    )
    return derived, np.where(trained, advantages, np.nan)
