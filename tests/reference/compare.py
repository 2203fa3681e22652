"""Holds the house's iteration against the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.models.support import relative
from tests.reference.house import HouseTold
from tests.reference.plain import Told
from tests.reference.rules import Row, Rules, Step

NEAR = 1e-5


def apart(found: HouseTold, wanted: Told, rows: list[Row], rules: Rules) -> dict[str, float]:
    """The largest distance of each kind: `old`, `ref`, `values`, `last`, `advantages`, `returns`,
    `numbers` (absolute), and of every step, say the actor's first, `actor 0 loss`,
    `actor 0 weights` (absolute), `actor 0 gradient` (relative L2).

    Raises `AssertionError` where other rows train, or in other minibatches, or steps are missing.
    """
    told: dict[str, float] = {}
    for at, row in enumerate(rows):
        key = (row.group, row.candidate)
        assert found.minibatch[key] == _minibatch(wanted, rules, at, row), key
        if wanted.credit.trained[at]:
            for name, gap in _columns_apart(found.columns[key], wanted, at).items():
                told[name] = max(told.get(name, 0.0), gap)
    told["numbers"] = _numbers_apart(found.numbers, numbers(wanted, rows))
    for role in ("actor", "critic"):
        mine, theirs = getattr(found, role), getattr(wanted, role)
        assert len(mine) == len(theirs), role
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            for name, gap in _steps_apart(*pair).items():
                told[f"{role} {number} {name}"] = gap
    return told


def _numbers_apart(mine: dict[str, float], theirs: dict[str, float]) -> float:
    assert mine.keys() == theirs.keys()
    return max(abs(mine[name] - theirs[name]) for name in theirs)


def _minibatch(wanted: Told, rules: Rules, at: int, row: Row) -> int:
    if not wanted.credit.trained[at]:
        return -1
    if rules.split:
        return sum(wanted.credit.trained[:at]) % len(rules.minibatches)
    return next(n for n, groups in enumerate(rules.minibatches) if row.group in groups)


def _columns_apart(mine: dict[str, Any], wanted: Told, at: int) -> dict[str, float]:
    exact = {
        "old": wanted.old,
        "ref": wanted.ref,
        "values": wanted.values,
        "last": wanted.last_values,
        "advantages": wanted.credit.advantages,
        "returns": wanted.credit.returns,
    }
    told = {}
    for name, columns in exact.items():
        column = None if columns is None else columns[at]
        assert (mine[name] is None) == (column is None), name
        if column is not None:
            told[name] = float(np.abs(np.asarray(mine[name]) - column).max())
    return told


def _steps_apart(found: Step, wanted: Step) -> dict[str, float]:
    assert found.weights.keys() == wanted.weights.keys()
    gaps = [(found.weights[name] - wanted.weights[name]).abs().max() for name in wanted.weights]
    told = {"loss": abs(found.loss - wanted.loss), "weights": float(torch.stack(gaps).max())}
    if found.gradient:
        assert found.gradient.keys() == wanted.gradient.keys()
        told["gradient"] = relative(found.gradient, wanted.gradient)
    return told


def numbers(wanted: Told, rows: list[Row]) -> dict[str, float]:
    """What metrics say of an iteration's credit, over the actions of the rows that train."""
    fit = [at for at, trains in enumerate(wanted.credit.trained) if trains]

    def over(columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(columns[at], float)[rows[at].acts] for at in fit])

    advantages = over(wanted.credit.advantages)
    told = {
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(),
        "advantage/abs_max": np.abs(advantages).max(),
    }
    if wanted.values is not None:
        returns, values = over(wanted.credit.returns), over(wanted.values)
        told |= {"return/mean": returns.mean(), "return/std": returns.std()}
        told["value/mean"] = values.mean()
        told["value/explained_variance"] = 1 - (returns - values).var() / returns.var()
    if wanted.ref is not None:
        kl = over(wanted.old) - over(wanted.ref)
        told["reference/kl"] = kl.mean()
        told["reference/sequences"] = sum(bool(rows[at].acts.any()) for at in fit)
        told["reference/kl_sequence"] = kl.sum() / told["reference/sequences"]
    return {name: float(number) for name, number in told.items()}
