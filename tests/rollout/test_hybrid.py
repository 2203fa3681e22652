"""The hand-over with both real libraries in one process: it proves what it wrote, or it stops.

Two ranks, actor TP2, two TP1 replicas of SGLang. Not covered: GPU memory release, more ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import Samples
from megarl.contracts.states import IllegalTransition, Journal, State
from megarl.contracts.version import PolicyVersion
from megarl.data.packing import build_pack
from megarl.world import World
from tests.models.support import write_hf_model
from tests.rollout.tiny import sampling, section

ACTOR = SimpleNamespace(
    lr=1e-3,
    lr_schedule="constant",
    lr_warmup_steps=0,
    min_lr=0.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    clip_grad=1.0,
    distributed_optimizer=True,
    logprob_chunk_tokens=64,
    recompute="none",
    sequence_parallel=False,
    max_skipped_steps=3,
    router="trained",
    router_aux_loss=0.0,
    replay_routing=False,
)


class Parts:
    """An actor and a generator of one checkpoint, and the engine between them."""

    def __init__(self, folder: Path) -> None:
        from megarl.models.roles import Actor
        from megarl.observe.timeline import Stopwatch
        from megarl.reshard.families import read_spec
        from megarl.reshard.layout import megatron_placement, sglang_placement
        from megarl.reshard.transfer import Resharder
        from megarl.rollout.generator import Generator
        from megarl.rollout.hybrid import HybridEngine

        mesh = Mesh(2, tp=2)
        self.world = World(mesh, torch.device("cpu"), 60.0)
        spec = read_spec(folder)
        model = SimpleNamespace(dtype="float32")
        self.actor = Actor(spec, folder, self.world, model, ACTOR, 1.0, 10)
        self.generator = Generator(folder, mesh, self.world.rank, section(), 1, torch.device("cpu"))
        self.resharder = Resharder(
            megatron_placement(spec, mesh),
            sglang_placement(spec, mesh),
            self.actor.named_parameters(),
            self.generator.named_parameters(),
            torch.float32,
            1 << 14,
            self.world,
        )
        self.journal = Journal(None)
        self.hybrid = HybridEngine(
            self.world, self.journal, self.generator, self.resharder, Stopwatch()
        )
        self.step = 0
        self.commit()

    def commit(self) -> None:
        self.manifest = self.resharder.manifest()
        self.version = PolicyVersion("run", self.step, 0, self.manifest.hash, "tokens", "config")
        self.step += 1
        self.journal.enter(
            State.ACTOR_COMMITTED, 0, self.version, weight_manifest_hash=self.manifest.hash
        )

    def generating(self):
        return self.hybrid.generating(0, self.version, self.manifest)

    def restart(self) -> None:
        """The journal of a fresh process, after a failure was looked at."""
        self.journal.state = State.ACTOR_COMMITTED
        self.hybrid._stage = "training"

    def close(self) -> None:
        from megarl.models.build import destroy_mesh

        self.generator.close()
        destroy_mesh()


def _requests(count: int):
    from megarl.rollout.requests import Request

    numbers = np.random.default_rng(3)
    return [
        Request(row, 0, tuple(numbers.integers(3, 300, 6).tolist()), seed=100 + row)
        for row in range(count)
    ]


def _gap(parts: Parts, samples: Samples) -> float:
    """max |actor − generator| over the samples' tokens."""
    pack = build_pack(samples, range(len(samples)))
    scores = parts.actor.log_probs([pack])[0].log_probs_A
    return float((scores - pack.take(samples.rollout_log_probs)).abs().max())


def _generate(parts: Parts) -> Samples:
    with parts.generating() as generator:
        contract = sampling(max_response_tokens=8)
        done = generator.generate(_requests(6), contract, parts.version, None)
    parts.restart()
    return Samples.from_rows(done, parts.version.id)


def _hand_over(folder: str) -> dict[str, object]:
    parts = Parts(Path(folder))
    told: dict[str, object] = {}
    try:
        live = parts.generator.named_parameters()
        for tensor in live.values():
            tensor.data.fill_(float("nan"))
        first = _generate(parts)
        told["gap from NaN-filled parameters"] = _gap(parts, first)

        with torch.no_grad():
            for tensor in parts.actor.named_parameters().values():
                tensor.mul_(1.25)
        told["gap with stale weights"] = _gap(parts, first)
        parts.commit()
        told["gap after the next version"] = _gap(parts, _generate(parts))

        def failing(spoil: Callable[[], None]) -> str:
            """What the hand-over says when `spoil` happens after the last write."""
            transfer = parts.resharder.transfer

            def spoiled():
                stats = transfer()
                spoil()
                return stats

            parts.resharder.transfer = spoiled
            try:
                with parts.generating():
                    return "no error"
            except Exception as error:
                return f"{type(error).__name__}: {error} active={parts.generator.active}"
            finally:
                parts.resharder.transfer = transfer
                parts.restart()

        def flip() -> None:
            if parts.world.rank == 1:
                norm = live["model.layers.1.input_layernorm.weight"].data
                norm.view(torch.int32)[7] ^= 1

        told["flipped bit"] = failing(flip)

        before = {name: tensor.clone() for name, tensor in live.items()}

        def stale() -> None:
            if parts.world.rank == 0:
                for name, tensor in live.items():
                    tensor.data.copy_(before[name])

        with torch.no_grad():
            for tensor in parts.actor.named_parameters().values():
                tensor.mul_(1.01)
        parts.commit()
        told["stale replica"] = failing(stale)

        with torch.no_grad():
            if parts.world.rank == 1:
                norms = parts.actor.named_parameters()
                norms["decoder.final_layernorm.weight"].view(-1)[3] += 1e-6
        try:
            parts.resharder.manifest()
            told["drifted rank"] = "no error"
        except Exception as error:
            told["drifted rank"] = f"{type(error).__name__}: {error}"
    finally:
        parts.close()
    return told


@pytest.fixture(scope="module")
def told(ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder, "llama", intermediate_size=128, eos_token_id=2)
    return ranks.run(2, _hand_over, str(folder))


@pytest.mark.dist
def test_every_parameter_is_written_and_the_versions_weights_are_really_used(told) -> None:
    for rank in told:
        assert rank["gap from NaN-filled parameters"] <= 1e-4
        assert rank["gap with stale weights"] > 1e-2
        assert rank["gap after the next version"] <= 1e-4


@pytest.mark.dist
@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "flipped bit",
            ["DigestError", "model.layers.1.input_layernorm.weight", "rank 1", "row 7"],
        ),
        ("stale replica", ["DigestError", "rank 0", "elements differ"]),
        ("drifted rank", ["DriftError", "model.norm.weight", "1"]),
    ],
)
def test_a_fault_stops_the_hand_over_and_names_tensor_and_rank(told, fault, words) -> None:
    for rank in told:
        assert all(word in rank[fault] for word in words), rank[fault]
        assert "active=None" in rank[fault] or fault == "drifted rank"


def test_states_out_of_order_are_refused() -> None:
    journal = Journal(None)
    version = PolicyVersion("run", 0, 0, "weights", "tokens", "config")
    journal.enter(State.ACTOR_COMMITTED, 0, version, weight_manifest_hash="weights")
    with pytest.raises(IllegalTransition, match="ACTOR_COMMITTED → GENERATING"):
        journal.enter(State.GENERATING, 0, version, samples=4)
