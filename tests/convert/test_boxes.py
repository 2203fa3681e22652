"""Every layout's chunks make up the global tensors exactly, whatever the family.

Not covered: that megatron has its tensors where these say (test_megatron.py).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from megarl.contracts.mesh import Mesh
from megarl.convert.boxes import global_shape, rank_chunks, smallest_world, whole_placement
from megarl.reshard.families import ModelSpec, read_spec
from megarl.reshard.placement import tiles
from tests.convert.models import FAMILIES, MOE, make

LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "uneven": {"pp": 2, "stages": (3, 1)},
    "interleaved": {"pp": 2, "virtual": 2},
}
EXPERT_LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "ep2": {"ep": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "expert_tp": 1},
}
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in (EXPERT_LAYOUTS if family in MOE else LAYOUTS)
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> dict[tuple[str, bool], ModelSpec]:
    place = tmp_path_factory.mktemp("specs")
    found = {}
    for family in FAMILIES:
        folder = make(place / family, family, num_hidden_layers=4)
        found[family] = read_spec(folder)
    return found


def mesh_of(sizes: dict) -> Mesh:
    tp, pp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "ep"))
    world = smallest_world(tp, pp, ep, sizes.get("expert_tp"))
    return Mesh(world, **({"tp": 1} | sizes))


@pytest.mark.parametrize("family, layout", CASES)
def test_the_ranks_chunks_tile_every_global_tensor(specs, family: str, layout: str) -> None:
    spec = specs[family]
    mesh = mesh_of((EXPERT_LAYOUTS | LAYOUTS)[layout])
    chunks = {}
    for rank in range(mesh.world):
        for chunk in rank_chunks(spec, mesh, rank):
            chunks.setdefault((chunk.param, chunk.row, chunk.col), chunk)
    by_param: dict[str, list] = {}
    for chunk in chunks.values():
        box = (chunk.row, chunk.col, chunk.rows, chunk.cols)
        by_param.setdefault(chunk.param, []).append(box)
    assert by_param.keys() == whole_placement(spec).params[0].keys()
    for param, boxes in by_param.items():
        rows, cols = [*global_shape(spec, param, mesh.tp), 1][:2]
        assert tiles(boxes, rows, cols), param


@pytest.mark.parametrize("family, layout", CASES)
def test_a_chunks_parts_name_each_logical_element_once(specs, family: str, layout: str) -> None:
    spec = specs[family]
    mesh = mesh_of((EXPERT_LAYOUTS | LAYOUTS)[layout])
    seen = set()
    boxes: dict[str, list] = {}
    for rank in range(mesh.world):
        for chunk in rank_chunks(spec, mesh, rank):
            if (chunk.param, chunk.row, chunk.col) in seen:
                continue
            seen.add((chunk.param, chunk.row, chunk.col))
            for part in chunk.parts:
                assert part.at_row + part.rows <= chunk.rows and part.cols == chunk.cols
                box = (part.row, part.col, part.rows, part.cols)
                boxes.setdefault(part.tensor, []).append(box)
    for name, tensor in whole_placement(spec).tensors.items():
        assert tiles(boxes[name], tensor.rows, tensor.cols), name
        assert sum(prod(box[2:]) for box in boxes[name]) == tensor.rows * tensor.cols


def test_the_world_is_the_smallest_that_holds_both_cuts(tmp_path: Path) -> None:
    assert smallest_world(1, 1, 1, None) == 1
    assert smallest_world(4, 2, 1, None) == 8
    assert smallest_world(2, 1, 4, 1) == 4  # 2 divides 4 · 1
    assert smallest_world(4, 1, 3, 1) == 12
    assert smallest_world(2, 1, 2, None) == 4
