"""The optimizer's state as whole parameters: what the distributed optimizer cut is put together.

The oracle is the same run without the distributed optimizer, read straight from torch's optimizer.
Not covered: Transformer Engine's FusedAdam (GPU), parameters of several dtypes in one model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.layouts import (
    Layout,
    logical,
    packs_of,
    place_of,
    plain_state,
    same_bits,
    train,
)
from tests.models.support import (
    gather_logical,
    make_samples,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

pytestmark = pytest.mark.dist
DP2 = Layout(2)
EP2_TP2_DP2 = Layout(4, tp=2, more={"ep": 2, "expert_tp": 1})


def _whole_states(source: Path, layout: Layout) -> dict[str, Any]:
    """After 2 steps: the gathered state, by key under HF names, and who owned what."""
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState

    actor = layout.actor(source)
    train(actor, 2)
    state = OptimizerState(actor.trainer)
    owned = state.gather()
    params = actor.named_parameters()
    told: dict[str, Any] = {"step": state.step, "owned": sorted(owned), "owners": state.owners}
    told["sizes"] = {name: param.numel() for name, param in params.items()}
    told["cut"] = sum(not part.is_whole for part in state.parts)
    for key in state.keys:
        mine = {name: tensors[key].view(params[name].shape) for name, tensors in owned.items()}
        # Each parameter comes from its owner; the others that hold it get it too.
        mesh, rank = actor.world.mesh, actor.world.rank
        shared: dict[str, torch.Tensor] = {}
        for other, theirs in enumerate(actor.world.gather(mine)):
            here = {
                name: tensor
                for name, tensor in theirs.items()
                if place_of(mesh, other, name) == place_of(mesh, rank, name)
            }
            assert not shared.keys() & here.keys(), "two owners"
            shared |= here
        told[key] = gather_logical(actor, shared)
        if not layout.sharded and layout.dtype == "float32":
            assert same_bits(told[key], plain_state(actor, key))
    destroy_mesh()
    return told


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # With a hidden size of 64 every cut of the distributed optimizer falls between parameters.
    write_hf_model(folder, "qwen2", hidden_size=80)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    # Nine experts are a rank's, so that the distributed optimizer cuts one in two.
    numbers = {"hidden_size": 80, "num_hidden_layers": 3, "num_experts": 6}
    write_hf_model(folder, "qwen3_moe", **numbers)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_state_is_that_of_a_run_that_never_cut_it(ranks, source, dtype: str) -> None:
    # The gradient norm is summed in another order where gradients are cut: no clipping by it.
    layout = replace(DP2, dtype=dtype, section={"clip_grad": 0.0})
    first, second = ranks.run(2, _whole_states, source, layout)
    plain, _ = ranks.run(2, _whole_states, source, replace(layout, sharded=False))
    assert first["step"] == plain["step"] == 2
    assert first["cut"] + second["cut"] > 0 and plain["cut"] == 0
    keys = {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if dtype == "bfloat16" else set())
    for key in keys:
        # Sums of two ranks are the same bits in either order.
        assert same_bits(first[key], plain[key]), key
    assert ("fp32_param" in first) == (dtype == "bfloat16")


def test_gathered_state_of_experts_is_that_of_a_run_that_never_cut_it(ranks, experts) -> None:
    """Experts have two holders, ranks 0 and 2 or 1 and 3, and so has the rest."""
    layout = replace(EP2_TP2_DP2, section={"clip_grad": 0.0})
    cut = ranks.run(4, _whole_states, experts, layout)
    plain = ranks.run(4, _whole_states, experts, replace(layout, sharded=False))
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(cut[0][key], plain[0][key]), key
    for told in (cut, plain):
        for kind in (True, False):
            loads = [
                sum(one["sizes"][name] for name in one["owned"] if ("experts" in name) == kind)
                for one in told
            ]
            assert min(loads) > 0, "owners share the load of either kind"


def test_every_parameter_has_one_owner_and_owners_share_the_load(ranks, source) -> None:
    for sharded in (True, False):
        told = ranks.run(2, _whole_states, source, replace(DP2, sharded=sharded))
        assert told[0]["owners"] == told[1]["owners"]
        sizes = told[0]["sizes"]
        assert sorted(told[0]["owned"] + told[1]["owned"]) == sorted(sizes)
        for rank in range(2):
            assert told[rank]["owned"] == sorted(
                name for name, owner in told[rank]["owners"].items() if owner == rank
            )
            load = sum(sizes[name] for name in told[rank]["owned"])
            # No more than the largest parameter beyond its half.
            assert load <= sum(sizes.values()) / 2 + max(sizes.values())


def _scattered(source: Path, layout: Layout) -> list[str]:
    """Faults of this rank's parts after state that tells its own place was scattered."""
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState

    actor = layout.actor(source)
    state = OptimizerState(actor.trainer)
    numbers = {key: 1e6 * (1 + n) for n, key in enumerate(state.keys)}
    names = sorted(actor.named_parameters())

    def place(key: str, name: str, start: int, end: int) -> torch.Tensor:
        base = numbers[key] + 1e5 * names.index(name) / len(names)
        return torch.arange(start, end, dtype=torch.float64).add_(base).float()

    whole = state.whole(fill=0.0)
    for name, tensors in whole.items():
        for key, tensor in tensors.items():
            tensor.copy_(place(key, name, 0, tensor.numel()))
    state.scatter(whole)
    faults = [
        f"{part.name} {key}"
        for part in state.parts
        for key, tensor in part.tensors.items()
        if not torch.equal(tensor, place(key, part.name, part.start, part.end))
    ]
    back = state.gather()
    faults += [
        f"{name} {key} gathered"
        for name, tensors in back.items()
        for key, tensor in tensors.items()
        if not torch.equal(tensor, place(key, name, 0, tensor.numel()))
    ]
    destroy_mesh()
    return faults


