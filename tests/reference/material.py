"""Rows and models made up for the comparison: ragged, cut off, failed, all equal, with holes.

Six prompts, four responses each, of 1 to 12 tokens. What a group is for:

    0  outcomes 1, 0, 0, 1; one response with tokens that are not the policy's
    1  all outcomes equal
    2  the scorer failed on one response
    3  graded outcomes, two responses cut off; one of them ends in a foreign token
    4  one of four is right; of one response no token is the policy's
    5  close outcomes, one response cut off, one of a single token
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.models.support import VOCAB, write_hf_model
from tests.reference.plain import log_probs
from tests.reference.rules import MOST_TOKENS, Row

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
REWARDS = (
    (1.0, 0.0, 0.0, 1.0),
    (0.5, 0.5, 0.5, 0.5),
    (1.0, 0.0, None, 0.25),
    (0.0, 0.5, 1.0, 0.25),
    (0.0, 0.0, 0.0, 1.0),
    (0.7, 0.701, 0.699, 0.7004),
)
CUT_OFF = {(3, 1), (3, 3), (5, 2)}
HOLES = {(0, 2): (2, 3), (3, 3): (11,), (4, 0): (0,), (4, 2): tuple(range(10))}
"""Response tokens that are no action."""
LENGTHS = (
    (5, 12, 7, 3),
    (2, 6, 11, 4),
    (8, 9, 3, 10),
    (4, 12, 6, 12),
    (9, 2, 10, 5),
    (7, 3, 12, 1),
)


def make_rows(model: Any, seed: int = 3) -> list[Row]:
    """In canonical order. The generator's log-probs are `model`'s, off by up to a nat or so."""
    draw = np.random.default_rng(seed)
    rows = []
    for group, rewards in enumerate(REWARDS):
        prompt = draw.integers(0, VOCAB, int(draw.integers(2, 7)))
        for candidate, reward in enumerate(rewards):
            length = LENGTHS[group][candidate]
            acts = np.ones(length, bool)
            acts[list(HOLES.get((group, candidate), ()))] = False
            last = int(np.flatnonzero(acts)[-1]) if acts.any() else length - 1
            middle = length // 2
            steps = [(last, float(draw.integers(0, 4)) / 4)]
            if middle < last:
                steps.insert(0, (middle, float(draw.integers(0, 4)) / 4))
            rows.append(
                Row(
                    group=group,
                    candidate=candidate,
                    prompt=prompt,
                    response=draw.integers(0, VOCAB, length),
                    acts=acts,
                    rollout=np.zeros(length, np.float32),
                    reward=reward,
                    truncated=(group, candidate) in CUT_OFF,
                    steps=() if reward is None else tuple(steps),
                )
            )
            with torch.no_grad():
                exact = log_probs(model, rows[-1])[0].numpy()
            noise = draw.normal(0, 0.4, length)
            rows[-1].rollout[:] = np.minimum(exact + noise, 0)
    assert all(len(row.response) == MOST_TOKENS for row in rows if row.truncated)
    return rows


def make_models(folder: Path) -> dict[str, Any]:
    """HF folders `actor`, `reference` (near the actor) and `critic` (a reward model's, with its
    own body and head), and the models of the same names."""
    models = {"actor": write_hf_model(folder / "actor", "qwen2", **SHAPE)}
    near = copy.deepcopy(models["actor"])
    torch.manual_seed(5)
    with torch.no_grad():
        for param in near.parameters():
            param.add_(0.01 * torch.randn_like(param))
    near.save_pretrained(folder / "reference")
    models["reference"] = near
    critic = write_hf_model(folder / "critic", "qwen2", task="TokenClassification", **SHAPE)
    models["critic"] = critic
    return models


def fresh_critic(model: Any) -> Any:
    """The body of a causal model under a value head of zeros."""
    critic = copy.deepcopy(model)
    del critic.lm_head
    critic.score = nn.Linear(critic.config.hidden_size, 1, bias=False)
    nn.init.zeros_(critic.score.weight)
    return critic
