"""What a layout asks of packs, and that padding gives no more than that. By hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.contracts.mesh import Mesh
from megarl.data.pack_shape import PackShape
from megarl.data.packing import Pack, build_pack
from tests.models.support import make_samples

FREE = PackShape()
SHAPES = [  # (mesh, experts, sequence parallel, shape)
    (Mesh(4, tp=2), False, False, FREE),
    (Mesh(4, tp=2), False, True, PackShape(multiple=2)),
    (Mesh(4, tp=2, pp=2), False, False, PackShape(one_length=True)),
    (Mesh(4, tp=2, pp=2), False, True, PackShape(one_length=True, multiple=2)),
    (Mesh(4, tp=2), True, True, PackShape(multiple=2)),
    (Mesh(2, tp=1), True, False, FREE),
    (Mesh(4, tp=2, ep=2), True, True, PackShape(True, True, 2)),
    (Mesh(4, tp=2, ep=2, expert_tp=1), True, True, PackShape(multiple=2)),
    (Mesh(4, tp=2, ep=4, expert_tp=1), True, True, PackShape(True, True, 2)),
    (Mesh(2, tp=1, expert_tp=2), True, False, PackShape(True, True)),
]


@pytest.mark.parametrize("mesh, experts, parallel, shape", SHAPES)
def test_shapes_of_layouts(mesh: Mesh, experts: bool, parallel: bool, shape: PackShape) -> None:
    """Ranks of one tensor-parallel group hold the same packs: experts cut within it ask nothing."""
    assert PackShape.of(mesh, experts=experts, sequence_parallel=parallel) == shape


def _packs() -> list[list[Pack]]:
    """Two minibatches of 9 and 13, and of 20 tokens."""
    made = []
    for length in (9, 13, 20):
        rows = make_samples(1, 1, prompt=(4, 5), response=(length - 4, length - 3))
        made.append(build_pack(rows, [0]))
    return [made[:2], made[2:]]


def _lengths(packs: Sequence[Sequence[Pack]]) -> list[list[int]]:
    return [[len(pack.token_ids_T) for pack in part] for part in packs]


def _nobody(value: float) -> float:
    raise AssertionError("lengths of this rank alone decide")


def test_padding_gives_what_is_asked_and_no_more() -> None:
    packs = _packs()
    assert _lengths(FREE.pad(packs, _nobody)) == [[9, 13], [20]]
    assert _lengths(PackShape(multiple=4).pad(packs, _nobody)) == [[12, 16], [20]]
    assert _lengths(PackShape(one_length=True).pad(packs, _nobody)) == [[20, 20], [20]]
    both = PackShape(one_length=True, multiple=8)
    assert _lengths(both.pad(packs, _nobody)) == [[24, 24], [24]]


def test_lengths_agree_with_the_longest_of_all_ranks() -> None:
    asked = []

    def maximum(value: float) -> float:
        asked.append(value)
        return 31.0

    shape = PackShape(one_length=True, across_parts=True, multiple=2)
    assert _lengths(shape.pad(_packs(), maximum)) == [[32, 32], [32]]
    assert _lengths(shape.pad([], maximum)) == [] and asked == [20, 0]
