"""The ranks that `test_kill.py` kills. A fork server imports it once: a rank then starts fast."""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import megarl.checkpoint.saver  # noqa: F401
import megarl.models.roles  # noqa: F401
from megarl.checkpoint.commit import newest_whole
from megarl.platforms.megatron_patches import install
from tests.checkpoint.saving import checkpointer, critic_of, fingerprint, restore, save, step
from tests.models.support import make_actor, make_world


def join(rank: int, world: int, store: str) -> None:
    """This process is rank `rank` of a gloo world that meets in the file `store`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    install()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )


def save_again_and_again(
    rank: int, store: str, model: Path, run: Path, tp: int, background: bool, tell: Connection
) -> None:
    """From the newest whole checkpoint on, until it is killed: a step, a save, a step, …

    Tells ("at", iteration, fingerprint) after loading, then ("begun", …) as a save begins and
    ("committed", iteration, fingerprint of what was saved).
    """
    join(rank, 2, store)
    actor = make_actor(model, make_world(tp))
    saver = checkpointer(run, actor, background=background, keep=2)
    commit = newest_whole(run)
    if commit is not None:
        restore(saver, commit)
    iteration = 0 if commit is None else commit.iteration
    tell.send(("at", iteration, fingerprint(saver)))
    draw = random.Random(iteration)  # the same on every rank
    while True:
        iteration += 1
        step(actor)
        saved = fingerprint(saver)
        tell.send(("begun", iteration, saved))
        save(saver, iteration)
        ahead = 0
        while saver.is_pending:
            if ahead == 0 and draw.random() < 0.5:
                step(actor)  # the weights move on while the files are written
                ahead += 1
            saver.settle(wait=False)
        tell.send(("committed", iteration, saved))
        if ahead:  # one iteration is one step here, so that a step tells the bits
            iteration += 1


def step_only(rank: int, store: str, model: Path, tp: int, steps: int, tell: Connection) -> None:
    """A writer that is never killed: its fingerprint after each step."""
    join(rank, 2, store)
    actor = make_actor(model, make_world(tp))
    saver = checkpointer(model.parent / "never saved", actor)
    found = [fingerprint(saver)]
    for _ in range(steps):
        step(actor)
        found.append(fingerprint(saver))
    tell.send(found)
    dist.destroy_process_group()


def die_before_the_critics_files(
    rank: int, store: str, models: Path, run: Path, tell: Connection
) -> None:
    """A whole checkpoint of two learners, or, where one is there, what is loaded from it; then a
    save in which this rank is killed when its actor's file is on the disk and its critic's is next.

    Tells its fingerprint before that save.
    """
    from megarl.checkpoint import torch_dist

    join(rank, 2, store)
    actor = make_actor(models / "actor", make_world(1))
    saver = checkpointer(run, actor, critic=critic_of(models / "critic", actor), background=True)
    commit = newest_whole(run)
    if commit is None:
        step(actor), step(saver.critic)
        save(saver, 1)
        saver.settle(wait=True)
    else:
        restore(saver, commit)
    tell.send(fingerprint(saver))
    write = torch_dist.write_bucket

    def killed(bucket: tuple, transforms: object) -> list:
        if Path(bucket[0]).parent.name == "critic":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(bucket, transforms)

    torch_dist.write_bucket = killed
    step(actor), step(saver.critic)
    save(saver, 2)
    saver.settle(wait=True)
