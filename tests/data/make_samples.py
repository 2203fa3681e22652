"""Samples with telling contents for tests: every number says whose it is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megarl.contracts.records import RewardRecord, RewardStatus
from megarl.contracts.samples import End, EndReason, Sample, Samples


def make_sample(
    draw_index: int, candidate: int, prompt: int, response: int, *, holes: bool = False
) -> Sample:
    """Token ids are 1000·draw + 100·candidate + position, prompt first; log-probs −position/100.

    `holes` makes every third response token no action (but never all of them).
    """
    base = 1000 * draw_index + 100 * candidate
    mask = np.ones(response, dtype=bool)
    if holes:
        mask[1::3] = False
    return Sample(
        draw_index=draw_index,
        candidate=candidate,
        prompt_ids=np.arange(base, base + prompt, dtype=np.int32),
        response_ids=np.arange(base + prompt, base + prompt + response, dtype=np.int32),
        action_mask=mask,
        rollout_log_probs=-np.arange(1, response + 1, dtype=np.float32) / 100,
        end=End.TERMINATED,
        end_reason=EndReason.EOS,
        seed=base + 7,
        started=float(base),
        finished=float(base + 1),
    )


def make_samples(
    shapes: Iterable[tuple[int, int, int, int]], version: str = "v0", *, holes: bool = False
) -> Samples:
    """One row per (draw index, candidate, prompt tokens, response tokens)."""
    return Samples.from_rows([make_sample(*shape, holes=holes) for shape in shapes], version)


def make_record(
    draw_index: int,
    candidate: int,
    total: float | None,
    status: RewardStatus = RewardStatus.OK,
    scorer_version: str = "s1",
) -> RewardRecord:
    return RewardRecord(
        draw_index=draw_index,
        candidate=candidate,
        total=total,
        components={} if total is None else {"correct": total},
        scorer_version=scorer_version,
        status=status,
    )
