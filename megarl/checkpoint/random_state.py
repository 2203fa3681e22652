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

from megarl.platforms import platform_of


def random_state(device: torch.device) -> dict[str, Any]:
    """This rank's generators as they are; `device` is the rank's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": platform_of(device.type).rng_state(device),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """As `random_state` found them, on a rank of the same number in a world of the same size."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    platform_of(device.type).restore_rng(device, state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])
