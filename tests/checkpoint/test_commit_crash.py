"""Which folders count as checkpoints after a crash, or a failing disk, at any moment.

A crash is an exception out of the n-th file operation, for every n; SIGKILL of processes that write
real tensors is in `test_kill.py`. Not covered: power loss, where what was not synced is gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    POSITION_FILE,
    clean,
    commit_folder,
    retain,
    whole_checkpoints,
)
from tests.checkpoint.folders import half_written, make, names, numbers


class Crash(BaseException):
    """The process is gone: nothing catches it."""


OPERATIONS = {
    os: ("open", "fsync", "fchmod", "rename", "replace", "unlink", "rmdir", "mkdir"),
    Path: ("rename", "unlink", "read_text"),
    shutil: ("rmtree",),
}


@contextmanager
def failing(at: int, error: BaseException) -> Iterator[SimpleNamespace]:
    """The `at`-th file operation, counted from 1, raises `error` and does nothing.

    Nothing cleans up behind a crash: every later operation raises as well.
    """
    seen = SimpleNamespace(count=0, names=[])

    def counted(name: str, do: Callable) -> Callable:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.count += 1
            seen.names.append(name)
            if seen.count == at or (seen.count > at and isinstance(error, Crash)):
                raise error
            return do(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, functions in OPERATIONS.items():
            for name in functions:
                label = f"{owner.__name__}.{name}"
                patch.setattr(owner, name, counted(label, getattr(owner, name)))
        # os.scandir-based removal calls os.unlink and os.rmdir one by one.
        yield seen


ERRORS = [Crash(), OSError(28, "No space left on device")]


@pytest.mark.parametrize("error", ERRORS, ids=["crash", "error"])
def test_a_commit_that_dies_anywhere_leaves_the_one_before_in_charge(tmp_path, error) -> None:
    at, committed = 0, False
    while True:
        at += 1
        run = tmp_path / str(at)
        make(run, 1)
        folder = half_written(run, 2)
        with failing(at, error) as seen:
            try:
                commit_folder(folder, "run", 2, "v2")
                over = seen.count < at
            except (Crash, OSError):
                over = False
        found = numbers(run)
        assert found in ([1], [1, 2])
        assert not committed or found == [1, 2], "once it counts it goes on to count"
        committed = found == [1, 2]
        if committed:
            assert seen.names[:at].count("os.rename") + seen.names.count("Path.rename") > 0
        clean(run)
        assert numbers(run) == found and len(names(run)) == len(found)
        shutil.rmtree(run)
        if over:
            break
    assert committed and at > 8, seen.names


@pytest.mark.parametrize("error", ERRORS, ids=["crash", "error"])
def test_a_removal_that_dies_anywhere_is_never_taken_for_whole(tmp_path, error) -> None:
    at = 0
    while True:
        at += 1
        run = tmp_path / str(at)
        make(run, 1, 2, 3)
        with failing(at, error) as seen:
            try:
                retain(run, 1, 0)
                over = seen.count < at
            except (Crash, OSError):
                over = False
        for commit in whole_checkpoints(run)[0]:
            assert all((commit.folder / name).is_file() for name in commit.files)
        assert numbers(run)[-1] == 3 and set(numbers(run)) <= {1, 2, 3}
        clean(run)
        assert len(names(run)) == len(numbers(run)), "what is half removed is removed"
        shutil.rmtree(run)
        if over:
            break
    assert at > 8, seen.names


def test_everything_is_on_the_disk_before_it_counts(tmp_path) -> None:
    """The order of operations: other files and folders synced, then COMMIT.json, then its folder.

    The tensors themselves were synced by the ranks that wrote them.
    """
    make(tmp_path, 1)
    folder = half_written(tmp_path, 2)
    order: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        order.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        order.append(("rename", str(target)))
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(Path, "rename", renamed)
        commit_folder(folder, "run", 2, "v2")
    counts = order.index(("rename", str(folder / COMMIT_FILE)))
    before = {path for kind, path in order[:counts] if kind == "sync"}
    wanted = {folder / POSITION_FILE, folder / "actor/.metadata", folder / "actor", folder}
    assert {str(path) for path in wanted} <= before
    assert any(path.startswith(str(folder / COMMIT_FILE)) for path in before)
    after = [path for kind, path in order[counts:] if kind == "sync"]
    assert after == [str(folder), str(folder.parent)]
