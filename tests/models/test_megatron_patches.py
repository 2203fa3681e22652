"""Each replacement is needed by the pinned megatron-core, and leaves no trace outside its scope.

A test here fails when a new megatron-core makes a replacement unnecessary (then delete it) or
wants another. Not covered: CUDA machines, where nothing is replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import (
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where CUDA is"),
]


def _attempts(folder: Path) -> dict[str, str]:
    """Build and step once with each replacement left out: the error, or "stepped"."""
    from megarl.models import build, step
    from megarl.platforms import megatron_patches as patches

    samples = make_samples(5, 4)
    world = make_world(1)

    def attempt(**section: Any) -> str:
        try:
            actor = make_actor(folder, world, **section)
            packs = local_packs(samples, world.mesh, world.rank, 200)
            result = actor.update([micro_batch(p, samples) for p in packs], policy_gradient)
            assert torch.zeros(1).type() == "torch.FloatTensor"
            return "stepped" if result.stepped else str(result.skipped_reason)
        except Exception as error:  # any failure is the answer here
            return f"{type(error).__name__}: {error}"
        finally:
            build.destroy_mesh()

    def without(*names: str) -> Callable:
        return lambda: patches.cpu_mode(frozenset(names))

    real = (step.cpu_mode, torch.cuda.current_device, patches.install)
    told = {"all": attempt(), "all, not sharded": attempt(distributed_optimizer=False)}
    for name in ("on_cpu", "type_as_on_cuda"):
        step.cpu_mode = without(name)
        told[name] = attempt()
    step.cpu_mode = lambda: nullcontext()
    told["no mode"] = attempt(distributed_optimizer=False)
    step.cpu_mode = real[0]
    patches.install = lambda: None
    torch.cuda.current_device = _no_device
    told["current_device"] = attempt()
    _, torch.cuda.current_device, patches.install = real
    told["all again"] = attempt()
    return told


def _no_device() -> int:
    raise AssertionError("no CUDA device here")


def test_every_replacement_is_needed(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    (told,) = ranks.run(1, _attempts, tmp_path)
    for name in ("all", "all, not sharded", "all again"):
        assert told[name] == "stepped", told
    for name in ("on_cpu", "type_as_on_cuda", "no mode", "current_device"):
        assert "Error" in told[name] or "Exception" in told[name], (name, told[name])


def _in_a_tied_pipeline(folder: Path) -> dict[str, str]:
    """On two stages: building without `stay`, and how a loss sees torch inside the schedule."""
    from megarl.models import build
    from megarl.platforms import megatron_patches as patches

    samples, world = make_samples(5, 4), make_world(1, 2)
    told: dict[str, str] = {}

    def loss(scores: Any, batch: Any) -> Any:
        told["in the loss"] = torch.zeros(1).type()
        return policy_gradient(scores, batch)

    actor = make_actor(folder, world)
    packs = local_packs(samples, world.mesh, world.rank, 30, padding=0)
    actor.update([micro_batch(pack, samples) for pack in packs], loss)
    whole = build.cpu_mode
    build.cpu_mode = lambda: patches.cpu_mode(frozenset({"stay"}))
    try:
        make_actor(folder, world)
    except AssertionError as error:
        told["stay"] = str(error)
    build.cpu_mode = whole
    build.destroy_mesh()
    return told


def test_the_replacement_for_a_tied_pipeline_is_needed(ranks, tmp_path) -> None:
    write_hf_model(tmp_path, tied=True)
    first, last = ranks.run(2, _in_a_tied_pipeline, tmp_path)
    assert "CUDA" in first["stay"] and "CUDA" in last["stay"]
    assert last["in the loss"] == "torch.FloatTensor"


def _recompute(folder: Path) -> dict[str, Any]:
    """A step with recompute as it is, and with megatron's own functions for the random state."""
    from megatron.core.tensor_parallel import random

    from megarl.models import build
    from megarl.platforms import megatron_patches as patches

    found = importlib.util.find_spec(random.__name__)
    megatrons = importlib.util.module_from_spec(found)
    found.loader.exec_module(megatrons)
    samples, world = make_samples(5, 4), make_world(1)
    packs = local_packs(samples, world.mesh, world.rank, 200)
    told: dict[str, Any] = {}
    for name in ("neither", "_get_cuda_rng_state", "_set_cuda_rng_state"):
        actor = make_actor(folder, world, recompute="full")
        replacement = getattr(random, name, None)
        if replacement is not None:
            setattr(random, name, getattr(megatrons, name))
        waiting = len(torch.cuda._queued_calls)
        try:
            actor.update([micro_batch(p, samples) for p in packs], policy_gradient)
            told[name] = len(torch.cuda._queued_calls) - waiting
        except AssertionError as error:
            told[name] = str(error)
        patches.install()
    build.destroy_mesh()
    return told


def test_the_replacements_for_recompute_are_needed(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    (told,) = ranks.run(1, _recompute, tmp_path)
    assert told["neither"] == 0
    assert "CUDA" in told["_get_cuda_rng_state"]
    assert told["_set_cuda_rng_state"] > 0, "calls that wait for a CUDA that never comes"


def _queues(folder: Path) -> dict[str, int]:
    """Processes that planning a save starts, with the replacement and with megatron's own."""
    import multiprocessing

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megarl.checkpoint.torch_dist import Staging, begin_save, rank_object
    from megarl.platforms import megatron_patches as patches

    found = importlib.util.find_spec(filesystem_async.__name__)
    megatrons = importlib.util.module_from_spec(found)
    found.loader.exec_module(megatrons)
    patches.install()
    assert filesystem_async._get_write_results_queue is patches.results_queue
    told: dict[str, int] = {}
    for name, function in (
        ("replaced", patches.results_queue),
        ("megatron's", megatrons._get_write_results_queue),
    ):
        filesystem_async._get_write_results_queue = function
        (folder / name).mkdir()
        before = len(multiprocessing.active_children())
        pending = begin_save({"value": rank_object("value", 1)}, folder / name, Staging())
        told[name] = len(multiprocessing.active_children()) - before
        pending.write()
        pending.finish()
    patches.install()
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    return told


def test_the_replacement_for_a_save_is_needed(ranks, tmp_path) -> None:
    """Planning a save asks for a queue, and megatron's own lives in a process that it spawns."""
    assert ranks.run(1, _queues, tmp_path) == [{"replaced": 0, "megatron's": 1}]


def _install_twice() -> bool:
    from megarl.platforms import megatron_patches as patches

    patches.install()
    once = torch.cuda.current_device
    patches.install()
    return torch.cuda.current_device is once and once() == torch.device("cpu")


def test_installing_again_changes_nothing(ranks) -> None:
    assert ranks.run(1, _install_twice) == [True]
