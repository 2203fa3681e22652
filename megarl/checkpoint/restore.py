"""From a checkpoint's files into live roles, in the layout at hand, and the proof that it worked.

What is proven is not that files were read: the weights and every tensor of the optimizers' state
are digested where they now lie, and must be, tensor by tensor, what was digested when they were
saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.commit import CheckpointError
from megarl.checkpoint.position import ADAM, LearnerPosition, Position, RolePosition
from megarl.checkpoint.random_state import restore_random_state
from megarl.checkpoint.saver import ACTOR, CRITIC, RANDOM, REFERENCE, Checkpointer
from megarl.checkpoint.tensor_digests import manifest_of_role, tensor_digests
from megarl.checkpoint.torch_dist import (
    Shards,
    load_tensors,
    model_tensors,
    owned_tensors,
    rank_object,
    read_whole,
    share_weights,
)
from megarl.models.optimizer_state import holders_of
from megarl.models.roles import Reference
from megarl.world import World

MOST_TOLD = 3


def restore_roles(
    folder: Path, position: Position, saver: Checkpointer, declared: Path | None = None
) -> None:
    """Fill the learners of `saver`, their optimizers and the reference from the checkpoint in
    `folder`. Collective.

    A world of another size keeps the random generators it has. A critic or a reference that the
    position has none of stays as it was built. A reference that was never refreshed stays too: its
    weights, of the model folder `declared`, must be those that were saved.

    Raises `TensorsError` where the files do not hold what is asked for, `CheckpointError` naming
    tensors whose digest is not the one that was saved; each on every rank.
    """
    same_world = position.layout["ranks"] == saver.world.size
    extra = {RANDOM: rank_object(RANDOM, None)} if same_world else {}
    actor = LearnerPosition(position.trainer, position.tensor_digests)
    plain = _restore_learner(folder, ACTOR, saver, actor, extra)
    if saver.critic is not None and position.critic is not None:
        critic = LearnerPosition(position.critic_trainer, position.critic_tensor_digests)
        _restore_learner(folder, CRITIC, saver, critic, {})
    if saver.reference is not None and position.reference is not None:
        if position.reference_refreshed_at > 0:
            _restore_reference(folder, position.reference, saver)
        else:
            _check_anchor(folder, position.reference, saver, declared)
    if same_world:
        restore_random_state(plain[RANDOM], saver.world.device)


def restore_policy(folder: Path, position: Position, policy: Reference, world: World) -> None:
    """The actor's weights from the checkpoint in `folder` into a policy without optimizer, in any
    layout. Collective.

    Raises `TensorsError` and `CheckpointError` on every rank, as `restore_roles` does.
    """
    weights = policy.named_parameters()
    carried = {
        name: shard
        for name, shard in model_tensors(policy.model).items()
        if dist.get_rank(holders_of(weights[name])) == 0
    }
    load_tensors(carried, folder / ACTOR)
    share_weights(policy.model, {})
    saved = position.actor.manifest
    here = manifest_of_role(policy, saved.tensors[0].dtype, world)
    if differing := saved.differences(here):
        raise CheckpointError(
            f"{folder / ACTOR}: the weights loaded are not those saved: {_first(differing)}; the "
            "files are damaged: take another checkpoint"
        )


def _restore_learner(
    folder: Path, role: str, saver: Checkpointer, saved: LearnerPosition, extra: Shards
) -> dict[str, Any]:
    """Weights, optimizer and counters of one role; returns the plain values of `extra`."""
    learner, state = saver.learners[role], saver.state_of(role)
    plain = read_whole(state, learner.model, folder / role, extra)
    learner.trainer.restore(saved.trainer)
    state.step = saved.trainer[ADAM]
    here = tensor_digests(learner, state, saver.world)
    _check_trained(folder / role, here, saved.tensor_digests)
    differing = [
        f"{name}: {here[name]} against {value}"
        for name, value in sorted(saved.tensor_digests.items())
        if here[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"{folder / role}: the tensors loaded are not those saved: {_first(differing)}; the "
            "files are damaged: resume.from another checkpoint"
        )
    return plain


def _check_trained(folder: Path, here: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raises `CheckpointError` where other tensors are trained than were."""
    odd = [
        f"{name}, which {'it does not hold' if name in here else 'nothing here takes'}"
        for name in sorted(here.keys() ^ saved.keys())
    ]
    if odd:
        raise CheckpointError(
            f"{folder}: its tensors are not those that are trained here: {_first(odd)}; set "
            "actor.router and the model as the checkpoint's run had them"
        )


def _restore_reference(folder: Path, saved: RolePosition, saver: Checkpointer) -> None:
    reference, state = saver.reference, saver.state_of(ACTOR)
    load_tensors(owned_tensors(reference.model, state), folder / REFERENCE)
    share_weights(reference.model, state.owners)
    reference.optimizer_step = saved.version.optimizer_step
    if differing := _differences(saved, saver):
        raise CheckpointError(
            f"{folder / REFERENCE}: the weights loaded are not those saved: {_first(differing)}; "
            "the files are damaged: resume.from another checkpoint"
        )


def _check_anchor(
    folder: Path, saved: RolePosition, saver: Checkpointer, declared: Path | None
) -> None:
    """A frozen reference has the weights of its model folder, then as ever."""
    if differing := _differences(saved, saver):
        where = "the reference's model folder" if declared is None else declared
        raise CheckpointError(
            f"{where}: its weights are not those of the reference in {folder}: "
            f"{_first(differing)}; put the folder back as it was, or name one that holds these "
            "weights in reference.path"
        )


def _differences(saved: RolePosition, saver: Checkpointer) -> Sequence[str]:
    """Of the live reference from the saved one. Collective."""
    dtype = saved.manifest.tensors[0].dtype
    here = manifest_of_role(saver.reference, dtype, saver.world)
    return saved.manifest.differences(here)


def _first(found: Sequence[str]) -> str:
    more = f" (and {len(found) - MOST_TOLD} more)" if len(found) > MOST_TOLD else ""
    return "; ".join(found[:MOST_TOLD]) + more
