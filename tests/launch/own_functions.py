"""Own functions of the algorithm, named in a recipe by import path."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from megarl.algorithms.advantages import CreditBatch
from megarl.algorithms.objectives import PolicyTokens


def over_all(batch: CreditBatch, settings: Any) -> np.ndarray:
    """Reward less the mean of everything that is compared."""
    return batch.on_tokens(batch.rewards - batch.rewards[batch.compared].mean())


def plain_ratio(tokens: PolicyTokens, settings: Any) -> Tensor:
    """The surrogate without a clip."""
    return -tokens.log_ratio_A.exp() * tokens.advantages_A


def too_few(batch: CreditBatch, settings: Any) -> np.ndarray:
    return np.zeros(1)
