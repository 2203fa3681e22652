"""Who steps: every rank or none, whatever one rank finds.

Not covered: a rank that dies instead of reporting (launch tests).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.support import (
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    replaced,
    write_hf_model,
)


class _Poison(torch.autograd.Function):
    """Finite forward, a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


def _state(actor: Any) -> dict[str, Tensor]:
    """Everything a step may change, by name."""
    held = {name: p.detach().clone() for name, p in actor.named_parameters().items()}
    inner = actor.trainer.optimizer.chained_optimizers[0].optimizer
    for index, state in enumerate(inner.state.values()):
        held |= {f"{index}.{key}": torch.as_tensor(v).clone() for key, v in state.items()}
    for index, param in enumerate(p for g in inner.param_groups for p in g["params"]):
        held[f"master {index}"] = param.detach().clone()
    return held


def _unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def refused_steps(folder: Path, tp: int, pp: int, distributed: bool) -> dict[str, Any]:
    """One good step, then one refused step of each kind, then a good one again."""
    from megarl.models.build import destroy_mesh

    world = make_world(tp, pp)
    samples = make_samples(5, 8)
    actor = make_actor(
        folder, world, distributed_optimizer=distributed, lr_schedule="linear", max_skipped_steps=9
    )
    packs = local_packs(samples, world.mesh, world.rank, 60, padding=0)
    batches = [micro_batch(pack, samples) for pack in packs]
    faulty = world.rank == world.size - 1
    final_norm = actor.model.decoder.final_layernorm  # on the last stage, where losses are
    norm_weight = None if final_norm is None else final_norm.weight

    def bad_loss(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        loss, sums = policy_gradient(scores, batch)
        return (loss * float("nan") if faulty else loss), sums

    def bad_gradient(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        # Of a parameter that TP ranks hold as copies: the norm counts the first rank's only.
        loss, sums = policy_gradient(scores, batch)
        poisoned = _Poison.apply(norm_weight[:1]).sum() * 1e-3
        return (loss + poisoned if faulty else loss + 1e-3 * norm_weight[0]), sums

    told: dict[str, Any] = {}
    good = actor.update(batches, policy_gradient)
    before = _state(actor)
    for name, loss in (("loss", bad_loss), ("gradient", bad_gradient)):
        result = actor.update(batches, loss)
        told[name] = (result.stepped, result.skipped_reason, _unchanged(before, _state(actor)))
    silent = [replaced(b, weights_A=torch.zeros_like(b.weights_A)) for b in batches]
    result = actor.update(silent, policy_gradient)
    told["empty"] = (result.stepped, result.skipped_reason, _unchanged(before, _state(actor)))
    told["counts"] = (
        actor.trainer.skipped_steps,
        actor.trainer.empty_minibatches,
        actor.optimizer_step,
    )
    again = actor.update(batches, policy_gradient)
    told["again"] = (good.stepped, again.stepped, actor.optimizer_step)
    told["lr"] = (good.lr, result.lr, again.lr)
    told["changed"] = not _unchanged(before, _state(actor))
    destroy_mesh()
    return told


@pytest.mark.dist
@pytest.mark.parametrize(
    "tp, pp, distributed",
    [(1, 1, True), (1, 1, False), (2, 1, True), (2, 1, False), (1, 2, True), (1, 2, False)],
)
def test_one_faulty_rank_keeps_every_rank_from_stepping(
    ranks, tmp_path, tp: int, pp: int, distributed: bool
) -> None:
    write_hf_model(tmp_path)
    for told in ranks.run(2, refused_steps, tmp_path, tp, pp, distributed):
        for kind in ("loss", "gradient"):
            stepped, reason, unchanged = told[kind]
            assert not stepped and unchanged, kind
            assert kind in reason and "rank 1" in reason, reason
        assert told["empty"][::2] == (False, True) and "empty" in told["empty"][1]
        assert told["counts"] == (2, 1, 1)
        assert told["again"] == (True, True, 2) and told["changed"]
        # The schedule counts steps taken: step 2's rate waited for step 2.
        assert told["lr"] == pytest.approx((9e-4, 8e-4, 8e-4))


def _row(folder: Path) -> list[str]:
    from megarl.models.build import destroy_mesh
    from megarl.models.step import TooManySkippedSteps

    world = make_world(1)
    samples = make_samples(5, 8)
    actor = make_actor(folder, world, max_skipped_steps=2)
    batches = [micro_batch(p, samples) for p in local_packs(samples, world.mesh, world.rank, 60)]

    def bad(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        return policy_gradient(scores, batch)[0] * float("inf"), {}

    told = []
    for loss in (bad, policy_gradient, bad, bad):  # a good step in between starts a new row
        try:
            told.append(str(actor.update(batches, loss).stepped))
        except TooManySkippedSteps as error:
            told.append(str(error))
    destroy_mesh()
    return told


@pytest.mark.dist
def test_refusals_in_a_row_stop_the_run_on_every_rank(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    for told in ranks.run(2, _row, tmp_path):
        assert told[:3] == ["False", "True", "False"]
        assert "2 steps in a row" in told[3] and "actor.max_skipped_steps" in told[3]


def _uneven(folder: Path) -> list[tuple]:
    """Rank 1 has no sample: a dummy pack, no response token, and all collectives."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh
    from tests.models.support import gather_logical

    world = make_world(1)
    samples = make_samples(5, 4)
    told = []
    for share in ((range(4), []), ([0, 1], [2, 3])):
        actor = make_actor(folder, world)
        pack = build_pack(samples, list(share[world.rank]))
        scores = actor.log_probs([pack])[0]
        assert len(scores.log_probs_A) == len(pack.target_A)
        result = actor.update([micro_batch(pack, samples)], policy_gradient)
        told.append((result.grad_norm, gather_logical(actor, actor.named_parameters())))
    destroy_mesh()
    return told


@pytest.mark.dist
def test_a_rank_without_samples_takes_part_and_adds_nothing(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    for (norm, weights), (wanted_norm, wanted) in ranks.run(2, _uneven, tmp_path):
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
        apart = torch.cat([(weights[n] - wanted[n]).abs().flatten() for n in wanted])
        assert (apart > 2e-6).double().mean() <= 1e-3
