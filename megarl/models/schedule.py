"""Learning rate of the n-th optimizer step. Pure, so that a resumed run continues it."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(
    step: int,
    *,
    lr: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    min_lr: float,
) -> float:
    """The rate of step `step` (the first is 1): `lr · step / warmup_steps` up to `warmup_steps`,
    then constant, or down to `min_lr` at `total_steps` and constant after it.

    Example: lr 1e-6, 10 warm-up steps, constant: step 1 → 1e-7, step 10 → 1e-6, step 26 → 1e-6.
    Raises `ValueError` for a step below 1 or an unknown schedule.
    """
    if step < 1 or schedule not in SCHEDULES:
        raise ValueError(f"no learning rate for step {step} of schedule {schedule!r}")
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    share = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return min_lr + (lr - min_lr) * share
