"""One run: the committed version, evaluation when due, metrics, the ledger and the final export.

`train.py` reads top to bottom because what is not the algorithm is here; `assemble.py` builds it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.objectives import merge_sums
from megarl.checkpoint.hf_folder import export_folder
from megarl.contracts.records import Derived, Experience, Prompt
from megarl.contracts.samples import SamplingContract
from megarl.contracts.states import Journal, State
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.data.prepare import Parity, ParityError
from megarl.data.prompts import PromptCursor
from megarl.data.table import SampleTable
from megarl.evaluate import evaluate
from megarl.experience.store import ExperienceStore, SealHeader
from megarl.models.roles import Actor, Reference
from megarl.models.step import StepResult
from megarl.observe.console import Console
from megarl.observe.metrics import MetricsWriter
from megarl.observe.report import write_report
from megarl.observe.runfolder import FINISHED_FILE
from megarl.observe.timeline import Stopwatch
from megarl.recipe import Recipe
from megarl.reshard.digest import Digester
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.transfer import weight_manifest
from megarl.rewards.score import ScoringPool
from megarl.rewards.scorer import component_name
from megarl.rollout.generator import Generator
from megarl.rollout.groups import IterationPlan
from megarl.rollout.hybrid import HybridEngine
from megarl.world import World


@dataclass
class Run:
    """The parts of a run on this rank. `version` and `manifest` are the committed actor's."""

    recipe: Recipe
    folder: Path
    world: World
    spec: ModelSpec
    tokens: Tokens
    cursor: PromptCursor
    held_out: tuple[Prompt, ...]
    actor: Actor
    reference: Reference | None
    hybrid: HybridEngine
    pool: ScoringPool | None
    store: ExperienceStore
    sampling: SamplingContract
    journal: Journal
    metrics: MetricsWriter | None
    console: Console
    stopwatch: Stopwatch
    version: PolicyVersion = field(init=False)
    manifest: WeightManifest = field(init=False)
    reference_version: PolicyVersion | None = field(default=None, init=False)
    started: float = field(default_factory=time.time)
    _evaluation: dict[str, float] = field(default_factory=dict, init=False)

    def iterations(self) -> Iterator[int]:
        for iteration in range(self.recipe.run.iterations):
            self.stopwatch.begin(iteration, self.version.id)
            yield iteration

    def seal_header(self, iteration: int, table: SampleTable) -> SealHeader:
        """Who made each column of this iteration's experience, and what held for all of it."""
        producers = {"rollout": table.version_id, "old": self.version.id}
        if self.reference is not None:
            producers["ref"] = self.reference_version.id
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

    def keep_derived(
        self, iteration: int, experience: Experience, derived: Derived, plan: IterationPlan
    ) -> None:
        """On disk, beside the facts: what was derived of them and is trained on now."""
        with self.stage("seal"):
            self.store.derive(
                iteration,
                experience.hash,
                derived.recipe_hash,
                plan.selection,
                plan.minibatch,
                experience.samples,
                derived,
            )

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
        self.world.vote(state, {"version": self.version.id, "iteration": iteration, **evidence})
        self.enter(state, iteration, **evidence)

    def commit(self, iteration: int) -> None:
        """ACTOR_COMMITTED: the actor's weights become a version, every copy of them compared."""
        with self.stage("commit"):
            self.manifest = self.hybrid.resharder.manifest()
            self.version = self._version("actor", self.actor.optimizer_step, self.manifest)
            self.agree(State.ACTOR_COMMITTED, iteration, weight_manifest_hash=self.manifest.hash)
            self._record_version(iteration, self.version)
        if self.reference is not None and self.reference_version is None:
            self.reference_version = self._version("reference", 0, self._reference_manifest())
            self._record_version(iteration, self.reference_version)

    def _version(self, role: str, step: int, manifest: WeightManifest) -> PolicyVersion:
        return PolicyVersion(
            run_id=self.recipe.run.name,
            optimizer_step=step,
            update_attempt=0,
            weight_manifest_hash=manifest.hash,
            tokenizer_hash=self.tokens.hash,
            model_config_hash=self.spec.config_hash,
            role=role,
        )

    def _reference_manifest(self) -> WeightManifest:
        placement = megatron_placement(self.spec, self.world.mesh)
        dtype = getattr(torch, self.recipe.rollout.dtype)
        parameters = self.reference.named_parameters()
        digester = Digester(placement, self.world.rank, parameters, dtype)
        return weight_manifest(placement, digester, dtype, self.world)

    def _record_version(self, iteration: int, version: PolicyVersion) -> None:
        if self.world.is_main:
            line = {"id": version.id, "iteration": iteration} | asdict(version)
            with open(self.folder / "versions.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def check_parity(self, parity: Parity) -> None:
        """Stop, or say so, when trainer and generator disagree beyond the recipe's bounds."""
        bounds = self.recipe.parity
        broken = parity.check(bounds.max, bounds.mean)
        if broken is None:
            return
        if bounds.action == "stop":
            raise ParityError(broken)
        self.console.note(broken)

    def close_ledger(self, iteration: int, plan: IterationPlan) -> None:
        """One line of `ledger.jsonl`: sampled = trained + dropped + refused."""
        if self.world.is_main:
            line = {"iteration": iteration, "version": self.version.id} | plan.account
            with open(self.folder / "ledger.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def global_sums(self, results: Sequence[StepResult]) -> list[dict[str, float]]:
        """Loss sums of every step over all ranks, each data-parallel part counted once."""
        mine = [result.sums for result in results] if self.world.leads_owners else None
        parts = [part for part in self.world.gather(mine) if part is not None]
        return [merge_sums(step) for step in zip(*parts, strict=True)]

    def evaluate_if_due(self, iteration: int, generator: Generator) -> None:
        """Held-out accuracy of the weights before this iteration's updates, every N iterations."""
        every, last = self.recipe.eval.every, self.recipe.run.iterations - 1
        due = iteration == 0 or (every and iteration % every == 0 and iteration < last)
        self._evaluation = self._evaluate(generator) if due and self.held_out else {}

    def _evaluate(self, generator: Generator) -> dict[str, float]:
        with self.stage("evaluate"):
            result = evaluate(
                self.world,
                generator,
                self.version,
                self.held_out,
                self.sampling,
                pool=self.pool,
                tokens=self.tokens,
                metric=component_name(self.recipe.reward.scorers[0].name),
                sampled=self.recipe.eval.sampled,
                max_error_share=self.recipe.reward.max_error_share,
                file=self.folder / "eval" / f"step_{self.version.optimizer_step}.jsonl",
            )
        return result | {"eval/optimizer_step": float(self.version.optimizer_step)}

    def finish(self, iteration: int, row: dict[str, float]) -> None:
        """Write the iteration's row; after the last one evaluate and export the final weights."""
        if iteration == self.recipe.run.iterations - 1:
            final = self._finish_training(iteration)
            row |= {f"eval/final/{key.removeprefix('eval/')}": v for key, v in final.items()}
            self._evaluation = self._evaluation or final
        times = self.stopwatch.take()
        generated = row["response/tokens"]
        if times.get("time/generate"):
            times["time/tokens_per_second"] = generated / times["time/generate"]
        row = {"iteration": iteration} | row | self._evaluation | times
        if self.metrics is not None:
            self.metrics.write(row)
        self.console.iteration(row)
        if not row["update/steps"]:
            self.console.note(f"iteration {iteration} taught nothing: {_why_nothing(row)}")

    def _finish_training(self, iteration: int) -> dict[str, float]:
        result: dict[str, float] = {}
        if self.held_out:
            with self.hybrid.generating(iteration, self.version, self.manifest) as generator:
                result = self._evaluate(generator)
            self.agree(State.ACTOR_COMMITTED, iteration, weight_manifest_hash=self.manifest.hash)
        with self.stage("export"):
            export_folder(
                self.folder / "hf",
                Path(self.recipe.model.path),
                megatron_placement(self.spec, self.world.mesh),
                self.actor.named_parameters(),
                self.spec,
                self.world,
                getattr(torch, self.recipe.model.dtype),
            )
        return result

    def mark_finished(self) -> None:
        """The last write of a run."""
        if not self.world.is_main:
            return
        whole = self.folder / (FINISHED_FILE + ".tmp")
        facts = {
            "iterations": self.recipe.run.iterations,
            "version": self.version.id,
            "weight_manifest_hash": self.manifest.hash,
            "seconds": round(time.time() - self.started, 1),
        }
        whole.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        whole.replace(self.folder / FINISHED_FILE)
        write_report(self.folder)
        self.console.note(
            f"finished: {self.folder}; python -m megarl.observe.summary {self.folder} sums it up"
        )


def _why_nothing(row: dict[str, float]) -> str:
    """Where the samples of an iteration without an optimizer step went."""
    where = {
        key.removeprefix("groups/samples_"): int(value)
        for key, value in row.items()
        if key.startswith("groups/samples_") and value
    }
    told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in where.items())
    return f"of {int(row['groups/samples'])} samples {told}"
