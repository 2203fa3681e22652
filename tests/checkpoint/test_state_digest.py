"""Digests of the optimizer's state: those of the assembled tensors, and every copy is compared.

The oracle assembles whole tensors with code of the tests and digests each by `block_digest`, which
`tests/reshard/test_digest.py` holds against its definition. Equality over layouts is in
`test_torch_dist.py`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.layouts import Layout, logical, train
from tests.models.support import write_hf_model

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
UNEVEN_EP2 = {"ep": 2, "stages": (2, 1)}


def test_a_flat_range_is_at_most_three_rectangles() -> None:
    from megarl.checkpoint.state_digest import rectangles

    for cols, rows in ((1, 7), (3, 4), (5, 3)):
        for start, end in itertools.combinations(range(rows * cols + 1), 2):
            found = rectangles(start, end, cols)
            assert len(found) <= 3
            at = 0
            for block in found:
                assert block.at == at
                places = [
                    (block.row + i) * cols + block.col + j
                    for i in range(block.rows)
                    for j in range(block.cols)
                ]
                assert block.col + block.cols <= cols
                assert places == list(range(start + at, start + at + len(places)))
                at += len(places)
            assert at == end - start
    assert rectangles(4, 4, 3) == []


def _digests(source: Path, layouts: list[Layout]) -> list[tuple[dict, dict]]:
    from megarl.checkpoint.state_digest import state_digests
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState
    from megarl.reshard.digest import block_digest

    found = []
    for layout in layouts:
        actor = layout.actor(source)
        train(actor, 1)
        state = OptimizerState(actor.trainer)
        digests = state_digests(actor.spec, actor.world.mesh, state, actor.world)
        right = {
            f"{key}/{name}": block_digest(tensor.float(), name, 0, 0)
            for key in state.keys
            for name, tensor in logical(actor, key).items()
        }
        found.append((digests, right))
        destroy_mesh()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True])
def test_digests_are_those_of_the_assembled_tensors(ranks, tmp_path, tied: bool) -> None:
    write_hf_model(tmp_path, "qwen2", tied=tied, hidden_size=80)
    for world, layouts in {
        1: [Layout(1, dtype="bfloat16")],
        2: [Layout(2), Layout(2, sharded=False), Layout(2, tp=2), Layout(2, pp=2)],
        4: [Layout(4), Layout(4, tp=2), Layout(4, pp=2), Layout(4, pp=2, sharded=False)],
    }.items():
        by_rank = ranks.run(world, _digests, tmp_path, layouts)
        assert all(found == by_rank[0] for found in by_rank), "the same on every rank"
        for digests, right in by_rank[0]:
            assert digests == right
            assert len(set(digests.values())) == len(digests)


@pytest.mark.dist
def test_digests_of_experts_are_those_of_the_assembled_tensors(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen3_moe", hidden_size=80, num_hidden_layers=3, num_experts=6)
    for world, layouts in {
        2: [Layout(2, more={"ep": 2}), Layout(2, tp=2, more={"expert_tp": 1})],
        4: [Layout(4, tp=2, more={"ep": 2, "expert_tp": 1}), Layout(4, pp=2, more=UNEVEN_EP2)],
    }.items():
        by_rank = ranks.run(world, _digests, tmp_path, layouts)
        assert all(found == by_rank[0] for found in by_rank), "the same on every rank"
        for digests, right in by_rank[0]:
            assert digests == right


def _faults(source: Path, layout: Layout, cases: list[tuple[int, str, int]]) -> list[Any]:
    """For each (rank, parameter, bit): what is told when that rank's first element lost a bit."""
    from megarl.checkpoint.state_digest import state_digests
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState
    from megarl.reshard.digest import DriftError

    actor = layout.actor(source)
    train(actor, 1)
    state = OptimizerState(actor.trainer)
    parts = {part.name: part for part in state.parts}

    def attempt() -> Any:
        try:
            return state_digests(actor.spec, actor.world.mesh, state, actor.world)
        except DriftError as error:
            return str(error)

    told = [attempt()]
    for rank, name, bit in cases:
        element = None
        if actor.world.rank == rank:
            element = parts[name].tensors["exp_avg_sq"].view(torch.int32)[:1]
            element ^= 1 << bit
        told.append(attempt())
        if element is not None:
            element ^= 1 << bit
    told.append(attempt())
    destroy_mesh()
    return told


