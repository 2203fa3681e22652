"""PREPARING: this rank's packs, and log-probs and values on them as they are before any update.

Old log-probs are the training actor's, before any update of the iteration, on the very packs the
update will use, so that the first ratio is exactly 1; values are the critic's, on its own packs.
Parity with the generator is a measured fact of every iteration: max and mean |old − rollout| over
action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

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


class Policy(Scorer, Protocol):
    """The actor."""

    def counting_experts(self, packs: Sequence[int]) -> AbstractContextManager[Sequence[Any]]:
        """The scope in which `log_probs` scores `packs[minibatch]` packs of each minibatch; what it
        gave holds, at its end, what an update of each needs to balance experts, or nothing."""


class ValueScorer(Protocol):
    """The critic."""

    def values(self, packs: Sequence[Pack]) -> Sequence: ...

    def padded(self, packs: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
        """As `Scorer.padded`."""


@dataclass(frozen=True)
class Prepared:
    """Per-token arrays run over `samples.response_ids` (R), per-sample ones over `samples` (n)."""

    samples: Samples
    packs: list[list[Pack]]
    """`packs[minibatch][pack]` of this rank."""
    old_log_probs: np.ndarray  # float32 [R]
    ref_log_probs: np.ndarray | None  # float32 [R]
    values: np.ndarray | None = None
    """float32 [R], the critic's V of the state that each token was drawn in; None: no critic."""
    last_values: np.ndarray | None = None
    """float32 [n], its V of the state after each sample's last token."""
    critic_packs: list[list[Pack]] | None = None
    """`packs[minibatch][pack]` that the critic learns on."""
    routers: Sequence[Any] = ()
    """By minibatch, what `Actor.update` needs to balance experts; empty: they are not balanced."""


def prepare(
    samples: Samples,
    pack_rows: Sequence[Sequence[np.ndarray]],
    actor: Policy,
    reference: Scorer | None,
    device: torch.device,
    critic: ValueScorer | None = None,
    critic_rows: Sequence[Sequence[np.ndarray]] | None = None,
) -> Prepared:
    """Collective over all ranks. `samples` are this rank's rows in canonical order,
    `pack_rows[minibatch][pack]` rows of them. Reference and critic are skipped where nothing needs
    them. `critic_rows` are rows of the critic's own packs; None: the actor's packs, padded further
    where the critic's layout needs that.

    Raises `ValueError` unless packs cover every response token exactly once, and as the roles do.
    """
    packs = actor.padded(_packs(samples, pack_rows, device))
    flat = [pack for part in packs for pack in part]
    with actor.counting_experts([len(part) for part in packs]) as routers:
        old = restore(flat, [scores.log_probs_A for scores in actor.log_probs(flat)])
    ref = None
    if reference is not None:
        ref = restore(flat, [scores.log_probs_A for scores in reference.log_probs(flat)])
    if critic is None:
        return Prepared(samples, packs, old, ref, routers=routers)
    theirs = packs if critic_rows is None else _packs(samples, critic_rows, device)
    theirs = critic.padded(theirs)
    values, last = _values(critic, [pack for part in theirs for pack in part], len(samples))
    return Prepared(samples, packs, old, ref, values, last, theirs, routers)


def _packs(
    samples: Samples, pack_rows: Sequence[Sequence[np.ndarray]], device: torch.device
) -> list[list[Pack]]:
    return [[build_pack(samples, rows).to(device) for rows in part] for part in pack_rows]


def _values(
    critic: ValueScorer, packs: Sequence[Pack], samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [R], float32 [n]) in the samples' order."""
    told = critic.values(packs)
    values = restore(packs, [each.values_A for each in told])
    rows = np.concatenate([np.zeros(0, np.int64), *(pack.rows.cpu().numpy() for pack in packs)])
    if not np.array_equal(np.sort(rows), np.arange(samples)):
        raise ValueError("the critic's packs do not hold every sample exactly once")
    last = np.empty(samples, dtype=np.float32)
    last[rows] = np.concatenate([np.zeros(0, np.float32), *(t.last_S.cpu().numpy() for t in told)])
    return values, last


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
