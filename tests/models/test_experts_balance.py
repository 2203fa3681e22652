"""The loss that balances experts, against an fp64 formula on the router logits of HF's models: its
value, every gradient, the norm and the step, over cuts, packs and padding. Routers that are frozen.

What routers do without them: `test_experts.py`, `test_latent.py`. Not covered: GPU.
"""

from __future__ import annotations

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
    micro_batch,
    policy_gradient,
    relative,
    torch_step,
    write_hf_model,
)
from tests.models.test_layouts import OPTIONS, SEQUENCE, SHARDED, is_the_step_of, run_all

pytestmark = pytest.mark.dist
WEIGHT = 1.0
BALANCED = OPTIONS | {"router_aux_loss": WEIGHT}
BALANCED_SP = SEQUENCE | {"router_aux_loss": WEIGHT}
FROZEN = OPTIONS | {"router": "frozen"}
LAYOUTS = {  # name → (ranks, tp, tokens per micro-batch, section)
    "one": (1, 1, 40, BALANCED),
    "one pack, padded": (1, 1, 1000, BALANCED | {"padding": 9}),
    "recomputed": (1, 1, 40, BALANCED | {"recompute": "full"}),
    "dp2": (2, 1, 25, BALANCED),
    "pp2 recomputed": (2, 1, 40, BALANCED | {"pp": 2, "recompute": "full"}),
    "ep2 etp1 tp2": (2, 2, 40, BALANCED_SP | {"mesh": {"ep": 2, "expert_tp": 1}}),
}
LONG = {
    "dp2 sharded": (2, 1, 40, BALANCED | SHARDED),
    "ep2": (2, 1, 40, BALANCED | {"mesh": {"ep": 2}}),
    "tp2": (2, 2, 40, BALANCED_SP),
    "etp1 tp2 recomputed": (
        2,
        2,
        40,
        BALANCED_SP | {"recompute": "full", "mesh": {"expert_tp": 1}},
    ),
    "ep2 tp2 dp2": (4, 2, 40, BALANCED_SP | {"mesh": {"ep": 2}}),
    "pp2 ep2 dp2": (4, 1, 30, BALANCED | {"pp": 2, "mesh": {"ep": 2}}),
    "pp2 tp2 ep2 etp1 recomputed": (
        4,
        2,
        40,
        BALANCED_SP | SHARDED | {"pp": 2, "recompute": "full", "mesh": {"ep": 2, "expert_tp": 1}},
    ),
}
DEEP = {  # four layers
    "virtual, three packs": (2, 1, 55, BALANCED | {"pp": 2, "mesh": {"virtual": 2}}),
    "virtual recomputed": (
        2,
        1,
        40,
        BALANCED | {"pp": 2, "recompute": "full", "mesh": {"virtual": 2}},
    ),
    "pp2 uneven": (2, 1, 40, BALANCED | {"pp": 2, "mesh": {"stages": (3, 1)}}),
}


def router_logits(model: Any, samples: Samples) -> list[torch.Tensor]:
    """float64 [tokens of all samples, E] of each layer with experts, one HF forward per sample."""
    layers: list[list[torch.Tensor]] = []
    seen: list[torch.Tensor] = []
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = []
    for gate in gates if model.config.model_type == "deepseek_v3" else []:
        hooks.append(gate.register_forward_hook(lambda _, given, out: seen.append(out)))
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
        if hooks:
            seen.clear()
            model(ids[None])
            layers.append(list(seen))
        else:
            layers.append(list(model(ids[None], output_router_logits=True).router_logits))
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts).double() for parts in zip(*layers, strict=True)]


def balance(model: Any, samples: Samples) -> torch.Tensor:
    """Σ_layers E · Σ_e f_e · P_e by its definition, in float64."""
    sigmoid = model.config.model_type == "deepseek_v3"
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    total = torch.zeros((), dtype=torch.float64)
    for gate, logits in zip(gates, router_logits(model, samples), strict=True):
        scores = logits.sigmoid() if sigmoid else logits.exp()
        probabilities = scores / scores.sum(dim=-1, keepdim=True)
        chosen = _chosen(model, gate, logits.detach())
        f = chosen.double().mean(dim=0) / model.config.num_experts_per_tok
        assert float(f.sum()) == pytest.approx(1.0)
        total = total + (f * probabilities.mean(dim=0)).sum() * chosen.shape[1]
    return WEIGHT * total


