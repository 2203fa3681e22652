"""When an iteration's updates end early. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def moved_too_far(target: float, sums: Mapping[str, float]) -> str | None:
    """Why no further step is taken, or None.

    `sums` are a minibatch's over all ranks before its step (`actor_loss`): its mean of
    ρ − 1 − log ρ per token estimates KL(old ‖ π) (Schulman 2020), and `target` is
    `algorithm.target_kl`, nats. Neither no tokens nor a KL that is no number stops anything.
    """
    tokens = sums.get("tokens", 0.0)
    kl = sums["approx_kl"] / tokens if tokens else 0.0
    if not kl > target:
        return None
    return f"approximate KL {kl:.3g} is above algorithm.target_kl {target:g}"
