"""`loop`: seconds of an iteration by stage, and what is neither generation nor learning."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import Bench, Spread, environment, interleaved, say
from tools.bench.runs import quickstart_model, run_megarl

WORK = ("generate", "log_probs", "update")
"""Stages that are the work itself; all the rest is the loop's own cost."""
ASIDE = ("evaluate", "export", "checkpoint")
"""Stages that not every iteration has: taken out of the iteration."""
LAYOUTS = {"tp2": {"actor.tp": 2}, "dp2": {"actor.tp": 1}}


def stage_seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean seconds per iteration and stage, `iteration` without what is aside, and `other`."""
    names = [key for row in rows for key in row if key.startswith("time/")]
    means = {
        key.removeprefix("time/"): statistics.fmean(row.get(key, 0.0) for row in rows)
        for key in dict.fromkeys(names)
        if not key.endswith("_per_second")
    }
    means["iteration"] -= sum(means.pop(name, 0.0) for name in ASIDE)
    inside = sum(means[name] for name in means if name != "iteration" and "/" not in name)
    return means | {"other": means["iteration"] - inside}


def overhead_share(seconds: Mapping[str, float]) -> float:
    """1 − (generate + log_probs + update) / iteration."""
    return 1 - sum(seconds[name] for name in WORK) / seconds["iteration"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of tools/make_tiny_model.py")
    parser.add_argument("--repeats", type=int, default=3, help="runs per layout (default: 3)")
    parser.add_argument("--iterations", type=int, default=30, help="of each run (default: 30)")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=list(LAYOUTS),
        default=["tp2", "dp2"],
        help="tp2: the recipe's; dp2: one whole actor per rank; the first one is the result",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="recipe keys")


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = quickstart_model(options.model)
    facts = environment()
    more = dict(item.split("=", 1) for item in options.set)
    settings = {"data.eval": "null", "run.iterations": options.iterations} | more

    def measure(layout: str) -> dict[str, float]:
        rows = run_megarl(f"loop-{layout}", folder, LAYOUTS[layout] | settings)
        return stage_seconds(rows)

    sides = {name: partial(measure, name) for name in options.layouts}
    turns = interleaved(sides, options.repeats, say)
    result: dict[str, Any] = {}
    for layout in options.layouts:
        told = _summary([turn[layout] for turn in turns])
        prefix = "" if layout == options.layouts[0] else f"{layout}_"
        result |= {prefix + key: value for key, value in told.items()}
    return result | {
        "layouts": options.layouts,
        "repeats": options.repeats,
        "iterations": options.iterations,
        "environment": facts,
    }


def _summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    result |= Spread.of([overhead_share(seconds) for seconds in runs]).keys("overhead_share")
    result |= Spread.of([seconds["iteration"] for seconds in runs]).keys("seconds_per_iteration")
    stages = {}
    for name in runs[0]:
        stages[name] = Spread.of([seconds[name] for seconds in runs]).keys("median")
    result["stages"] = stages
    for name, numbers in stages.items():
        if name != "iteration":
            result[f"seconds/{name}"] = numbers["median"]
    return result


BENCH = Bench(
    name="loop",
    line="the quickstart's iteration by stage, and the share that is not the work itself",
    text="""Whole runs of the quickstart. The first two iterations and the last one are left out,
and so are evaluation, export and checkpoints.

overhead_share         1 - (generate + log_probs + update) / iteration
                       (generation lasts until the slowest replica is done; the part of it that
                       rank 0 waited is `generate/wait`)
seconds_per_iteration  mean of a run; the median over the runs
stages                 the same by stage; `other` is outside every stage""",
    add_options=add_options,
    run=run,
)
