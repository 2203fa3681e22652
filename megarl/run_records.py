"""A run's own records: rank 0 writes them, line by line, each at the moment it becomes true.

    versions.jsonl   which weights every version is, and what the generators held
    updates.jsonl    what every update learnt from and led to
    ledger.jsonl     what became of every sample

The journal, metrics and sealed experience have writers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.contracts.lines import LinesWriter
from megarl.contracts.version import PolicyVersion
from megarl.experience.consumed import AlreadyTrained, Consumed, Use
from megarl.experience.updates import UPDATES_FILE, Update, UpdateStep, finite
from megarl.experience.versions import VersionLog
from megarl.learnt import Learnt
from megarl.world import Disagreement, World

if TYPE_CHECKING:
    from megarl.algorithms.reduction import Totals
    from megarl.models.step import StepResult

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class BegunUpdate:
    """What UPDATING_FROM was entered with."""

    iteration: int
    experience_hash: str
    derived_hash: str
    version: PolicyVersion
    """The weights that are updated."""
    totals: tuple[Totals, ...]
    """Per minibatch, over all ranks."""
    kl_beta: float = 0.0
    """Weight of the KL term in this update."""


class RunRecords:
    """Opened at start, on every rank; only rank 0 reads and writes files."""

    def __init__(self, run_folder: Path, world: World) -> None:
        """Raises on rank 0 as `Consumed.read` does."""
        main = run_folder if world.is_main else None
        self._world = world
        self._consumed = Consumed() if main is None else Consumed.read(main)
        self.versions = VersionLog(main)
        self._updates = None if main is None else LinesWriter(main / UPDATES_FILE)
        self._ledger = None if main is None else LinesWriter(main / LEDGER_FILE)

    def use(self, iteration: int, experience_hash: str, derived_hash: str) -> None:
        """Iteration `iteration` is about to train on this experience. Collective.

        Raises on every rank alike: `AlreadyTrained` where it was trained on before, in this
        process or an earlier one, `Disagreement` where ranks derived different things of it.
        """
        refusal = self._consumed.refusal(experience_hash, iteration)
        told = self._world.gather((refusal, derived_hash))
        if told[0][0] is not None:  # rank 0 has read the run's folder
            raise AlreadyTrained(told[0][0])
        odd = [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]
        if odd:
            raise Disagreement(
                f"iteration {iteration}: ranks {odd} derived other advantages or minibatches of "
                f"experience {experience_hash} than rank 0"
            )
        self._consumed.use(experience_hash, Use(iteration, "in this process"))

    def update(
        self,
        begun: BegunUpdate,
        committed: PolicyVersion,
        learnt: Learnt[StepResult],
        sums: Learnt[dict[str, float]],
    ) -> None:
        """The update that led to `committed`: its steps, and their loss sums over all ranks."""
        if self._updates is None:
            return
        update = Update(
            iteration=begun.iteration,
            experience_hash=begun.experience_hash,
            derived_hash=begun.derived_hash,
            from_version=begun.version.id,
            to_version=committed.id,
            steps=_steps(begun, learnt.actor, sums.actor),
            critic=_steps(begun, learnt.critic, sums.critic),
            kl_beta=begun.kl_beta,
        )
        self._updates.write(update.line())

    def ledger(self, line: Mapping[str, Any]) -> None:
        if self._ledger is not None:
            self._ledger.write(line)

    def close(self) -> None:
        self.versions.close()
        for lines in (self._updates, self._ledger):
            if lines is not None:
                lines.close()


def _steps(
    begun: BegunUpdate, results: Sequence[StepResult], sums: Sequence[Mapping[str, float]]
) -> tuple[UpdateStep, ...]:
    """Pass by pass over the minibatches; the last pass may have ended early."""
    minibatches = len(begun.totals)
    return tuple(
        UpdateStep(
            epoch=number // minibatches,
            minibatch=number % minibatches,
            stepped=result.stepped,
            skipped_reason=result.skipped_reason,
            stopped=result.stopped,
            loss=finite(told["loss"]),
            grad_norm=finite(result.grad_norm),
            lr=result.lr,
            tokens=begun.totals[number % minibatches].tokens,
            sequences=begun.totals[number % minibatches].sequences,
        )
        for number, (result, told) in enumerate(zip(results, sums, strict=True))
    )
