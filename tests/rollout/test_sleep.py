"""The generator's memory given back for training and taken again, on real SGLang in the ranks.

SGLang's own release and resume run here with its own request types; only the memory saver, which
needs CUDA, is replaced by one that spoils what it would have unmapped.
Not covered: that memory is freed (`tests/gpu`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.data.packing import build_pack
from tests.models.support import write_hf_model
from tests.rollout import tiny
from tests.rollout.engines import build, failure, folder, grid
from tests.rollout.test_hybrid import ACTOR, Parts, _gap, _generate

pytestmark = pytest.mark.dist
NAN = float("nan")


class Spoiler:
    """In place of SGLang's memory saver: what is paused loses its contents at once."""

    enabled = True

    def __init__(self, scheduler: Any, events: list[str]) -> None:
        self.scheduler, self.events = scheduler, events
        scheduler.weight_updater.memory_saver_adapter = self
        flush = scheduler.flush_cache

        def flushing(**options: Any) -> bool:
            events.append("flush")
            return flush(**options)

        scheduler.flush_cache = flushing  # the calls of the generator; SGLang keeps its own

    @torch.no_grad()
    def pause(self, tag: str) -> None:
        self.events.append(f"pause {tag}")
        if tag == "weights":
            model = self.scheduler.tp_worker.model_runner.model
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.data.fill_(NAN)
        else:
            cache = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
            for tensor in cache.k_buffer + cache.v_buffer:
                tensor.fill_(NAN)
            self.scheduler.req_to_token_pool.req_to_token.fill_(2**31 - 1)

    def resume(self, tag: str) -> None:
        self.events.append(f"resume {tag}")


def cycle(path: str, tp: int) -> dict[str, Any]:
    generator = build(path, tp=tp, release=True)
    events: list[str] = []
    Spoiler(generator._scheduler, events)
    sampling, version, told = tiny.sampling(), tiny.version(), {}
    before = generator.generate(grid(), sampling, version)
    weights = {n: p.detach().clone() for n, p in generator.named_parameters().items()}
    generator.sleep()
    generator.sleep()  # again does nothing but flush
    told["asleep"] = failure(generator.generate, grid(), sampling, version)
    told["not woken"] = failure(generator.activate, version)
    told["lost"] = all(bool(p.isnan().all()) for p in generator.named_parameters().values())
    generator.wake()
    generator.wake()
    padding = generator.padding()
    parameters = generator.named_parameters()
    told["padding"] = [bool((parameters[n][a:b] == 0).all()) for n, (a, b) in padding.items()]
    with torch.no_grad():
        for name, tensor in parameters.items():
            first = padding.get(name, (len(tensor), 0))[0]
            tensor.data[:first].copy_(weights[name][:first])
    events.append("write")
    generator.activate(version)
    after = generator.generate(grid(), sampling, version)
    told["same"] = all(
        a.response_ids.tolist() == b.response_ids.tolist()
        and a.rollout_log_probs.tolist() == b.rollout_log_probs.tolist()
        for a, b in zip(before, after, strict=True)
    )
    told["events"] = events
    generator.close()
    return told


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2)])
def test_a_generator_that_slept_generates_as_before(ranks, world: int, tp: int) -> None:
    everyone = ranks.run(world, cycle, folder("llama"), tp)
    assert any(told["padding"] for told in everyone)
    for told in everyone:
        assert told["same"] and told["lost"] and all(told["padding"])
        assert told["asleep"].startswith("WrongVersion")
        assert "wake() comes before" in told["not woken"]
        assert told["events"] == [
            "flush",
            "pause kv_cache",
            "pause weights",
            "flush",
            "resume weights",
            "write",
            "flush",
            "resume kv_cache",
        ]


def kept(path: str) -> list[str]:
    generator = build(path)
    events: list[str] = []
    Spoiler(generator._scheduler, events)
    generator.sleep()
    generator.wake()
    generator.activate(tiny.version())
    generator.close()
    return events


def test_without_release_nothing_is_given_back(ranks) -> None:
    assert ranks.run(1, kept, folder("llama")) == [["flush", "flush"]]


def loop(path: str, offloaded: bool) -> dict[str, Any]:
    """Two hand-overs with an update between them, everything asleep that can be."""
    from megarl.models.roles import Reference
    from megarl.platforms import platform_of
    from megarl.platforms.offload import OptimizerOffload, WeightOffload
    from tests.models.support import micro_batch, policy_gradient

    parts = Parts(Path(path))
    numbers = SimpleNamespace(dtype="float32")
    reference = Reference(parts.actor.spec, Path(path), parts.world, numbers, ACTOR, 1.0)
    events: list[str] = []
    if offloaded:
        parts.generator._section.release = True
        Spoiler(parts.generator._scheduler, events)
        parts.hybrid.offload = OptimizerOffload(parts.actor.trainer, platform_of("cpu"))
        parts.hybrid.frozen = WeightOffload(reference, platform_of("cpu"))
        parts.hybrid.frozen.out()
    told: dict[str, Any] = {"events": events}
    try:
        samples = _generate(parts)
        told["ids"] = [samples.response_ids.tolist()]
        with parts.hybrid.scoring():
            told["gap"] = [_gap(parts, samples)]
            pack = build_pack(samples, range(len(samples)))
            told["frozen"] = reference.log_probs([pack])[0].log_probs_A
        assert not offloaded or parts.hybrid.frozen.is_out
        batch = micro_batch(build_pack(samples, range(len(samples))), samples)
        with parts.hybrid.training():
            parts.actor.update([batch], policy_gradient)
        parts.commit()
        samples = _generate(parts)
        told["ids"].append(samples.response_ids.tolist())
        told["gap"].append(_gap(parts, samples))
        told["weights"] = parts.manifest.hash
    finally:
        parts.close()
    return told


def test_the_loop_is_the_same_with_everything_asleep_in_turn(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama", intermediate_size=128, eos_token_id=2)
    awake = ranks.run(2, loop, str(tmp_path), False)
    slept = ranks.run(2, loop, str(tmp_path), True)
    for one, other in zip(awake, slept, strict=True):
        assert torch.equal(one["frozen"], other["frozen"])
        assert one["ids"] == other["ids"] and one["weights"] == other["weights"]
        assert max(other["gap"]) < 1e-4
        assert other["events"][1:4] == ["flush", "pause kv_cache", "pause weights"]
        assert other["events"][4:7] == ["resume weights", "flush", "resume kv_cache"]
