"""One evaluation of one version on the held-out prompts: greedy responses, then sampled ones.

It touches no training state: no cursor moves, seeds are its own, its samples are never trained on,
and the generator's prefix cache is empty behind it, so that training reads its prompts as it would
have without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.contracts.records import Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import EndReason, Sample, SamplingContract
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion
from megarl.evaluation.files import gather_lines
from megarl.evaluation.numbers import (
    GREEDY,
    SAMPLED,
    Numbers,
    Responses,
    by_source,
    metrics_of,
    numbers_of,
)
from megarl.evaluation.probes import Probes
from megarl.recipe import EvalSection, RewardSection
from megarl.rewards.score import ScoringPool, first_component
from megarl.rollout.collect import Grading, check_failures, count_losses, make_requests, rollout
from megarl.world import World

if TYPE_CHECKING:  # its import takes seconds
    from megarl.rollout.generator import Generator

EVALUATION = -1
"""Takes the place of the iteration in seeds: every evaluation draws with the same ones."""

Key = tuple[int, int]
"""(draw index, candidate)."""


@dataclass(frozen=True)
class HeldOut:
    """What is evaluated and how; the same at every evaluation of a run."""

    prompts: tuple[Prompt, ...]
    fingerprint: str
    """Of the held-out data."""
    tokens: Tokens
    sampling: SamplingContract
    """The run's."""
    section: EvalSection
    reward: RewardSection
    max_lost_share: float
    pool: ScoringPool | None
    """None where this rank does not grade."""
    probes: Probes

    @property
    def modes(self) -> dict[str, SamplingContract]:
        """Mode → what its responses are drawn from."""
        greedy = replace(self.sampling, n=1, temperature=0.0)
        if not self.section.sampled:
            return {GREEDY: greedy}
        given = self.section.temperature
        temperature = self.sampling.temperature if given is None else given
        sampled = replace(self.sampling, n=self.section.samples, temperature=temperature)
        return {GREEDY: greedy, SAMPLED: sampled}


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation gave; numbers are the same on every rank."""

    version: PolicyVersion
    numbers: Numbers
    sources: dict[str, Numbers]
    facts: dict[str, Any]
    """What made the numbers; on rank 0 whole."""
    lines: list[dict[str, Any]]
    """Every generation; on rank 0, empty on others."""

    @property
    def metrics(self) -> dict[str, float]:
        return metrics_of(self.numbers, self.sources)

    def told(self) -> dict[str, Any]:
        """Plain JSON."""
        sources = {name: numbers.told() for name, numbers in self.sources.items()}
        return {**self.facts, "all": self.numbers.told(), "sources": sources}


def first_of_each_source(prompts: Sequence[Prompt], most: int | None) -> tuple[Prompt, ...]:
    """The first `most` prompts of each source, in the order in which they come; None: all."""
    if most is None:
        return tuple(prompts)
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.source] += 1
        if seen[prompt.source] <= most:
            kept.append(prompt)
    return tuple(kept)


def evaluate(
    world: World, generator: Generator, version: PolicyVersion, held_out: HeldOut
) -> Evaluated:
    """Evaluate `version`, which `generator` holds. Collective.

    Raises `LostGeneration` and `RewardError` on every rank where too large a share of responses is
    lost or could not be scored, and what `rollout` raises.
    """
    modes: dict[str, Responses] = {}
    lines: list[dict[str, Any]] = []
    for mode, sampling in held_out.modes.items():
        modes[mode], more = _one_mode(world, generator, version, held_out, mode, sampling)
        lines += more
    generator.flush()
    section = held_out.section
    return Evaluated(
        version=version,
        numbers=numbers_of(len(held_out.prompts), modes, section),
        sources=by_source(held_out.prompts, modes, section),
        facts=_facts(held_out, version),
        lines=gather_lines(world, lines),
    )


class _Both:
    """Where finished samples go: the run's scorers, and the probes."""

    def __init__(self, held_out: HeldOut) -> None:
        given = (held_out.prompts, held_out.tokens.known_ids)
        self.grading = Grading(held_out.pool, *given)
        self.probing = held_out.probes.grading(*given)

    def submit(self, sample: Sample) -> None:
        self.grading.submit(sample)
        self.probing.submit(sample)


