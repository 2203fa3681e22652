"""Models with a value head: values and gradients against HF's token and sequence classification.

Losses of values are not this package's business: any differentiable one will do here.
Not covered: GPU.
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
    make_samples,
    make_world,
    micro_batch,
    relative,
    write_hf_model,
)

pytestmark = pytest.mark.dist
TASKS = {"TokenClassification": "qwen2", "SequenceClassification": "qwen3"}  # with a bias, without
LAYOUTS = {  # name → (ranks, tp, pp, mesh, sequence parallel)
    "one": (1, 1, 1, {}, False),
    "tp2": (2, 2, 1, {}, False),
    "sp tp2": (2, 2, 1, {}, True),
    "pp2": (2, 1, 2, {}, False),
    "virtual": (2, 1, 2, {"virtual": 2}, False),
}


def _squares(values_A: Tensor, batch: Any) -> tuple[Tensor, dict]:
    """½ Σ w (V − A)², the advantages standing in for returns."""
    error = values_A - batch.advantages_A
    return 0.5 * (batch.weights_A * error.square()).sum(), {}


def _values_of(model: Any, samples: Samples) -> Tensor:
    """[R], one HF forward per sample: the head at the position before each response token."""
    found = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        hidden = model.model(ids[None]).last_hidden_state[0]
        found.append(model.score(hidden)[len(sample.prompt_ids) - 1 : -1, 0])
    return torch.cat(found)


@pytest.fixture(scope="module", params=list(TASKS))
def critic(request, tmp_path_factory) -> tuple[Path, Tensor, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_hf_model(
        folder, TASKS[request.param], task=request.param, num_hidden_layers=4, head_dim=16
    )
    samples = make_samples(5, 12)
    values = _values_of(model, samples)
    target = torch.sin(torch.arange(len(values)).float())
    (0.5 * (values - target).square().mean()).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return folder, values.detach(), as_stored(model, grads)


def _update(folder: Path, tp: int, pp: int, mesh: dict, parallel: bool) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh

    world, samples = make_world(tp, pp, **mesh), make_samples(5, 12)
    actor = make_actor(folder, world, sequence_parallel=parallel, distributed_optimizer=False)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, 40)])
    values = actor.values(packs)
    told: dict[str, Any] = {"values": merged(actor, packs, values, samples)}
    kept: list[Tensor] = []

    def loss(values_A: Tensor, batch: Any) -> tuple[Tensor, dict]:
        kept.append(values_A.detach().clone())
        return _squares(values_A, batch)

    step = actor.trainer.step

    def step_after_a_look(lr: float, norm: float) -> None:
        told["gradients"] = full_gradients(actor)
        step(lr, norm)

    actor.trainer.step = step_after_a_look
    told["result"] = actor.update([micro_batch(pack, samples) for pack in packs], loss)
    told["in_update"] = merged(actor, packs if kept else [], kept, samples)
    with pytest.raises(ValueError) as error:
        actor.log_probs(packs)
    told["refusal"] = str(error.value)
    destroy_mesh()
    return told


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_values_and_gradients_are_those_of_transformers(ranks, critic, name: str) -> None:
    folder, values, gradients = critic
    assert values.std() > 0.1, "a constant proves little"
    world, *layout = LAYOUTS[name]
    run = ranks.run(world, _update, folder, *layout)[0]
    assert (run["values"] - values).abs().max() <= 3e-5
    assert torch.equal(run["values"], run["in_update"])
    assert run["gradients"].keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        assert relative({tensor: run["gradients"][tensor]}, {tensor: gradient}) <= 1e-5, tensor
    everything = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert run["result"].grad_norm == pytest.approx(float(everything.norm()), rel=1e-5)
    assert "no log-probabilities" in run["refusal"]


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
