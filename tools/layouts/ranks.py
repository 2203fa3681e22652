"""What every rank does: a model goes from every layout of the trainer into every generator's.

For each layout of the generator one is built, for each of the trainer megarl's own actor; what is
checked of the two is in `handover.py`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.build import destroy_mesh
from megarl.models.config import refuse_layout
from megarl.models.roles import Actor
from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.rollout.generator import Generator
from megarl.world import World
from tools.layouts import handover, round_trip
from tools.layouts.job import Job
from tools.layouts.layouts import Rollout, Train, mesh_of, rollouts, trains
from tools.layouts.oracle import Oracle

CPU = torch.device("cpu")
TIMEOUT = 600.0
MANY = 4
"""Ranks from which on experts may lie in so many ways that not every pair is tried."""


def work(job: Job, tell: Callable[[Any], None], meet: Callable[[], None]) -> None:
    """Tells `{"kind": …}` dictionaries: `refused`, `begin`, `handover`, `round trip`."""
    folder = Path(job.folder)
    spec = read_spec(folder)
    fitting = _fitting(job, spec, tell)
    oracle: Oracle | None = None
    tried = set(job.trips)
    for number, rollout in enumerate(_fitting_rollouts(job, spec, tell)):
        chosen = fitting[number % 2 :: 2] if _is_thinned(job, spec) else fitting
        wanted = [train for train in chosen if _is_wanted(job, _names(job, train, rollout))]
        if not wanted:
            continue
        meet()
        mesh = mesh_of(job.world, Train(), rollout)
        rank = dist.get_rank()
        if oracle is None and rank == 0:
            oracle = Oracle(folder)
        tell({"kind": "begin"} | _names(job, wanted[0], rollout))
        generator = Generator(folder, mesh, rank, _rollout_section(job, rollout), 1, CPU)
        for train in wanted:
            tell({"kind": "begin"} | _names(job, train, rollout))
            name = train.name(job.world)
            _check(job, spec, train, rollout, generator, oracle, tell, name not in tried)
            tried.add(name)
            gc.collect()  # process groups end, with their threads, when nothing holds them
        generator.close()


def _names(job: Job, train: Train, rollout: Rollout) -> dict[str, str]:
    return {"train": train.name(job.world), "rollout": rollout.name(job.world)}


def _is_thinned(job: Job, spec: ModelSpec) -> bool:
    """Hundreds of pairs: every layout of either side then meets half of the other side's."""
    return spec.moe is not None and job.world >= MANY and job.only is None and not job.every


def _is_wanted(job: Job, names: dict[str, str]) -> bool:
    pair = names["train"], names["rollout"]
    return (job.only is None or pair in job.only) and pair not in job.done


def _check(
    job: Job,
    spec: ModelSpec,
    train: Train,
    rollout: Rollout,
    generator: Generator,
    oracle: Oracle | None,
    tell: Callable[[Any], None],
    with_round_trip: bool,
) -> None:
    """One pair of layouts, and, once for each of the trainer's, the way to HF and back."""
    names = _names(job, train, rollout)
    began = time.perf_counter()
    world = World(mesh_of(job.world, train, rollout), CPU, TIMEOUT)
    section = SimpleNamespace(**ACTOR, sequence_parallel=train.sequence_parallel)
    folder = Path(job.folder)
    actor = Actor(spec, folder, world, SimpleNamespace(dtype=job.dtype), section, 1.0, 1)
    row = handover.check(world, spec, actor, generator, oracle, job.dtype, job.bound, job.fault)
    tell({"kind": "handover"} | names | row | {"seconds": time.perf_counter() - began})
    if with_round_trip and job.fault is None:
        for dtype, source in job.folders.items():
            began = time.perf_counter()
            row = round_trip.check(world, spec, actor, Path(source), dtype)
            row |= {"dtype": dtype, "seconds": time.perf_counter() - began}
            tell({"kind": "round trip", "train": names["train"]} | row)
    destroy_mesh()
    dist.destroy_process_group(world.control)


ACTOR: dict[str, Any] = {
    "lr": 1e-3,
    "lr_schedule": "constant",
    "lr_warmup_steps": 0,
    "min_lr": 0.0,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "distributed_optimizer": True,
    "logprob_chunk_tokens": 1024,
    "recompute": "none",
    "max_skipped_steps": 3,
    "router": "trained",
    "router_aux_loss": 0.0,
    "replay_routing": False,
}
"""The recipe's actor section, but for the layout."""


def _rollout_section(job: Job, rollout: Rollout) -> SimpleNamespace:
    return SimpleNamespace(
        tp=rollout.tp,
        ep=rollout.ep,
        dtype=job.dtype,
        attention_backend="auto",
        max_total_tokens=2048,
        max_running_requests=16,
        chunked_prefill_tokens=256,
        retries=0,
        release=False,
    )


def _fitting(job: Job, spec: ModelSpec, tell: Callable[[Any], None]) -> list[Train]:
    """The trainer's layouts that fit; the others are told. The same on every rank."""
    found = []
    for train in trains(spec, job.world):
        try:
            mesh = mesh_of(job.world, train, Rollout())
            refuse_layout(spec, mesh, train.sequence_parallel)
            megatron_placement(spec, mesh)
        except ValueError as error:
            tell(_refusal("train", train.name(job.world), error))
        else:
            found.append(train)
    return found


def _fitting_rollouts(job: Job, spec: ModelSpec, tell: Callable[[Any], None]) -> list[Rollout]:
    found = []
    for rollout in rollouts(spec, job.world):
        try:
            sglang_placement(spec, mesh_of(job.world, Train(), rollout))
        except ValueError as error:
            tell(_refusal("rollout", rollout.name(job.world), error))
        else:
            found.append(rollout)
    return found


def _refusal(side: str, name: str, error: Exception) -> dict[str, str]:
    return {"kind": "refused", "side": side, "layout": name, "why": str(error)}
