"""`convert`: both directions of the converter against a copy of the same file, and its memory."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.checkpoint import random_model
from tools.bench.harness import (
    CACHE,
    ROOT,
    Bench,
    BenchError,
    Spread,
    environment,
    interleaved,
    say,
)

BLOCK = 16 * 2**20
"""Bytes of one plain read and write."""
SETTLED_AFTER = 1.0
"""Seconds that a disk goes on discarding the blocks of files that are gone."""
SMALLEST = 500 * 10**6
"""Bytes of weights below which start and end of a conversion weigh too much."""
PAIRS = {"over_copy": "to_hf", "over_copy_to_megatron": "to_megatron"}
"""Ratio → the side that is held against the copy."""

PEAK = """
import gc, json, sys
from pathlib import Path
from megarl.convert import cli
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
words, warm = json.loads(sys.argv[1])
assert cli.main(warm) == 0
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = peak()
assert cli.main(words) == 0
print(json.dumps(peak() - before))
"""
"""Peak memory above what it is after the imports and a look at the source, of which more are made
where they are first needed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--hidden", type=int, default=1024, help="its hidden size (default: 1024)")
    parser.add_argument("--vocab", type=int, default=32000, help="its vocabulary (default: 32000)")


class _Sides:
    """Each side reads the same weights and ends when its bytes are on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf, self.megatron = folder / "hf", folder / "megatron"
        self.file = self.hf / "model.safetensors"
        self.size = self.file.stat().st_size
        self.out = folder / "out"

    def copy(self) -> float:
        def copy() -> None:
            with open(self.file, "rb", buffering=0) as old, open(self.out, "xb", 0) as new:
                while block := old.read(BLOCK):
                    new.write(block)
                os.fsync(new.fileno())

        return self._timed(copy)

    def to_megatron(self) -> float:
        return self._timed(lambda: _convert("hf-to-megatron", self.hf, self.out))

    def to_hf(self) -> float:
        return self._timed(lambda: _convert("megatron-to-hf", self.megatron, self.out))

    def _timed(self, do: Callable[[], None]) -> float:
        """Seconds, with memory at hand, the source in the page cache and nothing else going on.

        A virtual machine may have given free memory back to its host; writing the page cache anew
        would then be measured, and only for whichever side comes after a pause.
        """
        import numpy as np

        for path in (self.file, *self.megatron.glob("*.distcp")):
            with open(path, "rb", buffering=0) as file:
                while file.read(BLOCK):
                    pass
        time.sleep(SETTLED_AFTER)
        touched = np.ones(self.size * 3 // 2, np.uint8)
        del touched
        began = time.perf_counter()
        do()
        seconds = time.perf_counter() - began
        if self.out.is_dir():
            shutil.rmtree(self.out)
        else:
            self.out.unlink()
        return seconds


def _convert(*words: object) -> None:
    from megarl.convert.cli import main

    told = sys.stdout
    sys.stdout = sys.stderr
    try:
        if main([str(word) for word in words]):
            raise BenchError(f"{words[0]} failed")
    finally:
        sys.stdout = told


def _peak(folder: Path, command: str, source: Path) -> int:
    """Bytes, of a process that does nothing else."""
    out = folder / "peak"
    words = [[command, str(source), str(out)], ["inspect", str(source)]]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{command}: {done.stderr.splitlines()[-1:]}")
    shutil.rmtree(out)
    return int(done.stdout.splitlines()[-1])


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    folder = CACHE / "runs" / "convert"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    random_model(folder / "hf", options)
    sides = _Sides(folder)
    if sides.size < SMALLEST:
        raise BenchError(f"{sides.size / 1e6:.0f} MB of weights; at least 500 (--layers, --hidden)")
    _convert("hf-to-megatron", sides.hf, sides.megatron)
    runs = {"copy": sides.copy, "to_megatron": sides.to_megatron, "to_hf": sides.to_hf}
    for side in runs.values():
        side()  # the first takes memory and loads what is loaded late
    turns = interleaved(runs, options.repeats, say)
    result: dict[str, Any] = {}
    for ratio, side in PAIRS.items():
        result |= Spread.of([turn["copy"] / turn[side] for turn in turns]).keys(ratio)
    for side in runs:
        result |= Spread.of([sides.size / turn[side] / 1e9 for turn in turns]).keys(
            f"{side}_gb_per_s"
        )
    say("peak memory")
    to_hf = _peak(folder, "megatron-to-hf", sides.megatron)
    to_megatron = _peak(folder, "hf-to-megatron", sides.hf)
    largest = 4 * max(options.vocab * options.hidden, 3 * options.hidden**2)
    shutil.rmtree(folder)
    return result | {
        "peak_extra_over_largest_tensor": round(to_hf / largest, 4),
        "peak_over_shard": round(to_megatron / sides.size, 4),
        "peak_extra_bytes": to_hf,
        "peak_extra_bytes_to_megatron": to_megatron,
        "bytes": sides.size,
        "repeats": options.repeats,
        "environment": facts,
    }


BENCH = Bench(
    name="convert",
    line="Hugging Face ↔ megatron torch_dist: against a copy of the same file; peak memory",
    text="""A random model of 500 MB or more is converted in both directions, in turn with a plain
copy of its safetensors file (blocks of 16 MiB); every side ends with its bytes on the disk (fsync)
and reads from the page cache. A ratio is taken within a turn. Before each measurement old files are
gone for a second, and as much memory as it takes was touched and freed: a virtual machine may give
free memory back to its host, and the page cache then grows at a third of the disk's speed.

over_copy                       seconds of the copy over those of megatron-to-hf, which reads,
                                digests, holds against the recorded digests and writes
over_copy_to_megatron           the same for hf-to-megatron
peak_extra_over_largest_tensor  megatron-to-hf: peak memory (VmHWM, a process of its own) above what
                                it is after the imports, over the bytes of the largest tensor
peak_over_shard                 hf-to-megatron: the same over the bytes of the rank's shard, which
                                is the whole model at one rank""",
    add_options=add_options,
    run=run,
)
