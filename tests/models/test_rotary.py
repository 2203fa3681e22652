"""Rotary frequencies against transformers' own functions, bit for bit, and by hand.

Not covered: whether a model with them scores as HF's does (`test_families.py`).
"""

from __future__ import annotations

import math

import pytest
import torch

from megarl.models.packed import pack_sequences
from megarl.models.rotary import inverse_frequencies
from megarl.reshard.families.spec import RopeScaling

THETA, DIM = 77_000.0, 24
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {  # name → (ours, HF's rope_parameters)
    "plain": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 3.0), {"rope_type": "linear", "factor": 3.0}),
    "llama3": (
        RopeScaling("llama3", original_max_positions=8192, **LLAMA3),
        {"rope_type": "llama3", "original_max_position_embeddings": 8192, **LLAMA3},
    ),
    "llama3, short": (
        RopeScaling("llama3", original_max_positions=64, **LLAMA3),
        {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    ),
    "yarn": (
        RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * math.log(4.0) + 1.0),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn, chosen": (
        RopeScaling("yarn", 4.0, 64, beta_fast=20.0, beta_slow=2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", list(SCALINGS))
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, parameters = SCALINGS[name]
    config = LlamaConfig(
        head_dim=DIM,
        max_position_embeddings=256,
        rope_parameters=parameters | {"rope_theta": THETA},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(DIM, THETA, scaling)
    assert torch.equal(ours, theirs.inv_freq)
    if scaling is not None:
        assert not torch.equal(ours, inverse_frequencies(DIM, THETA))
        assert scaling.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.arange(40)
    factor = 1.0 if scaling is None else scaling.attention_factor
    pack = pack_sequences(
        torch.tensor([0, 40], dtype=torch.int32), positions, ours, torch.float32, factor
    )
    cos, sin = theirs(torch.zeros(1), positions[None])
    assert torch.equal(pack.cos_TD[:, 0], cos[0, :, : DIM // 2])
    assert torch.equal(pack.sin_TD[:, 0], sin[0, :, : DIM // 2])


def test_linear_divides_and_another_kind_is_refused() -> None:
    """theta 1e4 in 4 dimensions turns by 1 and by 0.01 of a radian."""
    assert inverse_frequencies(4, 1e4, RopeScaling("linear", 4.0)).tolist() == pytest.approx(
        [0.25, 0.0025]
    )
    with pytest.raises(ValueError, match="'dynamic' is unknown: linear, llama3 or yarn"):
        inverse_frequencies(4, 1e4, RopeScaling("dynamic", 4.0))
