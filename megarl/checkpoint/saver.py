"""Saves a run's position while it goes on: a copy at once, the files behind it, COMMIT.json last.

    save()     every rank copies its tensors; the position is fixed; writing begins in a thread
    settle()   between iterations: once all ranks have written, they confirm, rank 0 commits

The weights may change as soon as `save` returns. A crash at any moment leaves the checkpoint before
it in charge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.checkpoint import commit as commits
from megarl.checkpoint.commit import CheckpointError, Commit, checkpoint_folder
from megarl.checkpoint.folder_check import TensorsError
from megarl.checkpoint.position import ADAM, LearnerPosition, Position
from megarl.checkpoint.random_state import random_state
from megarl.checkpoint.tensor_digests import tensor_digests
from megarl.checkpoint.torch_dist import (
    PendingSave,
    Shards,
    Staging,
    begin_save,
    model_tensors,
    rank_object,
    state_tensors,
)
from megarl.contracts.version import WeightManifest
from megarl.models.optimizer_state import OptimizerState
from megarl.models.roles import Actor, Critic, Reference
from megarl.platforms.offload import OptimizerOffload
from megarl.recipe.sections import CheckpointSection
from megarl.world import World

ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"
RANDOM = "random"
VOTE_CHECKPOINT = "CHECKPOINT"
STATE_BYTES = 4
"""Of an element of the optimizer's state, which is float32."""

MakePosition = Callable[[Mapping[str, LearnerPosition]], Position]
"""Of what `ACTOR` and, where there is one, `CRITIC` stand at; called on rank 0."""


@dataclass
class _Pending:
    """A save that is being written."""

    iteration: int
    version: str
    folder: Path
    position: Position | None
    """On rank 0."""
    best: Mapping[str, Any] | None
    parts: list[PendingSave]
    writing: Future[int]
    began: float
    held_up: float
    """Seconds that the loop waited for the copy."""


