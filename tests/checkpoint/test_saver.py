"""`Checkpointer` on real gloo ranks: what is saved is what was there, and all agree when it counts.

Failures are the file system's own: a folder in the place of a file, a disk that says it is full.
The oracle of equality is `saving.fingerprint`, which knows nothing of megarl's digests. Not
covered: GPU (pinned copies), a file system that several nodes share, kills (`test_kill.py`).
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    CheckpointError,
    checkpoint_folder,
    clean,
    newest_whole,
    whole_checkpoints,
)
from tests.models.support import make_actor, make_world, write_hf_model

pytestmark = pytest.mark.dist


def _actor(model: Path, tp: int, **section: Any) -> Any:
    return make_actor(model, make_world(tp), **section)


def _fresh(model: Path, tp: int, run: Path, **options: Any) -> Any:
    """Another actor, as the next start makes it; the one before is gone."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer

    destroy_mesh()
    return checkpointer(run, _actor(model, tp), **options)


def _old_values(model: Path, run: Path, tp: int) -> list[str]:
    """[saved, after steps beside the write, loaded] and that the loaded one steps on the same."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, fingerprint, restore, save, step

    saver = checkpointer(run, _actor(model, tp), background=True)
    step(saver.actor)
    saved = fingerprint(saver)
    gate = _hold(saver)
    save(saver, 1)
    for _ in range(2):
        step(saver.actor)
        saver.settle(wait=False)
        assert saver.is_pending and newest_whole(run) is None
    moved = fingerprint(saver)
    gate()
    saver.settle(wait=True)
    saver.close()
    fresh = _fresh(model, tp, run)
    restore(fresh, newest_whole(run))
    told = [saved, moved, fingerprint(fresh)]
    for _ in range(2):
        step(fresh.actor)
    told.append(fingerprint(fresh))
    destroy_mesh()
    return told


def _hold(saver: Any) -> Callable[[], None]:
    """The writing thread waits until the returned function is called."""
    from threading import Event

    event = Event()
    saver._writer.submit(event.wait, 60)
    return event.set


@pytest.mark.parametrize("tp", [1, 2])
def test_steps_beside_a_background_save_do_not_reach_its_files(ranks, tmp_path, tp: int) -> None:
    write_hf_model(tmp_path)
    for saved, moved, loaded, gone_on in ranks.run(2, _old_values, tmp_path, tmp_path / "r", tp):
        assert saved == loaded != moved
        assert gone_on == moved, "the same steps from the loaded one"


def _same_files(model: Path, run: Path) -> list[list[tuple[str, bytes]]]:
    """What each way of saving the same position wrote."""
    from megarl.models.build import destroy_mesh
    from megarl.models.roles import Reference
    from megarl.platforms import platform_of
    from megarl.platforms.offload import OptimizerOffload
    from megarl.reshard.families import read_spec
    from tests.checkpoint.saving import checkpointer, fingerprint, restore, save, step
    from tests.models.support import actor_section

    actor = _actor(model, 1)
    reference = Reference(
        read_spec(model), model, actor.world, SimpleNamespace(dtype="float32"), actor_section(), 1.0
    )
    step(actor)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    offload = OptimizerOffload(actor.trainer, platform_of("cpu"))
    found, marks = [], set()
    for number, (background, out) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        saver = checkpointer(
            run / str(number),
            actor,
            background=bool(background),
            reference=reference,
            offload=offload,
        )
        marks.add(fingerprint(saver))
        if out:
            offload.out()
        save(saver, 1)
        assert offload.is_out == bool(out), "it is left as it was found"
        saver.settle(wait=True)
        saver.close()
        offload.back()
        folder = checkpoint_folder(run / str(number), 1)
        files = sorted(folder.rglob("*.distcp"))
        found.append([(str(file.relative_to(folder)), file.read_bytes()) for file in files])
    marks.add(fingerprint(saver))
    with torch.no_grad():
        for weight in [*actor.named_parameters().values(), *reference.named_parameters().values()]:
            weight.zero_()
    restore(saver, newest_whole(run / "3"))
    assert marks == {fingerprint(saver)}
    assert any(bool(weight.any()) for weight in reference.named_parameters().values())
    destroy_mesh()
    return found


def test_background_and_offload_change_no_byte(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    for number in range(4):
        (tmp_path / "r" / str(number)).mkdir(parents=True)
    for plain, *others in ranks.run(2, _same_files, tmp_path, tmp_path / "r"):
        assert {name for name, _ in plain} >= {"actor/__0_0.distcp", "reference/__1_0.distcp"}
        assert all(other == plain for other in others)


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
    import re

    write_hf_model(tmp_path)
    first, second = ranks.run(2, _failing, tmp_path, tmp_path / "run", background)
    assert first == second, "every rank raises the same"
    for (told, whole), pattern in zip(first, TOLD, strict=True):
        assert re.search(pattern, told) and "\n" not in told, told
        assert whole == []


def _in_turn(model: Path, run: Path) -> list[list[Any]]:
    """Two saves without a settle between them; the second waits for the first."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, fingerprint, restore, save, step

    world = make_world(2)
    notes: list[str] = []
    saver = checkpointer(run, make_actor(model, world), background=True, keep=1, note=notes.append)
    marks = []
    for iteration in (1, 2, 3):
        step(saver.actor)
        marks.append(fingerprint(saver))
        save(saver, iteration)
        there = [commit.iteration for commit in whole_checkpoints(run)[0]]
        assert not world.is_main or there[-1:] == ([iteration - 1] if iteration > 1 else [])
        world.barrier("looked")
    saver.settle(wait=True)
    saver.settle(wait=True)  # nothing is pending: nothing happens
    saver.close()
    world.barrier("closed")
    commit = newest_whole(run)
    restore(saver, commit)
    told = [commit.iteration, fingerprint(saver) == marks[-1], len(whole_checkpoints(run)[0])]
    destroy_mesh()
    return [told, [note.split(":")[0] for note in notes] if world.is_main else []]


