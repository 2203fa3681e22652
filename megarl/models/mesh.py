"""Megatron's process groups for a mesh: global, so all roles of a process share one layout."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from megarl.contracts.mesh import Mesh
from megarl.platforms import megatron_patches


def initialize_mesh(mesh: Mesh, timeout: float = 1800.0) -> None:
    """Megatron's process groups for `mesh`; called again with the same mesh it does nothing.

    Collective. `timeout` in seconds bounds megatron's collectives. Raises `RuntimeError` when
    another mesh is initialised.
    """
    megatron_patches.install()
    if parallel_state.model_parallel_is_initialized():
        there, wanted = _sizes(), _wanted(mesh)
        if there != wanted:
            told = ", ".join(f"{name}={size}" for name, size in there.items())
            raise RuntimeError(f"megatron is initialised with {told}, not with {mesh}")
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.virtual if mesh.virtual > 1 else None,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        distributed_timeout_minutes=timeout / 60,
        create_gloo_process_groups=False,
    )
    # Under sequence parallelism megatron runs its layers in a random state of their own, though
    # nothing is drawn: the device's state as it is will do.
    random.get_cuda_rng_tracker().set_states(
        {random._MODEL_PARALLEL_RNG_TRACKER_NAME: random._get_cuda_rng_state()}
    )


def destroy_mesh() -> None:
    """Drop megatron's groups; after the last role, before `destroy_process_group`. Collective.

    Megatron forgets its groups without ending them, and each holds threads and sockets.
    """
    groups = parallel_state._global_process_group_list or ()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def _sizes() -> dict[str, int]:
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _wanted(mesh: Mesh) -> dict[str, int]:
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "virtual": mesh.virtual,
        "dp": mesh.dp,
        "ep": mesh.ep,
        "expert_tp": mesh.etp,
    }
