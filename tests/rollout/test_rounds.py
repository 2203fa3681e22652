"""How an iteration's rounds are decided, on real ranks with real scoring.

Responses are given here; that a generator makes them, awake between rounds, and loses some, is
shown by whole runs in tests/launch/test_rounds.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.contracts.mesh import Mesh
from megarl.contracts.records import Prompt
from megarl.contracts.samples import Samples
from megarl.data.curriculum import Curriculum, CurriculumError, Seen
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptError, PromptSet
from megarl.recipe import DynamicSamplingSection
from megarl.rewards.score import RewardError, ScoringPool
from megarl.rollout.collect import Grading
from megarl.rollout.requests import Loss, LostGeneration, LostReason
from megarl.rollout.rounds import Rounds, Sampled, prompts_wanted, shortfall
from megarl.world import World
from tests.data.make_rules import make_rules
from tests.rewards.make_pool import GRADERS, sample, scoring

GROUP = 2
KNOWN = np.ones(128, dtype=bool)


def _rows(count: int) -> PromptSet:
    rows = tuple(Prompt(str(i), ("even", "odd")[i % 2], "x", (1,), "1") for i in range(count))
    return PromptSet(rows, (), {}, "blake3:x")


def _recipe(rounds: int, target: int, **more: Any) -> SimpleNamespace:
    rules = make_rules(
        group_size=GROUP, prompts=target, dynamic_sampling=DynamicSamplingSection(max_rounds=rounds)
    )
    rules.data = SimpleNamespace(curriculum=None)
    rules.rollout.max_lost_share = more.get("max_lost_share", 0.0)
    rules.reward = SimpleNamespace(max_error_share=more.get("max_error_share", 0.0))
    return rules


def _text(prompt_id: str, candidate: int) -> str:
    """Rows 0, 3, 6, … are informative; all responses of the others score the same."""
    return f"score {candidate if int(prompt_id) % 3 == 0 else 1}"


def _sample_all(
    world: World, pool: ScoringPool, recipe: Any, rows: int, fails: str = "", loses: str = ""
) -> tuple[list[int], int, Sampled]:
    """One iteration; a response of prompt `fails` cannot be scored, one of `loses` is lost."""
    cursor = PromptCursor(_rows(rows), 1, recipe.rollout.prompts_per_iteration)
    rounds = Rounds(world, recipe, cursor, {"5"}, iteration=0)
    sizes = []
    while prompts := rounds.draw():
        first, samples, losses = rounds.first_draw, [], []
        sizes.append(len(prompts))
        mine = pool if world.leads_replica else None
        grading = Grading(mine, prompts, KNOWN, first)
        for draw, prompt in enumerate(prompts, first):
            for candidate in range(GROUP):
                if (draw + candidate) % world.mesh.replicas != world.replica:
                    continue
                text = _text(prompt.prompt_id, candidate)
                if (prompt.prompt_id, candidate) == (fails, 1):
                    text = "raise it"
                if (prompt.prompt_id, candidate) == (loses, 1):
                    losses.append(Loss(draw, candidate, LostReason.ABORTED, "told to"))
                    continue
                samples.append(sample(text, draw, candidate))
                grading.submit(samples[-1])
        rounds.add(prompts, Samples.from_rows(samples, "v").canonical(), losses, grading)
        if rounds.may_go_on:
            rounds.grade()
    return sizes, rounds.informative, rounds.finish()


def _world(size: int, rollout_tp: int) -> World:
    return World(Mesh(size, tp=1, rollout_tp=rollout_tp), torch.device("cpu"), 20.0)


def _told(size: int, rollout_tp: int) -> list:
    """(round sizes, informative groups, prompts) of several recipes, and this rank's rewards."""
    world = _world(size, rollout_tp)
    found = []
    with scoring(f"{GRADERS}:obey") as pool:
        for rounds, target, rows in ((1, 4, 30), (5, 4, 30), (2, 4, 30), (9, 4, 9), (9, 2, 30)):
            sizes, informative, sampled = _sample_all(world, pool, _recipe(rounds, target), rows)
            found.append([sizes, informative, [p.prompt_id for p in sampled.prompts]])
            _check_joined(world, sampled, rounds)
    return found


def _check_joined(world: World, sampled: Sampled, rounds: int) -> None:
    assert "5" not in [prompt.prompt_id for prompt in sampled.prompts]
    pairs = list(zip(sampled.samples.draw_index, sampled.samples.candidate, strict=True))
    scored = [(record.draw_index, record.candidate) for record in sampled.records]
    assert sorted(scored) == (sorted(pairs) if world.leads_replica else [])
    for record in sampled.records:
        prompt_id = sampled.prompts[record.draw_index].prompt_id
        assert record.total == float(_text(prompt_id, record.candidate).split()[1])
    assert sampled.drawn.sources == tuple(p.source for p in sampled.prompts)
    assert sampled.drawn.lost == {} and 1 <= sampled.drawn.rounds <= rounds


@pytest.mark.dist
def test_rounds_go_on_until_enough_groups_are_informative_on_any_number_of_ranks(ranks) -> None:
    (expected,) = ranks.run(1, _told, 1, 1)
    for size, rollout_tp in ((2, 1), (2, 2)):
        for told in ranks.run(size, _told, size, rollout_tp):
            assert told == expected

    one, many, two, few, small = expected
    assert one[0] == [4] and one[1] == 0  # nothing is decided: the rewards may still be out
    for sizes, informative, prompts in (many, two, few, small):
        assert len(set(prompts)) == len(prompts) == sum(sizes)
        assert informative <= sum(int(prompt_id) % 3 == 0 for prompt_id in prompts)
    assert many[1] >= 4 and len(many[0]) > 1
    assert many[2][:4] == one[2] and small[2][:2] == one[2][:2]
    assert two[0] == many[0][:2] and len(two[0]) == 2
    # Of nine rows, one of them barred, three are informative: every row is drawn, once.
    assert sum(few[0]) == 8 and few[1] == 3


