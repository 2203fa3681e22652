"""`Checkpointer` on real gloo ranks: what is saved is what was there, and all agree when it counts.

The oracle of equality is `saving.fingerprint`, which knows nothing of megarl's digests. Not
covered: GPU (pinned copies), a rank that cannot write (`test_saver_failures.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    checkpoint_folder,
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
    from megarl.platforms import platform_of
    from megarl.platforms.offload import OptimizerOffload
    from tests.checkpoint.saving import (
        checkpointer,
        fingerprint,
        reference_of,
        restore,
        save,
        step,
    )

    actor = _actor(model, 1)
    reference = reference_of(model, actor)
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
        save(saver, 1, refreshed=1)
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


def _experts(model: Path, run: Path) -> dict[str, Any]:
    """Saved with experts dealt to the ranks; loaded where they are copied, and over two stages."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.layouts import Layout, forget, logical
    from tests.checkpoint.saving import checkpointer, reference_of, restore, save, step
    from tests.models.support import gather_logical

    layouts = [Layout(2, more={"ep": 2}), Layout(2, tp=2, more={"expert_tp": 1})]
    layouts.append(Layout(2, pp=2, more={"virtual": 2}))
    told: dict[str, Any] = {"looks": [], "layouts": []}
    for layout in layouts:
        actor = layout.actor(model)
        frozen = reference_of(model, actor)
        saver = checkpointer(run, actor, reference=frozen)
        if layout is layouts[0]:
            step(actor)
            told["need"] = sum(actor.world.gather(saver._bytes()))
            saver.check_disk()
            save(saver, 1, refreshed=1)
            saver.settle(wait=True)
        else:
            forget(actor), forget(frozen)
            told["layouts"].append(restore(saver, newest_whole(run)).layout)
        saver.close()
        weights = [gather_logical(role, role.named_parameters()) for role in (actor, frozen)]
        told["looks"].append(
            [*weights, *(logical(actor, key) for key in saver.state_of("actor").keys)]
        )
        destroy_mesh()
    return told


def test_experts_come_back_to_other_ranks_and_need_the_room_they_take(ranks, tmp_path) -> None:
    from tests.checkpoint.layouts import same_bits

    model = write_hf_model(tmp_path, "qwen3_moe", vocab_size=512, num_hidden_layers=4)
    told = ranks.run(2, _experts, tmp_path, tmp_path / "run")[0]
    saved, *others = told["looks"]
    assert not same_bits(saved[0], saved[1]), "the step moved nothing"
    for loaded in others:
        assert all(same_bits(mine, its) for mine, its in zip(saved, loaded, strict=True))
    wanted = {"ranks": 2, "tp": 1, "pp": 1, "dp": 2, "rollout_tp": 1, "ep": 2}
    assert told["layouts"] == [wanted] * 2
    # Weights of two roles and two moments, each element once; the vocabulary needs no padding.
    assert told["need"] == 4 * 4 * sum(param.numel() for param in model.parameters())