def _chosen(model: Any, gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """bool [T, E]."""
    config = model.config
    rank = logits
    if config.model_type == "deepseek_v3":
        rank = logits.sigmoid() + gate.e_score_correction_bias.double()
        groups = rank.view(len(rank), config.n_group, -1)
        best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        worst = best.argsort(dim=-1)[:, : config.n_group - config.topk_group]
        closed = torch.zeros_like(best, dtype=torch.bool).scatter(1, worst, True)
        rank = groups.masked_fill(closed[..., None], -1e9).flatten(1)
    place = rank.argsort(dim=-1, descending=True)[:, : config.num_experts_per_tok]
    return torch.zeros_like(rank, dtype=torch.bool).scatter(1, place, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def by_torch(folder) -> dict[str, Any]:
    model = write_hf_model(folder, "qwen3_moe")
    value = float(balance(model, make_samples(5, 12)).detach())
    return torch_step(model, actor_section(**OPTIONS), balance) | {"value": value}


@pytest.fixture(scope="module")
def runs(ranks, folder, by_torch) -> dict[str, dict]:
    return run_all(ranks, folder, LAYOUTS | {"without": (1, 1, 40, OPTIONS)})


def _is_balanced(run: dict[str, Any], by_torch: dict[str, Any], name: str) -> None:
    is_the_step_of(run, by_torch, name)
    told = sum(sums["router_aux"] for sums in run["sums"])
    assert told == pytest.approx(by_torch["value"], rel=1e-6), name


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_value_gradient_and_step_are_those_of_the_formula(runs, by_torch, name: str) -> None:
    _is_balanced(runs[name], by_torch, name)


def test_the_loss_moves_gradients_and_no_forward(runs, by_torch) -> None:
    plain, balanced = runs["without"], runs["one"]
    gates = [name for name in by_torch["gradients"] if name.endswith("mlp.gate.weight")]
    for gate in gates:
        moved = {gate: plain["gradients"][gate]}, {gate: by_torch["gradients"][gate]}
        assert relative(*moved) > 0.03, gate
    assert "router_aux" not in plain["sums"][0]
    for forward in ("log_probs", "entropy", "in_update"):
        assert torch.equal(plain[forward], balanced[forward]), forward


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_all_layouts_of_all_routers(ranks, tmp_path, family: str) -> None:
    for depth, layouts in ((2, LAYOUTS | LONG), (4, DEEP)):
        folder = tmp_path / str(depth)
        model = write_hf_model(folder, family, num_hidden_layers=depth)
        value = float(balance(model, make_samples(5, 12)).detach())
        expected = torch_step(model, actor_section(**OPTIONS), balance) | {"value": value}
        for name, run in run_all(ranks, folder, layouts).items():
            _is_balanced(run, expected, name)


def test_grouped_sigmoid_routers_are_balanced_too(ranks, tmp_path) -> None:
    model = write_hf_model(tmp_path, "deepseek_v3")
    value = float(balance(model, make_samples(5, 12)).detach())
    expected = torch_step(model, actor_section(**OPTIONS), balance) | {"value": value}
    layouts = {name: LAYOUTS[name] for name in ("one", "one pack, padded")}
    for name, run in run_all(ranks, tmp_path, layouts).items():
        _is_balanced(run, expected, name)


def _counted(folder: Path) -> list[tuple[torch.Tensor, int]]:
    """Targets of three minibatches, cut over two ranks: rows 0 to 6, none, rows 7 to 11."""
    from megarl.data.packing import build_pack
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1), make_samples(5, 12)
    actor = make_actor(folder, world, router_aux_loss=1e-3)
    rows = [[[0, 1, 2, 3], [4]], [[]], [[7, 8], [9]]] if world.rank == 0 else None
    rows = rows or [[[5, 6], []], [[]], [[10, 11], []]]
    packs = actor.padded([[build_pack(samples, of) for of in part] for part in rows])
    with actor.counting_experts([len(part) for part in packs]) as targets:
        actor.log_probs([pack for part in packs for pack in part])
    destroy_mesh()
    return [(each.shares, each.tokens) for each in targets]


def test_shares_are_counted_over_the_global_minibatch(ranks, tmp_path) -> None:
    model = write_hf_model(tmp_path, "qwen3_moe")
    samples = make_samples(5, 12)
    first, second = ranks.run(2, _counted, tmp_path)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]
    for number, rows in ((0, range(7)), (2, range(7, 12))):
        shares, tokens = first[number]
        part = samples.select(list(rows))
        assert tokens == part.prompt_lengths.sum() + part.response_lengths.sum()
        with torch.no_grad():
            chosen = [_chosen(model, None, logits) for logits in router_logits(model, part)]
        expected = torch.stack([layer.double().mean(dim=0) / 2 for layer in chosen])
        assert torch.allclose(shares, expected, rtol=1e-14)
    shares, tokens = first[1]
    assert tokens == 0 and not shares.any()


