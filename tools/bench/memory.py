"""Seconds and peak memory of one call on every rank, as the operating system counts them."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """Of one call; the largest of all ranks after `cost_of`."""

    seconds: float
    """Until the last rank is through."""
    cpu_seconds: float
    """User's and system's, of this process."""
    extra_bytes: int
    """By which this process grew at most, above what was resident before and what was returned."""


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def cost_of(call: Callable[[], Sequence[Tensor]], room: int) -> Cost:
    """Collective. The peak is the kernel's (VmHWM, begun anew before): buffers of libraries count,
    memory that was never touched does not.

    `room` bytes are touched and freed before: a virtual machine may have given free memory back to
    its host, and getting it again would be measured.
    """
    gc.collect()
    touched = np.ones(room, np.uint8)
    del touched
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    returned = call()
    worked = time.process_time() - worked
    dist.barrier()
    seconds = time.perf_counter() - began
    extra = resident("VmHWM") - before - sum(tensor.nbytes for tensor in returned)
    return Cost(largest(seconds), largest(worked), int(largest(extra)))


def largest(value: float) -> float:
    """Of all ranks. Collective."""
    held = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)
