"""The metrics row of one iteration, from the global table and the steps. Pure.

Every number is the same on every rank and in every layout of the ranks; wall time is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms.importance import effective_share
from megarl.algorithms.objectives import merge_sums
from megarl.algorithms.values import explained_variance
from megarl.contracts.records import STATUSES, RewardStatus, Scores
from megarl.contracts.samples import End
from megarl.data.prepare import Parity
from megarl.data.table import SampleTable
from megarl.observe.metrics import PENALISED
from megarl.rewards.score import penalised
from megarl.rollout.account import drop_rates
from megarl.rollout.groups import IterationPlan

if TYPE_CHECKING:  # an audit reads rows without megatron, whose import takes seconds
    from megarl.algorithms.credit import Credit
    from megarl.learnt import Learnt
    from megarl.models.step import StepResult


def iteration_row(
    table: SampleTable,
    plan: IterationPlan,
    parity: Parity,
    credited: Credit,
    learnt: Learnt[StepResult],
    sums: Learnt[dict[str, float]],
) -> dict[str, float]:
    """`learnt` are the optimizer steps of each role, `sums` their loss sums over all ranks."""
    row = rollout_row(table, plan, parity) | credited.numbers
    scored = plan.rewards[plan.compared]
    if len(scored) and not np.array_equal(plan.rewards, table.scores.total, equal_nan=True):
        row["reward/shaped_mean"] = float(scored.mean())
    if credited.derived.kl_beta:
        row["kl/beta"] = credited.derived.kl_beta
    row |= policy_row(list(zip(learnt.actor, sums.actor, strict=True)))
    return row | critic_row(list(zip(learnt.critic, sums.critic, strict=True)))


def rollout_row(table: SampleTable, plan: IterationPlan, parity: Parity) -> dict[str, float]:
    """The part of the row that is known before anything is learnt."""
    row = reward_row(table.scores) | _responses(table) | _groups(plan) | source_row(table, plan)
    row["parity/tokens"] = float(parity.tokens)
    if parity.tokens:
        row |= {"parity/logprob_gap_max": parity.max, "parity/logprob_gap_mean": parity.mean}
    return row


def reward_row(scores: Scores) -> dict[str, float]:
    """What was scored, over all samples that could be, in all and by component; of each component
    over those that have it. A declared penalty counts in the total, and is told."""
    ok = scores.ok
    row = {"reward/unscored": float((~ok).sum())}
    for status in (RewardStatus.TIMEOUT, RewardStatus.ERROR):
        if count := int((scores.status_code == STATUSES.index(status)).sum()):
            row[f"reward/unscored/{status}"] = float(count)
    if count := int(penalised(scores).sum()):
        row[PENALISED] = float(count)
    if ok.any():
        total = scores.total[ok]
        row |= {"reward/mean": float(total.mean()), **_spread("reward", total)}
    for name, values in scores.components.items():
        known = values[~np.isnan(values)]
        if len(known):
            row[f"reward/{name}"] = float(known.mean())
            row[f"reward/{name}/scored"] = float(len(known))
            row |= _spread(f"reward/{name}", known)
    return row


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/std": float(values.std()),
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }


def source_row(table: SampleTable, plan: IterationPlan) -> dict[str, float]:
    """Rewards, lengths and groups by the source of the prompt; nothing where the iteration drew
    from one source alone."""
    names, source = np.unique(np.array(plan.sources, dtype=object), return_inverse=True)
    if len(names) < 2:
        return {}
    scores, of_row = table.scores, source[table.draw_index]
    equal = np.unique(table.draw_index[plan.selection.equal])
    row = {}
    for index, name in enumerate(names.tolist()):
        prompts = int((source == index).sum())
        row[f"rollout/prompts/source/{name}"] = float(prompts)
        row[f"groups/zero_variance/source/{name}"] = float((source[equal] == index).sum()) / prompts
        mine = of_row == index
        if mine.any():
            row[f"response/length/source/{name}"] = float(table.response_length[mine].mean())
            cut = table.end[mine] == End.TRUNCATED
            row[f"response/truncated/source/{name}"] = float(cut.mean())
        if (scored := mine & scores.ok).any():
            row[f"reward/source/{name}"] = float(scores.total[scored].mean())
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
    row["groups/zero_variance_share"] = counts["groups_zero_variance"] / counts["groups"]
    for reason, count in account["lost_reasons"].items():
        row[f"lost/{reason}"] = float(count)
    for label in ("source", "length"):
        rates = drop_rates(account[f"by_{label}"])
        row |= {f"drop_rate/{label}/{name}": rate for name, rate in rates.items()}
    return row


_POLICY_MEANS = {
    "policy_loss": "policy/loss",
    "ratio": "policy/ratio_mean",
    "ratio_above_2": "policy/ratio_above_2",
    "ratio_below_half": "policy/ratio_below_half",
    "approx_kl": "policy/approx_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "clip_dual": "policy/clip_dual",
    "entropy": "policy/entropy",
    "ref_kl": "policy/kl",
}
"""Sum over tokens → its mean's name."""
_CRITIC_MEANS = {
    "value_loss": "critic/value_loss",
    "value_clipped": "critic/clipped",
    "value": "critic/value_mean",
}


