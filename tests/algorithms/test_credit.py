"""From facts to advantages: what each estimator gives, by hand numbers and float64 formulas, and
the same bits on any number of data-parallel ranks.

Not covered: how the loss uses them (test_objectives.py); statistics of groups on their own
(test_advantages.py) and sums along responses (test_gae.py); own estimators
(test_own_estimator.py).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.credit import credit
from megarl.contracts.mesh import Mesh
from megarl.data.everyone import alone, everyone_of
from megarl.recipe.algorithm import AlgorithmSection
from megarl.world import World
from tests.algorithms.make_credit import Row, credit_of, make_facts, plan_of

PPO = {"name": "ppo", "gae": {"lam": 0.9}, "whiten": "none"}
KL_REWARD = {"kl": {"beta": 0.1, "place": "reward"}}


def _pair(*rewards: float, **keys) -> list[Row]:
    return [Row(0, candidate, reward, **keys) for candidate, reward in enumerate(rewards)]


def test_every_action_token_has_its_samples_advantage_and_no_other_token_has_any() -> None:
    rows = [Row(0, 0, 1.0, (1, 0, 1)), Row(0, 1, 0.0, (1,)), Row(1, 0, 5.0), Row(1, 1, 2.0)]
    got = credit_of(rows, group_std="none")
    assert got.derived.advantages.tolist() == [0.5, 0, 0.5, -0.5, 1.5, 1.5, -1.5, -1.5]
    assert got.derived.advantages.dtype == np.float32
    assert got.advantages.tolist() == [0.5, -0.5, 1.5, -1.5]
    assert (got.derived.experience_hash, got.derived.recipe_hash) == ("h", "r")
    assert got.derived.returns is None and got.derived.shaped_rewards is None
    assert got.numbers["advantage/abs_max"] == 1.5
    assert got.numbers["advantage/mean"] == pytest.approx((2 * 0.5 - 0.5) / 7)


def test_siblings_count_wherever_they_train_and_dropped_groups_do_not() -> None:
    rows = _pair(1.0, 0.0) + [Row(1, 0, 5.0), Row(1, 1, 5.0), Row(2, 0, 0.0), Row(2, 1, 2.0)]
    facts = make_facts(rows)
    plan = plan_of(facts, 2)
    settings = AlgorithmSection(minibatches=1, group_std="none")
    # Of two processes; the other's numbers come through `everyone`.
    here, there = np.array([1, 4]), np.array([0, 5])
    mine, other = (facts.experience(rows) for rows in (here, there))

    def everyone(values: np.ndarray) -> np.ndarray:
        whole = np.zeros((6, values.shape[1]))
        whole[here] = values
        return whole

    got = credit(mine, "r", facts.table, plan, settings, everyone, 0.0)
    assert got.derived.advantages.tolist() == [-0.5, -0.5, -1.0, -1.0]
    assert np.isnan(got.advantages[[2, 3]]).all()
    with pytest.raises(ValueError, match="no rank holds: 0/1, 2/0"):
        credit(other, "r", facts.table, plan, settings, alone(facts.table, other.samples), 0.0)


def test_whitening_is_over_the_tokens_of_the_iteration() -> None:
    """Token values 1, 2, 3, 4, by rewards along two responses: reinforce with γ 1."""
    rows = [
        Row(0, 0, 0.0, steps=[(0, -1.0), (1, 2.0)]),
        Row(0, 1, 0.0, steps=[(0, -1.0), (1, 4.0)]),
    ]
    by_kind = {
        "none": [1, 2, 3, 4],
        "full": [-1.1619, -0.3873, 0.3873, 1.1619],
        "scale": [0.7746, 1.5492, 2.3238, 3.0984],
    }
    for kind, right in by_kind.items():
        got = credit_of(rows, advantage="reinforce", rewards="process", whiten=kind)
        assert got.derived.advantages == pytest.approx(right, abs=1e-4)
        assert got.derived.shaped_rewards.tolist() == [-1, 2, -1, 4]


def test_whitening_of_one_token_and_of_equal_ones() -> None:
    one = [Row(0, 0, 3.0, (1,))]
    keys = {"advantage": "reinforce", "group_size": 1}
    for kind in ("full", "scale"):
        assert credit_of(one, whiten=kind, **keys).derived.advantages.tolist() == [3.0]
    equal = [Row(draw, 0, 0.1 + 0.2, (1, 0, 1)) for draw in range(3)]
    assert credit_of(equal, whiten="full", **keys).derived.advantages.tolist() == [0.0] * 9
    kept = credit_of(equal, whiten="scale", **keys).derived.advantages
    assert kept.tolist() == np.float32([0.3, 0, 0.3] * 3).tolist()
    # Equal but for rounding: 3 · 0.1 and 0.3 differ in the last bit.
    dust = [Row(0, 0, 0.1 + 0.2, (1,)), Row(1, 0, 0.3, (1,))]
    assert credit_of(dust, whiten="full", **keys).derived.advantages.tolist() == [0.0, 0.0]


def test_reinforce_discounts_rewards_less_their_kl() -> None:
    """γ 0.5, β 0.1; the last token's reward 1 less 0.1 · 2, the first's less 0.1 · 1."""
    rows = [Row(0, 0, 1.0, (1, 0, 1), kl=[1.0, 7.0, 2.0])]
    got = credit_of(rows, 1, 0.1, advantage="reinforce", gamma=0.5, whiten="none", **KL_REWARD)
    assert got.derived.shaped_rewards == pytest.approx([-0.1, 0, 0.8])
    assert got.derived.advantages == pytest.approx([-0.1 + 0.5 * 0.8, 0, 0.8])
    assert got.derived.kl_beta == 0.1
    assert got.numbers["reference/kl"] == pytest.approx(1.5)
    assert got.numbers["reference/kl_sequence"] == pytest.approx(3.0)
    assert got.numbers["reference/sequences"] == 1


def test_the_weight_in_effect_counts_not_the_recipes() -> None:
    rows = [Row(0, 0, 1.0, (1,), kl=[1.0])]
    got = credit_of(rows, 1, 0.5, advantage="reinforce", whiten="none", **KL_REWARD)
    assert got.derived.advantages.tolist() == [0.5] and got.derived.kl_beta == 0.5


def test_compared_rewards_are_less_the_sequences_kl() -> None:
    """Rewards 1 and 0 less 0.1 · (1 + 2) and 0.1 · 0: 0.7 and 0."""
    rows = [Row(0, 0, 1.0, kl=[1.0, 2.0]), Row(0, 1, 0.0)]
    for advantage, right in (("rloo", 0.7), ("grpo", 0.35), ("reinforce_baseline", 0.35)):
        keys = {"advantage": advantage, "whiten": "none", **KL_REWARD}
        keys |= {"group_std": "none"} if advantage == "grpo" else {}
        got = credit_of(rows, 2, 0.1, **keys)
        assert got.derived.advantages == pytest.approx([right, right, -right, -right], rel=1e-6)
    in_loss = credit_of(rows, 2, 0.1, group_std="none", kl={"beta": 0.1, "place": "loss"})
    assert in_loss.derived.advantages == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert in_loss.numbers["reference/kl_sequence"] == pytest.approx(1.5)


def test_reinforce_baseline_is_whitened_over_the_iteration() -> None:
    rows = _pair(1.0, 0.0) + [Row(1, 0, 4.0, (1,)), Row(1, 1, 0.0)]
    got = credit_of(rows, advantage="reinforce_baseline").derived.advantages
    tokens = np.array([0.5, 0.5, -0.5, -0.5, 2, -2, -2])
    right = (tokens - tokens.mean()) / tokens.std(ddof=1)
    assert got.tolist() == pytest.approx(right.tolist(), rel=1e-6)


def test_gae_knows_how_a_response_ended() -> None:
    """F20's numbers for the first; the second was cut off, in a state worth 2 to the critic."""
    values = [0.5, 0.6, 0.3, 0.2, 0.7]
    rows = [
        Row(0, 0, 1.0, (1, 1, 0, 0, 1), values=values, last_value=9.0),
        Row(1, 0, 0.0, (1,), cut=True, values=[0.5], last_value=2.0),
    ]
    got = credit_of(rows, 1, **PPO)
    assert got.derived.advantages == pytest.approx([0.433, 0.37, 0, 0, 0.3, 1.5], abs=1e-6)
    assert got.derived.returns == pytest.approx([0.933, 0.97, 0, 0, 1.0, 2.0], abs=1e-6)
    assert got.derived.shaped_rewards.tolist() == [0, 0, 0, 0, 1, 0]
    terminal = credit_of(rows, 1, **PPO | {"gae": {"lam": 0.9, "truncation": "terminal"}})
    assert terminal.derived.advantages[5] == np.float32(-0.5)
    values, returns = np.array([0.5, 0.6, 0.7, 0.5]), np.array([0.933, 0.97, 1.0, 2.0])
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert got.numbers["value/explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert got.numbers["return/mean"] == pytest.approx(returns.mean(), abs=1e-6)
    assert got.numbers["value/mean"] == pytest.approx(values.mean(), abs=1e-6)


def test_returns_are_those_of_advantages_before_whitening() -> None:
    rows = [Row(draw, 0, float(draw), values=[0.2, 0.1]) for draw in range(3)]
    plain, white = (credit_of(rows, 1, **PPO | {"whiten": kind}) for kind in ("none", "full"))
    assert plain.derived.returns.tobytes() == white.derived.returns.tobytes()
    whole = plain.derived.advantages.astype(np.float64)
    right = (whole - whole.mean()) / whole.std(ddof=1)
    assert white.derived.advantages == pytest.approx(right, rel=1e-5)


def test_steps_are_compared_with_their_groups_and_summed_from_behind() -> None:
    """Scores 1, 0 | 1 of a group: mean 2/3, deviation 0.57735 → 0.57735, −1.15470 | 0.57735."""
    rows = [
        Row(0, 0, 9.0, (1, 0, 1, 1), steps=[(1, 1.0), (2, 0.0)]),
        Row(0, 1, 9.0, (1, 1), steps=[(1, 1.0)]),
    ]
    got = credit_of(rows, rewards="process").derived.advantages
    # The first step ends in a hole and counts at the action before it; after the last step: 0.
    right = [0.57735 - 1.15470, 0, -1.15470, 0, 0.57735, 0.57735]
    assert got == pytest.approx(right, abs=1e-4)
    half = credit_of(rows, rewards="process", group_std="none").derived.advantages
    assert half == pytest.approx([-1 / 3, 0, -2 / 3, 0, 1 / 3, 1 / 3], abs=1e-6)


def test_steps_of_masked_rows_are_compared_and_shaped_totals_are_summed() -> None:
    rows = [
        *(Row(0, 0, 0.0, steps=[(1, 1.0)]), Row(0, 1, 0.0, steps=[(1, 0.0)])),
        Row(0, 2, 0.0, (1,) * 8, steps=[(7, -4.0)], cut=True),
    ]
    masked = {"overlong": {"mask_truncated": True}}
    got = credit_of(rows, 3, rewards="process", group_std="none", **masked)
    assert got.derived.advantages.tolist() == [2, 2, 1, 1]
    longer = [Row(0, 0, 1.0, (1,) * 6)]
    overlong = {"buffer_tokens": 4, "penalty": 1.0}
    got = credit_of(longer, 1, advantage="reinforce", whiten="none", overlong=overlong)
    assert got.derived.advantages.tolist() == [0.5] * 6


def test_overlong_totals_are_what_is_compared_and_masked_rows_are_compared() -> None:
    """Limit 8, buffer 4: 6 tokens cost half a point. The cut off one is compared, not trained."""
    rows = [
        Row(0, 0, 1.0, (1,) * 6),
        Row(0, 1, 1.0),
        Row(0, 2, 0.0, (1,) * 8, cut=True),
    ]
    overlong = {"buffer_tokens": 4, "penalty": 1.0, "mask_truncated": True}
    got = credit_of(rows, 3, group_std="none", overlong=overlong)
    # Totals 0.5, 1 and −1 have mean 1/6.
    assert got.advantages[:2] == pytest.approx([1 / 3, 5 / 6]) and np.isnan(got.advantages[2])
    assert len(got.derived.advantages) == 8


def test_a_response_without_an_action_and_nothing_at_all() -> None:
    rows = [Row(0, 0, 1.0, (0, 0)), Row(0, 1, 0.0)]
    for advantage in ("grpo", "rloo", "reinforce", "reinforce_baseline"):
        got = credit_of(rows, advantage=advantage)
        assert got.derived.advantages[:2].tolist() == [0, 0] and got.advantages[0] == 0
        assert np.isfinite(list(got.numbers.values())).all()
    # Nothing trains: the probe's rows have no credit, and there are no numbers.
    none = credit_of(_pair(1.0, 1.0))
    assert not none.derived.advantages.any() and none.numbers == {}
    assert np.isnan(none.advantages).all()
    white = credit_of(_pair(1.0, 1.0), whiten="full")
    assert not white.derived.advantages.any()


def test_what_is_missing_is_refused() -> None:
    facts = make_facts(_pair(1.0, 0.0))
    plan, whole = plan_of(facts, 2), facts.experience(np.arange(2))
    everyone = alone(facts.table, whole.samples)
    for change, keys, told in (
        ({"ref_log_probs": None}, KL_REWARD, "needs reference log-probs"),
        ({"values": None, "last_values": None}, PPO, "needs the critic's values"),
        ({"last_values": None}, PPO, "after the last token"),
        ({}, {"advantage": "rloo", "rewards": "process"}, "rloo compares totals"),
    ):
        settings = AlgorithmSection(minibatches=1, **keys)
        with pytest.raises(ValueError, match=told):
            credit(replace(whole, **change), "r", facts.table, plan, settings, everyone, 0.1)
    odd = SimpleNamespace(
        trained=plan.trained, compared=plan.compared, rewards=np.array([1, np.nan])
    )
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        settings = AlgorithmSection(minibatches=1)
        credit(whole, "r", facts.table, odd, settings, everyone, 0.0)


SETTINGS = (
    {},
    {"advantage": "rloo", "whiten": "scale"},
    {"advantage": "reinforce_baseline", **KL_REWARD},
    {"advantage": "reinforce", "gamma": 0.97, **KL_REWARD},
    {"name": "ppo", "gamma": 0.99, "kl": {"beta": 0.1}},
    {"rewards": "process", "group_std": "leave_one_out"},
)


def _random_rows() -> list[Row]:
    rng = np.random.default_rng(3)
    rows = []
    for draw in range(5):
        for candidate in range(3):
            length = int(rng.integers(1, 9))
            mask = rng.random(length) < 0.8
            steps = [(int(at), float(rng.normal())) for at in sorted(rng.integers(0, length, 2))]
            numbers = {name: rng.normal(size=length).tolist() for name in ("values", "kl")}
            reward, cut = float(rng.normal()), bool(rng.random() < 0.3)
            last = float(rng.normal())
            rows.append(Row(draw, candidate, reward, mask, steps, cut, last_value=last, **numbers))
    return rows


def _on_ranks(size: int) -> list:
    """Derived columns of all samples by key, and what every rank knows, for each setting."""
    world = World(Mesh(size, tp=1), torch.device("cpu"), 20.0)
    facts = make_facts(_random_rows())
    told = []
    for keys in SETTINGS:
        settings = AlgorithmSection(minibatches=2, **keys)
        plan = plan_of(facts, 3, dp=size, minibatches=2, **keys)
        # On four ranks the last one has nothing.
        owner = np.where(plan.trained, np.arange(len(facts.table)) % min(size, 3), -1)
        experience = facts.experience(np.flatnonzero(owner == world.rank))
        samples = experience.samples
        everyone = everyone_of(world, facts.table, samples)
        got = credit(experience, "r", facts.table, plan, settings, everyone, 0.1)
        names = ("advantages", "shaped_rewards", "returns")
        columns = [getattr(got.derived, name) for name in names]
        by_key = {
            int(key): [
                None
                if column is None
                else column[slice(*samples.response_offsets[row : row + 2])].tobytes()
                for column in columns
            ]
            for row, key in enumerate(samples.keys)
        }
        told.append((by_key, got.advantages.tobytes(), got.numbers))
    return told


@pytest.mark.dist
def test_any_number_of_ranks_gives_the_same_bits(ranks) -> None:
    (expected,) = ranks.run(1, _on_ranks, 1)
    for keys, (by_key, _, numbers) in zip(SETTINGS, expected, strict=True):
        assert len(by_key) > 6 and np.isfinite(list(numbers.values())).all(), keys
    for size in (2, 4):
        told = ranks.run(size, _on_ranks, size)
        for at, (by_key, advantages, numbers) in enumerate(expected):
            parts = [rank[at] for rank in told]
            assert {key: row for part in parts for key, row in part[0].items()} == by_key
            assert all(part[1:] == (advantages, numbers) for part in parts), SETTINGS[at]
