"""Models with a value head: values and gradients against HF's token and sequence classification.

Not covered: GPU, the loss of values (`tests/algorithms`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.contracts.samples import Samples
from tests.models.runs import merged
from tests.models.support import (
    as_stored,
    full_gradients,
    local_packs,
    make_actor,
    make_critic,
    make_samples,
    make_world,
    relative,
    squares,
    value_batch,
    write_hf_model,
)

pytestmark = pytest.mark.dist
TASKS = {"TokenClassification": "qwen2", "SequenceClassification": "qwen3"}  # with a bias, without
LAYOUTS = {  # name → (ranks, tp, pp, mesh, sequence parallel)
    "one": (1, 1, 1, {}, False),
    "dp2": (2, 1, 1, {}, False),
    "tp2": (2, 2, 1, {}, False),
    "sp tp2": (2, 2, 1, {}, True),
    "pp2": (2, 1, 2, {}, False),
    "virtual": (2, 1, 2, {"virtual": 2}, False),
}
EXPERT_LAYOUTS = {
    "ep2": (2, 1, 1, {"ep": 2}, False),
    "sp tp2": (2, 2, 1, {}, True),
    "ep2 pp2": (4, 1, 2, {"ep": 2}, False),
}


def values_of(model: Any, samples: Samples) -> tuple[Tensor, Tensor]:
    """([R], [N]), one HF forward per sample: the head at the position before each response token,
    and at the last token."""
    found, last = [], []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        values = model.score(model.model(ids[None]).last_hidden_state[0])[:, 0]
        found.append(values[len(sample.prompt_ids) - 1 : -1])
        last.append(values[-1:])
    return torch.cat(found), torch.cat(last)


def _expected(folder: Path, family: str, task: str, **numbers: Any) -> tuple:
    model = write_hf_model(folder, family, task=task, **numbers)
    samples = make_samples(5, 12)
    values, last = values_of(model, samples)
    target = torch.sin(torch.arange(len(values)).float())
    (0.5 * (values - target).square().mean()).backward()
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }
    return folder, values.detach(), last.detach(), as_stored(model, grads)


@pytest.fixture(scope="module", params=list(TASKS))
def critic(request, tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp(request.param)
    return _expected(folder, TASKS[request.param], request.param, num_hidden_layers=4, head_dim=16)


@pytest.fixture(scope="module")
def expert_critic(tmp_path_factory) -> tuple:
    return _expected(tmp_path_factory.mktemp("experts"), "qwen3_moe", "TokenClassification")


def _update(folder: Path, tp: int, pp: int, mesh: dict, parallel: bool) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh

    world, samples = make_world(tp, pp, **mesh), make_samples(5, 12)
    critic = make_critic(folder, world, sequence_parallel=parallel, distributed_optimizer=False)
    (packs,) = critic.padded([local_packs(samples, world.mesh, world.rank, 40)])
    values = critic.values(packs)
    told: dict[str, Any] = {
        "values": merged(critic, packs, [each.values_A for each in values], samples)
    }
    told["last"] = {
        row: last
        for pack, each in zip(packs, values, strict=True)
        for row, last in zip(pack.rows.tolist(), each.last_S.tolist(), strict=True)
    }
    kept: list[Tensor] = []

    def loss(values_A: Tensor, batch: Any) -> tuple[Tensor, dict]:
        kept.append(values_A.detach().clone())
        return squares(values_A, batch)

    step = critic.trainer.step

    def step_after_a_look(lr: float, norm: float) -> None:
        told["gradients"] = full_gradients(critic)
        step(lr, norm)

    critic.trainer.step = step_after_a_look
    told["result"] = critic.update([value_batch(pack, samples) for pack in packs], loss)
    told["in_update"] = merged(critic, packs if kept else [], kept, samples)
    with pytest.raises(ValueError) as error:
        critic.log_probs(packs)
    told["refusal"] = str(error.value)
    destroy_mesh()
    return told


def _check(ranks, expected: tuple, layout: tuple) -> None:
    folder, values, last, gradients = expected
    assert values.std() > 0.1 and last.std() > 0.1, "a constant proves little"
    world, *layout = layout
    runs = ranks.run(world, _update, folder, *layout)
    run = runs[0]
    assert (run["values"] - values).abs().max() <= 3e-5
    assert torch.equal(run["values"], run["in_update"])
    told: dict[int, float] = {}
    for each in runs:
        for row, value in each["last"].items():
            assert told.setdefault(row, value) == value, "ranks of one part differ"
    assert sorted(told) == list(range(len(last)))
    assert max(abs(told[row] - float(value)) for row, value in enumerate(last)) <= 3e-5
    assert run["gradients"].keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        assert relative({tensor: run["gradients"][tensor]}, {tensor: gradient}) <= 1e-5, tensor
    everything = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert run["result"].grad_norm == pytest.approx(float(everything.norm()), rel=1e-5)
    assert "no log-probabilities" in run["refusal"]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_values_and_gradients_are_those_of_transformers(ranks, critic, name: str) -> None:
    _check(ranks, critic, LAYOUTS[name])


@pytest.mark.parametrize("name", list(EXPERT_LAYOUTS))
def test_and_of_experts(ranks, expert_critic, name: str) -> None:
    _check(ranks, expert_critic, EXPERT_LAYOUTS[name])


def _no_values(folder: Path) -> str:
    from megarl.models.build import destroy_mesh

    actor = make_actor(folder, make_world(1))
    with pytest.raises(ValueError) as error:
        actor.values([])
    destroy_mesh()
    return str(error.value)


def test_a_policy_has_no_values(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    assert ranks.run(1, _no_values, tmp_path) == ["a model without a value head has no values"]
