"""Every random generator of a rank: Python's, numpy's, torch's and megarl's use of megatron's.

Nothing that megarl computes draws from them: prompts and samples have seeds of their own, made from
the recipe's seed and their ids. They are kept for what users add, scorers in the loop or dropout.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_state() -> dict[str, Any]:
    """This rank's generators as they are."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """As `random_state` found them, on a rank of the same number in a world of the same size."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