@pytest.mark.dist
def test_copies_that_differ_in_a_bit_are_named(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama", tied=True, hidden_size=80)
    norm, embedding = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
    cases = {
        Layout(2, tp=2): (norm, NORM, "rank 0 against rank 1"),
        Layout(2, sharded=False): (norm, NORM, "rank 0 against rank 1"),
        Layout(2, pp=2): (embedding, EMBEDDING, "rank 0 against rank 1"),
        Layout(4, sharded=False): (norm, NORM, "rank 0 drifted from ranks 1, 2, 3"),
        Layout(4, pp=2): (embedding, EMBEDDING, "ranks 0, 1 against ranks 2, 3"),
    }
    for layout, (param, name, told) in cases.items():
        for texts in ranks.run(layout.world, _faults, tmp_path, layout, [(0, param, 3)]):
            before, text, after = texts
            assert before == after and isinstance(before, dict)
            wanted = f"copies of the optimizer's state differ: exp_avg_sq/{name}: {told}"
            assert text.startswith(wanted), (layout, text)


@pytest.mark.dist
def test_copies_of_experts_that_differ_in_a_bit_are_named(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "qwen3_moe", hidden_size=80, num_hidden_layers=3, num_experts=6)
    expert = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight"
    name = "model.layers.2.mlp.experts.1.down_proj.weight"
    norm = "decoder.final_layernorm.weight"
    apart = {"ep": 2, "expert_tp": 1}
    cases = {
        Layout(2, tp=2, sharded=False, more={"expert_tp": 1}): (
            expert,
            name,
            "rank 0 against rank 1",
        ),
        Layout(4, tp=2, sharded=False, more=apart): (expert, name, "rank 0 against rank 2"),
        Layout(4, tp=2, more=apart): (norm, NORM, "ranks 0, 2 against ranks 1, 3"),
    }
    for layout, (param, tensor, told) in cases.items():
        for before, text, after in ranks.run(
            layout.world, _faults, tmp_path, layout, [(0, param, 3)]
        ):
            assert before == after and isinstance(before, dict)
            wanted = f"copies of the optimizer's state differ: exp_avg_sq/{tensor}: {told}"
            assert text.startswith(wanted), (layout, text)


@pytest.mark.dist
def test_any_bit_of_what_only_one_rank_holds_changes_one_digest(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama", hidden_size=80)
    param = "decoder.layers.0.mlp.linear_fc2.weight"
    cases = [(1, param, bit) for bit in (0, 22, 30)]
    before, *others, after = ranks.run(2, _faults, tmp_path, Layout(2, tp=2), cases)[0]
    assert before == after
    for digests in others:
        changed = {name for name in digests if digests[name] != before[name]}
        assert changed == {"exp_avg_sq/model.layers.0.mlp.down_proj.weight"}


def _missing_range(source: Path) -> str:
    from megarl.checkpoint.state_digest import state_digests
    from megarl.models.build import destroy_mesh
    from megarl.models.optimizer_state import OptimizerState
    from megarl.reshard.placement import LayoutError

    actor = Layout(2).actor(source)
    state = OptimizerState(actor.trainer)
    if actor.world.rank == 1:
        state.parts = state.parts[1:]
    try:
        state_digests(actor.spec, actor.world.mesh, state, actor.world)
    except LayoutError as error:
        return str(error)
    finally:
        destroy_mesh()
    return "digested"


@pytest.mark.dist
def test_ranges_that_make_up_no_parameter_are_refused(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, "llama", hidden_size=80)
    told = ranks.run(2, _missing_range, tmp_path)
    assert (
        told
        == ["the optimizer's state on ranks [0, 1] does not make up their parameters exactly"] * 2
    )
