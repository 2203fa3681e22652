"""Small iterations for tests of credit: rewards, masks and ends as given, one process or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.algorithms.credit import Credit, credit
from megarl.contracts.records import Experience, RewardRecord, RewardStatus, Scores
from megarl.contracts.samples import END_OF_REASON, EndReason, Sample, Samples
from megarl.data.everyone import alone
from megarl.data.table import SampleTable
from megarl.recipe.algorithm import AlgorithmSection
from megarl.rollout.groups import IterationPlan, plan_iteration
from tests.data.make_rules import make_rules

Steps = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Row:
    """One sample: its reward (None: not scored), action mask, values and KL per token."""

    draw: int
    candidate: int
    reward: float | None
    mask: Sequence[int] = (1, 1)
    steps: Steps = ()
    cut: bool = False
    values: Sequence[float] | None = None
    last_value: float = 0.0
    kl: Sequence[float] | None = None

    @property
    def sample(self) -> Sample:
        length = len(self.mask)
        reason = EndReason.MAX_TOKENS if self.cut else EndReason.EOS
        return Sample(
            draw_index=self.draw,
            candidate=self.candidate,
            prompt_ids=np.array([1, 2]),
            response_ids=np.arange(length) + 3,
            action_mask=np.array(self.mask, dtype=bool),
            rollout_log_probs=np.full(length, -1.0, dtype=np.float32),
            end=END_OF_REASON[reason],
            end_reason=reason,
            seed=0,
            started=0.0,
            finished=1.0,
        )

    @property
    def record(self) -> RewardRecord:
        status = RewardStatus.ERROR if self.reward is None else RewardStatus.OK
        return RewardRecord(
            self.draw, self.candidate, self.reward, {}, "s", status, step_rewards=tuple(self.steps)
        )


@dataclass(frozen=True)
class Facts:
    """All samples of an iteration."""

    samples: Samples
    table: SampleTable
    values: np.ndarray
    last_values: np.ndarray
    ref_log_probs: np.ndarray

    def experience(self, rows: np.ndarray) -> Experience:
        """Of the given rows."""
        samples = self.samples.select(rows)
        offsets = self.samples.response_offsets
        spans = [np.arange(offsets[row], offsets[row + 1]) for row in rows]
        at = np.concatenate([np.zeros(0, np.int64), *spans])
        return Experience(
            samples=samples,
            scores=self.table.scores.select(rows),
            old_log_probs=samples.rollout_log_probs.copy(),
            ref_log_probs=self.ref_log_probs[at],
            values=self.values[at],
            producers={"rollout": "v", "old": "v", "ref": "r", "critic": "c"},
            hash="h",
            last_values=self.last_values[rows],
        )


def make_facts(rows: Sequence[Row]) -> Facts:
    samples = Samples.from_rows([row.sample for row in rows], "v").canonical()
    at = {(row.draw, row.candidate): row for row in rows}
    keys = zip(samples.draw_index.tolist(), samples.candidate.tolist(), strict=True)
    rows = [at[key] for key in keys]
    starts = samples.response_offsets[:-1]
    table = SampleTable(
        draw_index=samples.draw_index,
        candidate=samples.candidate,
        prompt_length=samples.prompt_lengths,
        response_length=samples.response_lengths,
        actions=np.add.reduceat(samples.action_mask, starts, dtype=np.int64),
        end_reason=samples.end_reason,
        replica=np.zeros(len(samples), dtype=np.int32),
        started=samples.started,
        finished=samples.finished,
        scores=Scores.from_records([row.record for row in rows]),
        version_id="v",
    )

    def flat(name: str) -> np.ndarray:
        columns = [getattr(row, name) or [0.0] * len(row.mask) for row in rows]
        return np.concatenate([np.asarray(column, dtype=np.float32) for column in columns])

    old = np.float32(-1.0)
    last = np.array([row.last_value for row in rows], dtype=np.float32)
    return Facts(samples, table, flat("values"), last, old - flat("kl"))


def plan_of(facts: Facts, group_size: int, dp: int = 1, **algorithm: Any) -> IterationPlan:
    prompts = int(facts.table.draw_index.max()) + 1
    rules = make_rules(group_size=group_size, prompts=prompts, longest=8, **algorithm)
    return plan_iteration(facts.table, rules, dp)


def credit_of(
    rows: Sequence[Row], group_size: int = 2, beta: float = 0.0, **algorithm: Any
) -> Credit:
    """One process that holds every sample that is packed."""
    facts = make_facts(rows)
    plan = plan_of(facts, group_size, **algorithm)
    experience = facts.experience(np.flatnonzero(plan.update.packed))
    settings = AlgorithmSection(minibatches=1, **algorithm)
    everyone = alone(facts.table, experience.samples)
    return credit(experience, "r", facts.table, plan, settings, everyone, beta)
