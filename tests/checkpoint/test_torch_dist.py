"""Saved in one layout, loaded in another: every bit comes back, and training goes on the same.

The oracle assembles whole HF-named tensors from each rank's own (`layouts.py`) and compares bits;
without the distributed optimizer it reads torch's own state. Not covered: GPU (Transformer
Engine's FusedAdam, pinned copies), several nodes, file systems that tell an error only on close.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.layouts import (
    Layout,
    load,
    load_and_go_on,
    look,
    same_bits,
    train,
    train_and_save,
)
from tests.checkpoint.matrices import MOST_GRADIENT, matrix
from tests.models.support import relative, write_hf_model

pytestmark = pytest.mark.dist

TP2 = Layout(2, tp=2)
ONE, DP2, PP2 = Layout(1), Layout(2), Layout(2, pp=2)
TP2_PP2, PP2_DP2, TP2_DP2 = Layout(4, tp=2, pp=2), Layout(4, pp=2), Layout(4, tp=2)
SHARDED = [ONE, TP2, DP2, PP2, TP2_PP2, PP2_DP2, TP2_DP2]


def unsharded(layout: Layout) -> Layout:
    return replace(layout, sharded=False)


def bfloat16(layout: Layout) -> Layout:
    return replace(layout, dtype="bfloat16", section={"lr": 1e-2} | layout.section)


def test_saved_on_tp2_loaded_in_every_layout(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen2", hidden_size=80)
    loaders = [TP2, DP2, unsharded(DP2), PP2, TP2_PP2, PP2_DP2, TP2_DP2]
    matrix(ranks, tmp_path, tmp_path, TP2, loaders)


def test_a_tied_model_saved_by_one_rank_is_loaded_by_two(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama", tied=True, hidden_size=80)
    matrix(ranks, tmp_path, tmp_path, unsharded(ONE), [TP2, PP2, unsharded(PP2)])


def test_masters_of_bfloat16_come_back(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen2", tied=True, hidden_size=80)
    layouts = [bfloat16(layout) for layout in (DP2, TP2, unsharded(TP2), PP2)]
    matrix(ranks, tmp_path, tmp_path, layouts[0], layouts)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_layout_into_every_other(ranks, tmp_path, family: str, tied: bool) -> None:
    write_hf_model(tmp_path, family, tied=tied, hidden_size=80, num_hidden_layers=4)
    loaders = SHARDED + [unsharded(layout) for layout in (DP2, PP2, TP2_DP2, PP2_DP2)]
    for number, saver in enumerate(loaders):
        matrix(ranks, tmp_path / f"{number}", tmp_path, saver, loaders)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_in_every_layout(ranks, tmp_path, tied: bool) -> None:
    write_hf_model(tmp_path, "qwen2", tied=tied, hidden_size=80)
    loaders = SHARDED + [unsharded(layout) for layout in (DP2, PP2, TP2_DP2)]
    for number, saver in enumerate((TP2, TP2_DP2, unsharded(DP2), PP2)):
        matrix(
            ranks,
            tmp_path / f"{number}",
            tmp_path,
            bfloat16(saver),
            [bfloat16(layout) for layout in loaders],
        )


def _changed_after_begin(source: Path, folder: Path) -> dict | None:
    """Everything at the save; the live tensors are overwritten before anything is written."""
    from megarl.checkpoint import torch_dist
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState

    actor = DP2.actor(source)
    train(actor, 2)
    told = look(actor)
    state, staging = OptimizerState(actor.trainer), torch_dist.Staging()
    shards = torch_dist.model_tensors(actor.model, state.owners)
    values = {"drawn": 1}
    shards |= torch_dist.state_tensors(actor.model, state.gather())
    shards["random"] = torch_dist.rank_object("random", values)
    if actor.world.is_main:
        folder.mkdir()
    actor.world.barrier("folder")
    pending = torch_dist.begin_save(shards, folder, staging)
    train(actor, 1)
    with torch.no_grad():
        for param in actor.model.parameters():
            param.fill_(7.0)
        for part in state.parts:
            for tensor in part.tensors.values():
                tensor.fill_(7.0)
    values["drawn"] = 2
    pending.write()
    pending.finish()
    again = torch_dist.load_tensors({"random": torch_dist.rank_object("random", None)}, folder)
    assert again == {"random": {"drawn": 1}}
    load(actor, folder, 2)
    back = look(actor)
    destroy_mesh()
    return {"saved": told, "loaded": back} if actor.world.is_main else None


def test_what_is_saved_is_what_was_there_when_it_began(ranks, tmp_path) -> None:
    """The fault of a save behind the step: weights of the next step in the files of this one."""
    write_hf_model(tmp_path, "llama", hidden_size=80)
    told = ranks.run(2, _changed_after_begin, tmp_path, tmp_path / "saved")[0]
    saved, loaded = told["saved"], told["loaded"]
    assert same_bits(saved["weights"], loaded["weights"])
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(saved["state"][key], loaded["state"][key])
    assert saved["digests"] == loaded["digests"]


def test_warm_up_goes_on_where_it_stopped(ranks, tmp_path) -> None:
    """Warm-up 10 to 1e-6, stopped at 25: step 26 is at 1e-6; a restarted one would be at 1e-7."""
    write_hf_model(tmp_path, "llama", hidden_size=80)
    section = {"lr": 1e-6, "lr_warmup_steps": 10}
    saver, loader = (Layout(2, tp=tp, section=section) for tp in (2, 1))
    saved = ranks.run(2, train_and_save, tmp_path, tmp_path / "saved", saver, 25)[0]
    same, other = ranks.run(2, load_and_go_on, tmp_path, tmp_path / "saved", [saver, loader], 25)[0]
    for told in (saved, same, other):
        assert told["lr"] == 1e-6
        assert told["adam_step"] == told["steps"] == 25
    assert same_bits(saved["after 2"], same["after 2"])
    assert relative(other["gradient"], saved["gradient"]) <= MOST_GRADIENT
    forgotten = ranks.run(2, load_and_go_on, tmp_path, tmp_path / "saved", [saver], 0)[0][0]
    assert forgotten["lr"] == pytest.approx(1e-7)
