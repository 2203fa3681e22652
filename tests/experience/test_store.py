"""Writing experience: errors on all ranks alike, killed writers, retention, one writer at a time.

Obstacles are real ones: a full disk, a folder where a file should be, a killed process. Not
covered: power loss, NFS, permission errors (tests may run as root, whom nothing is denied).
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.contracts.hashes import file_hash
from megarl.experience.load import load_iteration, read_manifest, sealed_iterations
from megarl.experience.manifest import (
    DERIVED_FILE,
    FOLDER,
    MANIFEST_FILE,
    is_kept,
    iteration_folder,
)
from megarl.experience.store import ExperienceStore, StoreError
from tests.experience.make_facts import (
    derive_facts,
    make_facts,
    seal_facts,
    world_of,
    write_iterations,
)
from tests.experience.test_load import check_loaded
from tests.experience.writers import Writers

pytestmark = pytest.mark.dist


def _told(folder: Path, obstacle: str | None) -> list[str]:
    """On every rank: what each step raised, the first iteration being sound."""
    world = world_of(torch.distributed.get_world_size())
    store = ExperienceStore(folder, world, None, 0)
    facts = make_facts(1, 2, 2, groups=40)
    derive_facts(store, world, facts, 0, seal_facts(store, world, facts, 0))
    if obstacle is not None and world.is_main:
        (iteration_folder(folder, 1) / obstacle).mkdir(parents=True)
    world.gather(None)
    told = []
    try:
        experience_hash = seal_facts(store, world, facts, 1)
        told.append("sealed")
        derive_facts(store, world, facts, 1, experience_hash)
        told.append("derived")
    except StoreError as error:
        told.append(str(error))
    store.close()
    return told


@pytest.mark.parametrize(
    "obstacle, rank, done",
    [
        ("rollout_0.safetensors.tmp", 0, []),
        ("rollout_1.safetensors", 1, []),
        ("prompts.jsonl.tmp", 0, []),
        ("drawn.json.tmp", 0, []),
        ("scored_1.safetensors.tmp", 1, []),
        ("manifest.json.tmp", 0, []),
        ("derived_1.safetensors.tmp", 1, ["sealed"]),
        ("selection.safetensors", 0, ["sealed"]),
        ("derived.json.tmp", 0, ["sealed"]),
    ],
)
def test_what_one_rank_cannot_write_is_told_by_all(ranks, tmp_path, obstacle, rank, done) -> None:
    told = ranks.run(2, _told, tmp_path, obstacle)
    path = iteration_folder(tmp_path, 1) / obstacle.removesuffix(".tmp")
    line = f"experience cannot be written: rank {rank}: {path}: Is a directory (EISDIR)"
    assert told == [[*done, line]] * 2
    assert list(sealed_iterations(tmp_path)) == ([0, 1] if done else [0])
    load_iteration(tmp_path, 0)
    if done:
        assert load_iteration(tmp_path, 1).derived is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free", [0, 8, 16, 24])
def test_a_full_disk_is_told_by_all_and_leaves_what_was_sealed(ranks, small_disk, free) -> None:
    ranks.run(2, write_iterations, small_disk, [make_facts(0, 2, 2)])
    with open(small_disk / "filler", "wb", buffering=0) as filler:
        filler.write(bytes(shutil.disk_usage(small_disk).free - free * 1024))
    told = ranks.run(2, _continue, small_disk)
    assert told[0] == told[1] and str(iteration_folder(small_disk, 1)) in told[0]
    assert "No space left on device (ENOSPC)" in told[0], told
    assert list(sealed_iterations(small_disk)) == [0]
    load_iteration(small_disk, 0)
    (small_disk / "filler").unlink()
    facts = make_facts(1, 2, 2, groups=40)
    hashes = ranks.run(2, write_iterations, small_disk, [facts], 1, 1, 1)
    check_loaded(small_disk, facts, 1, hashes[0][0])


def _continue(folder: Path) -> str:
    world = world_of(2)
    store = ExperienceStore(folder, world, None, 0)
    try:
        seal_facts(store, world, make_facts(1, 2, 2, groups=40), 1)
    except StoreError as error:
        return str(error)
    finally:
        store.close()
    return "sealed"


def _bad_facts(folder: Path) -> str:
    """Rank 1 has a sample whose reward record is another sample's."""
    world = world_of(2)
    store = ExperienceStore(folder, world, None, 0)
    facts = make_facts(1, 2, 2, groups=8)
    records = [facts.records[row] for row in range(len(facts.samples))]
    if world.rank == 1:
        records = records[:-1]
    try:
        store.rollout(0, facts.samples, records, "scorer1", facts.prompts)
        seal_facts(store, world, facts, 0)
    except StoreError as error:
        return str(error)
    finally:
        store.close()
    return "sealed"


