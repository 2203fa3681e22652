"""The optimizer's state out of the device and back, around real updates of megatron's optimizer.

Not covered: a GPU (device and host are the same memory here), megatron's fused Adam.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import (
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_hf_model(path, "qwen2", tied=True)
    return path


def trained(folder: Path, offloaded: bool, **section: Any) -> dict[str, Any]:
    """Three updates; with `offloaded` the state is out before each and between them."""
    from megarl.models.build import destroy_mesh
    from megarl.platforms import platform_of
    from megarl.platforms.offload import OptimizerOffload

    world = make_world(1)
    actor = make_actor(folder, world, **section)
    samples = make_samples(5, 12)
    packs = local_packs(samples, world.mesh, world.rank, 60)
    batches = [micro_batch(pack, samples) for pack in packs]
    offload = OptimizerOffload(actor.trainer, platform_of("cpu"))
    told: dict[str, Any] = {"moved": []}
    for _ in range(3):
        if offloaded:
            state = [tensor.clone() for tensor in offload._state()]
            weights = {n: p.clone() for n, p in actor.named_parameters().items()}
            offload.out()
            offload.out()  # again does nothing
            told["moved"].append(sum(host.numel() for _, host in offload._saved))
            grads = [t.untyped_storage().nbytes() for t in offload._gradients()]
            kept = {n: torch.equal(p, weights[n]) for n, p in actor.named_parameters().items()}
            told["out"] = (offload.is_out, sum(grads), all(kept.values()))
            actor.log_probs(packs)  # scoring needs neither
            offload.back()
            offload.back()
            same = [torch.equal(a, b) for a, b in zip(state, offload._state(), strict=True)]
            zero = all(not t.any() for t in offload._gradients())
            told["back"] = (offload.is_out, all(same), zero)
        actor.update(batches, policy_gradient)
    told["weights"] = {n: p.detach().clone() for n, p in actor.named_parameters().items()}
    told["state"] = [tensor.detach().clone() for tensor in offload._state()]
    destroy_mesh()
    return told


def both(folder: Path, section: dict[str, Any]) -> tuple[dict, dict]:
    return trained(folder, False, **section), trained(folder, True, **section)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_updates_are_the_same_bit_for_bit(ranks, folder, dtype, sharded, world) -> None:
    section = {"dtype": dtype, "distributed_optimizer": sharded}
    for kept, moved in ranks.run(world, both, folder, section):
        assert moved["out"] == (True, 0, True)
        assert moved["back"] == (False, True, True)
        for name, weight in kept["weights"].items():
            assert torch.equal(weight, moved["weights"][name]), name
        for before, after in zip(kept["state"], moved["state"], strict=True):
            assert torch.equal(before, after)
        # Moments exist from the first step on. Of float32 the masters are the weights: they stay.
        first, second, _ = moved["moved"]
        assert second > first
        assert (first == 0) == (dtype == "float32")
