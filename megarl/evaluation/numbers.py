"""What responses to held-out prompts come to: accuracy, pass@k, probes; with intervals, by source.

A response that is lost or could not be scored is in no mean and counted. Every prompt weighs alike:
means are over prompts' means. A pure function of columns that are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megarl.contracts.records import Prompt
from megarl.evaluation.intervals import Estimate, estimate
from megarl.evaluation.pass_at_k import pass_at_k
from megarl.recipe import EvalSection

GREEDY, SAMPLED = "greedy", "sampled"
SUFFIXES = {GREEDY: "", SAMPLED: "_sampled"}
"""Of a mode's metrics."""


@dataclass(frozen=True)
class Responses:
    """Columns of one mode's responses, by (draw index, candidate) rising; N are there, the others
    are lost."""

    asked: int
    """Of each prompt."""
    draw_index: np.ndarray  # int32 [N], of the prompt
    candidate: np.ndarray  # int32 [N]
    score: np.ndarray  # float64 [N], what accuracy is made of; NaN: not scored
    total: np.ndarray  # float64 [N], the reward; NaN: none
    length: np.ndarray  # int32 [N], tokens
    truncated: np.ndarray  # bool [N], cut off at the longest length
    probes: dict[str, np.ndarray] = field(default_factory=dict)
    """float64 [N] each; NaN: not scored, or not asked."""
    probed: dict[str, np.ndarray] = field(default_factory=dict)
    """bool [N] each, whether the probe was asked."""

    def __len__(self) -> int:
        return len(self.draw_index)

    def of(self, prompts: np.ndarray) -> Responses:
        """Those to the prompts that are marked in bool [prompts]."""
        rows = prompts[self.draw_index]
        return Responses(
            self.asked,
            **{name: getattr(self, name)[rows] for name in PLAIN_COLUMNS},
            probes={name: column[rows] for name, column in self.probes.items()},
            probed={name: column[rows] for name, column in self.probed.items()},
        )


PLAIN_COLUMNS = ("draw_index", "candidate", "score", "total", "length", "truncated")


@dataclass(frozen=True, slots=True)
class ProbeNumbers:
    """What one probe said of one mode's responses."""

    mean: Estimate | None
    unscored: int


@dataclass(frozen=True, slots=True)
class PassNumbers:
    """pass@k for one k."""

    chance: Estimate | None
    left_out: int
    """Prompts with fewer than k scored responses."""


@dataclass(frozen=True, slots=True)
class ModeNumbers:
    """Of greedy or of sampled responses; None where there is nothing to take a mean of."""

    responses: int
    lost: int
    unscored: int
    accuracy: Estimate | None
    total: Estimate | None
    length: float | None
    truncated: float | None
    """Share."""
    probes: dict[str, ProbeNumbers]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of all held-out prompts, or of one source's."""

    prompts: int
    modes: dict[str, ModeNumbers]
    pass_at: dict[int, PassNumbers]
    """Of sampled responses; empty where none are."""

    def told(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "prompts": self.prompts,
            **{mode: asdict(numbers) for mode, numbers in self.modes.items()},
            "pass_at": {str(k): asdict(numbers) for k, numbers in self.pass_at.items()},
        }


def numbers_of(prompts: int, modes: Mapping[str, Responses], section: EvalSection) -> Numbers:
    """Of so many prompts and all responses to them."""
    passes: dict[int, PassNumbers] = {}
    if SAMPLED in modes:
        passes = {k: _pass_at(k, prompts, modes[SAMPLED], section) for k in section.pass_at}
    told = {mode: _mode(prompts, given, section) for mode, given in modes.items()}
    return Numbers(prompts, told, passes)


def by_source(
    prompts: Sequence[Prompt], modes: Mapping[str, Responses], section: EvalSection
) -> dict[str, Numbers]:
    """Of each source's prompts, in the order in which sources come."""
    names = np.array([prompt.source for prompt in prompts], dtype=object)
    found = {}
    for name in dict.fromkeys(names.tolist()):
        rows = names == name
        parts = {mode: given.of(rows) for mode, given in modes.items()}
        found[name] = numbers_of(int(rows.sum()), parts, section)
    return found