def test_facts_that_do_not_join_are_told_by_all(ranks, tmp_path: Path) -> None:
    told = ranks.run(2, _bad_facts, tmp_path)
    assert told[0] == told[1]
    assert "rank 1: reward records and samples do not join by id, at " in told[0]
    assert not list(sealed_iterations(tmp_path))


def _seal_twice(folder: Path) -> str:
    world = world_of(2)
    store = ExperienceStore(folder, world, None, 0)
    try:
        seal_facts(store, world, make_facts(9, 2, 2), 0)
    except StoreError as error:
        return str(error)
    finally:
        store.close()
    return "sealed"


def test_a_sealed_iteration_is_not_written_again(ranks, tmp_path: Path) -> None:
    ranks.run(2, write_iterations, tmp_path, [make_facts(1, 2, 2)])
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("iter_*/*")}
    told = ranks.run(2, _seal_twice, tmp_path)
    assert told[0] == told[1]
    assert "iter_000000 is sealed; an iteration's facts are written once" in told[0]
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("iter_*/*")}
    assert after == before


def _two_writers(folder: Path) -> list[str]:
    world, told = world_of(2), []
    first = ExperienceStore(folder, world, None, 0)
    try:
        ExperienceStore(folder, world, None, 0)
    except StoreError as error:
        told.append(str(error))
    first.close()
    ExperienceStore(folder, world, None, 0).close()
    return told


def test_a_second_writer_is_refused(ranks, tmp_path: Path) -> None:
    told = ranks.run(2, _two_writers, tmp_path)
    line = f"rank 0: {tmp_path / FOLDER} is being written by another process; wait for its end"
    assert told == [[f"experience cannot be written: {line}"]] * 2


def _without_a_folder(folder: Path) -> str:
    try:
        ExperienceStore(folder / "gone", world_of(2), None, 0)
    except StoreError as error:
        return str(error)
    return "opened"


def test_a_run_folder_that_is_not_there_is_told_by_all(ranks, tmp_path: Path) -> None:
    told = ranks.run(2, _without_a_folder, tmp_path)
    path = tmp_path / "gone" / FOLDER
    line = f"experience cannot be written: rank 0: {path}: No such file or directory (ENOENT)"
    assert told == [line] * 2


def _move_meanwhile(folder: Path) -> str:
    world = world_of(2)
    store = ExperienceStore(folder, world, None, 0)
    facts = make_facts(1, 2, 2)
    derive_facts(store, world, facts, 0, seal_facts(store, world, facts, 0))
    if world.is_main:
        folder.rename(folder.with_name("elsewhere"))
    world.gather(None)
    try:
        seal_facts(store, world, facts, 1)
    except StoreError as error:
        return str(error)
    finally:
        store.close()
    return "sealed"


