"""Faults that other training stacks had in their models and optimizer steps, with right numbers.

Not covered: faults of a GPU's kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.packed import RMSNorm
from megarl.models.rotary import inverse_frequencies
from megarl.models.schedule import learning_rate
from tests.models.runs import several
from tests.models.support import (
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    replaced,
    write_hf_model,
)


def _of_logits(logits: list[float], target: int, temperature: float, vocab: int) -> list[Tensor]:
    """[log-prob, entropy, d log-prob/dz, dH/dz] of this rank's part of one row of logits.

    With hidden size 1 and a hidden state of 1, the weight column is the row of logits.
    """
    from megarl.models.logprobs import token_scores

    group = dist.group.WORLD
    column = torch.tensor(logits).chunk(group.size())[group.rank()].clone()[:, None]
    column.requires_grad_()
    scores = token_scores(
        torch.ones(1, 1),
        column,
        torch.tensor([target]),
        temperature=temperature,
        vocab=vocab,
        chunk=8,
        group=group,
    )
    both = (scores.log_probs_A.sum(), scores.entropy_A.sum())
    grads = [torch.autograd.grad(value, column, retain_graph=True)[0][:, 0] for value in both]
    return [*(value.detach() for value in both), *grads]


def _numbers(cases: list[tuple]) -> list[list[Tensor]]:
    return [_of_logits(*case) for case in cases]


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_scores_have_the_right_values_and_gradients_on_every_shard(ranks, world: int) -> None:
    cases = [
        ([1.0, 2.0, 3.0, 4.0], 3, 1.0, 4),  # the target's owner, and the rank that is not
        ([2.0, 0.0], 0, 0.7, 2),  # a temperature
        ([2.0, 0.0], 1, 0.7, 2),
        ([2.0, 0.0], 1, 0.5, 2),
        ([1.0, 2.0, 3.0, 4.0, 0.0, 0.0], 3, 1.0, 4),  # two padding rows
    ]
    told = ranks.run(world, _numbers, cases)
    first = [case[:2] for case in told[0]]
    assert all(case[:2] == first[i] for rank in told for i, case in enumerate(rank))
    log_probs = [float(case[0]) for case in first]
    assert log_probs == pytest.approx(
        [-0.440190, -0.05584, -2.91299, -4.01815, -0.44019], abs=1e-5
    ), "gathered logits in a vocab-parallel loss would give −1.133337"
    entropies = [float(case[1]) for case in first]
    assert entropies[0] == pytest.approx(0.947537, abs=1e-6)
    assert entropies[1] == pytest.approx(0.21102, abs=1e-5)
    slope = torch.cat([rank[0][2] for rank in told])
    wanted = torch.tensor([-0.032059, -0.087144, -0.236883, 0.356086])
    torch.testing.assert_close(slope, wanted, atol=1e-6, rtol=0)
    bonus = torch.cat([rank[0][3] for rank in told])
    wanted = torch.tensor([0.07991, 0.13008, 0.11670, -0.32669])
    torch.testing.assert_close(bonus, wanted, atol=1e-5, rtol=0)
    padding = torch.cat([rank[4][2] for rank in told])[4:]
    assert not padding.any(), "padding rows have no probability and no gradient"


@pytest.mark.dist
@pytest.mark.parametrize("tp", [1, 2])
def test_the_ratio_is_exactly_one_before_any_update(ranks, tmp_path, tp: int) -> None:
    write_hf_model(tmp_path)
    calls = [
        (tmp_path, tp, budget, {"dtype": dtype})
        for budget in (40, 1000)
        for dtype in ("float32", "bfloat16")
    ]
    for run in ranks.run(2, several, calls)[0]:
        assert not run["log_probs"].isnan().any()
        assert torch.equal(run["log_probs"], run["in_update"])


def _neighbours(folder: Path) -> list[Any]:
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world)
    samples = make_samples(1, 2, prompt=(2, 3), response=(1, 7))
    ids = samples.prompt_ids.copy()
    ids[0] = (ids[0] + 1) % 300
    other = replace(samples, prompt_ids=ids)
    packs = [build_pack(samples, [0, 1]), build_pack(other, [0, 1])]
    packs += [build_pack(samples, [row]) for row in (0, 1)]
    both, changed, first, second = (s.log_probs_A for s in actor.log_probs(packs))
    destroy_mesh()
    return [both, changed, torch.cat([first, second]), int(samples.response_lengths[0])]


@pytest.mark.dist
def test_packed_neighbours_do_not_see_each_other(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama")
    ((both, changed, alone, tokens),) = ranks.run(1, _neighbours, tmp_path)
    assert not torch.equal(both[:tokens], changed[:tokens])
    assert torch.equal(both[tokens:], changed[tokens:])
    torch.testing.assert_close(both, alone, atol=3e-6, rtol=0)


def _global_mean(folder: Path, micro_batches: int) -> float:
    """Rank 0: 2 tokens of loss 1·p, rank 1: 6 tokens of loss 3·p; the gradient of p."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world, distributed_optimizer=False, clip_grad=0.0)
    samples = make_samples(3, 8, response=(1, 2))  # one token each
    mine = [[0, 1], [2, 3, 4, 5, 6, 7]][world.rank]
    parts = [mine[at::micro_batches] for at in range(micro_batches)]
    batches = [micro_batch(build_pack(samples, rows), samples) for rows in parts]
    p = actor.model.decoder.final_layernorm.weight

    def loss(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        per_token = (1.0, 3.0)[world.rank] * p[0]
        return (batch.weights_A * per_token).sum() + 0.0 * scores.log_probs_A.sum(), {}

    assert actor.update(batches, loss).stepped
    gradient = float(p.main_grad[0])
    destroy_mesh()
    return gradient


@pytest.mark.dist
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_token_mean_is_global_and_divided_once(ranks, tmp_path, micro_batches: int) -> None:
    write_hf_model(tmp_path)
    assert ranks.run(2, _global_mean, tmp_path, micro_batches) == pytest.approx([2.5, 2.5])


def _masked(folder: Path) -> list[Any]:
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world, weight_decay=0.5, distributed_optimizer=False)
    samples = make_samples(3, 4)
    batch = micro_batch(build_pack(samples, [world.rank]), samples)
    before = {name: p.detach().clone() for name, p in actor.named_parameters().items()}
    result = actor.update([replaced(batch, weights_A=batch.weights_A * 0)], policy_gradient)
    same = all(torch.equal(before[n], p) for n, p in actor.named_parameters().items())
    told = [result.stepped, result.loss, result.grad_norm, same, actor.trainer.empty_minibatches]
    destroy_mesh()
    return told


