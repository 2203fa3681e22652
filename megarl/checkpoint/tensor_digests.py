"""Digests of all that a checkpoint holds of a role, taken where the tensors live, in any layout."""

from __future__ import annotations

import torch

from megarl.checkpoint.state_digest import state_digests
from megarl.contracts.version import WeightManifest
from megarl.models.optimizer_state import OptimizerState
from megarl.models.roles import Actor, Reference
from megarl.reshard.digest import Digester
from megarl.reshard.families import family_rules
from megarl.reshard.layout import megatron_placement
from megarl.reshard.transfer import weight_manifest
from megarl.world import World


def manifest_of_role(role: Actor | Reference, dtype: str, world: World) -> WeightManifest:
    """The role's weights as they lie, digested in `dtype`, every copy compared. Collective; raises
    `DriftError`."""
    placement = megatron_placement(role.spec, world.mesh)
    as_dtype = getattr(torch, dtype)
    digester = Digester(placement, world.rank, role.named_parameters(), as_dtype)
    return weight_manifest(placement, digester, as_dtype, world)


def tensor_digests(
    actor: Actor, state: OptimizerState, world: World, manifest: WeightManifest | None = None
) -> dict[str, str]:
    """`weights/NAME`, `exp_avg/NAME`, … → digest in hex, of every bit that an update depends on.
    Collective; raises `DriftError`.

    `manifest`: of the weights as they are, the same on every rank; what it has in another dtype
    than it is held in is digested here.
    """
    dtype = str(actor.model.dtype).removeprefix("torch.")
    own = {rule.hf: rule.dtype or dtype for rule in family_rules(actor.spec)}
    entries = {entry.name: entry for entry in (manifest.tensors if manifest else ())}
    for kind in sorted(set(own.values())):
        if any(own[n] == kind and (n not in entries or entries[n].dtype != kind) for n in own):
            taken = manifest_of_role(actor, kind, world).tensors
            entries |= {entry.name: entry for entry in taken if own[entry.name] == kind}
    found = {f"weights/{name}": f"{entries[name].digest:#x}" for name in own}
    digests = state_digests(actor.spec, world.mesh, state, world)
    return found | {name: f"{digest:#x}" for name, digest in digests.items()}
