"""The metrics row of one iteration, from the global table and the steps. Pure.

Every number is the same on every rank and in every layout of the ranks; wall time is not here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.contracts.samples import End
from megarl.data.prepare import Parity
from megarl.data.table import SampleTable
from megarl.models.step import StepResult
from megarl.rollout.groups import IterationPlan


def iteration_row(
    table: SampleTable,
    plan: IterationPlan,
    parity: Parity,
    advantages: np.ndarray,
    results: Sequence[StepResult],
    sums: Sequence[dict[str, float]],
) -> dict[str, float]:
    """`results` are the optimizer steps, `sums` their loss sums over all ranks."""
    row = _rewards(table) | _responses(table) | _groups(plan)
    row["parity/tokens"] = float(parity.tokens)
    if parity.tokens:
        row |= {"parity/logprob_gap_max": parity.max, "parity/logprob_gap_mean": parity.mean}
    used = advantages[plan.trained]
    if len(used):
        row |= {"advantage/mean": float(used.mean()), "advantage/std": float(used.std())}
        row["advantage/abs_max"] = float(np.abs(used).max())
    return row | _updates(list(zip(results, sums, strict=True)))


def _rewards(table: SampleTable) -> dict[str, float]:
    scores = table.scores
    ok = scores.ok
    row = {"reward/unscored": float((~ok).sum())}
    if ok.any():
        total = scores.total[ok]
        row |= {
            "reward/mean": float(total.mean()),
            "reward/std": float(total.std()),
            "reward/min": float(total.min()),
            "reward/max": float(total.max()),
        }
    for name, values in scores.components.items():
        known = values[~np.isnan(values)]
        if len(known):
            row[f"reward/{name}"] = float(known.mean())
    return row


def _responses(table: SampleTable) -> dict[str, float]:
    lengths, end = table.response_length, table.end
    return {
        "response/tokens": float(lengths.sum()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float((end == End.TRUNCATED).mean()),
        "prompt/length_mean": float(table.prompt_length.mean()),
    }


def _groups(plan: IterationPlan) -> dict[str, float]:
    return {f"groups/{name}": float(count) for name, count in plan.selection.counts.items()}


def _updates(steps: Sequence[tuple[StepResult, dict[str, float]]]) -> dict[str, float]:
    """Means over the tokens of the iteration's minibatches; the first step's ratio apart, since
    it must be exactly 1."""
    stepped = [(result, sums) for result, sums in steps if result.stepped]
    row: dict[str, float] = {"update/steps": float(len(stepped))}
    row["update/skipped"] = float(len(steps) - len(stepped))
    tokens = sum(sums["tokens"] for _, sums in stepped)
    if not tokens:
        return row
    first = steps[0][1]
    if first.get("tokens"):
        row["policy/first_log_ratio_abs_max"] = first["log_ratio_abs_max"]
    for name, key in (
        ("policy_loss", "policy/loss"),
        ("ratio", "policy/ratio_mean"),
        ("approx_kl", "policy/approx_kl"),
        ("clip_low", "policy/clip_low"),
        ("clip_high", "policy/clip_high"),
        ("clip_dual", "policy/clip_dual"),
        ("entropy", "policy/entropy"),
        ("ref_kl", "policy/kl"),
    ):
        if name in stepped[0][1]:
            row[key] = sum(sums[name] for _, sums in stepped) / tokens
    row["policy/ratio_max"] = max(sums["ratio_max"] for _, sums in stepped)
    row["update/loss"] = float(np.mean([sums["loss"] for _, sums in stepped]))
    row["update/grad_norm"] = float(np.mean([result.grad_norm for result, _ in stepped]))
    row["update/lr"] = stepped[-1][0].lr
    return row