@dataclass
class Checkpointer:
    """The checkpoints of one run; every method is called on every rank, in step."""

    world: World
    run_folder: Path
    run_id: str
    section: CheckpointSection
    actor: Actor
    reference: Reference | None
    critic: Critic | None = None
    offload: OptimizerOffload | None = None
    note: Callable[[str], None] = lambda text: None
    """Tells a person, on rank 0."""
    newest: Commit | None = field(default=None, init=False)
    """The last one that this process committed, on rank 0."""
    newest_best: Mapping[str, Any] | None = field(default=None, init=False)
    """The best export in the newest position that was committed, on every rank."""
    _pending: _Pending | None = field(default=None, init=False)
    _states: dict[str, OptimizerState] = field(default_factory=dict, init=False)
    _staging: Staging = field(default_factory=Staging, init=False)
    _writer: ThreadPoolExecutor = field(init=False)
    _removing: Future[list[int]] | None = field(default=None, init=False)
    """On rank 0: the older ones are being removed."""

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @property
    def learners(self) -> dict[str, Actor | Critic]:
        """The roles with an optimizer, by the name of their folder; in the order in which all ranks
        take them."""
        return {ACTOR: self.actor} | ({} if self.critic is None else {CRITIC: self.critic})

    def state_of(self, role: str) -> OptimizerState:
        """A learner's optimizer state as whole parameters; collective when first asked for."""
        if role not in self._states:
            self._states[role] = OptimizerState(self.learners[role].trainer)
        return self._states[role]

    @property
    def is_pending(self) -> bool:
        """Whether a save is not committed yet; the same on every rank."""
        return self._pending is not None

    def is_due(self, iteration: int, last: int) -> bool:
        """Whether the position after `iteration` iterations is saved; `last` is the run's end."""
        every = self.section.every
        return iteration == last or (every > 0 and iteration % every == 0)

    def save(
        self,
        iteration: int,
        version: str,
        make_position: MakePosition,
        best: Mapping[str, Any] | None = None,
        manifests: Mapping[str, WeightManifest] | None = None,
    ) -> None:
        """Fix this position and begin to write it. Collective; a save before it is settled first.

        `best` is the position's, on every rank; `manifests` those of learners' weights, where there
        are some.

        Raises `CheckpointError` on every rank where the disk has no room or no folder can be made,
        and as `settle` does.
        """
        self.settle(wait=True)
        self.world.enter("checkpoint")
        began = time.perf_counter()
        folder = checkpoint_folder(self.run_folder, iteration)
        need = sum(self.world.gather(self._bytes()))
        self._on_main(lambda: self._make_room(folder, need))
        out = self.offload is not None and self.offload.is_out
        if out:
            self.offload.back()
        # What the loop waits for, and what stays where it is, is written from where it lies.
        staging = self._staging if self.section.background or out else None
        try:
            parts = [
                begin_save(self._shards(role), folder / role, staging) for role in self._folders
            ]
        except TensorsError as error:  # on every rank
            raise CheckpointError(f"no checkpoint was saved: {error}") from error
        writing = self._writer.submit(lambda: sum(part.write() for part in parts))
        # The disk has work from here on; the digests are of the same bits.
        stand = {role: self._stand(role, (manifests or {}).get(role)) for role in self.learners}
        position = make_position(stand) if self.world.is_main else None
        if out:
            self.offload.out()
        held_up = time.perf_counter() - began
        self._pending = _Pending(
            iteration, version, folder, position, best, parts, writing, began, held_up
        )
        if not self.section.background:
            self.settle(wait=True)

    def settle(self, *, wait: bool) -> None:
        """Commit the save that is going on if every rank has written its part, or after waiting
        for that. Collective.

        Raises `CheckpointError` on every rank where one of them could not write.
        """
        if self._pending is None:
            return
        pending = self._pending
        if wait:
            self.world.enter("checkpoint")
            pending.writing.exception()  # waits; `_agree` tells
        if not all(self.world.gather(pending.writing.done())):
            return
        self._pending = None
        self.world.enter("checkpoint")
        self._agree(pending.writing.exception())
        try:
            for part in pending.parts:
                part.finish()
        except TensorsError as error:  # on every rank
            raise CheckpointError(f"no checkpoint was saved: {error}") from error
        self._on_main(lambda: pending.position.write(pending.folder))
        stated = {"iteration": pending.iteration, "version": pending.version}
        self.world.vote(VOTE_CHECKPOINT, stated)
        self.world.enter("checkpoint_commit")
        self._on_main(lambda: self._commit(pending))
        self.newest_best = pending.best

    def close(self) -> None:
        """Wait for the thread. What is not committed by now never counts."""
        self._writer.shutdown(wait=True)
        self.wait_for_removal()

    @property
    def _folders(self) -> list[str]:
        """Of a checkpoint, in the order in which they are written: the critic's last."""
        frozen = [] if self.reference is None else [REFERENCE]
        return [ACTOR, *frozen, *([] if self.critic is None else [CRITIC])]

    def _shards(self, role: str) -> Shards:
        """What this rank holds of all that goes into the role's folder. Collective."""
        if role == REFERENCE:
            return model_tensors(self.reference.model, self.state_of(ACTOR).owners)
        model, state = self.learners[role].model, self.state_of(role)
        shards = model_tensors(model, state.owners) | state_tensors(model, state.gather())
        if role == ACTOR:  # a rank's generators serve all roles
            shards[RANDOM] = rank_object(RANDOM, random_state(self.world.device))
        return shards

    def _stand(self, role: str, manifest: WeightManifest | None) -> LearnerPosition:
        """On rank 0 whole; the others may hold no parameter's state. Collective."""
        learner, state = self.learners[role], self.state_of(role)
        digests = tensor_digests(learner, state, self.world, manifest)
        adam = {ADAM: state.step} if self.world.is_main else {}
        return LearnerPosition(learner.trainer.state | adam, digests)

    def _bytes(self) -> int:
        """About what this rank writes: of copies on tensor-parallel ranks too."""
        total = 0
        for role in self._folders:
            frozen = role == REFERENCE
            state = self.state_of(ACTOR if frozen else role)
            weights = (self.reference if frozen else self.learners[role]).named_parameters()
            for name, weight in weights.items():
                if state.carries(name, weight):
                    total += weight.numel() * weight.element_size()
                if not frozen and state.owns(name):
                    total += weight.numel() * len(state.keys) * STATE_BYTES
        return total

    def _make_room(self, folder: Path, need: int) -> None:
        (self.run_folder / commits.FOLDER).mkdir(exist_ok=True)
        self.wait_for_removal()
        commits.check_room(folder.parent, need, f"the checkpoint {folder.name}")
        folder.mkdir()
        for role in self._folders:
            (folder / role).mkdir()

    def check_disk(self) -> None:
        """At start: room for those that are kept and one that is being written. Collective.

        Raises `CheckpointError` on every rank.
        """
        need = sum(self.world.gather(self._bytes()))

        def check() -> None:
            place = self.run_folder / commits.FOLDER  # may lead to a disk of its own
            place.mkdir(exist_ok=True)
            there, _ = commits.whole_checkpoints(self.run_folder)
            more = max(1, self.section.keep + 1 - len(there))
            commits.check_room(place, need * more, f"room for {more} more checkpoint(s)")

        self._on_main(check)

    def _commit(self, pending: _Pending) -> None:
        self.newest = commits.commit_folder(
            pending.folder, self.run_id, pending.iteration, pending.version
        )
        seconds = time.perf_counter() - pending.began
        self.note(
            f"saved {commits.FOLDER}/{pending.folder.name}: {self.newest.bytes / 1e6:.1f} MB, "
            f"{seconds:.2f} s, {pending.held_up:.2f} s of them held the loop up"
        )
        # Freeing many blocks takes a file system as long as a part of the save did.
        self._removing = self._writer.submit(
            commits.retain, self.run_folder, self.section.keep, self.section.keep_every
        )

    def wait_for_removal(self) -> None:
        """Wait until those beyond `checkpoint.keep` are gone. One that stays harms nothing but the
        room on the disk."""
        if self._removing is None:
            return
        error = self._removing.exception()
        if error is not None:
            self.note(f"an old checkpoint could not be removed: {_one_line(error)}")
        elif self._removing.result():
            self.note(f"removed checkpoints {', '.join(map(str, self._removing.result()))}")
        self._removing = None

    def _on_main(self, do: Callable[[], Any]) -> None:
        """Rank 0 does it; every rank raises where it could not. Collective."""
        problem: BaseException | None = None
        if self.world.is_main:
            try:
                do()
            except (OSError, CheckpointError) as error:
                problem = error
        self._agree(problem)

    def _agree(self, problem: BaseException | None) -> None:
        told = "" if problem is None else _one_line(problem)
        answers = self.world.gather(told)
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if bad:
            raise CheckpointError("no checkpoint was saved: " + "; ".join(bad)) from problem


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def layout_of(world: World) -> Mapping[str, Any]:
    """Of a position."""
    return world.mesh.described
