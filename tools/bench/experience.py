"""`experience`: what it costs to seal facts on disk, and to join and account for many samples."""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import CACHE, Bench, Spread, environment, interleaved, say
from tools.bench.loop import ASIDE
from tools.bench.runs import quickstart_model, run_megarl

UNIT = 100_000
"""Samples that a second of joining is told for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of tools/make_tiny_model.py")
    parser.add_argument("--repeats", type=int, default=5, help="of the comparison (default: 5)")
    parser.add_argument("--samples", type=int, default=8192, help="sealed at once (default: 8192)")
    parser.add_argument("--tokens", type=int, default=512, help="mean response (default: 512)")
    parser.add_argument(
        "--join-samples",
        type=int,
        nargs="+",
        default=[UNIT, 300_000, 1_000_000],
        help="sizes that are joined (default: 100000 300000 1000000)",
    )
    parser.add_argument("--join-tokens", type=int, default=32, help="mean response (default: 32)")
    parser.add_argument("--join-repeats", type=int, default=3, help="of each size (default: 3)")
    parser.add_argument("--iterations", type=int, default=30, help="of the run (default: 30)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["seal", "join", "run"],
        default=["seal", "join", "run"],
        help="what is measured (default: all)",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    result: dict[str, Any] = {}
    if {"seal", "join"} & set(options.parts):
        from megarl.world import process_group

        with process_group("gloo", 600):
            if "seal" in options.parts:
                result |= seal_against_raw(options)
            if "join" in options.parts:
                result |= join_seconds(options)
    if "run" in options.parts:
        result |= iteration_share(options)
    told = {name: getattr(options, name) for name in ("repeats", "samples", "tokens")}
    return result | told | {"join_tokens": options.join_tokens, "environment": facts}


def seal_against_raw(options: argparse.Namespace) -> dict[str, Any]:
    """The store's `rollout` and `seal`, against writing the bytes they wrote and fsync of each."""
    from tools.bench import facts

    folder = CACHE / "runs" / "experience-seal"
    shutil.rmtree(folder, ignore_errors=True)
    made = facts.make(options.samples, options.tokens)
    sealing = facts.Sealing(folder / "sealed", made)
    sealing.once()
    bodies = sealing.bodies()
    raw = facts.Raw(folder / "raw", bodies)
    raw.once()
    sides = {"seal": sealing.once, "raw": raw.once}
    turns = interleaved(sides, options.repeats, say)
    sealing.close()
    shutil.rmtree(folder)
    size = sum(map(len, bodies.values()))
    tokens = len(made.samples.response_ids)
    result: dict[str, Any] = {}
    result |= Spread.of([turn["raw"] / turn["seal"] for turn in turns]).keys("seal_over_raw")
    for side in sides:
        result |= Spread.of([size / turn[side] / 1e6 for turn in turns]).keys(f"{side}_mb_per_s")
    return result | {
        "bytes_per_token": round(size / tokens, 3),
        "sealed_bytes": size,
        "sealed_tokens": tokens,
    }


def join_seconds(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per 100 k samples of each size, by step, and the exponent of their growth."""
    from tools.bench import facts

    sizes = sorted(options.join_samples)
    sides = {
        str(size): partial(facts.join, facts.make(size, options.join_tokens)) for size in sizes
    }
    turns = interleaved(sides, options.join_repeats, say)
    joined = {size: [turn[str(size)] for turn in turns] for size in sizes}
    result: dict[str, Any] = {}
    for name, field in (("join_s_per_100k", "seconds"), ("join_cpu_s_per_100k", "cpu")):
        spreads = {
            size: Spread.of([getattr(one, field) * UNIT / size for one in joined[size]])
            for size in sizes
        }
        result |= spreads[UNIT if UNIT in sizes else sizes[0]].keys(name)
        if len(sizes) > 1:
            totals = [spreads[size].median * size for size in sizes]
            result[name.replace("s_per_100k", "exponent")] = round(_exponent(sizes, totals), 3)
        result[f"{name}_by_size"] = {str(size): spreads[size].keys("median") for size in sizes}
    result["join_seconds_by_step"] = {
        str(size): {
            step: round(statistics.median(one.steps[step] for one in joined[size]), 4)
            for step in joined[size][0].steps
        }
        for size in sizes
    }
    return result


def _exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log size: 1 is linear."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    return statistics.linear_regression(x, y).slope


def iteration_share(options: argparse.Namespace) -> dict[str, Any]:
    """What sealing takes of the iterations of a run of the quickstart."""
    settings = {"data.eval": "null", "run.iterations": options.iterations}
    rows = run_megarl("experience-run", quickstart_model(options.model), settings)
    aside = [sum(row.get(f"time/{name}", 0.0) for name in ASIDE) for row in rows]
    whole = [row["time/iteration"] - more for row, more in zip(rows, aside, strict=True)]
    seal = [row["time/seal"] for row in rows]
    shares = [part / iteration for part, iteration in zip(seal, whole, strict=True)]
    return Spread.of(shares).keys("iteration_share") | {
        "seal_seconds": round(statistics.median(seal), 5),
        "seconds_per_iteration": round(statistics.median(whole), 4),
        "iterations": len(rows),
    }


BENCH = Bench(
    name="experience",
    line="sealing on disk: against raw writes, its share of an iteration; joins of 1 M samples",
    text="""Three measurements, each on this machine's disk and cores.

seal_over_raw        seconds to write the same bytes to as many files and fsync them, over the
                     seconds that the store takes to seal (columns, hashes, manifest, fsync), in
                     turn; one process
bytes_per_token      sealed facts of these samples, by response token
iteration_share      median of time/seal over the iteration, in a run of the quickstart
join_s_per_100k      join + exchange + selection + ledger of 100 k samples in one process
join_exponent        slope of its logarithm over that of the size: 1 is linear
join_cpu_…           the same of the process's own seconds: told apart from a busy machine""",
    add_options=add_options,
    run=run,
)
