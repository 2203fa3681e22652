"""From a checkpoint's files into live roles, in the layout at hand, and the proof that it worked.

What is proven is not that files were read: the weights and every tensor of the optimizer's state
are digested where they now lie, and must be, tensor by tensor, what was digested when they were
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.checkpoint.commit import CheckpointError
from megarl.checkpoint.position import Position
from megarl.checkpoint.random_state import restore_random_state
from megarl.checkpoint.saver import ACTOR, RANDOM, REFERENCE
from megarl.checkpoint.tensor_digests import manifest_of_role, tensor_digests
from megarl.checkpoint.torch_dist import (
    load_tensors,
    owned_tensors,
    rank_object,
    read_whole,
    share_weights,
)
from megarl.models.optimizer_state import OptimizerState
from megarl.models.roles import Actor, Reference
from megarl.world import World

MOST_TOLD = 3
ADAM = "adam_steps"
"""The optimizer's own count, beside the trainer's in a position."""


def restore_roles(
    folder: Path,
    position: Position,
    actor: Actor,
    reference: Reference | None,
    state: OptimizerState,
    world: World,
) -> None:
    """Fill the actor, its optimizer and the reference from the checkpoint in `folder`. Collective.

    A world of another size keeps the random generators it has. Raises `TensorsError`
    where the files do not hold what is asked for, `CheckpointError` naming tensors whose digest is
    not the one that was saved; each on every rank.
    """
    same_world = position.layout["ranks"] == world.size
    extra = {RANDOM: rank_object(RANDOM, None)} if same_world else {}
    plain = read_whole(state, actor.model, folder / ACTOR, extra)
    actor.trainer.restore(position.trainer)
    state.step = position.trainer[ADAM]
    here, saved = tensor_digests(actor, state, world), position.tensor_digests
    _refuse(
        folder / ACTOR,
        "tensors",
        [
            f"{name}: {here.get(name)} against {saved.get(name)}"
            for name in sorted(here.keys() | saved.keys())
            if here.get(name) != saved.get(name)
        ],
    )
    if reference is not None and position.reference is not None:
        load_tensors(owned_tensors(reference.model, state), folder / REFERENCE)
        share_weights(reference.model, state.owners)
        here = manifest_of_role(reference, position.reference.manifest.tensors[0].dtype, world)
        _refuse(folder / REFERENCE, "weights", position.reference.manifest.differences(here))
    if same_world:
        restore_random_state(plain[RANDOM], world.device)


def _refuse(folder: Path, what: str, found: Sequence[str]) -> None:
    if found:
        more = f" (and {len(found) - MOST_TOLD} more)" if len(found) > MOST_TOLD else ""
        told = "; ".join(found[:MOST_TOLD])
        raise CheckpointError(
            f"{folder}: the {what} loaded are not those saved: {told}{more}; the files are "
            "damaged: resume.from another checkpoint"
        )