def _frozen(folder: Path) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh
    from megarl.models.roles import Reference

    world, samples = make_world(1), make_samples(5, 12)
    actor = make_actor(folder, world, **FROZEN)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, 40)])
    reference = Reference(
        actor.spec, folder, world, SimpleNamespace(dtype="float32"), actor_section(**FROZEN), 0.8
    )
    same = [
        torch.equal(mine.log_probs_A, theirs.log_probs_A)
        for mine, theirs in zip(actor.log_probs(packs), reference.log_probs(packs), strict=True)
    ]
    actor.update([micro_batch(pack, samples) for pack in packs], policy_gradient)
    held = actor.named_parameters()
    trained = sum(p.numel() for name, p in held.items() if not name.endswith("router.weight"))
    groups = actor.trainer.optimizer.param_groups
    stepped = sum(p.numel() for group in groups for p in group["params"])
    destroy_mesh()
    return {"same": same, "trained": trained, "stepped": stepped, "names": list(held)}


def test_frozen_routers_keep_their_bits_and_all_else_learns(ranks, tmp_path) -> None:
    model = write_hf_model(tmp_path, "qwen3_moe")
    gates = {f"{name}.weight": m for name, m in model.named_modules() if name.endswith("mlp.gate")}
    kept = {name: gate.weight.detach().clone() for name, gate in gates.items()}
    for gate in gates.values():
        gate.weight.requires_grad_(False)
    expected = torch_step(model, actor_section(**OPTIONS))
    layouts = {
        "one": (1, 1, 40, FROZEN),
        "tp2": (2, 2, 40, SEQUENCE | {"router": "frozen"}),
        "ep2 sharded": (2, 1, 40, FROZEN | SHARDED | {"mesh": {"ep": 2}}),
    }
    for name, run in run_all(ranks, tmp_path, layouts).items():
        is_the_step_of(run, expected, name)
        for tensor, weight in run["weights"].items():
            if tensor in kept:
                assert torch.equal(weight, kept[tensor].double()), (name, tensor)
            else:
                assert (weight - expected["weights"][tensor]).abs().max() < 1e-4, (name, tensor)
    (told,) = ranks.run(1, _frozen, tmp_path)
    assert all(told["same"]) and told["stepped"] == told["trained"]
    assert sum(name.endswith("router.weight") for name in told["names"]) == len(gates) == 2


def _refusals() -> list[str]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.models.build import destroy_mesh, initialize_mesh
    from megarl.models.routers import Router

    initialize_mesh(make_world(1).mesh)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    told = []
    for changes in (
        {"moe_input_jitter_eps": 1e-2},
        {"moe_router_load_balancing_type": "aux_loss"},
        {"moe_z_loss_coeff": 1e-3},
    ):
        numbers = {
            "num_layers": 1,
            "hidden_size": 4,
            "num_attention_heads": 1,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 4,
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        }
        with pytest.raises(ValueError) as error:
            Router(TransformerConfig(**numbers | changes), groups, normalize=True)
        told.append(str(error.value))
    destroy_mesh()
    return told


def test_noise_and_losses_of_packs_are_refused(ranks) -> None:
    (told,) = ranks.run(1, _refusals)
    assert "no noise" in told[0]
    assert all("none of megarl" not in line for line in told)
    assert all("auxiliary losses" in line for line in told[1:])
