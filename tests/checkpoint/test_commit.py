"""Which folders count as checkpoints: damaged, linked, old and named ones.

The files are small stand-ins: what whole means does not depend on what is in them. What a crash or
a failing disk leaves is in `test_commit_crash.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from megarl.checkpoint import commit as commits
from megarl.checkpoint.commit import (
    COMMIT_FILE,
    POSITION_FILE,
    CheckpointError,
    NoCheckpoint,
    checkpoint_folder,
    clean,
    find_checkpoint,
    newest_whole,
    read_commit,
    retain,
    whole_checkpoints,
)
from tests.checkpoint.folders import SHARD, half_written, make, names, numbers


def edit_commit(folder: Path, **changes: Any) -> None:
    path = folder / COMMIT_FILE
    told = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(told))


def test_a_commit_lists_every_file_and_is_read_back(tmp_path) -> None:
    (folder,) = make(tmp_path, 7)
    commit = read_commit(folder)
    assert (commit.run_id, commit.iteration, commit.version) == ("run", 7, "v7")
    assert commit.files == {
        SHARD: 107,
        "actor/.metadata": 5,
        "actor/common.pt": 6,
        POSITION_FILE: len('{"iteration": 7}'),
    }
    assert commit.bytes == 107 + 5 + 6 + 16
    assert commit.hashes == {
        name: f"blake3:{blake3((folder / name).read_bytes()).hexdigest()}"
        for name in ("actor/.metadata", "actor/common.pt", POSITION_FILE)
    }
    assert not list(folder.rglob("*.tmp")) and newest_whole(tmp_path) == commit


def _cut(folder: Path) -> None:
    path = folder / COMMIT_FILE
    text = path.read_text()
    path.unlink()
    path.write_text(text[: len(text) // 2])


def _without(key: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / COMMIT_FILE
        told = json.loads(path.read_text())
        del told[key]
        path.unlink()
        path.write_text(json.dumps(told))

    return damage


def _other_position(folder: Path) -> None:
    path = folder / POSITION_FILE
    path.write_text(path.read_text().replace("9", "8"))


def _flip(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        body = bytearray((folder / name).read_bytes())
        body[-1] ^= 1
        (folder / name).write_bytes(body)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no commit": (lambda f: (f / COMMIT_FILE).unlink(), "half-written, there is no COMMIT.json"),
    "commit is cut": (_cut, r"COMMIT.json: not readable: JSONDecodeError"),
    "commit is empty": (lambda f: os.truncate(_writable(f / COMMIT_FILE), 0), "not readable"),
    "commit is a list": (lambda f: _replace(f / COMMIT_FILE, "[1]"), "not readable: TypeError"),
    "commit is a folder": (lambda f: _as_folder(f / COMMIT_FILE), "not readable: IsADirectory"),
    "no run_id": (_without("run_id"), "not readable: KeyError: 'run_id'"),
    "files is a list": (lambda f: edit_commit(f, files=[SHARD]), "not readable: AttributeError"),
    "a size is no number": (lambda f: edit_commit(f, files={SHARD: "x"}), "not readable: Value"),
    "another format": (lambda f: edit_commit(f, format=2), "format 2, this megarl reads 1"),
    "a shard is missing": (lambda f: (f / SHARD).unlink(), f"{SHARD}: missing, COMMIT.json lists"),
    "a shard is short": (lambda f: os.truncate(f / SHARD, 50), "50 bytes, 109 were committed"),
    "a shard is long": (lambda f: os.truncate(f / SHARD, 110), "110 bytes, 109 were committed"),
    "a shard is a folder": (lambda f: _as_folder(f / SHARD), f"{SHARD}: missing"),
    "no position": (lambda f: (f / POSITION_FILE).unlink(), "position.json: missing"),
    "another position": (_other_position, "position.json: not the one that was committed"),
    "another index": (_flip("actor/.metadata"), "actor/.metadata: not the one that was committed"),
    "another common.pt": (_flip("actor/common.pt"), "common.pt: not the one that was committed"),
    "a hash of no file": (
        lambda f: edit_commit(f, hashes={"actor/gone": "blake3:0"}),
        "actor/gone: not readable: ",
    ),
    "hashes is a list": (lambda f: edit_commit(f, hashes=[]), "not readable: AttributeError"),
    "another iteration": (lambda f: edit_commit(f, iteration=8), "COMMIT.json is of iteration 8"),
    "position not listed": (lambda f: _unlisted_position(f), "lists no position.json"),
}


def _writable(path: Path) -> Path:
    path.chmod(0o644)
    return path


def _replace(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _unlisted_position(folder: Path) -> None:
    (folder / POSITION_FILE).unlink()
    told = json.loads((folder / COMMIT_FILE).read_text())
    edit_commit(folder, files={k: v for k, v in told["files"].items() if k != POSITION_FILE})


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_whole_is_reported_and_never_chosen(tmp_path, name: str) -> None:
    damage, why = DAMAGES[name]
    _, newer = make(tmp_path, 4, 9)
    damage(newer)
    whole, others = whole_checkpoints(tmp_path)
    assert [commit.iteration for commit in whole] == [4]
    assert len(others) == 1 and str(newer) in others[0] and "\n" not in others[0]
    with pytest.raises(CheckpointError, match=why):
        read_commit(newer)
    assert re.search(why, others[0]), others[0]
    assert newest_whole(tmp_path).iteration == find_checkpoint(tmp_path).iteration == 4


def test_a_commit_without_hashes_is_read_by_sizes_and_its_position(tmp_path) -> None:
    (folder,) = make(tmp_path, 7)
    _without("hashes")(folder)
    _flip("actor/.metadata")(folder)
    assert read_commit(folder).hashes == {}
    _flip(POSITION_FILE)(folder)
    with pytest.raises(CheckpointError, match="position.json: not the one"):
        read_commit(folder)


def test_tensor_files_are_held_to_their_sizes_alone(tmp_path) -> None:
    (folder,) = make(tmp_path, 7)
    _flip(SHARD)(folder)
    assert numbers(tmp_path) == [7]


def test_a_folder_under_another_name_is_not_that_iteration(tmp_path) -> None:
    _, newer = make(tmp_path, 4, 9)
    newer.rename(checkpoint_folder(tmp_path, 30))
    assert numbers(tmp_path) == [4]
    (line,) = whole_checkpoints(tmp_path)[1]
    assert "iter_000030" in line and "of iteration 9" in line
    with pytest.raises(NoCheckpoint, match="iter_000030.*of iteration 9"):
        find_checkpoint(checkpoint_folder(tmp_path, 30))


def test_other_things_that_lie_there_are_left_alone(tmp_path) -> None:
    make(tmp_path, 4)
    home = tmp_path / commits.FOLDER
    (home / "iter_best").mkdir()
    (home / "iter_000004.bak").mkdir()
    (home / "notes.txt").write_text("mine")
    (home / "iter_000009").write_text("a file under a checkpoint's name")
    there = names(tmp_path)
    assert clean(tmp_path) == [] and retain(tmp_path, 1, 0) == []
    assert names(tmp_path) == there and numbers(tmp_path) == [4]


def test_a_checkpoint_behind_a_link_is_one_and_is_removed_with_its_link(tmp_path) -> None:
    for folder in make(tmp_path, 1, 2):
        elsewhere = tmp_path / "other disk" / folder.name
        elsewhere.parent.mkdir(exist_ok=True)
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    make(tmp_path, 3)
    assert numbers(tmp_path) == [1, 2, 3]
    assert retain(tmp_path, 2, 0) == [1] and numbers(tmp_path) == [2, 3]
    assert names(tmp_path) == ["iter_000002", "iter_000003"]
    (checkpoint_folder(tmp_path, 2) / COMMIT_FILE).unlink()
    assert len(clean(tmp_path)) == 1 and names(tmp_path) == ["iter_000003"]
    assert list((tmp_path / "other disk").iterdir()) == []


def test_clean_removes_what_was_never_committed_and_nothing_else(tmp_path) -> None:
    make(tmp_path, 1, 2, 3)
    half = half_written(tmp_path, 4)
    os.truncate(checkpoint_folder(tmp_path, 2) / SHARD, 1)
    lines = clean(tmp_path)
    assert names(tmp_path) == ["iter_000001", "iter_000002", "iter_000003"]
    assert lines[0] == f"{half}: half-written, removed"
    assert "1 bytes, 102 were committed; ignored" in lines[1] and len(lines) == 2
    assert clean(tmp_path) == lines[1:], "the damaged one stays for a person to look at"
    assert clean(tmp_path / "no such run") == []


@pytest.mark.parametrize(
    "keep, keep_every, left",
    [
        (1, 0, [12]),
        (2, 0, [10, 12]),
        (9, 0, [2, 4, 6, 8, 10, 12]),
        (1, 4, [4, 8, 12]),
        (2, 6, [6, 10, 12]),
        (0, 0, [12]),  # the recipe refuses it; the newest stays all the same
    ],
)
def test_retention_keeps_the_newest_and_every_so_many(tmp_path, keep, keep_every, left) -> None:
    make(tmp_path, 2, 4, 6, 8, 10, 12)
    removed = retain(tmp_path, keep, keep_every)
    assert numbers(tmp_path) == left and len(names(tmp_path)) == len(left)
    assert removed == [n for n in (2, 4, 6, 8, 10, 12) if n not in left]
    assert retain(tmp_path, keep, keep_every) == []


def test_damaged_newer_ones_do_not_cost_the_newest_whole_one(tmp_path) -> None:
    _, _, third, fourth = make(tmp_path, 1, 2, 3, 4)
    os.truncate(third / SHARD, 1)
    (fourth / COMMIT_FILE).unlink()
    assert retain(tmp_path, 1, 0) == [1]
    assert numbers(tmp_path) == [2]
    assert third.is_dir() and fourth.is_dir(), "retention removes whole ones only"


def test_a_disk_without_room_is_told_with_what_to_do(tmp_path, monkeypatch) -> None:
    free = 3 * 10**9
    usage = SimpleNamespace(total=10**12, used=0, free=free)
    monkeypatch.setattr(commits.shutil, "disk_usage", lambda folder: usage)
    commits.check_room(tmp_path, free - commits.SPARE_BYTES, "the checkpoint")
    with pytest.raises(CheckpointError) as told:
        commits.check_room(tmp_path, 8 * 10**9, "the checkpoint of iteration 10")
    assert str(told.value) == (
        f"{tmp_path}: the checkpoint of iteration 10 needs 8.0 GB, 3.0 GB are free; make room, "
        "lower checkpoint.keep, or set run.folder to another disk"
    )
    with pytest.raises(CheckpointError, match="needs 3000.0 MB|needs 3.0 GB"):
        commits.check_room(tmp_path, free, "it")


def test_a_named_checkpoint_is_found_or_refused_in_one_line(tmp_path) -> None:
    one, two = make(tmp_path, 1, 2)
    assert find_checkpoint(tmp_path).folder == two
    assert find_checkpoint(one).iteration == 1
    moved = tmp_path / "kept" / "step one"
    moved.parent.mkdir()
    shutil.copytree(one, moved)
    assert find_checkpoint(moved).iteration == 1, "a copy under a person's own name"
    os.truncate(two / SHARD, 1)
    assert find_checkpoint(tmp_path).folder == one
    cases = {
        two: r"resume.from: .*__0_0.distcp: 1 bytes, 102 were committed",
        checkpoint_folder(tmp_path, 77): r"resume.from: .*iter_000077: no such folder",
        tmp_path / "nowhere": r"resume.from: there is no folder .*nowhere",
        tmp_path / "kept": r"resume.from: .*kept holds no whole checkpoint; name a run's folder",
    }
    half = half_written(tmp_path / "other", 5)
    cases[half] = "resume.from: .*half-written, there is no COMMIT.json"
    cases[tmp_path / "other"] = r"holds no whole checkpoint \(.*half-written.*\); name a run's"
    for path, why in cases.items():
        with pytest.raises(NoCheckpoint, match=why) as told:
            find_checkpoint(path)
        assert "\n" not in str(told.value)
