"""A checkpointer around a tiny actor, for tests that save and load positions on real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from blake3 import blake3

from megarl.checkpoint.model_fit import numbers_of
from megarl.checkpoint.position import LearnerPosition, Position, RolePosition
from megarl.checkpoint.restore import restore_roles
from megarl.checkpoint.saver import ACTOR, CRITIC, REFERENCE, Checkpointer, layout_of
from megarl.checkpoint.tensor_digests import manifest_of_role
from megarl.contracts.version import PolicyVersion
from megarl.recipe.sections import CheckpointSection
from tests.checkpoint.layouts import train


def checkpointer(folder: Path, actor: Any, **options: Any) -> Checkpointer:
    """`options`: those of the recipe's `checkpoint`, and `reference`, `critic`, `offload`,
    `note`."""
    given = {name: options.pop(name) for name in ("critic", "offload", "note") if name in options}
    reference = options.pop("reference", None)
    section = CheckpointSection(**options)
    folder.mkdir(parents=True, exist_ok=True)  # a run has made its own by now
    return Checkpointer(actor.world, folder, "run", section, actor, reference, **given)


def critic_of(folder: Path, actor: Any, **section: Any) -> Any:
    """A critic on the actor's ranks, from a folder of a causal model or one with a value head.
    Collective."""
    from megarl.models.critic_spec import critic_spec
    from megarl.models.roles import Critic
    from tests.models.support import actor_section

    spec, fresh = critic_spec(folder, actor.spec)
    own = vars(actor.trainer.section) | section
    dtype = SimpleNamespace(dtype=str(actor.model.dtype).removeprefix("torch."))
    rest = (actor_section(**own), actor.temperature, 10)
    return Critic(spec, folder, actor.world, dtype, *rest, fresh_head=fresh)


def reference_of(folder: Path, actor: Any) -> Any:
    """A reference on the actor's ranks. Collective."""
    from megarl.models.roles import Reference
    from megarl.reshard.families import read_spec
    from tests.models.support import actor_section

    section = actor_section(sequence_parallel=actor.trainer.section.sequence_parallel)
    dtype = SimpleNamespace(dtype=str(actor.model.dtype).removeprefix("torch."))
    return Reference(read_spec(folder), folder, actor.world, dtype, section, 1.0)


def roles_of(saver: Checkpointer) -> dict[str, Any]:
    return saver.learners | ({} if saver.reference is None else {REFERENCE: saver.reference})


def position(
    saver: Checkpointer,
    manifests: Mapping[str, Any],
    iteration: int,
    refreshed: int,
    told: Mapping[str, Any],
    learners: Mapping[str, LearnerPosition],
) -> Position:
    roles = {
        name: RolePosition(PolicyVersion("run", role.optimizer_step, 0, m.hash, "t", "m"), m)
        for (name, role), m in zip(roles_of(saver).items(), manifests.values(), strict=True)
    }
    values = learners.get(CRITIC, LearnerPosition({}, {}))
    return Position(
        run_id="run",
        iteration=iteration,
        actor=roles[ACTOR],
        reference=roles.get(REFERENCE),
        reference_refreshed_at=refreshed,
        attempt=0,
        trainer=learners[ACTOR].trainer,
        tensor_digests=learners[ACTOR].tensor_digests,
        cursor={},
        quarantine={},
        best=None,
        contracts={},
        recipe=told.get("recipe", {}),
        recipe_hash="none",
        layout=dict(layout_of(saver.world)),
        records={},
        eval_files=[],
        exports=[],
        seconds=0.0,
        packages={},
        critic=roles.get(CRITIC),
        critic_trainer=values.trainer,
        critic_tensor_digests=values.tensor_digests,
        critic_model={} if saver.critic is None else numbers_of(saver.critic.spec),
        kl=told.get("kl", {}),
    )


def save(saver: Checkpointer, iteration: int, *, refreshed: int = 0, **told: Any) -> None:
    """Collective. `refreshed`: the iteration whose weights the reference has; `told`: a position's
    `kl` and `recipe`."""
    manifests = {
        name: manifest_of_role(role, "float32", saver.world)
        for name, role in roles_of(saver).items()
    }
    make = partial(position, saver, manifests, iteration, refreshed, told)
    saver.save(iteration, f"v{iteration}", make, manifests=manifests)


def restore(saver: Checkpointer, commit: Any, declared: Path | None = None) -> Position:
    """Collective; proves every digest. `declared`: the reference's model folder."""
    from megarl.checkpoint.position import read_position

    found = read_position(commit)
    restore_roles(commit.folder, found, saver, declared)
    return found


def step(actor: Any) -> None:
    """One deterministic optimizer step, on samples of its own number."""
    train(actor, 1)


def fingerprint(saver: Checkpointer) -> str:
    """Of every bit that this rank holds of weights and optimizer state; no digest of megarl's."""
    hasher = blake3()
    counts = []
    for name, learner in saver.learners.items():
        state = saver.state_of(name)
        tensors = [weight.detach() for _, weight in sorted(learner.named_parameters().items())]
        tensors += [part.tensors[key] for part in state.parts for key in sorted(part.tensors)]
        for tensor in tensors:  # copies: what numpy has seen cannot be offloaded any more
            hasher.update(tensor.clone().view(-1).view(torch.uint8).numpy())
        counts += [str(state.step), str(learner.trainer.steps)]
    return " ".join([hasher.hexdigest()[:16], *counts])
