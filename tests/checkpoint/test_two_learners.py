"""The checkpoint of a run with a critic: both learners come back, in any layout, bit for bit.

Not covered: GPU, offloaded optimizers (`test_saver.py` has the actor's), whole runs
(`tests/launch`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.commit import checkpoint_folder, newest_whole
from tests.checkpoint import two_learners
from tests.checkpoint.layouts import Layout, same_bits
from tests.checkpoint.two_learners import COUNTERS, KL
from tests.models.support import write_hf_model

pytestmark = pytest.mark.dist

ONE, DP2, TP2, PP2 = Layout(1), Layout(2), Layout(2, tp=2), Layout(2, pp=2)
LEARNERS = ("actor", "critic")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write_hf_model(place / "actor")
    task, numbers = "TokenClassification", {"hidden_size": 48, "num_attention_heads": 6}
    write_hf_model(place / "critic", "qwen3", task=task, **numbers)
    write_hf_model(place / "other", "qwen2")
    _change_one_weight(place / "other")
    return place


def _change_one_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.125
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _elements(folder: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def _compare(saved: dict[str, Any], told: dict[str, Any], same_layout: bool) -> None:
    for name in LEARNERS:
        mine, its = saved[name], told[name]
        assert same_bits(mine["weights"], its["weights"]), name
        assert mine["state"].keys() == its["state"].keys() == {"exp_avg", "exp_avg_sq"}
        for key, tensors in mine["state"].items():
            assert any(bool(tensor.any()) for tensor in tensors.values()), (name, key)
            assert same_bits(tensors, its["state"][key]), (name, key)
        assert mine["digests"] == its["digests"] and mine["digests"]
        assert mine["adam_step"] == its["adam_step"] == mine["steps"] == its["steps"]
        assert mine["counters"] == its["counters"]
        assert COUNTERS.items() <= its["counters"].items()
        if same_layout:
            assert same_bits(saved["gone on"][name], told["gone on"][name]), name
        assert not same_bits(saved[name]["weights"], saved["gone on"][name]), "nothing moved"
    assert told["actor"]["steps"] == 2 and told["critic"]["steps"] == 3
    reference = saved["reference"]
    assert same_bits(reference["weights"], told["reference"]["weights"])
    assert not same_bits(reference["weights"], saved["actor"]["weights"]), "the actor went on"
    assert reference["step"] == told["reference"]["step"] == 1
    assert told["kl"] == KL and told["refreshed"] == 1


def _matrix(ranks: Any, models: Path, run: Path, saver: Layout, loaders: list[Layout]) -> dict:
    run.mkdir()
    saved = ranks.run(saver.world, two_learners.saved, models, run, saver)[0]
    for world in sorted({loader.world for loader in loaders}):
        group = [loader for loader in loaders if loader.world == world]
        found = ranks.run(world, two_learners.loaded, models, run, group)[0]
        for layout, told in zip(group, found, strict=True):
            _compare(saved, told, same_layout=layout == saver)
    return saved


def test_both_learners_come_back_in_any_layout(ranks, models, tmp_path) -> None:
    loaders = [DP2, replace(PP2, sharded=False)]
    saved = _matrix(ranks, models, tmp_path / "run", DP2, loaders)
    folder = newest_whole(tmp_path / "run").folder
    position = json.loads((folder / "position.json").read_text())
    assert set(position["critic_tensor_digests"]) > {"weights/score.weight", "exp_avg/score.bias"}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        *("actor", "critic", "reference"),
    }
    elements = _elements(models / "actor") * 4 + _elements(models / "critic") * 3
    assert 4 * elements <= saved["need"] < 4.5 * elements, "the vocabularies are padded a little"


@pytest.mark.long
@pytest.mark.parametrize("saver", [TP2, PP2, ONE, Layout(4, tp=2, pp=2)], ids=str)
def test_every_layout_to_every_other(ranks, models, tmp_path, saver: Layout) -> None:
    others = [
        Layout(4, tp=2),
        Layout(4, pp=2),
        Layout(2, tp=2, section={"sequence_parallel": True}),
    ]
    loaders = [ONE, DP2, TP2, PP2, replace(DP2, sharded=False), *others]
    _matrix(ranks, models, tmp_path / "run", saver, loaders)


def test_a_frozen_reference_is_the_declared_one(ranks, models, tmp_path) -> None:
    told = ranks.run(2, two_learners.anchored, models, tmp_path / "run", DP2)
    assert told[0] == told[1], "every rank tells the same"
    own, other = told[0]
    assert own == "restored"
    assert "\n" not in other and "model.norm.weight" in other and "reference.path" in other
    for folder in (models / "other", checkpoint_folder(tmp_path / "run", 1)):
        assert str(folder) in other


def test_a_critic_that_the_position_has_not_begins_as_built(ranks, models, tmp_path) -> None:
    for built, both, alone, taken in ranks.run(1, two_learners.without, models, tmp_path, ONE):
        assert both == built
        assert taken == alone


def test_a_frozen_router_has_no_state(ranks, tmp_path) -> None:
    model = write_hf_model(tmp_path / "model", "qwen3_moe", vocab_size=512)
    frozen = {"router": "frozen"}
    layouts = [
        Layout(2, more={"ep": 2}, section=frozen),
        Layout(2, tp=2, more={"expert_tp": 1}, section=frozen),
    ]
    args = (tmp_path / "model", tmp_path / "run", layouts)
    saved, *others = ranks.run(2, two_learners.frozen_routers, *args)[0]
    for told in others:
        assert told["routers"] > 0 and not told["trained"], "the routers are not frozen"
        assert same_bits(saved["weights"], told["weights"])
        assert saved["digests"] == told["digests"]
        assert not any("mlp.gate.weight" in name for name in told["digests"])
        assert saved["adam_step"] == told["adam_step"] == 2
        for key, tensors in saved["state"].items():
            assert same_bits(tensors, told["state"][key]), key
    gates = sum(p.numel() for n, p in model.named_parameters() if n.endswith("mlp.gate.weight"))
    everything = sum(param.numel() for param in model.parameters())
    assert gates and saved["need"] == 4 * everything + 8 * (everything - gates)
