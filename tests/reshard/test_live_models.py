"""Real megatron-core shards into real SGLang parameters: what SGLang itself loads is the oracle.

Not covered: log-probs of what was written (the loop's parity tests), GPU, bfloat16 engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.contracts.mesh import Mesh
from megarl.reshard.families import read_spec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.transfer import Resharder
from megarl.world import World
from tests.models.support import write_hf_model
from tests.rollout.tiny import section

CPU = torch.device("cpu")


def _publish(folders: list[str], tp: int, rollout_tp: int) -> list[str]:
    """Parameters of each folder's model that transfer and SGLang's loader leave different."""
    # SGLang before megatron: its stand-ins for a CPU must be there when megatron looks for CUDA.
    from megarl.models.build import build_model, destroy_mesh, initialize_mesh
    from megarl.rollout.generator import Generator

    mesh = Mesh(dist.get_world_size(), tp=tp, rollout_tp=rollout_tp)
    world = World(mesh, CPU, timeout=60)
    initialize_mesh(mesh)
    different = []
    for folder in map(Path, folders):
        spec = read_spec(folder)
        model = build_model(spec, folder, mesh, world.rank, torch.float32, CPU)
        generator = Generator(folder, mesh, world.rank, section(tp=rollout_tp), 1, CPU)
        live = generator.named_parameters()
        loaded = {name: param.detach().clone() for name, param in live.items()}
        target = sglang_placement(spec, mesh)
        for param in live.values():
            param.data.fill_(float("nan"))
        resharder = Resharder(
            megatron_placement(spec, mesh),
            target,
            dict(model.named_parameters()),
            live,
            torch.float32,
            1 << 20,
            world,
        )
        manifest = resharder.manifest()
        resharder.transfer()
        resharder.verify(manifest)
        for pad in target.padding[world.rank]:
            assert loaded[pad.param][pad.param_row :].abs().max() == 0
            live[pad.param].data[pad.param_row :].zero_()
        different += [name for name in live if not torch.equal(live[name], loaded[name])]
        generator.close()
    destroy_mesh()
    return different


@pytest.mark.dist
@pytest.mark.parametrize("tp, rollout_tp", [(2, 1), (1, 2), (2, 2)])
def test_transfer_writes_what_sglang_would_load(ranks, tmp_path, tp, rollout_tp) -> None:
    folders = []
    for family, tied, head_dim in (("llama", False, 24), ("qwen2", True, 16)):
        folder = tmp_path / family
        write_hf_model(folder, family, tied=tied, intermediate_size=128, head_dim=head_dim)
        folders.append(str(folder))
    assert ranks.run(2, _publish, folders, tp, rollout_tp) == [[], []]
