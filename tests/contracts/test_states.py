"""The state machine and its journal. Agreement of ranks (`World.vote`): tests/test_world.py."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megarl.contracts.states import (
    COLLECTING,
    EVIDENCE,
    FROM_SEALED,
    RESUMED,
    TRANSITIONS,
    VOTED,
    IllegalTransition,
    Journal,
    State,
)
from megarl.contracts.version import PolicyVersion

V = PolicyVersion("run", 3, 0, "sha256:w", "sha256:t", "sha256:m")
NEXT = replace(V, optimizer_step=4, weight_manifest_hash="sha256:x")
FULL = {
    "weight_manifest_hash": "sha256:w",
    "bytes_sent": 0,
    "verified": True,
    "samples": 8,
    "experience_hash": "sha256:e",
    "derived_hash": "blake3:d",
    "reason": "disk full",
}
CYCLE = [
    State.ACTOR_COMMITTED,
    State.EXPORTING,
    State.ROLLOUT_LOADING,
    State.ROLLOUT_READY,
    State.GENERATING,
    State.PREPARING,
    State.EXPERIENCE_SEALED,
    State.UPDATING_FROM,
]


def _at(state: State) -> Journal:
    journal = Journal(None)
    for step in CYCLE[: CYCLE.index(state) + 1]:
        journal.enter(step, 1, V, **FULL)
    return journal


def test_an_iteration_runs_through_and_only_its_end_changes_the_version(tmp_path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    for state in CYCLE:
        journal.enter(state, 1, V, **{key: FULL[key] for key in EVIDENCE[state]})
    journal.enter(State.ACTOR_COMMITTED, 2, NEXT, weight_manifest_hash="sha256:x")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    journal.close()
    assert [line["state"] for line in lines] == [*map(str, CYCLE), "ACTOR_COMMITTED"]
    assert [line["version"] for line in lines] == [V.id] * 8 + [NEXT.id]
    assert lines[6]["experience_hash"] == "sha256:e" and lines[6]["samples"] == 8
    assert lines[-1]["iteration"] == 2 and lines[-1]["optimizer_step"] == 4


def test_every_other_step_is_refused_naming_both_states() -> None:
    for state in CYCLE:
        for target in set(State) - TRANSITIONS[state] - {State.FAILED}:
            with pytest.raises(IllegalTransition, match=f"{state} → {target} is not legal"):
                _at(state).enter(target, 1, V, **FULL)


def test_a_run_starts_committed() -> None:
    with pytest.raises(IllegalTransition, match="starts at ACTOR_COMMITTED, not at GENERATING"):
        Journal(None).enter(State.GENERATING, 1, V, **FULL)


def test_a_state_without_its_evidence_is_not_entered() -> None:
    for state in CYCLE[1:]:
        before = CYCLE[CYCLE.index(state) - 1]
        for key in EVIDENCE[state]:
            for missing in (None, ""):
                journal = _at(before)
                with pytest.raises(IllegalTransition, match=f"{state} needs evidence.*{key}"):
                    journal.enter(state, 1, V, **(FULL | {key: missing}))
                assert journal.state is before


def test_nothing_sent_and_nothing_verified_are_still_evidence() -> None:
    journal = _at(State.EXPORTING)
    journal.enter(State.ROLLOUT_LOADING, 1, V, bytes_sent=0)
    journal.enter(State.ROLLOUT_READY, 1, V, weight_manifest_hash="sha256:w", verified=False)
    assert journal.state is State.ROLLOUT_READY


def test_another_version_inside_an_iteration_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="GENERATING names .*the run is at"):
        _at(State.ROLLOUT_READY).enter(State.GENERATING, 1, NEXT, **FULL)


def test_an_older_step_or_attempt_is_refused() -> None:
    journal = _at(State.UPDATING_FROM)
    with pytest.raises(IllegalTransition, match="is older than"):
        journal.enter(State.ACTOR_COMMITTED, 1, replace(V, optimizer_step=2), **FULL)
    journal.enter(State.ACTOR_COMMITTED, 1, replace(NEXT, update_attempt=1), **FULL)
    with pytest.raises(IllegalTransition, match="is older than"):
        journal.enter(State.ACTOR_COMMITTED, 1, NEXT, **FULL)


def test_any_state_may_fail_and_nothing_follows() -> None:
    for state in CYCLE:
        journal = _at(state)
        journal.enter(State.FAILED, 1, V, reason="rank 1 is missing")
        with pytest.raises(IllegalTransition, match="FAILED → ACTOR_COMMITTED"):
            journal.enter(State.ACTOR_COMMITTED, 1, V, **FULL)


def test_the_three_voted_states_and_every_state_is_declared() -> None:
    assert set(TRANSITIONS) == set(EVIDENCE) == set(State)
    assert {State.ROLLOUT_READY, State.EXPERIENCE_SEALED, State.ACTOR_COMMITTED} == VOTED


def test_a_run_that_collects_ends_an_iteration_sealed_with_the_version_it_had() -> None:
    journal = Journal(None, COLLECTING)
    for state in (*CYCLE[:7], State.ACTOR_COMMITTED, *CYCLE[1:7]):
        journal.enter(state, 1, V, **FULL)
    with pytest.raises(IllegalTransition, match="EXPERIENCE_SEALED → UPDATING_FROM is not legal"):
        journal.enter(State.UPDATING_FROM, 1, V, **FULL)
    with pytest.raises(IllegalTransition, match="follows .* without an update"):
        journal.enter(State.ACTOR_COMMITTED, 1, NEXT, **FULL)


def test_a_run_that_was_resumed_may_find_its_experience_sealed_and_generates_all_the_same() -> None:
    journal = Journal(None, RESUMED)
    walk = (State.ACTOR_COMMITTED, State.EXPERIENCE_SEALED, State.UPDATING_FROM)
    for state in walk:
        journal.enter(state, 3, V, **FULL)
    journal.enter(State.ACTOR_COMMITTED, 3, NEXT, **FULL)
    for state in CYCLE[1:7]:
        journal.enter(state, 4, NEXT, **FULL)
    with pytest.raises(IllegalTransition, match="ACTOR_COMMITTED → EXPERIENCE_SEALED is not legal"):
        whole = Journal(None)
        for state in walk:
            whole.enter(state, 3, V, **FULL)


def test_a_run_that_trains_from_sealed_experience_never_generates() -> None:
    journal = Journal(None, FROM_SEALED)
    walk = (State.EXPERIENCE_SEALED, State.UPDATING_FROM)
    for state in (State.ACTOR_COMMITTED, *walk):
        journal.enter(state, 0, V, **FULL)
    journal.enter(State.ACTOR_COMMITTED, 0, NEXT, **FULL)
    with pytest.raises(IllegalTransition, match="ACTOR_COMMITTED → EXPORTING is not legal"):
        journal.enter(State.EXPORTING, 1, NEXT, **FULL)
    for partial in (COLLECTING, FROM_SEALED, RESUMED):
        assert set(partial) == set(State) and not partial[State.FAILED]
