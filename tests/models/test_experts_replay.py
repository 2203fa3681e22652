"""Tokens that go to given experts (R3): gradients, norm and step of HF's model whose gates are made
to choose them, over cuts, packs and padding; and what the generator tells of its own choice, on the
way from SGLang through seals and packs to the trainer.

Not covered: GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.contracts.samples import Samples
from tests.models.support import (
    actor_section,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    torch_step,
    write_hf_model,
)
from tests.models.test_layouts import OPTIONS, SEQUENCE, is_the_step_of, run_all

pytestmark = pytest.mark.dist
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


def with_experts(samples: Samples, seed: int = 3) -> Samples:
    """Random distinct experts for every token but the last of each sample, in every layer."""
    draw = np.random.default_rng(seed)
    read = samples.prompt_lengths + samples.response_lengths - 1
    order = draw.random((int(read.sum()), LAYERS, EXPERTS)).argsort(axis=-1)[..., :CHOSEN]
    offsets = np.concatenate([[0], np.cumsum(read * LAYERS * CHOSEN)])
    return replace(samples, experts=order.astype(np.int16).ravel(), experts_offsets=offsets)


def make_choose(model: Any, samples: Samples) -> None:
    """From here on `model`'s gates choose what `samples` tell, one forward per sample in order."""
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]

    def choosing(layer: int) -> Any:
        calls = iter(range(10**6))

        def hook(gate: Any, given: tuple, out: tuple) -> tuple:
            logits, _, own = out
            told = samples[next(calls) % len(samples)].experts.reshape(-1, LAYERS, CHOSEN)
            index = own.clone()
            index[:-1] = torch.from_numpy(told[:, layer].astype(np.int64))
            top = logits.softmax(dim=-1).gather(1, index)
            return logits, top / top.sum(dim=-1, keepdim=True), index

        return hook

    for layer, gate in enumerate(gates):
        gate.register_forward_hook(choosing(layer))


