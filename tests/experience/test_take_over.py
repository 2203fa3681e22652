"""What a store does, when it is opened, with iterations that its run did not seal.

Not covered: what a resume sets aside before (`tests/checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.experience.load import load_iteration, read_manifest
from megarl.experience.manifest import DERIVED_FILE, MANIFEST_FILE, SOURCE_FILE, iteration_folder
from megarl.experience.source import write_source
from megarl.experience.store import ExperienceStore
from tests.experience.make_facts import (
    Facts,
    derive_facts,
    make_facts,
    world_of,
    write_iterations,
)
from tests.experience.test_load import check_loaded

pytestmark = pytest.mark.dist


def test_what_an_earlier_attempt_did_not_seal_is_gone(ranks, tmp_path: Path) -> None:
    first, second = make_facts(1, 2, 2), make_facts(2, 2, 2)
    ranks.run(2, write_iterations, tmp_path, [first])
    left = iteration_folder(tmp_path, 1)
    left.mkdir()
    (left / "rollout_7.safetensors").write_bytes(b"of four replicas")
    (left / "scored_0.safetensors.tmp").write_bytes(b"half")
    (left / "scored_0.safetensors.tmp").chmod(0o444)
    hashes = ranks.run(2, write_iterations, tmp_path, [second], 1, 1, 1)
    check_loaded(tmp_path, second, 1, hashes[0][0])
    listed = {part.file for part in read_manifest(left).parts}
    derived = {"selection.safetensors", "derived_0.safetensors", "derived_1.safetensors"}
    there = {path.name for path in left.iterdir()}
    assert there == listed | derived | {MANIFEST_FILE, DERIVED_FILE}
    assert read_manifest(left).previous == read_manifest(iteration_folder(tmp_path, 0)).hash


def test_what_was_derived_of_another_runs_facts_stays(ranks, tmp_path: Path) -> None:
    """A run that trains on sealed experience has no manifest of its own."""
    facts = make_facts(1, 2, 2)
    (tmp_path / "there").mkdir()
    ranks.run(2, write_iterations, tmp_path / "there", [facts])
    ranks.run(2, _derive_only, tmp_path / "here", tmp_path / "there", facts)
    place = iteration_folder(tmp_path / "here", 0)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert {SOURCE_FILE, DERIVED_FILE, "derived_1.safetensors"} < before.keys()
    assert MANIFEST_FILE not in before
    unsealed = iteration_folder(tmp_path / "here", 1)
    unsealed.mkdir()
    ranks.run(2, _open, tmp_path / "here")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert not unsealed.exists()


def _derive_only(folder: Path, source: Path, facts: Facts) -> None:
    world = world_of(2)
    if world.is_main:
        folder.mkdir()
        write_source(folder, 0, load_iteration(source, 0))
    world.gather(None)
    store = ExperienceStore(folder, world, None, 0)
    derive_facts(store, world, facts, 0, "sha256:sealed there")
    store.close()


def _open(folder: Path) -> None:
    ExperienceStore(folder, world_of(2), None, 0).close()