@pytest.mark.dist
def test_a_fully_masked_minibatch_changes_nothing_and_is_counted(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    assert ranks.run(2, _masked, tmp_path) == [[False, 0.0, 0.0, True, 1]] * 2


def _unusable(folder: Path) -> list[tuple]:
    """A gradient [value, 1] of two weights on the last rank only; clip 1."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(folder, world)
    samples = make_samples(3, 4)
    batch = micro_batch(build_pack(samples, [world.rank]), samples)
    weight = actor.model.decoder.final_layernorm.weight
    told = []
    for value in (float("nan"), float("inf"), 1.0):
        factor = torch.tensor([value if world.rank == world.size - 1 else 1.0, 1.0])

        def loss(scores: Any, batch: Any, factor: Tensor = factor) -> tuple[Tensor, dict]:
            finite = torch.where(factor.isfinite(), weight[:2] * factor, 0.0).sum()
            weight.register_hook(lambda grad: _times(grad, factor))
            return finite + 0.0 * scores.log_probs_A.sum(), {}

        before = {name: p.detach().clone() for name, p in actor.named_parameters().items()}
        result = actor.update([batch], loss)
        same = all(torch.equal(before[n], p) for n, p in actor.named_parameters().items())
        weight._backward_hooks.clear()
        told.append((result.stepped, same, actor.optimizer_step, actor.trainer.skipped_steps))
    destroy_mesh()
    return told


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    return torch.cat([grad[:2] * factor, grad[2:]])


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_reaches_no_weight_on_any_rank(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    wanted = [(False, True, 0, 1), (False, True, 0, 2), (True, False, 1, 2)]
    assert ranks.run(2, _unusable, tmp_path) == [wanted, wanted]


def _loaded(folder: Path, dtype: str, distributed: bool, synchronize: bool) -> float:
    """Load 5.0 over a norm weight, then one Adam step of rate 0.1 with gradient 1: its value."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world = make_world(1)
    actor = make_actor(
        folder, world, dtype=dtype, lr=0.1, clip_grad=0.0, distributed_optimizer=distributed
    )
    samples = make_samples(3, 2)
    weight = actor.named_parameters()["decoder.final_layernorm.weight"]
    with torch.no_grad():
        weight.fill_(5.0)
    if synchronize:
        actor.synchronize_masters()
    batch = micro_batch(build_pack(samples, [world.rank]), samples)

    def loss(scores: Any, batch: Any) -> tuple[Tensor, dict]:
        return weight.float().sum() + 0.0 * scores.log_probs_A.sum(), {}

    actor.update([batch], loss)
    values = weight.detach().float()
    assert (values == values[0]).all() or not synchronize
    destroy_mesh()
    return float(values.max())


@pytest.mark.dist
@pytest.mark.parametrize("distributed", [True, False])
def test_masters_follow_loaded_weights(ranks, tmp_path, distributed: bool) -> None:
    write_hf_model(tmp_path)
    for dtype, bound in (("float32", 1e-6), ("bfloat16", 2**-7)):
        told = ranks.run(2, _loaded, tmp_path, dtype, distributed, True)
        assert told == pytest.approx([4.9, 4.9], abs=bound), dtype
    stale = ranks.run(2, _loaded, tmp_path, "bfloat16", distributed, False)
    assert max(stale) < 1.5, "without it the old masters come back: the call is needed"


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    settings = {"lr": 1e-6, "warmup_steps": 10, "total_steps": 100, "min_lr": 0.0}
    assert learning_rate(26, schedule="constant", **settings) == 1e-6
    assert learning_rate(1, schedule="constant", **settings) == pytest.approx(1e-7)


def test_numbers_of_the_config_reach_rotation_and_norm() -> None:
    assert inverse_frequencies(4, 1e4).tolist() == pytest.approx([1, 0.01])
    assert inverse_frequencies(4, 1e6).tolist() == pytest.approx([1, 0.001])
    config = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=torch.float32, sequence_parallel=False
    )
    for eps, value in ((1e-6, 0.70711), (1e-5, 0.30151)):
        norm = RMSNorm(config, hidden_size=8, eps=eps)
        with torch.no_grad():
            norm.weight.fill_(1.0)
        assert norm(torch.full((1, 8), 1e-3)).tolist()[0] == pytest.approx([value] * 8, abs=1e-5)
