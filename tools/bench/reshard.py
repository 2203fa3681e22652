"""`reshard`: moving weights from the trainer's layout to the generator's, against plain copies."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from tools.bench.harness import CACHE, ROOT, Bench, BenchError, Spread, environment, say
from tools.bench.runs import run_command

LAYOUTS = (
    {"name": "tp1-tp1", "world": 1, "tp": 1, "pp": 1, "rollout_tp": 1},
    {"name": "tp2-tp1x2", "world": 2, "tp": 2, "pp": 1, "rollout_tp": 1},
    {"name": "tp4-tp2x2", "world": 4, "tp": 4, "pp": 1, "rollout_tp": 2},
    {"name": "tp2pp2-tp2x2", "world": 4, "tp": 2, "pp": 2, "rollout_tp": 2},
)
PAIRS = {
    "local_over_memcpy": ("memcpy_local", "local"),
    "cross_over_alltoall": ("alltoall", "cross"),
    "digest_over_memcpy": ("memcpy", "digest"),
    "digest_bf16_over_memcpy": ("memcpy_bf16", "digest_bf16"),
    "time_over_gather": ("transfer", "gather"),
}
"""Ratio → the side whose seconds are divided, and the one that they are divided by."""
GATHERS = 4
"""Ranks from which on gathering whole tensors is compared."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="turns of each layout (default: 5)")
    add_model_options(parser)
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=[str(layout["name"]) for layout in LAYOUTS],
        default=[str(layout["name"]) for layout in LAYOUTS],
        help="which are measured (default: all)",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--ffn", type=int, default=2816, help="its feed-forward (default: 2816)")
    parser.add_argument("--vocab", type=int, default=32000, help="vocabulary (default: 32000)")
    parser.add_argument(
        "--bucket-bytes", type=int, default=64 * 2**20, help="rollout.bucket_bytes (default: 2^26)"
    )


def numbers(options: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Of a Llama; what `ModelSpec` takes."""
    if options.hidden % 128:
        raise BenchError(f"--hidden {options.hidden}: a multiple of 128, so that 8 heads divide it")
    return {
        "family": "llama",
        "layers": layers,
        "hidden": options.hidden,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": options.hidden // 8,
        "ffn": options.ffn,
        "vocab": options.vocab,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tied": False,
        "qkv_bias": False,
        "max_positions": 4096,
        "config_hash": "sha256:bench",
    }


def on_ranks(name: str, world: int, job: dict[str, Any]) -> Any:
    """What rank 0 of `world` ranks tells of the job; raises `BenchError` when one fails."""
    folder = CACHE / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = folder / "result.json"
    (folder / "job.json").write_text(json.dumps(job | {"result": str(result)}), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "-m", "tools.bench.reshard_ranks"]
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run_command([*command, str(folder / "job.json")], started, CACHE / "runs" / f"{name}.log")
    told = json.loads(result.read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return told


def run(options: argparse.Namespace) -> dict[str, Any]:
    chosen = [layout for layout in LAYOUTS if layout["name"] in options.layouts]
    if any(options.layers % int(layout["pp"]) for layout in chosen):
        raise BenchError(f"--layers {options.layers}: an even number, for two pipeline stages")
    facts = environment()
    told = []
    for layout in chosen:
        say(f"{layout['name']}: {layout['world']} ranks, {options.repeats} turns")
        job = layout | {
            "what": "sides",
            "model": numbers(options, options.layers),
            "repeats": options.repeats,
            "bucket_bytes": options.bucket_bytes,
            "gather": layout["world"] >= GATHERS,
        }
        told.append(layout | on_ranks("reshard", int(layout["world"]), job))
    return summary(told) | {
        "repeats": options.repeats,
        "bucket_bytes": options.bucket_bytes,
        "parameter_bytes": told[0]["parameter_bytes"],
        "layouts": {one["name"]: of_layout(one) for one in told},
        "environment": facts,
    }


def ratios(told: dict[str, Any]) -> dict[str, list[float]]:
    """One layout's, within each turn."""
    seconds = told["seconds"]
    found = {
        ratio: [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        for ratio, (above, below) in PAIRS.items()
        if above in seconds and below in seconds
    }
    found["peak_extra_over_bucket"] = told["peak_extra_over_bucket"]
    if told["bytes_bound"]:
        found["bytes_over_bound"] = [told["bytes_sent"] / told["bytes_bound"]]
    if told["bytes_gather"]:
        found["bytes_over_gather"] = [told["bytes_sent"] / told["bytes_gather"]]
    return found


def summary(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the turns of all layouts, and for each layout the medians."""
    pooled: dict[str, list[float]] = {}
    for one in told:
        for name, values in ratios(one).items():
            pooled.setdefault(name, []).extend(values)
    result: dict[str, Any] = {}
    for name, values in pooled.items():
        result |= Spread.of(values).keys(name)
    return result


def of_layout(told: dict[str, Any]) -> dict[str, Any]:
    """Ratios and seconds of one layout."""
    found: dict[str, Any] = {"ranks": told["world"]}
    for name, values in ratios(told).items():
        found |= Spread.of(values).keys(name)
    for side, seconds in told["seconds"].items():
        found |= Spread.of(seconds).keys(f"{side}_seconds")
    return found | {key: told[key] for key in ("bytes_sent", "bytes_bound", "bytes_gather")}


BENCH = Bench(
    name="reshard",
    line="weights from trainer to generator: against plain copies, all-to-all and gathering",
    text="""Ranks of one thread each hold the float32 shards of a Llama-shaped model in the
trainer's layout and move them into the generator's: one rank; tensor parallel 2 to two replicas;
tensor parallel 4, and 2 with 2 pipeline stages, to two replicas of 2. All sides of a layout run in
turn on the same ranks and buffers, each warmed up once; seconds are until the last rank is through,
a ratio is taken within a turn, and low and high are over the turns of all layouts (each layout's
own are in the JSON). Before each measurement memory is touched and freed, for a virtual machine may
have given it back to its host.

local_over_memcpy     seconds of one plain copy of the bytes that stay within ranks, over those of
                      the transfer's local part
cross_over_alltoall   seconds of one all-to-all of what goes between ranks (same splits, no buckets,
                      nothing packed), over those of the transfer's part between ranks
digest_over_memcpy    seconds of one plain copy of the parameters, over those of their digest;
                      digest_bf16_over_memcpy: of bfloat16 parameters
bytes_over_bound      bytes sent over the fewest possible
bytes_over_gather     bytes sent over those of the usual way: every rank gathers each whole
                      parameter (all-gather over tensor-parallel ranks, broadcast to the other
                      pipeline stages) and slices what it wants; time_over_gather: seconds
peak_extra_over_bucket  the most that a rank's memory grows, from before the transfer's buffers are
                      made until its end, over rollout.bucket_bytes: peak resident set size
                      (VmHWM, reset before) less what was resident; bound: 2""",
    add_options=add_options,
    run=run,
)
