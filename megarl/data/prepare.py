"""PREPARING: this rank's packs and the frozen log-probs on them, checked against the generator's.

Old log-probs are the training actor's, before any update of the iteration, on the very packs the
update will use, so that the first ratio is exactly 1. Parity with the generator is a measured
fact of every iteration: max and mean |old − rollout| over action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megarl.contracts.samples import Samples
from megarl.data.packing import Pack, build_pack, restore
from megarl.world import World


class ParityError(RuntimeError):
    """Trainer and generator disagree about the same tokens under the same weights."""


class Scorer(Protocol):
    """The actor or the reference: a frozen forward over packs."""

    def log_probs(self, packs: Sequence[Pack]) -> Sequence: ...

    def padded(self, packs: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
        """`packs[minibatch][pack]` with the lengths that the scorer's layout needs."""


@dataclass(frozen=True)
class Prepared:
    """Per-token arrays run over `samples.response_ids` (R)."""

    samples: Samples
    packs: list[list[Pack]]
    """`packs[minibatch][pack]` of this rank."""
    old_log_probs: np.ndarray  # float32 [R]
    ref_log_probs: np.ndarray | None  # float32 [R]


def prepare(
    samples: Samples,
    pack_rows: Sequence[Sequence[np.ndarray]],
    actor: Scorer,
    reference: Scorer | None,
    device: torch.device,
) -> Prepared:
    """Collective over all ranks. `samples` are this rank's rows in canonical order,
    `pack_rows[minibatch][pack]` rows of them. The reference is skipped when nothing needs it.
    """
    packs = [[build_pack(samples, rows) for rows in part] for part in pack_rows]
    packs = actor.padded(packs)
    packs = [[pack.to(device) for pack in part] for part in packs]
    flat = [pack for part in packs for pack in part]
    old = restore(flat, [scores.log_probs_A for scores in actor.log_probs(flat)])
    ref = None
    if reference is not None:
        ref = restore(flat, [scores.log_probs_A for scores in reference.log_probs(flat)])
    return Prepared(samples=samples, packs=packs, old_log_probs=old, ref_log_probs=ref)


@dataclass(frozen=True, slots=True)
class Parity:
    """|old − rollout| log-probs over all action tokens of the iteration."""

    max: float
    mean: float
    tokens: int
    """How many tokens were compared; 0 says that nothing was measured."""
    where: str
    """The sample and response token of the largest gap on this rank's part."""

    def check(self, max_gap: float, mean_gap: float) -> str | None:
        """One line when a bound is broken (a gap that is no number breaks it), else None."""
        if not self.tokens or self.max <= max_gap and self.mean <= mean_gap:
            return None
        return (
            f"trainer and generator disagree: |old − rollout| log-prob max {self.max:.2e} "
            f"(bound {max_gap:.0e}), mean {self.mean:.2e} (bound {mean_gap:.0e}), "
            f"largest here at {self.where}; the generator ran other weights, another temperature "
            "or another precision than the actor, or set parity.max / parity.mean"
        )


def measure_parity(world: World, prepared: Prepared) -> Parity:
    """Collective; the same numbers on every rank (but `where`)."""
    samples = prepared.samples
    gap = np.abs(prepared.old_log_probs.astype(np.float64) - samples.rollout_log_probs)
    gap = np.where(samples.action_mask, gap, 0.0)
    where = "no token"
    if len(gap):
        token = int(np.argmax(gap))
        row = int(np.searchsorted(samples.response_offsets, token, side="right") - 1)
        where = (
            f"draw {samples.draw_index[row]} candidate {samples.candidate[row]} "
            f"response token {token - samples.response_offsets[row]}"
        )
    sums = world.totals(
        {"gap": float(gap.sum()), "tokens": float(samples.action_mask.sum())},
        counted=world.leads_owners,
    )
    largest = world.maximum(float(gap.max()) if len(gap) else 0.0)
    mean = sums["gap"] / sums["tokens"] if sums["tokens"] else 0.0
    return Parity(max=largest, mean=mean, tokens=int(sums["tokens"]), where=where)
