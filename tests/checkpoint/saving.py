"""A checkpointer around a tiny actor, for tests that save and load positions on real ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from megarl.checkpoint.position import Position, RolePosition
from megarl.checkpoint.restore import ADAM, restore_roles
from megarl.checkpoint.saver import Checkpointer, layout_of
from megarl.checkpoint.tensor_digests import manifest_of_role
from megarl.contracts.version import PolicyVersion
from megarl.recipe.sections import CheckpointSection
from tests.checkpoint.layouts import train


def checkpointer(folder: Path, actor: Any, **options: Any) -> Checkpointer:
    """`options`: those of the recipe's `checkpoint`, and `reference`, `offload`, `note`."""
    given = {name: options.pop(name) for name in ("offload", "note") if name in options}
    reference = options.pop("reference", None)
    section = CheckpointSection(**options)
    folder.mkdir(parents=True, exist_ok=True)  # a run has made its own by now
    return Checkpointer(actor.world, folder, "run", section, actor, reference, **given)


def position(
    saver: Checkpointer, manifests: list[Any], iteration: int, digests: Any, adam_steps: int
) -> Position:
    trainer = saver.actor.trainer
    roles = [
        RolePosition(PolicyVersion("run", trainer.steps, 0, manifest.hash, "t", "m"), manifest)
        for manifest in manifests
    ]
    return Position(
        run_id="run",
        iteration=iteration,
        actor=roles[0],
        reference=roles[1] if len(roles) > 1 else None,
        reference_refreshed_at=0,
        attempt=0,
        trainer=trainer.state | {ADAM: adam_steps},
        tensor_digests=digests,
        cursor={},
        quarantine={},
        best=None,
        contracts={},
        recipe={},
        recipe_hash="none",
        layout=dict(layout_of(saver.world)),
        records={},
        eval_files=[],
        exports=[],
        seconds=0.0,
        packages={},
    )


def save(saver: Checkpointer, iteration: int) -> None:
    """Collective."""
    roles = [role for role in (saver.actor, saver.reference) if role is not None]
    manifests = [manifest_of_role(role, "float32", saver.world) for role in roles]
    saver.save(iteration, f"v{iteration}", partial(position, saver, manifests, iteration))


def restore(saver: Checkpointer, commit: Any) -> Position:
    """Collective; proves every digest."""
    from megarl.checkpoint.position import read_position

    found = read_position(commit)
    roles = (saver.actor, saver.reference)
    restore_roles(commit.folder, found, *roles, saver.state, saver.world)
    return found


def step(actor: Any) -> None:
    """One deterministic optimizer step, on samples of its own number."""
    train(actor, 1)


def fingerprint(saver: Checkpointer) -> str:
    """Of every bit that this rank holds of weights and optimizer state; no digest of megarl's."""
    hasher = blake3()
    tensors = [weight.detach() for _, weight in sorted(saver.actor.named_parameters().items())]
    tensors += [part.tensors[key] for part in saver.state.parts for key in sorted(part.tensors)]
    for tensor in tensors:  # copies: what numpy has seen cannot be offloaded any more
        hasher.update(tensor.clone().view(-1).view(torch.uint8).numpy())
    return f"{hasher.hexdigest()[:16]} {saver.state.step} {saver.actor.trainer.steps}"
