"""The position of a live run, gathered from its parts, and when it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from megarl.checkpoint.commit import checkpoint_folder
from megarl.checkpoint.model_fit import numbers_of
from megarl.checkpoint.position import LearnerPosition, Position, RolePosition
from megarl.checkpoint.records import present_files
from megarl.checkpoint.saver import ACTOR, CRITIC, layout_of
from megarl.observe.environment import package_versions
from megarl.run_outputs import elapsed_seconds, export_on_the_way
from megarl.stop import StopAsked

if TYPE_CHECKING:
    from megarl.run import Run


def position_of(run: Run, iteration: int, learners: Mapping[str, LearnerPosition]) -> Position:
    """Rank 0's: where `run` stands before iteration `iteration`, its records on the disk.
    `learners`: by role."""
    reference = critic = None
    if run.reference_version is not None:
        reference = RolePosition(run.reference_version, run.reference_manifest)
    if run.critic is not None:
        critic = RolePosition(run.critic_version, run.critic_manifest)
    values = learners.get(CRITIC, LearnerPosition({}, {}))
    present = present_files(run.folder)
    return Position(
        run_id=run.recipe.run.name,
        iteration=iteration,
        actor=RolePosition(run.version, run.manifest),
        reference=reference,
        reference_refreshed_at=run.reference_refreshed_at,
        attempt=run.attempt,
        trainer=learners[ACTOR].trainer,
        tensor_digests=learners[ACTOR].tensor_digests,
        cursor=run.cursor.state,
        curriculum=run.cursor.history,
        quarantine=run.quarantine.state,
        best=None if run.exports is None else run.exports.state,
        contracts=dict(run.contracts),
        recipe=run.recipe.model_dump(mode="json"),
        recipe_hash=run.recipe.hash,
        layout=dict(layout_of(run.world)),
        records=run.positions.take(),
        eval_files=present["eval_files"],
        exports=present["export_names"],
        seconds=round(elapsed_seconds(run), 3),
        packages=package_versions(),
        model=numbers_of(run.spec),
        critic=critic,
        critic_trainer=values.trainer,
        critic_tensor_digests=values.tensor_digests,
        critic_model={} if critic is None else numbers_of(run.critic.spec),
        kl=run.controller.state,
    )


def save_if_due(run: Run, iteration: int) -> None:
    """Before iteration `iteration`: commit the save that goes on, begin one if it is time.
    Collective.

    Raises `StopAsked` on every rank, with the position saved, where one was asked to stop.
    """
    saver, last = run.checkpointer, run.recipe.run.iterations
    if saver is None:
        return
    if iteration > run.first:
        export_on_the_way(run, iteration)
    stopping = any(run.world.gather(run.stop.asked)) and run.first < iteration < last
    with run.stopwatch("checkpoint"):
        saver.settle(wait=False)
        due = iteration > run.first and saver.is_due(iteration, last)
        if due or stopping:
            best = None if run.exports is None else run.exports.state
            manifests = {ACTOR: run.manifest}
            if run.critic is not None:
                manifests[CRITIC] = run.critic_manifest
            position = partial(position_of, run, iteration)
            saver.save(iteration, run.version.id, position, best, manifests)
        if stopping or iteration == last:
            saver.settle(wait=True)
        if run.exports is not None and saver.newest_best is not None:
            run.exports.settle(saver.newest_best)
    if stopping:
        raise StopAsked(iteration - 1, checkpoint_folder(run.folder, iteration))