def test_a_run_folder_that_is_moved_away_ends_the_run(ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    told = ranks.run(2, _move_meanwhile, folder)
    assert told[0] == told[1] and told[0].count("iter_000001: No such file or directory") == 2
    assert not folder.exists()
    load_iteration(tmp_path / "elsewhere", 0)


@pytest.mark.parametrize(
    "keep, keep_every, stay",
    [(None, 0, range(8)), (2, 0, [6, 7]), (1, 3, [0, 3, 6, 7]), (20, 0, range(8))],
)
def test_retention_removes_whole_iterations(ranks, tmp_path, keep, keep_every, stay) -> None:
    every = [make_facts(seed, 2, 2) for seed in range(8)]
    hashes = ranks.run(2, write_iterations, tmp_path, every, 1, 1, 0, keep, keep_every)
    assert list(sealed_iterations(tmp_path)) == list(stay)
    folders = {path.name for path in (tmp_path / FOLDER).glob("iter_*")}
    assert folders == {f"iter_{number:06d}" for number in stay}
    for number in stay:
        check_loaded(tmp_path, every[number], number, hashes[0][number])


def test_the_newest_stays_whatever_else_is_kept() -> None:
    for newest in range(5):
        assert is_kept(newest, newest, 1, 0) and is_kept(newest, newest, None, 0)
    assert [n for n in range(9) if is_kept(n, 8, 2, 4)] == [0, 4, 7, 8]


@pytest.fixture(scope="module")
def writers() -> Writers:
    return Writers()


def _kill_often(writers: Writers, folder: Path, times: int) -> None:
    """Whatever was being written when the ranks were killed, the next ones go on behind it."""
    (folder / FOLDER).mkdir()
    moments, checked = random.Random(1), 0
    for _ in range(times):
        writers.kill_after(folder, moments.uniform(0, 0.05))
        sealed = list(sealed_iterations(folder))
        assert sealed == list(range(len(sealed)))
        for number in sealed[checked:]:
            facts = make_facts(number, 2, 2)
            told = load_iteration(folder, number)
            if told.derived is not None:
                hashes = (told.manifest.experience_hash, "")
                check_loaded(folder, facts, number, hashes)
            else:
                assert number == sealed[-1] and told.records == facts.records
        # The next ranks do not derive the last one again: it is checked as it is.
        checked = len(sealed)
    manifests = [read_manifest(iteration_folder(folder, number)) for number in sealed]
    assert [m.previous for m in manifests] == [None, *(m.hash for m in manifests[:-1])]


def test_killed_writers_leave_whole_iterations_or_none(writers, tmp_path: Path) -> None:
    _kill_often(writers, tmp_path, 5)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_writers_leave_whole_iterations_or_none_often(writers, tmp_path: Path) -> None:
    _kill_often(writers, tmp_path, 100)


def _settle_late(folder: Path) -> list[bool]:
    """`derived.json` of iteration 0: after `derive`, after the next `seal`."""
    world = world_of(2)
    store = ExperienceStore(folder, world, None, 0)
    facts, there = make_facts(1, 2, 2), []
    path = iteration_folder(folder, 0) / DERIVED_FILE
    hash_ = seal_facts(store, world, facts, 0)
    derive_facts(store, world, facts, 0, hash_, settle=False)
    there.append(path.exists())
    world.gather(None)
    seal_facts(store, world, facts, 1)
    there.append(path.exists())
    store.close()
    return there


def test_what_was_derived_is_on_the_disk_before_the_next_facts(ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _settle_late, tmp_path) == [[False, True]] * 2
    assert load_iteration(tmp_path, 0).derived is not None
    assert load_iteration(tmp_path, 1).derived is None


def test_the_hashes_are_those_of_the_files(ranks, tmp_path: Path) -> None:
    told = ranks.run(2, write_iterations, tmp_path, [make_facts(1, 2, 2)])
    assert told[0] == told[1]
    experience_hash, derived_hash = told[0][0]
    folder = iteration_folder(tmp_path, 0)
    assert derived_hash == file_hash(folder / DERIVED_FILE)
    manifest = read_manifest(folder)
    assert manifest.hash == file_hash(folder / MANIFEST_FILE)
    assert manifest.experience_hash == experience_hash
