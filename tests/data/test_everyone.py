"""Numbers of one rank's samples become everybody's, on real gloo ranks.

Not covered: tensor-parallel ranks that hold the same samples (tests/launch).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.data.everyone import everyone_of
from megarl.world import World
from tests.algorithms.make_credit import Row, make_facts


def _bad_numbers() -> list[str]:
    world = World(Mesh(2, tp=1), torch.device("cpu"), 20.0)
    facts = make_facts([Row(0, 0, 1.0), Row(0, 1, 0.0)])
    own = facts.samples.select([world.rank])
    told = []
    for samples, values in (
        (own, np.zeros((1 + world.rank, 1))),
        (facts.samples, np.zeros((2, 1))),
    ):
        try:
            everyone_of(world, facts.table, samples)(values)
        except ValueError as error:
            told.append(str(error))
    whole = everyone_of(world, facts.table, own)(np.full((1, 2), float(world.rank)))
    return [*told, whole.tolist()]


@pytest.mark.dist
def test_numbers_that_do_not_fit_are_refused_on_every_rank(ranks) -> None:
    first, second = ranks.run(2, _bad_numbers)
    assert first == second
    assert "rank 1: float64(2, 1) for 1 samples" in first[0]
    assert "two data-parallel parts hold: 0/0, 0/1" in first[1]
    assert first[2] == [[0.0, 0.0], [1.0, 1.0]]