def _mode(prompts: int, given: Responses, section: EvalSection) -> ModeNumbers:
    confidence = section.confidence
    probes = {
        name: ProbeNumbers(
            _mean(given.draw_index, column, confidence),
            int((np.isnan(column) & given.probed[name]).sum()),
        )
        for name, column in given.probes.items()
    }
    return ModeNumbers(
        responses=len(given),
        lost=prompts * given.asked - len(given),
        unscored=int(np.isnan(given.score).sum()),
        accuracy=_mean(given.draw_index, given.score, confidence),
        total=_mean(given.draw_index, given.total, confidence),
        length=float(given.length.mean()) if len(given) else None,
        truncated=float(given.truncated.mean()) if len(given) else None,
        probes=probes,
    )


def _mean(draw_index: np.ndarray, values: np.ndarray, confidence: float) -> Estimate | None:
    """The mean over prompts of their responses' mean value, NaN left out."""
    there = ~np.isnan(values)
    values = values[there]
    groups = _groups(draw_index[there])
    means = [float(values[rows].mean()) for rows in groups]
    return estimate(means, len(values), confidence)


def _groups(draw_index: np.ndarray) -> list[slice]:
    """Rows of each prompt; `draw_index` rises."""
    edges = np.flatnonzero(np.diff(draw_index)) + 1
    starts = [0, *edges.tolist()] if len(draw_index) else []
    return [slice(a, b) for a, b in zip(starts, [*edges.tolist(), len(draw_index)], strict=False)]


def _pass_at(k: int, prompts: int, given: Responses, section: EvalSection) -> PassNumbers:
    there = ~np.isnan(given.score)
    right = given.score[there] >= section.solved_at
    chances, responses = [], 0
    for rows in _groups(given.draw_index[there]):
        count = rows.stop - rows.start
        if count >= k:
            chances.append(pass_at_k(count, int(right[rows].sum()), k))
            responses += count
    chance = estimate(chances, responses, section.confidence)
    return PassNumbers(chance, prompts - len(chances))


def metrics_of(whole: Numbers, sources: Mapping[str, Numbers]) -> dict[str, float]:
    """Names and numbers of a metrics row. By source, where there are several, without intervals."""
    found: dict[str, float] = {"eval/prompts": float(whole.prompts)}
    for mode, numbers in whole.modes.items():
        found.update(_mode_metrics(numbers, SUFFIXES[mode]))
    for k, passes in whole.pass_at.items():
        found.update(_with_interval(f"eval/pass@{k}", passes.chance))
        if passes.left_out:
            found[f"eval/pass@{k}/left_out"] = float(passes.left_out)
    if len(sources) > 1:
        for source, numbers in sources.items():
            found.update(_source_metrics(numbers, source))
    return found


def _mode_metrics(numbers: ModeNumbers, suffix: str) -> Iterator[tuple[str, float]]:
    yield from _with_interval(f"eval/accuracy{suffix}", numbers.accuracy)
    yield f"eval/unscored{suffix}", float(numbers.unscored)
    if numbers.lost:
        yield f"eval/lost{suffix}", float(numbers.lost)
    if numbers.total is not None:
        yield f"eval/total{suffix}", numbers.total.value
    if numbers.length is not None:
        yield f"eval/response_length{suffix}", numbers.length
        yield f"eval/truncated{suffix}", numbers.truncated
    for name, probe in numbers.probes.items():
        if probe.mean is not None:
            yield f"eval/probe/{name}{suffix}", probe.mean.value
        yield f"eval/probe/{name}/unscored{suffix}", float(probe.unscored)


def _source_metrics(numbers: Numbers, source: str) -> Iterator[tuple[str, float]]:
    yield f"eval/prompts/source/{source}", float(numbers.prompts)
    for mode, told in numbers.modes.items():
        suffix = SUFFIXES[mode]
        if told.accuracy is not None:
            yield f"eval/accuracy{suffix}/source/{source}", told.accuracy.value
        for name, probe in told.probes.items():
            if probe.mean is not None:
                yield f"eval/probe/{name}{suffix}/source/{source}", probe.mean.value
    for k, passes in numbers.pass_at.items():
        if passes.chance is not None:
            yield f"eval/pass@{k}/source/{source}", passes.chance.value


def _with_interval(name: str, told: Estimate | None) -> Iterator[tuple[str, float]]:
    if told is None:
        return
    yield name, told.value
    if told.low is not None:
        yield f"{name}/low", told.low
        yield f"{name}/high", told.high