def policy_row(steps: Sequence[tuple[StepResult, dict[str, float]]]) -> dict[str, float]:
    """The actor's steps: means over the tokens of the iteration's minibatches; the first step's
    ratio apart, since it must be exactly 1, and the approximate KL of the step that was stopped,
    since means are of steps that were taken."""
    stepped = [(result, sums) for result, sums in steps if result.stepped]
    row: dict[str, float] = {"update/steps": float(len(stepped))}
    row["update/stopped"] = float(sum(result.stopped for result, _ in steps))
    row["update/skipped"] = len(steps) - len(stepped) - row["update/stopped"]
    for result, sums in steps:
        if result.stopped:
            row["policy/approx_kl_stopped"] = sums["approx_kl"] / sums["tokens"]
    tokens = sum(sums["tokens"] for _, sums in stepped)
    if not tokens:
        return row
    first = steps[0][1]
    if first.get("tokens"):
        row["policy/first_log_ratio_abs_max"] = first["log_ratio_abs_max"]
    row |= _means(stepped, _POLICY_MEANS)
    row["policy/ratio_max"] = max(sums["ratio_max"] for _, sums in stepped)
    row["policy/ratio_min"] = min(sums["ratio_min"] for _, sums in stepped if "ratio_min" in sums)
    if "router_aux" in stepped[0][1]:  # no sum over tokens: the loss of the whole minibatch
        row["policy/router_aux"] = float(np.mean([sums["router_aux"] for _, sums in stepped]))
    return row | _importance([sums for _, sums in stepped]) | _optimizer(stepped, "update")


def _importance(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the weights that correct trainer against generator; nothing where there are none."""
    merged = merge_sums(steps)
    if "importance" not in merged:
        return {}
    tokens = merged["tokens"]
    return {
        "importance/mean": merged["importance"] / tokens,
        "importance/max": merged["importance_max"],
        "importance/ratio_max": merged["importance_ratio_max"],
        "importance/ratio_min": merged["importance_ratio_min"],
        "importance/above_high": merged["importance_high"] / tokens,
        "importance/below_low": merged["importance_low"] / tokens,
        "importance/effective_share": effective_share(merged) or 0.0,
    }


def critic_row(steps: Sequence[tuple[StepResult, dict[str, float]]]) -> dict[str, float]:
    """The critic's steps, in the same way, and how much of the last one's returns its values
    explain; nothing where there is no critic."""
    if not steps:
        return {}
    stepped = [(result, sums) for result, sums in steps if result.stepped]
    row = {
        "critic/steps": float(len(stepped)),
        "critic/skipped": float(len(steps) - len(stepped)),
    }
    if not sum(sums["tokens"] for _, sums in stepped):
        return row
    explained = explained_variance(stepped[-1][1])
    if explained is not None:
        row["critic/explained_variance"] = explained
    return row | _means(stepped, _CRITIC_MEANS) | _optimizer(stepped, "critic")


def _means(
    stepped: Sequence[tuple[StepResult, dict[str, float]]], names: Mapping[str, str]
) -> dict[str, float]:
    tokens = sum(sums["tokens"] for _, sums in stepped)
    return {
        key: sum(sums[name] for _, sums in stepped) / tokens
        for name, key in names.items()
        if name in stepped[0][1]
    }


def _optimizer(
    stepped: Sequence[tuple[StepResult, dict[str, float]]], group: str
) -> dict[str, float]:
    return {
        f"{group}/loss": float(np.mean([sums["loss"] for _, sums in stepped])),
        f"{group}/grad_norm": float(np.mean([result.grad_norm for result, _ in stepped])),
        f"{group}/lr": stepped[-1][0].lr,
    }
