"""The metrics row of one iteration, from the global table and the steps. Pure.

Every number is the same on every rank and in every layout of the ranks; wall time is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.contracts.records import Scores
from megarl.contracts.samples import End
from megarl.data.prepare import Parity
from megarl.data.table import SampleTable
from megarl.rollout.account import drop_rates
from megarl.rollout.groups import IterationPlan

if TYPE_CHECKING:  # an audit reads rows without megatron, whose import takes seconds
    from megarl.models.step import StepResult


def iteration_row(
    table: SampleTable,
    plan: IterationPlan,
    parity: Parity,
    advantages: np.ndarray,
    results: Sequence[StepResult],
    sums: Sequence[dict[str, float]],
) -> dict[str, float]:
    """`results` are the optimizer steps, `sums` their loss sums over all ranks."""
    row = rollout_row(table, plan, parity)
    used = advantages[plan.trained]
    if len(used):
        row |= {"advantage/mean": float(used.mean()), "advantage/std": float(used.std())}
        row["advantage/abs_max"] = float(np.abs(used).max())
    return row | _updates(list(zip(results, sums, strict=True)))


def rollout_row(table: SampleTable, plan: IterationPlan, parity: Parity) -> dict[str, float]:
    """The part of the row that is known before anything is learnt."""
    row = reward_row(table.scores) | _responses(table) | _groups(plan)
    row["parity/tokens"] = float(parity.tokens)
    if parity.tokens:
        row |= {"parity/logprob_gap_max": parity.max, "parity/logprob_gap_mean": parity.mean}
    return row


def reward_row(scores: Scores) -> dict[str, float]:
    """What was scored, over all samples that could be."""
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
    counts, account = plan.selection.counts, plan.account
    row = {f"groups/{name}": float(count) for name, count in counts.items()}
    row["rollout/rounds"] = float(account["rounds"])
    row["rollout/prompts"] = float(account["prompts"])
    row["rollout/informative_share"] = counts["groups_informative"] / counts["groups"]
    for reason, count in account["lost_reasons"].items():
        row[f"lost/{reason}"] = float(count)
    for label in ("source", "length"):
        rates = drop_rates(account[f"by_{label}"])
        row |= {f"drop_rate/{label}/{name}": rate for name, rate in rates.items()}
    return row


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


def why_nothing(row: Mapping[str, float]) -> str:
    """Where the samples of an iteration without an optimizer step went."""
    where = {
        key.removeprefix("groups/samples_"): int(value)
        for key, value in row.items()
        if key.startswith("groups/samples_") and value
    }
    told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in where.items())
    return f"of {int(row['groups/samples'])} samples {told}"
