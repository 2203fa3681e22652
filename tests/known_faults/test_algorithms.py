"""What went wrong elsewhere in advantages, losses, grouping and packing, with the right numbers.

Not covered here: losses (test_losses.py), estimators beside GRPO (test_credit.py); context
parallelism, which is not offered; what the recipe refuses (test_recipe.py); the model's own
positions and attention (test_models.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import grpo_advantages, per_token
from megarl.algorithms.reduction import Totals, token_weights
from megarl.contracts.mesh import Mesh
from megarl.contracts.records import RewardStatus, Scores
from megarl.contracts.samples import End, EndReason, Sample, Samples
from megarl.data.exchange import exchange, gather_table
from megarl.data.packing import build_pack
from megarl.rollout.groups import plan_iteration, select_groups
from megarl.world import World
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_record, make_samples


def _grpo(*groups: list[float], std: str = "sample", eps: float = 1e-6) -> list[float]:
    total = np.array([reward for group in groups for reward in group], dtype=np.float64)
    group = np.repeat(np.arange(len(groups)), [len(rewards) for rewards in groups])
    return grpo_advantages(total, group, np.isfinite(total), std, eps).tolist()


def test_statistics_are_the_prompts_own_groups() -> None:
    assert _grpo([1, 0], [1, 1]) == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)


def test_the_std_is_the_samples_with_eps_added() -> None:
    assert _grpo([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert _grpo([1, 0, 0, 0], std="none") == [0.75, -0.25, -0.25, -0.25]
    assert _grpo([1, 0, 0, 0], std="population") == pytest.approx(
        [1.7320, -0.5773] + [-0.5773] * 2, abs=1e-4
    )
    eight = _grpo([1, 0, 1, 1, 0, 0, 0, 0])
    assert sorted(set(np.round(eight, 4))) == [-0.7246, 1.2076]


def test_close_but_unequal_rewards_keep_their_advantage() -> None:
    pairs = np.float32([[1.00000, 1.00001], [2.00000, 2.00001]]).tolist()
    # fp32 spaces values near 2 by 2.4e-7, so the second pair is 1.001e-5 apart instead of 1e-5.
    assert _grpo(*pairs) == pytest.approx([-0.6196, 0.6196, -0.6196, 0.6196], abs=3e-4)


def test_equal_reward_values_give_exactly_zero() -> None:
    for value in (0.95, 0.1, 0.1 + 0.2, 1e-30, float(np.float32(0.95))):
        for size in (2, 3, 7, 8):
            assert _grpo([value] * size) == [0.0] * size
    assert max(map(abs, _grpo([0.0] + [float(np.float32(0.95))] * 7))) < 2.5


def test_an_unscorable_sample_is_left_out() -> None:
    got = _grpo([1, 0, math.nan, 0])
    assert got == pytest.approx([1.1547, -0.5773, 0, -0.5773], abs=1e-4)
    assert _grpo([1, math.nan, math.nan]) == [0, 0, 0]
    records = [make_record(0, c, v) for c, v in enumerate([1.0, 0.0])]
    records += [make_record(0, 2, None, RewardStatus.ERROR), make_record(0, 3, 0.0)]
    table = Scores.from_records(records)
    selection = select_groups(table, np.zeros(4), 4, "drop", "keep_scored")
    assert selection.kept.tolist() == [True, True, False, True]
    again = grpo_advantages(table.total, table.draw_index, selection.kept, "sample", 1e-6)
    assert again.tolist() == got


def test_a_singleton_has_no_advantage_and_is_counted() -> None:
    assert _grpo([1.0]) == [0.0]
    table = Scores.from_records([make_record(0, 0, 1.0)])
    selection = select_groups(table, np.zeros(1), 1, "keep", "keep_scored")
    assert not selection.kept.any() and selection.counts["groups_of_one"] == 1


def _one(response: list[int], reason: EndReason) -> Samples:
    n = len(response)
    return Samples.from_rows(
        [
            Sample(
                draw_index=0,
                candidate=0,
                prompt_ids=np.array([7, 8]),
                response_ids=np.array(response),
                action_mask=np.ones(n, bool),
                rollout_log_probs=-np.ones(n, np.float32),
                end=End.TERMINATED,
                end_reason=reason,
                seed=0,
                started=0.0,
                finished=1.0,
            )
        ],
        "v",
    )


def test_a_response_is_trained_to_its_stop_token_whatever_its_id() -> None:
    # eos = pad = 0, and 0 also inside the response: length says what is real, never an id.
    samples = _one([5, 0, 6, 0], EndReason.EOS)
    pack = build_pack(samples, [0])
    weights = token_weights("token_mean", pack.action_mask_A, pack.sequence_A, Totals(4, 1), 8)
    assert pack.target_A.tolist() == [5, 0, 6, 0] and weights.tolist() == [0.25] * 4
    assert per_token(np.array([1.0]), samples.response_lengths).tolist() == [1, 1, 1, 1]


def test_a_response_that_was_cut_keeps_the_engines_ids() -> None:
    samples = _one([4, 5, 6], EndReason.MAX_TOKENS)
    pack = build_pack(samples.select([0]).canonical(), [0])
    assert pack.target_A.tolist() == [4, 5, 6] and samples[0].end is End.TRUNCATED
    assert per_token(np.array([2.0]), samples.response_lengths).tolist() == [2, 2, 2]


def test_the_token_before_predicts_and_neighbours_do_not() -> None:
    samples = make_samples([(0, 0, 3, 3), (0, 1, 3, 2)])
    pack = build_pack(samples, [0, 1])
    predicting = torch.zeros(11, dtype=torch.long)
    predicting[pack.predictor_A] = 1
    assert predicting[:6].tolist() == [0, 0, 1, 1, 1, 0]
    tokens = torch.zeros(11, dtype=torch.long)
    tokens[pack.predictor_A + 1] = 1
    assert tokens[:6].tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(pack.token_ids_T[pack.predictor_A + 1], pack.target_A)
    starts = pack.cu_seqlens[:-1].long()
    assert not torch.isin(pack.predictor_A + 1, starts).any()


def test_positions_count_real_tokens_only() -> None:
    pack = build_pack(make_samples([(0, 0, 1, 2), (0, 1, 2, 2)]), [1, 0])
    assert pack.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]


def _iteration(rewards: dict[tuple[int, int], float]) -> tuple[list, list, list]:
    """Candidates of a group on different replicas; returns what this rank will run."""
    world = World(Mesh(2, tp=1), torch.device("cpu"), 20.0)
    mine = [(d, c, 2, 3) for d, c in rewards if c % 2 == world.rank]
    records = [make_record(d, c, rewards[d, c]) for d, c, _, _ in mine]
    samples = make_samples(mine)
    table = gather_table(world, samples, records)
    recipe = make_rules(group_size=2, prompts=3, tokens=5, minibatches=2)
    plan = plan_iteration(table, recipe, world.mesh.dp)
    owned = exchange(world, samples, table, plan.update.owner)
    own, scored = owned.samples, owned.scores
    advantages = grpo_advantages(
        table.scores.total, table.draw_index, plan.selection.kept, "sample", 1e-6
    )
    packs = [len(part) for part in plan.update.local_packs(world.dp_index)]
    assert np.array_equal(scored.draw_index, own.draw_index)
    ids = list(zip(own.draw_index.tolist(), own.candidate.tolist(), strict=True))
    return packs, advantages.round(4).tolist(), ids


@pytest.mark.dist
def test_a_group_spread_over_ranks_is_still_one_group(ranks) -> None:
    rewards = {(d, c): float(c == d % 2) for d in range(3) for c in range(2)}
    told = ranks.run(2, _iteration, rewards)
    assert told[0][1] == told[1][1] == [0.7071, -0.7071, -0.7071, 0.7071, 0.7071, -0.7071]
    assert sorted(told[0][2] + told[1][2]) == sorted(rewards)


@pytest.mark.dist
@pytest.mark.parametrize("mixed", [[0], []])
def test_dropping_is_global_so_every_rank_runs_as_many_packs(ranks, mixed) -> None:
    rewards = {(d, c): float(c if d in mixed else 1) for d in range(3) for c in range(2)}
    told = ranks.run(2, _iteration, rewards, timeout=20)
    assert told[0][0] == told[1][0] == [1, 1]
    # Where nothing trains, the first group is packed all the same, to be compared, at no weight.
    packed = mixed or [0]
    assert sorted(told[0][2] + told[1][2]) == [(d, c) for d in packed for c in range(2)]