def _limits(size: int) -> list[str]:
    world = _world(size, 1)
    lossy, failing = {"loses": "3"}, {"fails": "3"}
    found = []
    for more, fate in (
        ({}, lossy),
        ({"max_lost_share": 0.1}, lossy),
        ({}, failing),
        ({"max_error_share": 0.1}, failing),
    ):
        with scoring(f"{GRADERS}:obey") as pool:
            try:
                _, _, sampled = _sample_all(world, pool, _recipe(1, 8, **more), 9, **fate)
            except (LostGeneration, RewardError) as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append(str(sampled.drawn.lost))
    return found


@pytest.mark.dist
def test_a_loss_or_failure_on_one_replica_is_every_ranks_decision(ranks) -> None:
    """16 responses are asked for; one is lost, on one replica, or cannot be scored."""
    for told in ranks.run(2, _limits, 2):
        stopped, allowed, failed, passed = told
        assert stopped.startswith("LostGeneration: 1 of 16 responses are lost")
        assert "rollout.max_lost_share is 0: draw" in stopped and "(told to)" in stopped
        assert allowed == "{'aborted': 1}"
        assert failed.startswith("RewardError: 1 of 16 responses could not be scored")
        assert passed == "{}"


def _exhausted() -> str:
    world = _world(1, 1)
    rounds = Rounds(world, _recipe(1, 2), PromptCursor(_rows(2), 1, 2), {"0", "1"}, iteration=0)
    try:
        rounds.draw()
    except PromptError as error:
        return str(error)
    return "drawn"


@pytest.mark.dist
def test_a_run_whose_prompts_are_all_in_quarantine_stops_with_one_line(ranks) -> None:
    (told,) = ranks.run(1, _exhausted)
    assert told.startswith("every training prompt is in quarantine") and "\n" not in told


HERE = "tests.rollout.test_rounds"


def by_rank(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    """Differs on rank 1, and not before the first iteration that is drawn."""
    return iteration == 0 or (int(prompt.prompt_id) + torch.distributed.get_rank()) % 2 == 0


def fails_on_rank_1(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return iteration == 0 or 1 / (1 - torch.distributed.get_rank()) > 0


def first_four(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return iteration == 0 or int(prompt.prompt_id) < 4


def refuses_all(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return iteration == 0


def _with_curriculum(function: str) -> list[str]:
    """What this rank draws, in up to three rounds of up to 3, in iteration 1."""
    world = _world(2, 1)
    cursor = PromptCursor(_rows(9), 1, 3, Curriculum(f"{HERE}:{function}"))
    rounds = Rounds(world, _recipe(3, 3), cursor, {"0"}, iteration=1)
    drawn = []
    try:
        while prompts := rounds.draw():
            drawn += [prompt.prompt_id for prompt in prompts]
            rounds.done += 1
    except (CurriculumError, PromptError) as error:
        return [f"{type(error).__name__}: {error}"]
    return drawn


@pytest.mark.dist
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("by_rank", "keeps other prompts on rank 1 than on rank 0 in iteration 1; it must follow"),
        ("fails_on_rank_1", "in iteration 1, raised ZeroDivisionError"),
        ("refuses_all", "refuses every training prompt that is not in quarantine in iteration 1"),
    ],
)
def test_a_curriculum_that_fails_or_differs_on_a_rank_stops_every_rank(ranks, function, says):
    first, second = ranks.run(2, _with_curriculum, function)
    assert first == second and len(first) == 1 and "\n" not in first[0]
    assert f"Error: data.curriculum: {HERE}:{function}" in first[0] and says in first[0]


@pytest.mark.dist
def test_rounds_end_where_a_curriculum_keeps_no_more(ranks):
    first, second = ranks.run(2, _with_curriculum, "first_four")
    assert first == second and sorted(first) == ["1", "2", "3"]


def test_too_few_prompts_are_told_with_what_keeps_the_others_back():
    counts = {"groups": 3, "groups_informative": 3}
    plan: Any = SimpleNamespace(selection=SimpleNamespace(counts=counts), account={"rounds": 1})
    recipe = _recipe(1, 4)
    says = "iteration 7: only 3 of 4 prompts are left, the others are in quarantine"
    assert shortfall(7, recipe, plan) == says
    recipe.data.curriculum = f"{HERE}:first_four"
    assert shortfall(7, recipe, plan) == f"{says}, or refused by data.curriculum"


@pytest.mark.parametrize(
    "missing, informative, drawn, expected",
    [(8, 0, 0, 8), (8, 0, 8, 8), (4, 4, 8, 8), (1, 7, 8, 2), (3, 5, 8, 5), (7, 1, 8, 8)],
)
def test_a_round_draws_what_the_share_so_far_asks_for(missing, informative, drawn, expected):
    assert prompts_wanted(missing, informative, drawn, 8) == expected


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 500), st.integers(1, 500))
def test_a_round_is_never_empty_and_never_too_large(missing, informative, more, most):
    assert 1 <= prompts_wanted(missing, informative, informative + more, most) <= most
