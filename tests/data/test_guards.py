"""Guards before the loss: each planted fault is refused on all ranks, by sample and field.

Two gloo ranks, two data-parallel parts; the fault is on rank 1 alone. Not covered: pipeline padding
(`pad_pack` has its own tests), a plan that differs between ranks (the digest of `gather_table` and
the seal's vote).
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megarl.contracts.records import RewardStatus
from megarl.data.guards import GuardError, check_sealed
from megarl.recipe.algorithm import OverlongSection
from tests.data.make_iteration import (
    CRITIC,
    REFERENCE,
    VERSION,
    Iteration,
    guard,
    make_iteration,
    recipe,
    spoilt,
)
from tests.data.make_samples import make_record
from tests.data.planted_faults import DERIVED, FACTS
from tests.data.planted_faults_critic import CRITIC_FACTS

RELOADED = ("nan in old", "a row is in two packs", "totals", "half a group", "a hole in the mask")
"""Of `FACTS`, what is also looked at in experience that was sealed earlier."""


PPO = {"name": "ppo", "overlong": OverlongSection(mask_truncated=True)}


def _told_of_facts(it: Iteration, **judge: object) -> str:
    try:
        guard(it, **judge).check_facts(it.producers, it.prepared, it.scores, it.table, it.plan)
    except GuardError as error:
        return str(error)
    return ""


def _told_of_ppo(it: Iteration) -> str:
    critic = SimpleNamespace(optimizer_step=it.critic_step)
    rules = {"algorithm": recipe(**PPO).algorithm, "critic": critic, "critic_version": CRITIC}
    return _told_of_facts(it, **rules)


def _told_of_derived(it: Iteration, **judge: object) -> str:
    try:
        guard(it, **judge).check_derived(it, it.derived)
    except GuardError as error:
        return str(error)
    return ""


def _told_of_sealed(it: Iteration) -> str:
    it = replace(it, experience=spoilt(it.experience, samples=it.prepared.samples))
    try:
        check_sealed(it.world, guard(it).identities, recipe(), "recipe", it, it.derived)
    except GuardError as error:
        return str(error)
    return ""


def _refusals() -> dict[str, tuple[str, str]]:
    """In the ranks: what each fault leads to, and the first sample of rank 1."""
    whole, of_ppo = make_iteration(), make_iteration(**PPO)
    sound = _told_of_facts(whole) + _told_of_derived(whole) + _told_of_sealed(whole)
    told = {"none": ("", sound)}
    rules = recipe(**PPO).algorithm
    told["none of ppo"] = ("", _told_of_ppo(of_ppo) + _told_of_derived(of_ppo, algorithm=rules))
    for kind, of, faults, judged in (
        ("facts", whole, FACTS, _told_of_facts),
        ("derived", whole, DERIVED, _told_of_derived),
        ("sealed", whole, {name: FACTS[name] for name in RELOADED}, _told_of_sealed),
        ("critic", of_ppo, CRITIC_FACTS, _told_of_ppo),
    ):
        first = guard(of).identities.sample_id(
            int(of.prepared.samples.draw_index[0]), int(of.prepared.samples.candidate[0])
        )
        for name, (spoil, _) in faults.items():
            it = replace(of)
            if whole.world.rank == 1:
                spoil(it)
            told[f"{kind}: {name}"] = (first, judged(it))
    return told


@pytest.fixture(scope="module")
def refusals(ranks) -> list[dict[str, tuple[str, str]]]:
    return ranks.run(2, _refusals)


@pytest.mark.dist
def test_a_sound_iteration_passes(refusals) -> None:
    for name in ("none", "none of ppo"):
        assert [told[name] for told in refusals] == [("", ""), ("", "")]


NAMES = [
    *(f"facts: {name}" for name in FACTS),
    *(f"derived: {name}" for name in DERIVED),
    *(f"sealed: {name}" for name in RELOADED),
    *(f"critic: {name}" for name in CRITIC_FACTS),
]
OF_KIND = {"derived": DERIVED, "critic": CRITIC_FACTS}
SUBJECT = {
    "facts": "facts",
    "critic": "facts",
    "derived": "advantages",
    "sealed": "sealed experience",
}


@pytest.mark.dist
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_refused_on_every_rank_by_sample_and_field(refusals, name: str) -> None:
    kind, _, fault = name.partition(": ")
    _, pattern = OF_KIND.get(kind, FACTS)[fault]
    first, told = refusals[1][name]
    assert refusals[0][name][1] == told
    assert told.startswith(f"the {SUBJECT[kind]} of iteration 3 may not train: rank 1: ")
    assert re.search(pattern.replace("FIRST", re.escape(first)), told), told
    assert "\n" not in told


def _without_returns() -> str:
    it = make_iteration(**PPO)
    it.derived = spoilt(it.derived, returns=None)
    return _told_of_derived(it, algorithm=recipe(**PPO).algorithm)


@pytest.mark.dist
def test_a_critic_without_anything_to_learn_is_refused(ranks) -> None:
    (told,) = ranks.run(1, _without_returns)
    assert "returns of the advantages: none there, the critic learns them" in told


def _partial(rule: str) -> str:
    records = [make_record(d, c, float(c)) for d in range(3) for c in range(2)]
    records[1] = make_record(0, 1, None, RewardStatus.ERROR)
    it = make_iteration(records, partial_groups=rule)
    rules = recipe(partial_groups=rule).algorithm
    return _told_of_facts(it, algorithm=rules) + _told_of_derived(it, algorithm=rules)


@pytest.mark.dist
@pytest.mark.parametrize("rule", ["drop", "keep_scored"])
def test_both_partial_rules_pass_as_declared(ranks, rule: str) -> None:
    assert ranks.run(2, _partial, rule) == ["", ""]


def _without_reference() -> str:
    it = make_iteration()
    it.producers = {"rollout": VERSION.id, "old": VERSION.id}
    it.prepared = replace(it.prepared, ref_log_probs=None)
    sound = _told_of_facts(it, reference=None)
    it.producers["ref"] = REFERENCE.id
    return sound + "|" + _told_of_facts(it, reference=None)


@pytest.mark.dist
def test_log_probs_of_a_reference_that_nobody_asked_for_are_refused(ranks) -> None:
    (told,) = ranks.run(1, _without_reference)
    assert told.startswith("|the facts") and "expects none" in told


def _nothing_trains() -> str:
    it = make_iteration([make_record(d, c, 1.0) for d in range(3) for c in range(2)])
    return _told_of_facts(it) + _told_of_derived(it)


@pytest.mark.dist
def test_an_iteration_that_only_probes_passes(ranks) -> None:
    assert ranks.run(2, _nothing_trains) == ["", ""]
