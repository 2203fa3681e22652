"""Faults in what a critic and a moving KL weight leave: values, returns, token rewards, steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from tests.audit.fault import fault
from tests.audit.forge import Columns, Forger

CUT_OFF = 3
"""An `end_reason`: the most tokens."""


def _edit(forger: Forger, part: str, name: str, change: Callable[[np.ndarray], None]) -> None:
    """A column of iteration 1, and every hash above it made right."""
    forger.columns(1, part, lambda columns, _: change(columns[name]))
    forger.all_hashes(1)


def _set(at: int, value: float) -> Callable[[np.ndarray], None]:
    return lambda column: column.__setitem__(at, value)


@fault("parts", "scored_0")
def a_flipped_bit_of_a_value(forger: Forger) -> None:
    forger.flip(1, "scored_0", "values")


@fault("log_probs", "the value of token 3 is nan")
def a_value_that_is_no_number(forger: Forger) -> None:
    _edit(forger, "scored_0", "values", _set(3, np.nan))


@fault("log_probs", "the value after its last token is inf")
def a_value_after_the_end_that_is_none(forger: Forger) -> None:
    _edit(forger, "scored_0", "last_values", _set(0, np.inf))


@fault("advantages", "returns")
def an_edited_value(forger: Forger) -> None:
    _edit(forger, "scored_0", "values", _set(3, 0.75))


@fault("advantages", "advantages")
def an_edited_value_after_a_response_that_was_cut_off(forger: Forger) -> None:
    """It is what the response is bootstrapped with; other ones are not read."""
    ends: dict[tuple[int, int], int] = {}
    for part in ("rollout_0", "rollout_1"):
        held, _ = forger.read_columns(1, part)
        pairs = zip(held["draw_index"].tolist(), held["candidate"].tolist(), strict=True)
        ends |= dict(zip(pairs, held["end_reason"].tolist(), strict=True))

    def edit(columns: Columns, _: dict) -> None:
        pairs = zip(columns["draw_index"].tolist(), columns["candidate"].tolist(), strict=True)
        row = next(row for row, pair in enumerate(pairs) if ends[pair] == CUT_OFF)
        columns["last_values"][row] += 1

    forger.columns(1, "scored_0", edit)
    forger.all_hashes(1)


@fault("advantages", "returns")
def an_edited_return(forger: Forger) -> None:
    _edit(forger, "derived_0", "returns", _set(0, 3.0))


@fault("advantages", "shaped_rewards")
def an_edited_token_reward(forger: Forger) -> None:
    _edit(forger, "derived_0", "shaped_rewards", _set(0, 3.0))


@fault("advantages", "returns")
def returns_left_out(forger: Forger) -> None:
    forger.columns(1, "derived_0", lambda columns, _: columns.pop("returns") is None)
    forger.all_hashes(1)


@fault("columns", "values and last_values are not both there")
def values_without_those_after_the_end(forger: Forger) -> None:
    forger.columns(1, "scored_0", lambda columns, _: columns.pop("last_values") is None)
    forger.all_hashes(1)


@fault("producers", "values of a critic are needed by the recipe")
def a_critic_left_out(forger: Forger) -> None:
    def edit(columns: Columns, told: dict) -> None:
        del columns["values"], columns["last_values"], told["producers"]["critic"]

    forger.columns(1, "scored_0", edit)
    forger.manifest(1, lambda told: told["producers"].pop("critic"))
    forger.all_hashes(1)


@fault("producers", "is the critic of then")
def values_of_an_earlier_critic(forger: Forger) -> None:
    _made_by(forger, "critic", 1, _version_of(forger, "critic", 0))


@fault("producers", "is the reference of then")
def log_probs_of_the_reference_before_its_refresh(forger: Forger) -> None:
    _made_by(forger, "ref", 3, _version_of(forger, "reference", 0))


def _version_of(forger: Forger, role: str, number: int) -> str:
    lines = map(json.loads, (forger.run / "versions.jsonl").read_text().splitlines())
    return [line["id"] for line in lines if line.get("role") == role][number]


def _made_by(forger: Forger, role: str, iteration: int, version: str) -> None:
    def edit(_: Columns, told: dict) -> None:
        told["producers"][role] = version

    forger.columns(iteration, "scored_0", edit)
    forger.manifest(iteration, lambda told: told["producers"].update({role: version}))
    forger.all_hashes(iteration)


@fault("versions producers", "no entry")
def a_critic_without_an_entry(forger: Forger) -> None:
    used = _version_of(forger, "critic", 1)
    forger.lines("versions.jsonl", lambda lines: [v for v in lines if v["id"] != used])


@fault("handovers", "once more than journal.jsonl has ACTOR_COMMITTED")
def a_critic_told_twice(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines.append(dict([line for line in lines if line.get("role") == "critic"][-1]))

    forger.lines("versions.jsonl", edit)


@fault("updates metrics", "3 steps, the recipe has 2 × 2 minibatches")
def a_step_of_the_critic_is_missing(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[1]["critic"].pop())


@fault("updates", "out of order")
def steps_of_two_passes_swapped(forger: Forger) -> None:
    def edit(lines: list) -> None:
        steps = lines[1]["steps"]
        steps[1], steps[2] = steps[2], steps[1]
        for at, other in ((1, 2), (2, 1)):  # the numbers stay where they were
            for name in ("tokens", "sequences"):
                steps[at][name] = lines[1]["critic"][at][name]
            assert steps[at]["epoch"] != steps[other]["epoch"]

    forger.lines("updates.jsonl", edit)


@fault("updates losses", "the critic was warming up")
def a_step_of_the_actor_while_the_critic_warmed_up(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[0]["steps"] = [lines[0]["critic"][0] | {"stepped": False, "skipped_reason": "none"}]

    forger.lines("updates.jsonl", edit)
    forger.lines("metrics.jsonl", lambda lines: lines[0].update({"update/skipped": 1.0}))


@fault("updates metrics", "a step was stopped, and nothing stops these")
def a_stop_that_nobody_asked_for(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["steps"][-1].update(stopped=True, stepped=False)

    forger.lines("updates.jsonl", edit)


@fault("denominators", "counted 7")
def a_step_of_the_critic_with_another_denominator(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[1]["critic"][2].update(tokens=7))


@fault("losses metrics", "the critic's loss of step 0")
def an_edited_first_loss_of_the_critic(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["critic"][0]["loss"] += 0.01

    forger.lines("updates.jsonl", edit)


@fault("metrics", "critic/grad_norm")
def an_edited_metric_of_the_critic(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["critic/grad_norm"] += 0.01

    forger.lines("metrics.jsonl", edit)


@fault("metrics", "value/explained_variance")
def an_edited_metric_of_values(forger: Forger) -> None:
    def edit(lines: list) -> None:
        lines[1]["value/explained_variance"] += 0.01

    forger.lines("metrics.jsonl", edit)


@fault("beta", "has 0.0")
def a_weight_of_kl_that_the_update_did_not_use(forger: Forger) -> None:
    forger.lines("updates.jsonl", lambda lines: lines[0].update(kl_beta=0.5))


@fault("advantages beta", "of iteration 1 follows")
def a_weight_of_kl_that_the_rewards_did_not_use(forger: Forger) -> None:
    """The actor had moved away from the reference."""
    _beta(forger, 2)


@fault("beta metrics", "of iteration 2 follows")
def a_last_weight_of_kl_that_follows_from_none(forger: Forger) -> None:
    """The reference was the actor, so no reward depends on it."""
    _beta(forger, 3)


def _beta(forger: Forger, iteration: int) -> None:
    """Another β, told alike wherever it is told."""
    for part in ("derived_0", "selection"):
        forger.columns(iteration, part, lambda _, told: told.update(kl_beta=0.5))
    path = forger.folder(iteration) / "derived.json"
    forger.json(path, lambda told: told.update(kl_beta=0.5))
    forger.all_hashes(iteration)
    forger.lines("updates.jsonl", lambda lines: lines[iteration].update(kl_beta=0.5))
