"""An own estimator within an iteration: called, held to its contract, and kept off the facts.

Not covered: its trial at start (test_registry.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.credit import credit
from megarl.data.everyone import alone
from megarl.recipe.algorithm import AlgorithmSection
from tests.algorithms.make_credit import Row, credit_of, make_facts, plan_of


def _pair(*rewards: float, **keys) -> list[Row]:
    return [Row(0, candidate, reward, **keys) for candidate, reward in enumerate(rewards)]


def not_finite(batch, settings) -> np.ndarray:
    return np.where(batch.action_mask, np.nan, 0.0)


def single(batch, settings) -> np.ndarray:
    return np.zeros(len(batch.action_mask), dtype=np.float32)


def over_written(batch, settings) -> np.ndarray:
    rewards = batch.rewards
    rewards *= 0.0
    return batch.on_tokens(rewards)


def over_written_unseen(batch, settings) -> np.ndarray:
    """As far as tensors go that share memory with arrays; they heed no read-only flag."""
    for array in batch.arrays().values():
        torch.from_numpy(array).zero_()
    return np.zeros(len(batch.action_mask))


def a_list(batch, settings) -> list[float]:
    return [0.0] * len(batch.action_mask)


def three(batch, settings) -> tuple[np.ndarray, ...]:
    return (batch.token_rewards,) * 3


def negated(batch, settings) -> np.ndarray:
    return -batch.on_tokens(batch.rewards)


def test_an_own_estimator_is_called_and_held_to_its_contract() -> None:
    rows, keys = _pair(1.0, 0.0), {"whiten": "none"}
    got = credit_of(rows, advantage=f"{__name__}:negated", **keys)
    assert got.derived.advantages.tolist() == [-1, -1, 0, 0]
    for name, told in (
        ("not_finite", "gave advantages that are not finite, of samples 0/0, 0/1"),
        ("single", r"gave advantages float32\[4\], not float64\[4\]"),
        ("a_list", r"gave advantages a list, not float64\[4\]"),
        ("three", "gave 3 columns, not advantages and returns"),
        ("over_written", r"changes an array of its batch in place \(.*\): copy it first"),
    ):
        with pytest.raises(ValueError, match=f"^algorithm.advantage {__name__}:{name} {told}"):
            credit_of(rows, advantage=f"{__name__}:{name}", **keys)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_facts_are_the_same_bits_whatever_an_estimator_does() -> None:
    facts = make_facts([*_pair(1.0, 0.25, kl=[1.0, 2.0]), Row(1, 0, 3.0), Row(1, 1, 2.0)])
    plan, experience = plan_of(facts, 2), facts.experience(np.arange(4))
    everyone = alone(facts.table, experience.samples)

    def held() -> list[tuple[bool, bytes]]:
        arrays = [facts.table.scores.total, plan.rewards, plan.trained, plan.compared]
        arrays += [facts.table.draw_index, experience.samples.action_mask, experience.values]
        arrays += [experience.old_log_probs, experience.ref_log_probs, experience.last_values]
        return [(array.flags.writeable, array.tobytes()) for array in arrays]

    before = held()
    assert plan.rewards.flags.writeable
    for name in ("over_written", "over_written_unseen", "grpo", "gae"):
        own = f"{__name__}:{name}" if name.startswith("over") else name
        keys = {"name": "ppo" if name == "gae" else "grpo", "advantage": own}
        settings = AlgorithmSection(minibatches=1, **keys)
        told = None
        try:
            told = credit(experience, "r", facts.table, plan, settings, everyone, 0.0)
        except ValueError as error:
            assert name == "over_written" and "copy it first" in str(error)
        assert held() == before, name
        # Numbers are of the facts: 3 nats in each of two sequences, none in two.
        assert told is None or told.numbers["reference/kl_sequence"] == pytest.approx(1.5)