def _one_mode(
    world: World,
    generator: Generator,
    version: PolicyVersion,
    held_out: HeldOut,
    mode: str,
    sampling: SamplingContract,
) -> tuple[Responses, list[dict[str, Any]]]:
    """All replicas' responses, and this rank's generations."""
    both = _Both(held_out)
    requests = make_requests(held_out.prompts, sampling, EVALUATION)
    samples, losses = rollout(world, generator, requests, sampling, version, both)
    count_losses(world, losses, len(requests), held_out.max_lost_share)
    records, probed = both.grading.collect(), both.probing.collect()
    check_failures(world, both.grading.failures, held_out.reward.max_error_share)
    rows: dict[Key, Sample] = {(one.draw_index, one.candidate): one for one in samples}
    told = [
        _Row(rows[record.draw_index, record.candidate], record, probed, held_out)
        for record in records
    ]
    parts = world.gather([row.numbers for row in told])
    numbers = sorted((row for part in parts for row in part), key=lambda row: row[:2])
    responses = _columns(sampling.n, numbers, held_out.probes.names)
    return responses, [row.line(mode) for row in told]


@dataclass(frozen=True)
class _Row:
    """One response and all that was said of it."""

    sample: Sample
    record: RewardRecord
    probed: Mapping[str, Mapping[Key, RewardRecord]]
    held_out: HeldOut

    @property
    def key(self) -> Key:
        return self.record.draw_index, self.record.candidate

    @property
    def probes(self) -> dict[str, RewardRecord]:
        """Of the probes that were asked."""
        return {name: told[self.key] for name, told in self.probed.items() if self.key in told}

    @property
    def numbers(self) -> tuple:
        """(draw index, candidate, score, total, length, truncated, probe → its score); None where
        there is none."""
        prompt = self.held_out.prompts[self.record.draw_index]
        component = first_component(self.held_out.reward, prompt.reward)
        return (
            *self.key,
            _score(self.record, component),
            self.record.total,
            len(self.sample.response_ids),
            self.sample.end_reason is EndReason.MAX_TOKENS,
            {name: _score(record, name) for name, record in self.probes.items()},
        )

    def line(self, mode: str) -> dict[str, Any]:
        prompt = self.held_out.prompts[self.record.draw_index]
        return {
            "mode": mode,
            "prompt_id": prompt.prompt_id,
            "source": prompt.source,
            "reward": prompt.reward,
            "candidate": self.record.candidate,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "response": self.held_out.tokens.decode(self.sample.response_ids),
            "end_reason": self.sample.end_reason.name.lower(),
            "status": str(self.record.status),
            "total": self.record.total,
            "components": self.record.components,
            "probes": {
                name: {
                    "score": _score(record, name),
                    "status": str(record.status),
                    "detail": record.detail,
                }
                for name, record in self.probes.items()
            },
            "detail": self.record.detail,
        }


def _score(record: RewardRecord, component: str | None) -> float | None:
    """A declared penalty is a total without components: not scored, as far as accuracy goes."""
    if record.status is not RewardStatus.OK or component is None:
        return None
    return record.components.get(component)


def _columns(asked: int, rows: Sequence[tuple], probes: Sequence[str]) -> Responses:
    def column(place: int, dtype: type) -> np.ndarray:
        return np.array([row[place] for row in rows], dtype=dtype)

    told = [row[6] for row in rows]
    return Responses(
        asked=asked,
        draw_index=column(0, np.int32),
        candidate=column(1, np.int32),
        score=column(2, np.float64),
        total=column(3, np.float64),
        length=column(4, np.int32),
        truncated=column(5, np.bool_),
        probes={name: np.array([one.get(name) for one in told], np.float64) for name in probes},
        probed={name: np.array([name in one for one in told], np.bool_) for name in probes},
    )


def _facts(held_out: HeldOut, version: PolicyVersion) -> dict[str, Any]:
    section = held_out.section
    return {
        "version": version.id,
        "run": version.run_id,
        "optimizer_step": version.optimizer_step,
        "weight_manifest_hash": version.weight_manifest_hash,
        "sampling": {
            mode: asdict(sampling) | {"hash": sampling.hash}
            for mode, sampling in held_out.modes.items()
        },
        "eval_data": held_out.fingerprint,
        "max_prompts": section.max_prompts,
        "scorer_version": None if held_out.pool is None else held_out.pool.version,
        "probe_versions": held_out.probes.versions,
        "solved_at": section.solved_at,
        "confidence": section.confidence,
    }