@pytest.mark.parametrize(
    "layout",
    [
        DP2,
        replace(DP2, sharded=False),
        replace(DP2, dtype="bfloat16"),
        replace(DP2, dtype="bfloat16", sharded=False),
        Layout(4, pp=2),
        pytest.param(Layout(4), marks=pytest.mark.long),
        pytest.param(Layout(4, tp=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_scattered_state_reaches_every_rank_that_holds_it(ranks, source, layout: Layout) -> None:
    """Also every copy: without the distributed optimizer each rank steps its own."""
    for faults in ranks.run(layout.world, _scattered, source, layout):
        assert faults == []


@pytest.mark.parametrize(
    "layout",
    [
        EP2_TP2_DP2,
        replace(EP2_TP2_DP2, sharded=False),
        Layout(2, tp=2, more={"expert_tp": 1}),
        Layout(2, more={"expert_tp": 2}),
        pytest.param(replace(EP2_TP2_DP2, dtype="bfloat16"), marks=pytest.mark.long),
        pytest.param(Layout(4, pp=2, more={"stages": (2, 1)}), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_scattered_state_of_experts_too(ranks, experts, layout: Layout) -> None:
    for faults in ranks.run(layout.world, _scattered, experts, layout):
        assert faults == []


def _steps(source: Path) -> list[Any]:
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState

    told: list[Any] = []
    for asked_first in (False, True):
        actor = DP2.actor(source)
        if asked_first:
            state = OptimizerState(actor.trainer)
            told.append(state.step)
            told.append(any(bool(t.any()) for p in state.parts for t in p.tensors.values()))
        train(actor, 1)
        told.append(logical(actor, "exp_avg"))
        told.append(gather_logical(actor, actor.named_parameters()))
    told.append(state.step)
    state.step = 41
    train(actor, 1)
    told.append(OptimizerState(actor.trainer).step)
    optimizer = actor.trainer.optimizer.chained_optimizers[0].optimizer
    next(iter(optimizer.state.values()))["step"].fill_(7)
    try:
        told.append(state.step)
    except RuntimeError as error:
        told.append(str(error))
    destroy_mesh()
    return told


def test_state_made_before_the_first_step_changes_no_bit_of_it(ranks, source) -> None:
    moments, weights, before, made, again, same, after, set_to, torn = ranks.run(2, _steps, source)[
        0
    ]
    assert before == 0 and not made
    assert same_bits(moments, again) and same_bits(weights, same)
    assert after == 1 and set_to == 42
    assert "[7, 42]" in torn


def _empty_handed(source: Path, folder: Path, layout: Layout) -> dict[str, Any]:
    """Two steps, a save, other values, a load: faults, and how many parts each rank holds."""
    from megarl.checkpoint import torch_dist
    from megarl.checkpoint.state_digest import state_digests
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState

    actor = layout.actor(source)
    for _ in range(2):
        samples = make_samples(5, 12, below=100)
        batches = [micro_batch(pack, samples) for pack in packs_of(actor, samples)]
        assert actor.update(batches, policy_gradient).stepped
    state = OptimizerState(actor.trainer)
    told: dict[str, Any] = {"parts": len(state.parts), "keys": state.keys}
    if state.parts:
        assert state.step == 2
    else:
        with pytest.raises(RuntimeError, match="holds no parameter's state"):
            _ = state.step

    def digests() -> dict[str, int]:
        return state_digests(actor.spec, actor.world.mesh, state, actor.world)

    before = digests()
    shards = torch_dist.model_tensors(actor.model, state.owners)
    shards |= torch_dist.state_tensors(actor.model, state.gather())
    actor.world.barrier("gathered")
    pending = torch_dist.begin_save(shards, folder, torch_dist.Staging())
    pending.write()
    pending.finish()
    for part in state.parts:
        for tensor in part.tensors.values():
            tensor.fill_(7.0)
    state.step = 41
    told["changed"] = digests() != before
    torch_dist.read_whole(state, actor.model, folder, {})
    told["same"] = digests() == before
    destroy_mesh()
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_may_hold_no_part_of_any_parameter(ranks, tmp_path, dtype: str) -> None:
    """Parameters end before the last rank's share of the padded buffer begins."""
    numbers = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 2}
    numbers |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100}
    write_hf_model(tmp_path, "llama", tied=True, **numbers)
    saved = tmp_path / "saved"
    saved.mkdir()
    found = ranks.run(5, _empty_handed, tmp_path, saved, Layout(5, dtype=dtype))
    assert found[-1]["parts"] == 0 < found[0]["parts"]
    assert len({told["keys"] for told in found}) == 1
    for told in found:
        assert told["changed"] and told["same"]
