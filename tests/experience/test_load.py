"""Facts written by real ranks come back as they were, and whatever was changed is named.

Not covered: several nodes, a shared file system, files so large that one write does not take them.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.experience.columns import SealError
from megarl.experience.load import load_iteration, read_manifest, sealed_iterations
from megarl.experience.manifest import (
    DERIVED_FILE,
    FOLDER,
    MANIFEST_FILE,
    SealHeader,
    iteration_folder,
)
from tests.experience.make_facts import RECIPE, Facts, make_facts, write_iterations

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 1, 1), (4, 2, 4), (4, 4, 2)]
"""Ranks, actor.tp, rollout.tp: 1 to 4 replicas, 1 to 4 owners."""


def check_loaded(folder: Path, facts: Facts, iteration: int, hashes: tuple[str, str]) -> None:
    told = load_iteration(folder, iteration)
    assert told.manifest.experience_hash == hashes[0]
    for item in fields(facts.samples):
        assert np.array_equal(getattr(told.samples, item.name), getattr(facts.samples, item.name))
    assert told.records == facts.records and told.drawn == facts.drawn
    assert told.replica.dtype == np.int32 and np.array_equal(told.replica, facts.replica)
    assert [dict(prompt) for prompt in told.prompts] == [
        {k: v for k, v in asdict(prompt).items() if k != "token_ids"} for prompt in facts.prompts
    ]
    totals = [np.nan if record.total is None else record.total for record in facts.records]
    assert np.array_equal(told.scores.total, totals, equal_nan=True)
    assert told.scores.detail == tuple(record.detail for record in facts.records)
    assert np.array_equal(told.owner, facts.owner)
    owned = facts.tokens_of(np.flatnonzero(facts.owner >= 0))
    assert told.derived.recipe_hash == RECIPE
    assert np.array_equal(told.derived.minibatch, facts.minibatch)
    assert np.array_equal(told.derived.verdict, facts.selection.verdict)
    assert told.derived.kl_beta == facts.kl_beta
    derived, rows = told.derived.columns, np.flatnonzero(facts.owner >= 0)
    for column, whole, kept in (
        (told.old_log_probs, facts.old, owned),
        (told.ref_log_probs, facts.ref, owned),
        (told.values, facts.values, owned),
        (told.last_values, facts.last_values, rows),
        (derived["advantages"], facts.advantages, owned),
        (derived.get("shaped_rewards"), facts.shaped_rewards, owned),
        (derived.get("returns"), facts.returns, owned),
    ):
        if whole is None:
            assert column is None
            continue
        expected = np.full(len(whole), np.nan, dtype=np.float32)
        expected[kept] = whole[kept]
        assert column.dtype == np.float32 and column.tobytes() == expected.tobytes()
    steps = [record.step_rewards for record in facts.records]
    assert told.scores.steps.counts.tolist() == [len(row) for row in steps]
    assert told.scores.steps.token.tolist() == [at for row in steps for at, _ in row]
    assert told.scores.steps.value.tolist() == [value for row in steps for _, value in row]


def _round_trip(ranks, folder: Path, layout, seeds, with_ref: bool, with_critic: bool) -> None:
    size, tp, rollout_tp = layout
    every = [
        make_facts(
            seed,
            size // rollout_tp,
            size // tp,
            groups=at,
            with_ref=with_ref,
            with_critic=with_critic,
        )
        for at, seed in enumerate(seeds, 1)
    ]
    told = ranks.run(size, write_iterations, folder, every, tp, rollout_tp)
    assert all(hashes == told[0] for hashes in told)
    moved = folder.rename(folder.with_name(folder.name + "-moved"))
    for iteration, (facts, hashes) in enumerate(zip(every, told[0], strict=True)):
        check_loaded(moved, facts, iteration, hashes)
    manifests = [read_manifest(iteration_folder(moved, n)) for n in range(len(every))]
    assert [m.previous for m in manifests] == [None, *(m.hash for m in manifests[:-1])]
    files = list((moved / FOLDER).rglob("iter_*/*"))
    assert files and all(path.stat().st_mode & 0o777 == 0o444 for path in files)
    shutil.rmtree(moved)


_ANY = {
    "layout": st.sampled_from(LAYOUTS),
    "seeds": st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
    "with_ref": st.booleans(),
    "with_critic": st.booleans(),
}
_SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@pytest.mark.dist
@settings(max_examples=8, **_SETTINGS)
@given(**_ANY)
def test_what_any_ranks_wrote_is_loaded_as_it_was(
    ranks, tmp_path_factory, layout, seeds, with_ref, with_critic
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _round_trip(ranks, folder, layout, seeds, with_ref, with_critic)


@pytest.mark.dist
@pytest.mark.long
@settings(max_examples=150, **_SETTINGS)
@given(**_ANY)
def test_what_any_ranks_wrote_is_loaded_as_it_was_often(
    ranks, tmp_path_factory, layout, seeds, with_ref, with_critic
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _round_trip(ranks, folder, layout, seeds, with_ref, with_critic)


@pytest.mark.dist
def test_what_is_no_sealed_iteration_does_not_count(run: Path) -> None:
    experience = run / FOLDER
    (experience / "iter_000002").mkdir()
    shutil.copy(iteration_folder(run, 1) / "rollout_0.safetensors", experience / "iter_000002")
    (experience / "iter_000002" / (MANIFEST_FILE + ".tmp")).write_text("{")
    (experience / "iter_000000" / ("rollout_9.safetensors" + ".tmp")).write_bytes(b"half")
    for name in ("iter_5", "iter_000009.old", "iter_other", "notes"):
        shutil.copytree(iteration_folder(run, 1), experience / name)
    assert list(sealed_iterations(run)) == [0, 1]
    load_iteration(run, 0)
    with pytest.raises(SealError, match="iter_000002/manifest.json: .*never sealed"):
        load_iteration(run, 2)
    assert list(sealed_iterations(run / "nothing")) == []


@pytest.mark.dist
def test_an_iteration_that_was_not_derived_has_none(run: Path) -> None:
    (iteration_folder(run, 1) / DERIVED_FILE).unlink()
    assert load_iteration(run, 1).derived is None


def test_the_header_of_a_manifest_is_what_the_hash_is_over() -> None:
    """A field that is added to the header is in the hash as well."""
    names = {item.name for item in fields(SealHeader)}
    assert names == {
        "run_id",
        "iteration",
        "producers",
        "tokenizer_hash",
        "recipe_hash",
        "sampling",
        "scorer_version",
        "samples",
    }
