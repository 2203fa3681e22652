"""Versions of a run's roles: whose weights they are, and when they became so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.checkpoint.tensor_digests import manifest_of_role
from megarl.contracts.version import PolicyVersion, WeightManifest

if TYPE_CHECKING:
    from megarl.checkpoint.position import Position, RolePosition
    from megarl.run import Run


def version_of(run: Run, role: str, step: int, manifest: WeightManifest) -> PolicyVersion:
    """The version of `role` (`actor`, `critic`, `reference`) after `step` optimizer steps of its
    own, of a reference after that many of the actor."""
    spec = {"critic": run.critic, "reference": run.reference}.get(role, run.actor).spec
    return PolicyVersion(
        run_id=run.recipe.run.name,
        optimizer_step=step,
        update_attempt=_attempt(run, role, step),
        weight_manifest_hash=manifest.hash,
        tokenizer_hash=run.tokens.hash,
        model_config_hash=spec.config_hash,
        role=role,
    )


def _attempt(run: Run, role: str, step: int) -> int:
    """The run's, of weights that this start made; of those that it started from, their own."""
    if run.start is None:
        return 0
    saved = _saved(run.start.position, role)
    first, own = (0, 0) if saved is None else (saved.optimizer_step, saved.update_attempt)
    return run.attempt if step > first else own


def _saved(position: Position | None, role: str) -> PolicyVersion | None:
    found: RolePosition | None = None if position is None else getattr(position, role)
    return None if found is None else found.version


def commit_critic(run: Run) -> None:
    """The critic's weights as they are. Collective; raises `DriftError` where copies differ."""
    run.critic_manifest = manifest_of_role(run.critic, run.recipe.model.dtype, run.world)
    steps = run.critic.optimizer_step
    run.critic_version = version_of(run, "critic", steps, run.critic_manifest)


def commit_reference(run: Run, iteration: int) -> None:
    """The reference's weights as they are: once at each start, and after each refresh. Collective;
    raises `DriftError` where copies differ."""
    with run.hybrid.scoring():  # where its weights are on the device
        manifest = manifest_of_role(run.reference, run.recipe.rollout.dtype, run.world)
    steps = run.reference.optimizer_step
    run.reference_version = version_of(run, "reference", steps, manifest)
    run.reference_manifest = manifest
    run.records.versions.committed(iteration, run.reference_version, manifest)


def refresh_reference_if_due(run: Run, iteration: int) -> None:
    """After `iteration`: the reference takes the actor's weights where the recipe says so.
    Collective.

    Raises `RuntimeError` on every rank where its weights are not the actor's then.
    """
    every, finished = run.recipe.reference.refresh_every, iteration + 1
    if run.reference is None or not every or finished % every:
        return
    with run.stage("commit"):
        with run.hybrid.scoring():
            run.reference.refresh_from(run.actor)
        run.reference_refreshed_at = finished
        commit_reference(run, iteration)
        if run.reference_manifest.hash != run.manifest.hash:
            differ = run.manifest.differences(run.reference_manifest)
            raise RuntimeError(f"the refreshed reference is not the actor: {differ[0]}")
