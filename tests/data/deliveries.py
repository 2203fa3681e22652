"""What replicas deliver when nothing goes well: any order, repeats, losses and late results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from megarl.contracts.records import RewardRecord, RewardStatus
from megarl.contracts.samples import Samples
from megarl.data.arrivals import Arrival, Scope
from tests.data.make_samples import make_record, make_samples

SCOPE = Scope("run", 7, "v7", "s1", attempt=1)
STALE = (
    replace(SCOPE, run_id="other"),
    replace(SCOPE, iteration=6),
    replace(SCOPE, attempt=0),
    replace(SCOPE, version_id="v6"),
)
REWARDS = (0.0, 1.0, 0.1, 0.3)


@dataclass(frozen=True)
class Truth:
    """What was made and not lost, in canonical order."""

    samples: Samples
    records: list[RewardRecord]


@dataclass
class Planted:
    """How many deliveries must be counted as what."""

    duplicates: int = 0
    late: int = 0


def draw_truth(random: Random, groups: int, group_size: int) -> Truth:
    """Groups of candidates with lengths and scores, some lost; at least one sample stays."""
    shapes, records = [], []
    for draw in range(groups):
        for candidate in range(group_size):
            if shapes and random.random() < 0.15:
                continue
            shapes.append((draw, candidate, random.randint(1, 4), random.randint(1, 6)))
            status = random.choice([RewardStatus.OK] * 6 + [RewardStatus.ERROR])
            total = random.choice(REWARDS) if status is RewardStatus.OK else None
            records.append(make_record(draw, candidate, total, status))
    return Truth(make_samples(shapes, SCOPE.version_id, holes=True), records)


def deliver(random: Random, truth: Truth, replicas: int) -> tuple[list[list[Arrival]], Planted]:
    """Arrivals of each replica: the truth once, and on top repeats and late results."""
    planted = Planted()
    homes = [random.randrange(replicas) for _ in range(len(truth.samples))]
    arrivals: list[list[Arrival]] = [[] for _ in range(replicas)]
    for replica in range(replicas):
        rows = [row for row, home in enumerate(homes) if home == replica]
        # A row that another replica made too is a repeated sample and a repeated record.
        extra = [row for row in range(len(homes)) if row not in rows and random.random() < 0.1]
        planted.duplicates += 2 * len(extra)
        rows += extra
        again = [row for row in rows if random.random() < 0.2]
        scored_again = [row for row in rows if random.random() < 0.2]
        planted.duplicates += len(again) + len(scored_again)
        for part in _cut(random, rows) + [[row] for row in again]:
            later = float(random.randint(0, 3)) if part in [[row] for row in again] else 0.0
            arrivals[replica].append(Arrival(SCOPE, _later(truth.samples.select(part), later)))
        for part in _cut(random, rows) + [[row] for row in scored_again]:
            records = [replace(truth.records[row], seconds=random.random()) for row in part]
            arrivals[replica].append(Arrival(SCOPE, _none(), records))
        for _ in range(random.randint(0, 2)):
            part = random.sample(range(len(homes)), random.randint(1, len(homes)))
            arrivals[replica].append(_stale(random, truth, part))
            planted.late += 2 * len(part)
        for row in [row for row in rows if random.random() < 0.1]:
            record = replace(truth.records[row], scorer_version="s0", detail="old rules")
            arrivals[replica].append(Arrival(SCOPE, _none(), [record]))
            planted.late += 1
        random.shuffle(arrivals[replica])
    return arrivals, planted


def _cut(random: Random, rows: list[int]) -> list[list[int]]:
    """The rows in any order, in up to three pieces."""
    rows = random.sample(rows, len(rows))
    cuts = sorted(random.randint(0, len(rows)) for _ in range(2))
    return [rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :]]


def _later(samples: Samples, seconds: float) -> Samples:
    return replace(samples, started=samples.started + seconds, finished=samples.finished + seconds)


def _none() -> Samples:
    return make_samples([], SCOPE.version_id)


def _stale(random: Random, truth: Truth, part: list[int]) -> Arrival:
    """The same ids with other contents, of what nobody awaits any more."""
    scope = random.choice(STALE)
    samples = truth.samples.select(part)
    samples = replace(
        samples,
        response_ids=samples.response_ids + 1,
        seed=samples.seed + np.int64(1),
        version_id=scope.version_id,
    )
    records = [make_record(sample.draw_index, sample.candidate, 9.0) for sample in samples]
    return Arrival(scope, samples, records)