SAMPLES = with_experts(make_samples(5, 12))
REPLAYED = {"replay_routing": True, "samples": SAMPLES}
LAYOUTS = {
    "one": (1, 1, 40, OPTIONS | REPLAYED),
    "one pack, padded": (1, 1, 1000, OPTIONS | REPLAYED | {"padding": 9}),
    "dp2": (2, 1, 25, OPTIONS | REPLAYED),
    "pp2 recomputed": (2, 1, 40, OPTIONS | REPLAYED | {"pp": 2, "recompute": "full"}),
    "ep2 etp1 tp2": (2, 2, 40, SEQUENCE | REPLAYED | {"mesh": {"ep": 2, "expert_tp": 1}}),
}
LONG = {
    "ep2 tp2 dp2": (4, 2, 40, SEQUENCE | REPLAYED | {"mesh": {"ep": 2}}),
    "pp2 tp2 ep2 etp1 recomputed": (
        4,
        2,
        40,
        SEQUENCE | REPLAYED | {"pp": 2, "recompute": "full", "mesh": {"ep": 2, "expert_tp": 1}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    model = write_hf_model(folder, "qwen3_moe")
    make_choose(model, SAMPLES)
    return torch_step(model, actor_section(**OPTIONS))


@pytest.fixture(scope="module")
def runs(ranks, folder, by_torch) -> dict[str, dict]:
    layouts = LAYOUTS | {"own choice": (1, 1, 40, OPTIONS | {"samples": SAMPLES})}
    return run_all(ranks, folder, layouts)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_that_of_gates_with_the_given_choice(runs, by_torch, name: str) -> None:
    is_the_step_of(runs[name], by_torch, name)


def test_without_replay_routers_choose_by_themselves(runs, by_torch) -> None:
    gap = (runs["own choice"]["log_probs"] - by_torch["log_probs"]).abs()
    assert gap.max() > 0.1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_more_layouts(ranks, folder, by_torch) -> None:
    for name, run in run_all(ranks, folder, LONG).items():
        is_the_step_of(run, by_torch, name)


def _refusals(folder: Path) -> list[str]:
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world, replay_routing=True)
    told = []
    half = replace(
        SAMPLES, experts=SAMPLES.experts[::2], experts_offsets=SAMPLES.experts_offsets // 2
    )
    large = replace(SAMPLES, experts=SAMPLES.experts + np.int16(1))
    for samples in (make_samples(5, 12), half, large):
        with pytest.raises(ValueError) as error:
            actor.log_probs(local_packs(samples, world.mesh, world.rank, 40))
        told.append(str(error.value))
    destroy_mesh()
    return told


def test_samples_without_experts_or_of_another_model_are_refused(ranks, folder, by_torch) -> None:
    (told,) = ranks.run(1, _refusals, folder)
    assert "actor.replay_routing is true" in told[0] and "do not tell" in told[0]
    assert "samples tell 2 experts of a token" in told[1] and "the model has 4 of 4" in told[1]
    assert "the largest 4" in told[2]


def _generated(folder: Path, tp: int, ep: int) -> dict[str, Any]:
    """Samples of SGLang, with prompts that share a cached beginning and are read in pieces, and the
    trainer's log-probs of them."""
    from megarl.contracts.mesh import Mesh
    from megarl.models.build import destroy_mesh
    from megarl.rollout.generator import Generator
    from megarl.rollout.requests import Request
    from tests.rollout import tiny

    world = make_world(1)
    mesh = Mesh(world.size, tp=1, rollout_tp=tp)
    section = tiny.section(tp=tp, ep=ep, chunked_prefill_tokens=32, max_running_requests=6)
    generator = Generator(folder, mesh, world.rank, section, 1, torch.device("cpu"), experts=True)
    generator.activate(tiny.version())
    ids = np.random.default_rng(0).integers(6, 90, 60).tolist()
    requests = [Request(n, 0, (*ids[: 20 + n % 7], 7 + n), seed=n) for n in range(12)]
    rows = generator.generate(requests, tiny.sampling(max_response_tokens=9), tiny.version())
    generator.close()
    samples = Samples.from_rows(rows, "version").canonical()
    actor = make_actor(folder, world, temperature=1.0, replay_routing=True)
    packs = local_packs(samples, SimpleNamespace(dp=1, dp_index=lambda _: 0), 0, 200)
    scores = actor.log_probs(actor.padded([packs])[0])
    destroy_mesh()
    old = np.empty(len(samples.response_ids), np.float32)
    for pack, score in zip(packs, scores, strict=True):
        old[pack.response_A.numpy()] = score.log_probs_A.numpy()
    return {"samples": samples, "gap": float(np.abs(old - samples.rollout_log_probs).max())}


@pytest.mark.parametrize("world, tp, ep", [(1, 1, 1), (2, 2, 2)])
def test_the_generator_tells_its_choice(ranks, folder, by_torch, world, tp, ep) -> None:
    found = ranks.run(world, _generated, folder, tp, ep)
    model = type(write_hf_model(folder, "qwen3_moe")).from_pretrained(folder)
    for told in found:
        samples = told["samples"]
        assert told["gap"] < 3e-5
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
            with torch.no_grad():
                logits = model(ids[None], output_router_logits=True).router_logits
            own = torch.stack([layer.topk(CHOSEN).indices for layer in logits], dim=1)[:-1]
            chosen = torch.from_numpy(sample.experts.astype(np.int64)).view(-1, LAYERS, CHOSEN)
            assert torch.equal(chosen.sort(-1).values, own.sort(-1).values)


def test_experts_are_a_fact_of_a_sample() -> None:
    """They go where rows go, are sealed with them, and change their fingerprint."""
    from megarl.experience.parts import samples_of

    rows = [5, 0, 11]
    some = SAMPLES.select(rows)
    for at, row in enumerate(rows):
        assert np.array_equal(some[at].experts, SAMPLES[row].experts)
    again = Samples.concat([SAMPLES.select([0, 1]), SAMPLES.select(range(2, 12))])
    assert np.array_equal(again.experts, SAMPLES.experts)
    assert Samples.from_rows(list(SAMPLES), "test").fingerprints.tolist() == (
        SAMPLES.fingerprints.tolist()
    )
    other = SAMPLES.experts.copy()
    other[0] = 3 - other[0]
    changed = replace(SAMPLES, experts=other).fingerprints != SAMPLES.fingerprints
    assert changed.tolist() == [True] + [False] * 11
    columns = {n: getattr(SAMPLES, n) for n in Samples.__dataclass_fields__ if n != "version_id"}
    assert np.array_equal(samples_of(columns, "test").experts, SAMPLES.experts)
    with pytest.raises(ValueError, match="experts must be as many"):
        replace(SAMPLES, experts=SAMPLES.experts[1:], experts_offsets=_less(SAMPLES))
    with pytest.raises(ValueError, match="experts must be as many"):
        Samples.concat([SAMPLES.select([0]), make_samples(5, 12).select([1])])


def _less(samples: Samples) -> np.ndarray:
    offsets = samples.experts_offsets.copy()
    offsets[1:] -= 1
    return offsets


def _sent(rows: Samples) -> list[Samples]:
    from megarl.data.wire import send_to_owners

    world = make_world(1)
    mine = rows.select(range(world.rank, len(rows), 2))
    return send_to_owners(world, mine, np.arange(len(mine)) % 3 - 1)


def test_experts_come_to_owners_with_their_samples(ranks) -> None:
    arrived: set[int] = set()
    for parts in ranks.run(2, _sent, SAMPLES):
        for sample in (sample for part in parts for sample in part):
            arrived.add(sample.draw_index)
            assert np.array_equal(sample.experts, SAMPLES[sample.draw_index].experts)
    assert len(arrived) == 8
