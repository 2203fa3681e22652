"""Estimators by name, own ones tried before anything is loaded, and β steered to its target.

Not covered: own objectives (test_own.py), what estimators compute (test_credit.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from megarl.algorithms.advantages import ESTIMATORS
from megarl.algorithms.controller import KlController
from megarl.algorithms.own import code_hash
from megarl.algorithms.registry import check_functions, code_hashes, estimator_of, made_up_batch
from megarl.contracts.errors import InputError
from megarl.recipe.algorithm import ESTIMATORS as NAMES
from megarl.recipe.algorithm import AlgorithmSection


def sound(batch, settings) -> np.ndarray:
    """Reward less the mean of all: asks everybody, also on a rank without samples."""
    own = batch.rewards[batch.own]
    everybody = batch.everyone(own[:, None])
    return batch.on_tokens(everybody[:, 0] - everybody.mean())


def with_returns(batch, settings) -> tuple[np.ndarray, np.ndarray]:
    return batch.token_rewards - batch.values, batch.token_rewards


def float32(batch, settings) -> np.ndarray:
    return sound(batch, settings).astype(np.float32)


def per_sample(batch, settings) -> np.ndarray:
    return batch.rewards[batch.own]


def infinite(batch, settings) -> np.ndarray:
    return np.full(len(batch.action_mask), np.inf)


def a_list(batch, settings) -> list[float]:
    return [0.0] * len(batch.action_mask)


def raises(batch, settings) -> np.ndarray:
    raise RuntimeError("no such thing")


def not_of_nothing(batch, settings) -> np.ndarray:
    return batch.token_rewards - batch.token_rewards.max()


def in_place(batch, settings) -> np.ndarray:
    rewards = batch.rewards
    rewards -= rewards.mean()
    return batch.on_tokens(rewards)


def in_place_unseen(batch, settings) -> np.ndarray:
    """`np.add.at` heeds no read-only flag."""
    np.add.at(batch.steps.value, [0], 1.0)
    return batch.on_tokens(batch.rewards)


def at_random(batch, settings) -> np.ndarray:
    return batch.on_tokens(batch.rewards + np.random.normal(size=len(batch.rewards)))


running: list[float] = []


def remembers(batch, settings) -> tuple[np.ndarray, np.ndarray]:
    """Returns depend on all rewards that it ever saw."""
    running.extend(batch.rewards)
    return batch.token_rewards, batch.token_rewards + sum(running)


kept: list[np.ndarray] = []


def gives_one_array(batch, settings) -> np.ndarray:
    """The very array of its last call, changed."""
    if not kept or len(kept[0]) != len(batch.action_mask):
        kept[:] = [np.zeros(len(batch.action_mask))]
    kept[0] += 1.0
    return kept[0]


def _own(function: str, **keys) -> AlgorithmSection:
    return AlgorithmSection(minibatches=1, advantage=f"{__name__}:{function}", **keys)


def test_the_recipes_names_are_the_estimators() -> None:
    assert tuple(ESTIMATORS) == NAMES
    assert all(estimator_of(name) is ESTIMATORS[name] for name in NAMES)
    with pytest.raises(InputError, match="^algorithm.advantage: there is no vtrace; built in are"):
        estimator_of("vtrace")


def test_built_ins_and_sound_functions_pass() -> None:
    for section in (
        *(AlgorithmSection(minibatches=1, advantage=name) for name in NAMES),
        _own("sound"),
        _own("with_returns", name="ppo"),
    ):
        check_functions(section)


@pytest.mark.parametrize(
    "name, keys, told",
    [
        ("float32", {}, r"advantages float32\[10\]; they must be float64\[10\]"),
        ("per_sample", {}, r"advantages float64\[4\]; they must be float64\[10\]"),
        ("infinite", {}, "advantages that are not finite"),
        ("a_list", {}, "advantages of type list, no array"),
        ("raises", {}, "raised RuntimeError: no such thing$"),
        ("not_of_nothing", {}, "raised ValueError: .* on a rank without samples"),
        ("sound", {"name": "ppo"}, r"gave no pair \(advantages, returns\)"),
        ("with_returns", {"name": "grpo"}, "raised TypeError"),
        ("nowhere", {}, "cannot import"),
        (
            "in_place",
            {},
            r"in_place changes an array of its batch in place \(ValueError: output array is "
            r"read-only\): copy it first, as in batch.rewards.copy\(\)$",
        ),
        ("in_place_unseen", {}, "changes batch.steps.value in place: copy it first"),
        ("at_random", {}, "gives other advantages when called again with the same samples: a run"),
        ("remembers", {"name": "ppo"}, "gives other returns when called again"),
        ("gives_one_array", {}, "gives other advantages when called again"),
    ],
)
def test_a_faulty_estimator_is_told_in_one_line(name, keys, told) -> None:
    with pytest.raises(InputError, match=told) as refused:
        check_functions(_own(name, **keys))
    assert str(refused.value).startswith("algorithm.advantage: ")
    assert "\n" not in str(refused.value)


def test_the_code_of_own_functions_is_hashed_by_key() -> None:
    section = _own("sound", objective="tests.algorithms.own_functions:reinforce")
    hashes = code_hashes(section)
    assert hashes == {
        key: code_hash(key, getattr(section, key.partition(".")[2]))
        for key in ("algorithm.advantage", "algorithm.objective")
    }
    assert len(set(hashes.values())) == 2
    assert code_hashes(AlgorithmSection(minibatches=1)) == {}


def test_every_array_of_a_batch_is_read_only_and_a_copy_shares_none() -> None:
    batch = made_up_batch(4, with_values=True)
    copy = batch.copy()
    arrays = batch.arrays()
    assert {"rewards", "values", "action_mask", "steps.value", "own"} < arrays.keys()
    arrays |= {name: getattr(batch, name) for name in ("sample", "trained_mask", "trained_sample")}
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="output array is read-only"):
            np.logical_not(array, out=array, casting="unsafe")
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0
        assert name not in copy.arrays() or not np.shares_memory(array, copy.arrays()[name])
    with pytest.raises(ValueError, match="read-only"):
        copy.rewards[0] = 9.0


@pytest.mark.parametrize("name", NAMES)
def test_built_ins_keep_the_contract_of_own_functions(name) -> None:
    section = AlgorithmSection(minibatches=1, advantage=name)
    for rows in (4, 0):
        batch = made_up_batch(rows, with_values=True)
        estimate = ESTIMATORS[name](batch, section)
        columns = estimate if isinstance(estimate, tuple) else (estimate,)
        for column in columns:
            assert column.dtype == np.float64 and column.shape == batch.action_mask.shape
            assert np.isfinite(column).all() and not column[~batch.action_mask].any()


def test_beta_follows_the_kl_in_proportion_and_within_bounds() -> None:
    """Target 6, horizon 10000, 64 responses: KL 6.6 is 10 % above; 60 and 0 meet the bound."""
    for kl, error in ((6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (6.0, 0.0)):
        controller = KlController(0.2, 6.0, 10000)
        assert controller.update(kl, 64) == pytest.approx(0.2 * (1 + error * 64 / 10000))
    assert KlController(0.2, None, 10000).update(60.0, 64) == 0.2
    many = KlController(0.2, 6.0, 10)
    assert many.update(0.0, 10**6) == pytest.approx(0.2 * 0.8)


def test_a_controller_goes_on_where_another_stopped() -> None:
    first = KlController(0.2, 6.0, 100)
    first.update(9.0, 10)
    second = KlController(0.2, 6.0, 100)
    second.restore(first.state)
    assert second.update(1.0, 10) == first.update(1.0, 10) and second.beta == first.beta
    assert first.update(float("nan"), 0) == first.beta
    with pytest.raises(ValueError, match="KL to the reference is nan"):
        first.update(float("nan"), 1)
