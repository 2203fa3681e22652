"""One run: the committed version, evaluation when due, metrics, the ledger and the final export.

`train.py` reads top to bottom because what is not the algorithm is here; `assemble.py` builds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.algorithms.controller import KlController
from megarl.algorithms.objectives import merge_sums
from megarl.checkpoint.records import RecordPositions
from megarl.checkpoint.run_position import save_if_due
from megarl.checkpoint.saver import Checkpointer
from megarl.checkpoint.start import Start
from megarl.contracts.records import Derived, Experience, Prompt
from megarl.contracts.samples import SamplingContract
from megarl.contracts.states import Journal, State
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.data.arrivals import Scope
from megarl.data.cursor import PromptCursor
from megarl.data.join import JoinCounts
from megarl.data.prepare import Parity, ParityError
from megarl.data.table import SampleTable
from megarl.evaluation.probes import Probes
from megarl.experience.store import ExperienceStore, SealHeader
from megarl.exports import Exports
from megarl.learnt import Learnt
from megarl.models.roles import Actor, Critic, Reference
from megarl.models.step import StepResult
from megarl.observe.console import Console
from megarl.observe.metrics import ACCURACY, MetricsWriter, final_name
from megarl.observe.notes import ended_early, little_taught
from megarl.observe.timeline import Stopwatch
from megarl.recipe import Recipe
from megarl.reshard.families.spec import ModelSpec
from megarl.rewards.quarantine import Quarantine, quarantine_notes
from megarl.rewards.score import ScoringPool
from megarl.rollout.generator import Generator
from megarl.rollout.groups import IterationPlan
from megarl.rollout.hybrid import HybridEngine, TrainingOnly
from megarl.rollout.rounds import shortfall
from megarl.run_outputs import evaluate_held_out, export_final, export_on_the_way
from megarl.run_records import BegunUpdate, RunRecords
from megarl.run_versions import commit_critic, commit_reference, version_of
from megarl.stop import StopRequest
from megarl.world import World


@dataclass
class Run:
    """The parts of a run on this rank. `version` and `manifest` are the committed actor's.

    A run that trains from sealed experience has none of what draws, generates and scores.
    """

    recipe: Recipe
    folder: Path
    world: World
    spec: ModelSpec
    tokens: Tokens
    cursor: PromptCursor | None
    quarantine: Quarantine | None
    held_out: tuple[Prompt, ...]
    actor: Actor | Reference
    """A reference where nothing is learnt: it has no optimizer."""
    reference: Reference | None
    critic: Critic | None
    controller: KlController
    """Weighs the KL term."""
    hybrid: HybridEngine | TrainingOnly
    pool: ScoringPool | None
    store: ExperienceStore
    sampling: SamplingContract
    journal: Journal
    records: RunRecords
    metrics: MetricsWriter | None
    console: Console
    stopwatch: Stopwatch
    checkpointer: Checkpointer | None = None
    """None where nothing is saved: a run that only collects, or trains from sealed experience."""
    exports: Exports | None = None
    """Hugging Face folders on the way; None where `checkpointer` is."""
    probes: Probes = field(default_factory=Probes)
    """Asked in evaluations only."""
    contracts: Mapping[str, str] = field(default_factory=dict)
    """What a position of this run is only good with."""
    start: Start | None = None
    """Where it goes on; None for a new run."""
    stop: StopRequest = field(default_factory=StopRequest)
    version: PolicyVersion = field(init=False)
    manifest: WeightManifest = field(init=False)
    reference_version: PolicyVersion | None = field(default=None, init=False)
    reference_manifest: WeightManifest | None = field(default=None, init=False)
    reference_refreshed_at: int = field(default=0, init=False)
    """Iterations after which the reference took the actor's weights; 0: it has its folder's."""
    critic_version: PolicyVersion | None = field(default=None, init=False)
    critic_manifest: WeightManifest | None = field(default=None, init=False)
    positions: RecordPositions = field(init=False)
    """How far each record has come; asked on rank 0 only."""
    reusable: int | None = field(default=None, init=False)
    """The iteration that goes on from what it had sealed, if it had, before this start; or None."""
    started: float = field(default_factory=time.time)
    _evaluation: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.positions = RecordPositions(self.folder)
        position = None if self.start is None else self.start.position
        if position is not None and self.reference is not None:
            self.reference_refreshed_at = position.reference_refreshed_at
        if self.start is not None and self.start.resume.use == "reuse_sealed":
            self.reusable = self.first

    @property
    def first(self) -> int:
        """The first iteration of this start."""
        return 0 if self.start is None else self.start.iteration

    @property
    def attempt(self) -> int:
        """`update_attempt` of every update from here on."""
        return 0 if self.start is None else self.start.resume.attempt

    def iterations(self) -> Iterator[int]:
        """Numbers of the iterations to run; between two of them positions are saved.

        Raises `StopAsked` on every rank where one was asked to stop.
        """
        for iteration in range(self.first, self.recipe.run.iterations):
            self.stopwatch.begin(iteration, self.version.id)
            save_if_due(self, iteration)
            yield iteration
        if self.first == self.recipe.run.iterations:  # killed behind its last checkpoint
            export_final(self)
        save_if_due(self, self.recipe.run.iterations)

    def scope(self, iteration: int) -> Scope:
        """What this iteration's samples and rewards must be of to be taken."""
        return Scope(
            run_id=self.recipe.run.name,
            iteration=iteration,
            version_id=self.version.id,
            scorer_version=None if self.pool is None else self.pool.version,
            attempt=self.attempt,
        )

    def seal_header(self, iteration: int, table: SampleTable) -> SealHeader:
        """Who made each column of this iteration's experience, and what held for all of it."""
        producers = {"rollout": table.version_id, "old": self.version.id}
        if self.reference is not None:
            producers["ref"] = self.reference_version.id
        if self.critic is not None:
            producers["critic"] = self.critic_version.id
        return SealHeader(
            run_id=self.recipe.run.name,
            iteration=iteration,
            producers=producers,
            tokenizer_hash=self.tokens.hash,
            recipe_hash=self.recipe.hash,
            sampling=self.sampling,
            scorer_version=table.scores.scorer_version,
            samples=len(table),
        )

    def begin_update(
        self, iteration: int, experience: Experience, derived: Derived, plan: IterationPlan
    ) -> BegunUpdate:
        """UPDATING_FROM: what is trained on now is on disk beside the facts, and was never before.

        Raises `AlreadyTrained` on every rank where this experience was.
        """
        with self.stage("seal"):
            derived_hash = self.store.derive(
                iteration,
                experience.hash,
                derived.recipe_hash,
                plan.selection,
                plan.minibatch,
                experience.samples,
                derived,
            )
            self.records.use(iteration, experience.hash, derived_hash)
        hashes = {"experience_hash": experience.hash, "derived_hash": derived_hash}
        self.enter(State.UPDATING_FROM, iteration, **hashes)
        beta = derived.kl_beta
        return BegunUpdate(
            iteration, **hashes, version=self.version, totals=plan.totals, kl_beta=beta
        )

    def close_update(
        self, begun: BegunUpdate, learnt: Learnt[StepResult]
    ) -> Learnt[dict[str, float]]:
        """After the commit: one line of `updates.jsonl`. Collective; returns `global_sums` of each
        role's steps."""
        sums = Learnt(self.global_sums(learnt.actor), self.global_sums(learnt.critic))
        self.records.update(begun, self.version, learnt, sums)
        if told := ended_early(begun.iteration, learnt.actor):
            self.console.note(told)
        return sums

    def global_sums(self, results: Sequence[StepResult]) -> list[dict[str, float]]:
        """Loss sums of every step over all ranks, each data-parallel part counted once."""
        mine = [result.sums for result in results] if self.world.leads_owners else None
        parts = [part for part in self.world.gather(mine) if part is not None]
        return [merge_sums(step) for step in zip(*parts, strict=True)]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Names the stage for the console and adds its seconds to `time/<name>`."""
        self.world.enter(name)
        self.console.stage(name.replace("_", " "))
        with self.stopwatch(name):
            yield

    def enter(self, state: State, iteration: int, **evidence: Any) -> None:
        self.journal.enter(state, iteration, self.version, **evidence)

    def agree(self, state: State, iteration: int, **evidence: Any) -> None:
        """Vote on `state` and its evidence, then enter it."""
        self._vote(state, iteration, **evidence)
        self.enter(state, iteration, **evidence)

    def _vote(self, state: State, iteration: int, **evidence: Any) -> None:
        self.world.vote(state, {"version": self.version.id, "iteration": iteration, **evidence})

    def begin(self) -> None:
        """The first ACTOR_COMMITTED of this start: the weights as they were built or restored."""
        self.commit(self.first)

    def commit(self, iteration: int) -> None:
        """ACTOR_COMMITTED: the actor's weights become a version, every copy of them compared, and
        the critic's another one."""
        with self.stopwatch("seal"):  # what was learnt from is on the disk before it is committed
            self.store.settle()
        with self.stage("commit"):
            self.manifest = self.hybrid.manifest()
            self.version = version_of(self, "actor", self.actor.optimizer_step, self.manifest)
            if self.critic is not None:
                commit_critic(self)
            evidence = self.committed
            self._vote(State.ACTOR_COMMITTED, iteration, **evidence)
            # Who finds the state in the journal finds the weights of its version.
            versions = self.records.versions
            versions.committed(iteration, self.version, self.manifest)
            if self.critic is not None:
                versions.committed(iteration, self.critic_version, self.critic_manifest)
            self.enter(State.ACTOR_COMMITTED, iteration, **evidence)
        if self.reference is not None and self.reference_version is None:
            commit_reference(self, iteration)

    @property
    def committed(self) -> dict[str, str]:
        """What ACTOR_COMMITTED is entered with: whose weights the next iteration begins from."""
        evidence = {"weight_manifest_hash": self.manifest.hash}
        return evidence if self.critic is None else evidence | {"critic": self.critic_version.id}

    def judge_prompts(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        table: SampleTable,
        plan: IterationPlan,
    ) -> None:
        """Which prompts are drawn no more, and a word where this iteration has too few."""
        self.cursor.note(table, prompts)
        found = self.quarantine.note(iteration, table, prompts)
        told = quarantine_notes(found)
        told += self.cursor.emptied([item.prompt_id for item in found], self.quarantine.prompt_ids)
        for line in (*told, shortfall(iteration, self.recipe, plan)):
            if line is not None:
                self.console.note(line)

    def check_parity(self, parity: Parity) -> None:
        """Stop, or say so, when trainer and generator disagree beyond the recipe's bounds."""
        bounds = self.recipe.parity
        broken = parity.check(bounds.max, bounds.mean)
        if broken is None:
            return
        if bounds.action == "stop":
            raise ParityError(broken)
        self.console.note(broken)

    def close_ledger(
        self,
        iteration: int,
        experience_hash: str,
        plan: IterationPlan,
        joined: JoinCounts = JoinCounts(),  # noqa: B008 - frozen; sealed results arrive once
    ) -> None:
        """One line of `ledger.jsonl`: sampled = trained + dropped + refused, how the samples came
        about, and what came again or late and changed nothing."""
        head = {"iteration": iteration, "version": self.version.id}
        head["experience_hash"] = experience_hash
        self.records.ledger(head | plan.account | {"joined": joined.account})

    def evaluation_is_due(self, iteration: int) -> bool:
        """Before this iteration's updates, every N iterations."""
        every, last = self.recipe.eval.every, self.recipe.run.iterations - 1
        due = iteration == 0 or (every and iteration % every == 0 and iteration < last)
        return bool(due and self.held_out)

    def evaluate_if_due(self, iteration: int, generator: Generator) -> None:
        """Held-out accuracy of the weights before this iteration's updates."""
        due = self.evaluation_is_due(iteration)
        self._evaluation = evaluate_held_out(self, generator) if due else {}
        export_on_the_way(self, iteration, self._evaluation.get(ACCURACY))

    def finish(self, iteration: int, row: dict[str, float]) -> None:
        """Write the iteration's row; after the last one evaluate and export the final weights."""
        if iteration == self.recipe.run.iterations - 1:
            final = self._finish_training(iteration)
            row |= {final_name(key): value for key, value in final.items()}
        self.report(iteration, row)
        for line in little_taught({"iteration": iteration} | row, self.recipe):
            self.console.note(line)

    def report(self, iteration: int, row: Mapping[str, Any]) -> None:
        """The iteration's row, with its times, to metrics and console."""
        times = self.stopwatch.take()
        if times.get("time/generate"):
            times["time/tokens_per_second"] = row["response/tokens"] / times["time/generate"]
        drawn: dict[str, float] = {}
        if self.cursor is not None:
            drawn["rollout/epoch"] = self.cursor.epoch
            drawn |= {f"rollout/epoch/{name}": told for name, told in self.cursor.epochs.items()}
            drawn["rollout/quarantined"] = float(len(self.quarantine.prompt_ids))
        line = {"iteration": iteration} | dict(row) | drawn | self._evaluation | times
        if self.metrics is not None:
            self.metrics.write(line)
        self.console.iteration(line)

    def _finish_training(self, iteration: int) -> dict[str, float]:
        result: dict[str, float] = {}
        if self.held_out:
            with self.hybrid.generating(iteration, self.version, self.manifest) as generator:
                result = evaluate_held_out(self, generator)
                export_on_the_way(self, iteration + 1, result.get(ACCURACY))
            self.agree(State.ACTOR_COMMITTED, iteration, **self.committed)
        export_final(self)
        return result
