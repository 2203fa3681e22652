"""What the ranks of the pool do, and what the reference told of the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reference import house, plain
from tests.reference.cases import Case
from tests.reference.house import HouseTold, Layout
from tests.reference.material import fresh_critic, make_models, make_rows
from tests.reference.plain import Told
from tests.reference.rules import Optimizer, Row

OPTIMIZERS = {
    "sgd": Optimizer("sgd", lr=0.05),
    "adam": Optimizer("adam", lr=2e-3, eps=1e-3),
    "clipped": Optimizer("adam", lr=2e-3, eps=1e-3, clip_grad=0.5),
}
Job = tuple[Case, Layout, Optimizer]


@dataclass
class Bench:
    """The models, the rows, and the reference's iterations on them."""

    folder: Path
    models: dict[str, Any] = field(init=False)
    rows: list[Row] = field(init=False)
    _known: dict[tuple[Case, Optimizer], Told] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.models = make_models(self.folder)
        self.rows = make_rows(self.models["actor"])

    def wanted(self, case: Case, how: Optimizer) -> Told:
        """The reference's iteration, of fresh copies of the models."""
        if (case, how) not in self._known:
            critic = None
            if case.critic == "fresh":
                critic = fresh_critic(self.models["actor"])
            elif case.critic is not None:
                critic = copy.deepcopy(self.models["critic"])
            self._known[case, how] = plain.iterate(
                copy.deepcopy(self.models["actor"]),
                case.rows(self.rows),
                case.rules,
                how,
                self.models["reference"] if case.rules.beta else None,
                critic,
            )
        return self._known[case, how]


def iterations(folder: Path, rows: list[Row], jobs: list[Job]) -> list[HouseTold]:
    """The house's iterations, one after the other on the same ranks; from rank 0 only."""
    import torch.distributed as dist

    told = [house.iterate(folder, rows, *job) for job in jobs]
    return told if dist.get_rank() == 0 else []
