"""β of the KL penalty, steered towards a target KL."""

from __future__ import annotations

import math
from collections.abc import Mapping

MOST = 0.2
"""Bound on the proportional error."""


class KlController:
    """Ziegler's proportional controller (arXiv:1909.08593, section 2.2).

        e = clip(KL / target − 1, ±0.2)        β ← β (1 + e · min(n / horizon, 1))

    Without a target β stays as it is. The bound on n / horizon keeps β above 0, from where no
    factor would lead back.
    """

    def __init__(self, beta: float, target: float | None, horizon: float) -> None:
        """`target` in nats of a whole response, `horizon` in responses."""
        self.beta = float(beta)
        self._target, self._horizon = target, horizon

    def update(self, kl: float, sequences: int) -> float:
        """β from here on.

        `kl` is the mean over the iteration's trained responses of Σ_t (log π_old − log π_ref),
        `sequences` their number n; with none β stays, whatever `kl` is. Raises `ValueError` for
        a KL that is not finite.
        """
        if self._target is None or sequences == 0:
            return self.beta
        if not math.isfinite(kl):
            raise ValueError(f"KL to the reference is {kl}: β cannot be steered by it")
        error = min(max(kl / self._target - 1.0, -MOST), MOST)
        self.beta *= 1.0 + error * min(sequences / self._horizon, 1.0)
        return self.beta

    @property
    def state(self) -> dict[str, float]:
        """Plain JSON."""
        return {"beta": self.beta}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where the controller with `state` stopped."""
        self.beta = float(state["beta"])
