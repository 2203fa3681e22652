"""What one iteration is about: the choices, under the recipe's names, and the sampled rows.

Every choice is spelled out here for the reference; the house gets a recipe in which what it fills
by itself is left empty (`cases.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

MOST_TOKENS = 12
"""`rollout.max_response_tokens`."""
GROUP_SIZE = 4
TEMPERATURE = 0.8


@dataclass(frozen=True, eq=False)
class Row:
    """One response and what was made of it. Arrays run over its response tokens."""

    group: int
    candidate: int
    prompt: np.ndarray
    response: np.ndarray
    acts: np.ndarray  # bool, the policy's own tokens
    rollout: np.ndarray  # float32, the generator's log-probs
    reward: float | None
    """None: the scorer failed."""
    truncated: bool
    steps: tuple[tuple[int, float], ...] = ()
    """Process rewards: (response token index, value)."""

    @property
    def actions(self) -> np.ndarray:
        return np.flatnonzero(self.acts)


@dataclass(frozen=True)
class Rules:
    """`algorithm` and `critic` of a recipe, all values concrete."""

    advantage: str = "grpo"
    group_std: str = "sample"
    advantage_eps: float = 1e-6
    process: bool = False
    gamma: float = 1.0
    lam: float = 0.95
    bootstrap: bool = True
    whiten: str = "none"
    buffer_tokens: int = 0
    penalty: float = 1.0
    mask_truncated: bool = False
    compares: bool = True
    """Responses to a prompt are compared: groups that cannot be are left out."""
    drop_equal: bool = True
    drop_partial: bool = True
    objective: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    importance: str = "none"
    importance_mode: str = "truncate"
    importance_low: float = 0.0
    importance_high: float = 2.0
    reduction: str = "token_mean"
    entropy: float = 0.0
    beta: float = 0.0
    kl_in_loss: bool = False
    kl_in_reward: bool = False
    estimator: str = "k3"
    epochs: int = 1
    target_kl: float | None = None
    minibatches: tuple[tuple[int, ...], ...] = ()
    """Groups of each minibatch, by hand."""
    split: bool = False
    """Rows go to as many minibatches in turn, whatever their group."""
    critic: bool = False
    value_clip: float | None = 0.2


@dataclass(frozen=True)
class Optimizer:
    """One of torch's, and what comes before it."""

    kind: str  # sgd or adam
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    clip_grad: float = 1e9
    """Largest norm of the whole gradient."""


@dataclass
class Step:
    """What one optimizer step did. Tensors are float64 matrices under HF's names."""

    loss: float
    gradient: dict = field(repr=False)
    weights: dict = field(repr=False)
