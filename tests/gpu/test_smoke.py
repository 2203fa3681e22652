"""The CUDA choices on one GPU: build, generate, parity, hand-over, sleep and wake.

Not covered: several GPUs (NCCL), float32, speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.platforms import platform_of
from tests.models.support import write_hf_model

REASON = platform_of("cuda").refusal()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
MIB = 2**20
CACHE_TOKENS = 65536
PARITY = 5e-2
"""Of bfloat16, as the recipe's default."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Any:
    """One rank's actor and generator in bfloat16, both with everything that can sleep."""
    import torch.distributed as dist

    from megarl.contracts.mesh import Mesh
    from megarl.models.build import destroy_mesh
    from megarl.world import World, process_group

    platform = platform_of("cuda")
    platform.prepare()
    device = platform.device(0)
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder, "llama", hidden_size=512, intermediate_size=1024, eos_token_id=2)
    with process_group(platform.backend, 120.0):
        assert dist.get_backend() is not None
        made = Loop(folder, World(Mesh(1, tp=1), device, 120.0), platform)
        yield made
        made.generator.close()
        destroy_mesh()


class Loop:
    """The hand-over's parts on one GPU."""

    def __init__(self, folder: Path, world: Any, platform: Any) -> None:
        from megarl.contracts.states import Journal
        from megarl.observe.timeline import Stopwatch
        from megarl.platforms.offload import OptimizerOffload
        from megarl.reshard.families import read_spec
        from megarl.reshard.layout import megatron_placement, sglang_placement
        from megarl.reshard.transfer import Resharder
        from megarl.rollout.generator import Generator
        from megarl.rollout.hybrid import HybridEngine
        from tests.models.support import make_actor
        from tests.rollout.tiny import section

        self.world, self.platform = world, platform
        sizes = {"max_total_tokens": CACHE_TOKENS, "release": True, "dtype": "bfloat16"}
        self.actor = make_actor(folder, world, dtype="bfloat16", temperature=1.0)
        self.offload = OptimizerOffload(self.actor.trainer, platform)
        self.generator = Generator(folder, world.mesh, 0, section(**sizes), 1, world.device)
        spec = read_spec(folder)
        self.resharder = Resharder(
            megatron_placement(spec, world.mesh),
            sglang_placement(spec, world.mesh, "cuda"),
            self.actor.named_parameters(),
            self.generator.named_parameters(),
            torch.bfloat16,
            1 << 20,
            world,
        )
        self.journal = Journal(None)
        self.hybrid = HybridEngine(
            world, self.journal, self.generator, self.resharder, Stopwatch(), self.offload
        )
        self.steps = 0
        self.commit()

    def commit(self) -> None:
        from megarl.contracts.states import State
        from megarl.contracts.version import PolicyVersion

        self.manifest = self.resharder.manifest()
        self.version = PolicyVersion("gpu", self.steps, 0, self.manifest.hash, "tokens", "config")
        self.steps += 1
        self.journal.state = State.ACTOR_COMMITTED

    def generate(self) -> Any:
        from megarl.contracts.samples import Samples
        from megarl.contracts.states import State
        from tests.rollout.test_hybrid import _requests
        from tests.rollout.tiny import sampling

        with self.hybrid.generating(0, self.version, self.manifest) as generator:
            contract = sampling(max_response_tokens=8, dtype="bfloat16")
            done = generator.generate(_requests(6), contract, self.version)
        self.journal.state = State.ACTOR_COMMITTED
        return Samples.from_rows(done, self.version.id)

    def packed(self, samples: Any) -> Any:
        from megarl.data.packing import build_pack

        return build_pack(samples, range(len(samples)))

    def gap(self, samples: Any) -> float:
        pack = self.packed(samples)
        scores = self.actor.log_probs([pack.to(self.world.device)])[0].log_probs_A.cpu()
        return float((scores - pack.take(samples.rollout_log_probs)).abs().max())

    def used(self) -> int:
        """Bytes in use on the device, by anyone."""
        self.platform.release_cached()
        free, total = torch.cuda.mem_get_info(self.world.device)
        return total - free


def test_trainer_and_generator_agree_and_draws_repeat(parts: Loop) -> None:
    state = torch.cuda.get_rng_state(parts.world.device)
    first, again = parts.generate(), parts.generate()
    assert torch.equal(state, torch.cuda.get_rng_state(parts.world.device))
    assert first.response_ids.tolist() == again.response_ids.tolist()
    assert parts.gap(first) < PARITY


def test_an_update_reaches_the_generator(parts: Loop) -> None:
    from tests.models.support import micro_batch, policy_gradient

    samples = parts.generate()
    batch = micro_batch(parts.packed(samples), samples).to(parts.world.device)
    with parts.hybrid.training():
        assert parts.actor.update([batch], policy_gradient).stepped
    before = parts.version
    parts.commit()
    assert parts.version.weight_manifest_hash != before.weight_manifest_hash
    assert parts.gap(parts.generate()) < PARITY


def test_sleep_gives_the_memory_back_and_waking_takes_as_much(parts: Loop) -> None:
    cache = parts.generator._scheduler.token_to_kv_pool_allocator.get_kvcache()
    expected = sum(t.numel() * t.element_size() for t in cache.k_buffer + cache.v_buffer)
    parts.generate()
    asleep = parts.used()
    with parts.hybrid.generating(0, parts.version, parts.manifest):
        awake = parts.used()
    parts.hybrid.journal.state = type(parts.hybrid.journal.state).ACTOR_COMMITTED
    assert awake - asleep > expected - 8 * MIB
    for _ in range(3):
        parts.generate()
    assert abs(parts.used() - asleep) < 64 * MIB
