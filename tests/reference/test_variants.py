"""Estimators, objectives, KL, importance, reductions, whitening: each a whole iteration with SGD by
the house and by the reference, on one rank; on two in the long tests.

Not covered: larger layouts (`test_iteration.py`), own functions, what a recipe refuses.
"""

from __future__ import annotations

import pytest
import torch

from tests.reference.cases import MAIN, VARIANTS
from tests.reference.compare import NEAR, apart
from tests.reference.house import TWO, Layout
from tests.reference.runs import OPTIMIZERS, iterations

HOW = OPTIMIZERS["sgd"]
SAME = {"ppo, own packs": "ppo, one pass"}
"""What must end where another one does."""


@pytest.mark.dist
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant(ranks, bench, name: str) -> None:
    case = VARIANTS[name]
    (run,) = ranks.run(1, iterations, bench.folder, bench.rows, [(case, Layout(), HOW)])[0]
    gaps = apart(run, bench.wanted(case, HOW), case.rows(bench.rows), case.rules)
    assert max(gaps.values()) <= NEAR, {key: gap for key, gap in gaps.items() if gap > NEAR}


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", list(TWO))
def test_variants_on_two_ranks(ranks, bench, layout: str) -> None:
    jobs = [(case, TWO[layout], HOW) for case in VARIANTS.values()]
    runs = ranks.run(2, iterations, bench.folder, bench.rows, jobs, timeout=600)[0]
    for (name, case), run in zip(VARIANTS.items(), runs, strict=True):
        gaps = apart(run, bench.wanted(case, HOW), case.rows(bench.rows), case.rules)
        assert max(gaps.values()) <= NEAR, (name, gaps)


def test_no_variant_ends_where_another_does(bench) -> None:
    """Else a rule could be passed over unseen: by the reference alone."""
    ends = {}
    for name, case in (MAIN | VARIANTS).items():
        told = bench.wanted(case, HOW)
        parts = [step.weights for role in (told.actor, told.critic) for step in role[-1:]]
        ends[name] = torch.cat([part[key].flatten() for part in parts for key in sorted(part)])
    for name, end in ends.items():
        for other, another in ends.items():
            if name < other and len(end) == len(another):
                gap = float((end - another).abs().max())
                if other == SAME.get(name) or name == SAME.get(other):
                    assert gap == 0, (name, other)
                else:
                    assert gap > 10 * NEAR, (name, other, gap)
