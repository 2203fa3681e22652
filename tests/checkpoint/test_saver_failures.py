"""A `Checkpointer` some rank of which cannot write: all ranks stop, and nothing counts.

Failures are the file system's own: a folder in the place of a file, a disk that says it is full.
Not covered: a file system that several nodes share, kills (`test_kill.py`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.commit import (
    CheckpointError,
    checkpoint_folder,
    clean,
    whole_checkpoints,
)
from tests.models.support import make_actor, make_world, write_hf_model

pytestmark = pytest.mark.dist


def _failing(model: Path, run: Path, background: bool) -> list[tuple[str, list[str]]]:
    """Every way in which a rank cannot write: what each rank raised, and what lies there then."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, save

    world = make_world(2)
    actor = make_actor(model, world)
    found = []
    for number, (name, spoil) in enumerate(SPOILED.items()):
        saver = checkpointer(run, actor, background=background)
        folder = checkpoint_folder(run, 2 + number)
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, world.rank, folder)
            try:
                save(saver, 2 + number)
                assert saver.is_pending, f"{name}: no rank noticed"
                saver.settle(wait=True)
                told = "nothing"
            except CheckpointError as error:
                told = str(error)
        saver.close()
        world.barrier("look")
        whole = [commit.iteration for commit in whole_checkpoints(run)[0]]
        found.append((told, whole))
        world.barrier("looked")
        if world.is_main:
            clean(run)
        world.barrier("cleaned")
    destroy_mesh()
    return found


def _no_file(patch: Any, rank: int, folder: Path) -> None:
    """Rank 1 finds a folder in the place of its file, made as soon as there is a folder for it."""
    from megarl.checkpoint import torch_dist

    write = torch_dist.write_bucket

    def into_the_way(bucket: Any, transforms: Any) -> Any:
        if rank == 1:
            Path(bucket[0]).mkdir()
        return write(bucket, transforms)

    patch.setattr(torch_dist, "write_bucket", into_the_way)


def _full_disk(patch: Any, rank: int, folder: Path) -> None:
    """Writing on rank 1 goes to a device that is always full."""
    from megarl.checkpoint import torch_dist

    write = torch_dist.write_bucket

    def to_full(bucket: Any, transforms: Any) -> Any:
        if rank == 1:
            Path(bucket[0]).symlink_to("/dev/full")
        return write(bucket, transforms)

    patch.setattr(torch_dist, "write_bucket", to_full)


def _no_room(patch: Any, rank: int, folder: Path) -> None:
    usage = SimpleNamespace(total=1, used=1, free=100)
    patch.setattr(shutil, "disk_usage", lambda path: usage)


def _already_there(patch: Any, rank: int, folder: Path) -> None:
    if rank == 0:
        folder.mkdir(parents=True)


def _no_position(patch: Any, rank: int, folder: Path) -> None:
    from megarl.checkpoint import position

    def refuse(path: Path, *chunks: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    patch.setattr(position, "write_whole", refuse)


def _no_commit(patch: Any, rank: int, folder: Path) -> None:
    from megarl.checkpoint import commit

    def refuse(path: Path, *chunks: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    patch.setattr(commit, "write_whole", refuse)


SPOILED = {
    "no file": _no_file,
    "full disk": _full_disk,
    "no room": _no_room,
    "already there": _already_there,
    "no position": _no_position,
    "no commit": _no_commit,
}
TOLD = (
    r"no checkpoint was saved: .*iter_000002/actor: __1_0.distcp could not be written: .*"
    r"Is a directory.*\(rank 1\)",
    r"no checkpoint was saved: .*iter_000003/actor: __1_0.distcp could not be written: "
    r".*\(rank 1\)",
    r"no checkpoint was saved: rank 0: .*the checkpoint iter_000004 needs .* are free; make room",
    r"no checkpoint was saved: rank 0: .*iter_000005: File exists",
    r"no checkpoint was saved: rank 0: .*position.json: No space left on device",
    r"no checkpoint was saved: rank 0: .*COMMIT.json: No space left on device",
)


@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_stops_all_and_nothing_counts(ranks, tmp_path, background) -> None:
    write_hf_model(tmp_path)
    first, second = ranks.run(2, _failing, tmp_path, tmp_path / "run", background)
    assert first == second, "every rank raises the same"
    for (told, whole), pattern in zip(first, TOLD, strict=True):
        assert re.search(pattern, told) and "\n" not in told, told
        assert whole == []
