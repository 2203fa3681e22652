"""Estimators and objectives by name: the built-in ones, and own functions by import path."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.algorithms.advantages import ESTIMATORS, CreditBatch, Estimator
from megarl.algorithms.own import code_hash as own_code_hash
from megarl.algorithms.own import is_own, load_own
from megarl.contracts.errors import InputError
from megarl.contracts.steps import Steps
from megarl.rewards.scorer import said

KEY = "algorithm.advantage"


def estimator_of(name: str) -> Estimator:
    """Raises `InputError` for a name that is neither built in nor an importable function."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not is_own(name):
        raise InputError(
            f"{KEY}: there is no {name}; built in are {', '.join(ESTIMATORS)}, an own function is "
            "named import.path:function"
        )
    return load_own(KEY, name)


def check_functions(algorithm: Any) -> None:
    """Try the own functions of the recipe's `algorithm` section on made-up facts.

    Raises `InputError`, one line that names the key, for what cannot be imported, raises, or does
    not give what it must (`check_estimator`, `own_objective.check_objective`).
    """
    from megarl.algorithms.own_objective import check_objective  # torch; an audit has no need of it

    check_estimator(algorithm)
    check_objective(algorithm)


def code_hashes(algorithm: Any) -> dict[str, str]:
    """Recipe key → hash of the own function's source, of those that are own."""
    named = {KEY: algorithm.advantage, "algorithm.objective": algorithm.objective}
    return {key: own_code_hash(key, name) for key, name in named.items() if is_own(name)}


def check_estimator(algorithm: Any) -> None:
    """Call an own estimator on four made-up samples and on a rank that has none of them.

    It must give finite advantages, float64 [R], and with a critic (advantages, returns); leave
    the batch's arrays as they are; and give the same bits for the same samples, or nobody could
    recompute a run. Raises `InputError`, one line.
    """
    name = algorithm.advantage
    estimator = estimator_of(name)
    if name in ESTIMATORS:
        return
    for rows in (4, 0):
        first, again = (_try(name, estimator, algorithm, rows) for _ in range(2))
        for what, column in first.items():
            if column.tobytes() != again[what].tobytes():
                raise InputError(
                    f"{KEY}: {name} gives other {what} when called again with the same samples: a "
                    "run could not be recomputed; keep no state, and seed random numbers in the "
                    "call"
                )


def in_place(error: Exception) -> str | None:
    """What an own function did that raised `error`, if that was a write to a read-only array."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        return (
            f"changes an array of its batch in place ({said(error)}): copy it first, as in "
            "batch.rewards.copy()"
        )
    return None


def shape_of(column: Any) -> str:
    """`float64[10]`, or `a list` for what is no array."""
    if isinstance(column, np.ndarray):
        return f"{column.dtype}{list(column.shape)}"
    return f"a {type(column).__name__}"


def _try(name: str, estimator: Estimator, algorithm: Any, rows: int) -> dict[str, np.ndarray]:
    """The estimator's columns of made-up samples, checked and copied: it may give them again."""
    batch = made_up_batch(rows, with_values=algorithm.needs_values)
    before = batch.copy()
    try:
        estimate = estimator(batch, algorithm)
    except Exception as error:  # foreign code may raise anything
        where = "" if rows else " on a rank without samples"
        told = in_place(error) or f"raised {said(error)}"
        raise InputError(f"{KEY}: {name} {told}{where}") from error
    for what, column in before.arrays().items():
        if batch.arrays()[what].tobytes() != column.tobytes():  # not every writer heeds the flag
            raise InputError(f"{KEY}: {name} changes batch.{what} in place: copy it first")
    return _checked(name, estimate, len(batch.action_mask), algorithm.needs_values)


def _checked(name: str, estimate: Any, tokens: int, with_returns: bool) -> dict[str, np.ndarray]:
    """Copies of the columns of an estimate by name, float64 [`tokens`] and finite."""
    columns = {"advantages": estimate}
    if with_returns:
        if not isinstance(estimate, tuple) or len(estimate) != 2:
            raise InputError(
                f"{KEY}: {name} gave no pair (advantages, returns); the critic of ppo learns the "
                "returns"
            )
        columns = dict(zip(("advantages", "returns"), estimate, strict=True))
    elif isinstance(estimate, tuple):
        raise InputError(f"{KEY}: {name} gave {len(estimate)} columns; without a critic give one")
    for what, column in columns.items():
        if not isinstance(column, np.ndarray):
            raise InputError(f"{KEY}: {name} gave {what} of type {type(column).__name__}, no array")
        if column.dtype != np.float64 or column.shape != (tokens,):
            raise InputError(
                f"{KEY}: {name} gave {what} {shape_of(column)}; they must be "
                f"float64[{tokens}], one per response token"
            )
        if not np.isfinite(column).all():
            raise InputError(f"{KEY}: {name} gave {what} that are not finite: {column.tolist()}")
    return {what: column.copy() for what, column in columns.items()}


def made_up_batch(rows: int, *, with_values: bool) -> CreditBatch:
    """Two groups of two samples, of which this rank holds the first `rows`: ragged, with a hole,
    one cut off, step scores, and a reference."""
    lengths = np.array([3, 1, 4, 2])[:rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(offsets[-1])
    mask = np.arange(tokens) != 1
    token_rewards = np.zeros(tokens)
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    token_rewards[offsets[1:] - 1] = rewards[:rows]
    everybody = np.arange(8.0).reshape(4, 2) / 8

    def everyone(values: np.ndarray) -> np.ndarray:
        whole = np.resize(everybody, (4, values.shape[1]))
        whole[:rows] = values
        return whole

    return CreditBatch(
        offsets=offsets,
        action_mask=mask,
        terminated=np.array([True, True, False, True])[:rows],
        token_rewards=token_rewards,
        old_log_probs=-np.linspace(0.1, 2.0, tokens, dtype=np.float32),
        ref_log_probs=-np.linspace(0.2, 1.8, tokens, dtype=np.float32),
        values=np.linspace(-0.5, 0.5, tokens) if with_values else None,
        last_values=np.linspace(0.0, 0.3, rows) if with_values else None,
        own=np.arange(rows),
        group=np.array([0, 0, 1, 1]),
        compared=np.ones(4, dtype=bool),
        trained=np.ones(4, dtype=bool),
        rewards=rewards,
        steps=Steps.from_pairs([[(0, 0.5), (2, 1.0)], [(0, 0.0)], [(3, 0.5)], [(1, 0.25)]]),
        everyone=everyone,
    )
