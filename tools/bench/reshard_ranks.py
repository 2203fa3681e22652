"""What every rank of `bench.py reshard` and `reshard-growth` does.

    torchrun … -m tools.bench.reshard_ranks JOB.json

Every measurement begins and ends at a barrier; rank 0 writes what was measured to the job's
`result`. Parameters are random tensors of the layouts' shapes; no model is built.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.contracts.mesh import Mesh
from megarl.reshard.digest import Digester
from megarl.reshard.exchange import Exchange
from megarl.reshard.families import ModelSpec
from megarl.reshard.layout import megatron_placement, sglang_placement
from megarl.reshard.plan import Copy, Plan, make_plan
from megarl.world import process_group
from tools.bench.harness import BenchError, interleaved, say
from tools.bench.reshard_gather import Gather

ROOM = 2**28
"""Bytes that are touched before a measurement."""


class LocalPart(Plan):
    """What stays within ranks."""

    def buckets(self, capacity: int, rank: int | None = None) -> list[list[Copy]]:
        return []


class CrossPart(Plan):
    """What goes between ranks."""

    def of(self, rank: int) -> list[Copy]:
        return [copy for copy in super().of(rank) if copy.source != copy.target]


class Model:
    """One rank's parameters in both layouts, and the plan between them."""

    def __init__(self, model: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.mesh = Mesh(world, tp=job["tp"], pp=job["pp"], rollout_tp=job["rollout_tp"])
        spec = ModelSpec(**model)
        self.bucket_bytes = job["bucket_bytes"]
        self.source = megatron_placement(spec, self.mesh)
        self.target = sglang_placement(spec, self.mesh)
        draw = torch.Generator().manual_seed(self.rank)
        self.source_params = {}
        for name, shape in self.source.params[self.rank].items():
            # Vectors are the same on tensor-parallel ranks, matrices are cut.
            flat = len(shape) == 1
            made = torch.arange(shape[0]).float() if flat else torch.rand(shape, generator=draw)
            self.source_params[name] = made
        self.target_params = {
            name: torch.zeros(shape) for name, shape in self.target.params[self.rank].items()
        }
        self.plan = make_plan(self.source, self.target)

    def exchange(self, kind: type[Plan] = Plan) -> Exchange:
        return Exchange(
            kind(self.plan.world, self.plan.shares),
            self.rank,
            self.source_params,
            self.target_params,
            torch.float32,
            self.bucket_bytes,
            torch.device("cpu"),
        )


def timed(do: Callable[[], Any]) -> float:
    """Seconds until the last rank is through, with memory at hand."""
    touched = np.ones(ROOM // dist.get_world_size(), np.uint8)
    del touched
    dist.barrier()
    began = time.perf_counter()
    do()
    dist.barrier()
    return time.perf_counter() - began


def size_of(params: Mapping[str, Tensor]) -> int:
    return sum(param.nbytes for param in params.values())


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def peak_extra(model: Model) -> int:
    """Bytes that this rank's memory grows by at most while an exchange is made and run."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
    model.exchange().run()
    return resident("VmHWM") - before


def plain_sides(model: Model, exchange: Exchange) -> dict[str, Callable[[], Any]]:
    """Copies and one all-to-all of as many bytes as the transfer's parts, in flat buffers."""
    local = sum(c.elements for c in model.plan.of(model.rank) if c.source == c.target)
    splits = [
        [sum(side.splits[peer] for side in sides) for peer in range(model.plan.world)]
        for sides in (exchange.sends, exchange.receives)
    ]
    held = size_of(model.source_params) // 4
    a = torch.rand(max(held, local, sum(splits[0])))
    b = torch.zeros(max(held, local, sum(splits[1])))

    def alltoall() -> None:
        send, receive = splits
        dist.all_to_all_single(b[: sum(receive)], a[: sum(send)], receive, send)

    sides: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: b[:held].copy_(a[:held]),
        "memcpy_local": lambda: b[:local].copy_(a[:local]),
    }
    half = a[: held // 2].view(torch.bfloat16), b[: held // 2].view(torch.bfloat16)
    sides["memcpy_bf16"] = lambda: half[1].copy_(half[0])
    return sides | ({"alltoall": alltoall} if model.plan.world > 1 else {})


def sides_of(model: Model, gather: Gather | None) -> dict[str, Callable[[], Any]]:
    exchange = model.exchange()
    half = {name: param.bfloat16() for name, param in model.source_params.items()}
    sides = plain_sides(model, exchange) | {
        "transfer": exchange.run,
        "local": model.exchange(LocalPart).run,
        "digest": Digester(model.source, model.rank, model.source_params, torch.float32).digest,
        "digest_bf16": Digester(model.source, model.rank, half, torch.bfloat16).digest,
    }
    if model.plan.world > 1:
        sides["cross"] = model.exchange(CrossPart).run
    if gather is not None:
        sides["gather"] = gather.run
    return sides


def check_equal(model: Model, gather: Gather) -> None:
    """Both ways write the same; raises `BenchError` on the rank where they do not."""
    written = []
    for run in (model.exchange().run, gather.run):
        for param in model.target_params.values():
            param.fill_(-1)
        run()
        digester = Digester(model.target, model.rank, model.target_params, torch.float32)
        written.append(digester.digest().tolist())
    if written[0] != written[1]:
        raise BenchError(f"rank {model.rank}: gathering wrote other weights than the transfer")


def total(value: int) -> int:
    """Over all ranks."""
    summed = torch.tensor(value)
    dist.all_reduce(summed)
    return int(summed)


def measure(job: Mapping[str, Any], note: Callable[[str], None] | None) -> dict[str, Any]:
    """Seconds of every side by turn, bytes and memory of one layout."""
    model = Model(job["model"], job)
    gather = None
    if job["gather"]:
        params = model.source_params, model.target_params
        gather = Gather(model.source, model.target, model.mesh, model.rank, *params)
        check_equal(model, gather)
    gc.collect()
    gc.freeze()  # as a run does: what lives for all of it is not looked at again and again
    peak_extra(model)
    peaks = []
    for _ in range(job["repeats"]):
        peak = torch.tensor(peak_extra(model))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks.append(int(peak) / job["bucket_bytes"])
    sides = sides_of(model, gather)
    for run in sides.values():
        timed(run)
    measured = {name: lambda run=run: timed(run) for name, run in sides.items()}
    turns = interleaved(measured, job["repeats"], note)
    return {
        "seconds": {name: [turn[name] for turn in turns] for name in sides},
        "peak_extra_over_bucket": peaks,
        "bytes_sent": 4 * model.plan.elements_sent,
        "bytes_bound": 4 * model.plan.bound,
        "bytes_gather": total(gather.received) if gather else 0,
        "parameter_bytes": 4 * sum(t.rows * t.cols for t in model.target.tensors.values()),
    }


def grow(job: Mapping[str, Any], note: Callable[[str], None] | None) -> dict[str, Any]:
    """Seconds of a transfer by turn, and bytes, for each of the job's models."""
    models = {str(number): Model(each, job) for number, each in enumerate(job["models"])}
    exchanges = {name: model.exchange() for name, model in models.items()}
    gc.collect()
    gc.freeze()
    for exchange in exchanges.values():
        timed(exchange.run)
    sides = {name: lambda run=one.run: timed(run) for name, one in exchanges.items()}
    turns = interleaved(sides, job["repeats"], note)
    tensors = [model.target.tensors.values() for model in models.values()]
    return {
        "bytes": [4 * sum(t.rows * t.cols for t in each) for each in tensors],
        "seconds": [[turn[name] for turn in turns] for name in sides],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with process_group("gloo", 600):
        note = say if dist.get_rank() == 0 else None
        told = (measure if job["what"] == "sides" else grow)(job, note)
        if dist.get_rank() == 0:
            Path(job["result"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