def test_a_save_settles_the_one_before_and_old_ones_go(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    (first, notes), (second, _) = ranks.run(2, _in_turn, tmp_path, tmp_path / "run")
    assert first == second == [3, True, 1]
    assert notes == [
        "saved checkpoints/iter_000001",
        "saved checkpoints/iter_000002",
        "removed checkpoints 1",
        "saved checkpoints/iter_000003",
        "removed checkpoints 2",
    ]


def _generators(model: Path, run: Path) -> bool:
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, restore, save

    world = make_world(2)
    saver = checkpointer(run, make_actor(model, world), background=True)
    random.seed(world.rank), np.random.seed(10 + world.rank), torch.manual_seed(20 + world.rank)
    np.random.standard_normal()  # which holds a second number back
    random.gauss(0, 1)
    save(saver, 1)

    def drawn() -> list[Any]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()] + [
            torch.rand(3).tolist(),
            torch.randn(3).tolist(),
        ]

    wanted = drawn()
    saver.settle(wait=True)
    saver.close()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    restore(saver, newest_whole(run))
    found = drawn()
    others = world.gather(wanted)
    destroy_mesh()
    return found == wanted and others[0] != others[1]


def test_every_rank_gets_its_random_generators_back(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    assert ranks.run(2, _generators, tmp_path, tmp_path / "run") == [True, True]


def _slow(model: Path, run: Path) -> list[Any]:
    """Rank 1 writes slowly; both look again and again."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, save

    world = make_world(2)
    saver = checkpointer(run, make_actor(model, world), background=True)
    gate = _hold(saver) if world.rank == 1 else None
    save(saver, 1)
    folder = checkpoint_folder(run, 1)
    pending, announced = [], []
    until = time.perf_counter() + 20
    while not (folder / "actor/__0_0.distcp").exists() and time.perf_counter() < until:
        time.sleep(0.01)
    for _ in range(5):
        saver.settle(wait=False)
        pending.append(saver.is_pending)
        announced.append((folder / COMMIT_FILE).exists())
    mine = (folder / f"actor/__{world.rank}_0.distcp").exists()
    if gate is not None:
        gate()
    saver.settle(wait=True)
    saver.close()
    destroy_mesh()
    return [mine, any(announced), all(pending), saver.is_pending, (folder / COMMIT_FILE).exists()]


def test_nothing_is_announced_before_the_slowest_rank_has_written(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    told = ranks.run(2, _slow, tmp_path, tmp_path / "run")
    assert told == [[True, False, True, False, True], [False, False, True, False, True]]
