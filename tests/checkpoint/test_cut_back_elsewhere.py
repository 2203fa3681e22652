"""A run's folder brought back where its checkpoints lie on another disk, behind a link.

Kills are real ones (SIGKILL), before every call that writes, renames, copies or removes. Not
covered: a kill in the middle of one call, a disk that fails while it is copied to.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.checkpoint import commit
from megarl.checkpoint.commit import CheckpointError, checkpoint_folders
from tests.checkpoint.cut_runs import (
    Run,
    check_nothing_lost,
    in_memory,
    killed_at,
    make_run,
    tree,
    without_events,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run") / "r")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """For runs: a folder in memory, and so on another file system than `tmp_path`."""
    with in_memory() as folder:
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip(f"{folder} is on the same file system")
        yield folder


def linked(run: Run, folder: Path, other: Path, name: str = "checkpoints") -> Path:
    """A copy of the run, one of its folders on the `other` disk."""
    run.copy(folder)
    shutil.move(folder / name, other / name)
    (folder / name).symlink_to(other / name)
    with pytest.raises(OSError, match="cross-device") as caught:
        first = next((folder / name).iterdir())
        os.rename(first, folder / first.name)
    assert caught.value.errno == errno.EXDEV
    return folder


def all_files(folder: Path, other: Path, name: str) -> dict:
    """As if there were no link."""
    found = tree(folder) | {name: None}
    return found | {f"{name}/{inner}": body for inner, body in tree(other / name).items()}


@pytest.mark.parametrize("name", ["checkpoints", "experience"])
def test_what_lies_on_another_disk_is_set_aside_as_on_the_same(
    run: Run, here: Path, tmp_path: Path, name: str
) -> None:
    plain = run.copy(here / "plain")
    told = run.to_position(plain)
    folder = linked(run, here / "r", tmp_path, name)
    assert run.to_position(folder) == told
    assert without_events(all_files(folder, tmp_path, name)) == run.then
    asides = [tree(each / "resumes" / "001") for each in (plain, folder)]
    assert asides[0] == asides[1]


@pytest.mark.long
def test_killed_before_any_call_nothing_half_moved_is_taken_for_whole(
    run: Run, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process loses nothing that was not synced, and a real disk makes syncs slow.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    calls = 0
    while True:
        place = tmp_path / f"{calls}"
        place.mkdir()
        folder = linked(run, here / f"r{calls}", place)
        run.aside(folder, 1)
        if not killed_at(calls + 1, lambda: run.to_position(folder)):  # noqa: B023 - runs now
            break
        calls += 1
        before = {key: body for key, body in run.later.items() if key.startswith("checkpoints/")}
        now = all_files(folder, place, "checkpoints")
        for _, left in checkpoint_folders(folder):
            name = f"checkpoints/{left.name}"
            whole = {key: body for key, body in before.items() if key.startswith(name)}
            ours = {key: body for key, body in now.items() if key.startswith(name)}
            assert ours == whole or f"{name}/COMMIT.json" not in ours, calls
        # Copies too: under their own name only what is whole.
        for copy in (folder / "resumes" / "001" / "checkpoints").glob("iter_*"):
            if copy.suffix != ".tmp":
                there = {f"checkpoints/{copy.name}/{key}": body for key, body in tree(copy).items()}
                inside = f"checkpoints/{copy.name}/"
                assert there == {k: body for k, body in before.items() if k.startswith(inside)}
        check_nothing_lost(run, folder, place)
        run.to_position(folder, 1 + calls % 2)
        assert without_events(all_files(folder, place, "checkpoints")) == run.then
        check_nothing_lost(run, folder, place)
        left = (folder / "resumes" / "001" / "checkpoints").glob("*.tmp")
        assert calls % 2 or not list(left), "the next start into the same aside clears it"
        shutil.rmtree(folder)
        shutil.rmtree(place)
    assert calls > 40  # or the hook saw nothing


def test_no_room_for_the_copy_is_told_and_leaves_it_where_it_is(
    run: Run, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = linked(run, here / "r", tmp_path)
    monkeypatch.setattr(commit, "SPARE_BYTES", 2**62)
    with pytest.raises(CheckpointError, match=r"what goes to .*iter_000005 needs .* make room"):
        run.to_position(folder)
    assert (folder / "checkpoints" / "iter_000005").is_dir()
    monkeypatch.undo()
    run.to_position(folder)
    assert without_events(all_files(folder, tmp_path, "checkpoints")) == run.then
