"""`scoring`: how fast scorers are, what of them hides behind generation, a storm of bad graders."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import Bench, Spread, environment, interleaved, say
from tools.bench.runs import quickstart_model, run_megarl

GRADERS = "tools.bench.scoring_graders"
SCORERS: dict[str, dict[str, Any]] = {
    "exact_match": {"name": "exact_match", "pattern": r"so (\d+)$"},
    "math": {"name": "math"},
    "gsm8k": {"name": "gsm8k"},
    "multiple_choice": {"name": "multiple_choice"},
    "code": {"name": "code"},
    "plain": {"name": f"{GRADERS}:plain"},
    "batched": {"name": f"{GRADERS}:batched", "batch": 64},
    "awaited": {"name": f"{GRADERS}:awaited"},
}
"""Name in the report → the scorer; the last three are own functions."""
HEADLINE = "math"
SLOW = {"code": 20}
"""Scorer → how many times fewer records it is given."""
WAITS = {"least": 0.05, "most": 0.2}
CPU_SECONDS = 0.005
SLACK = 1.3
PARTS = ("rates", "overlap", "storm")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of tools/make_tiny_model.py")
    parser.add_argument("--repeats", type=int, default=3, help="of every comparison (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="scoring processes (default: 2)")
    parser.add_argument("--records", type=int, default=4000, help="of each scorer (default: 4000)")
    parser.add_argument(
        "--prompts", type=int, default=64, help="of an iteration, times 8 responses"
    )
    parser.add_argument("--iterations", type=int, default=10, help="of a run; 3 do not count")
    parser.add_argument("--storm", type=int, default=10_000, help="samples (default: 10000)")
    parser.add_argument("--storm-workers", type=int, default=4, help="in the storm (default: 4)")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds, in the storm")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer records")


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    if options.quick:
        options.repeats, options.records, options.storm = 1, 400, 1000
        options.prompts, options.iterations = min(options.prompts, 32), 6
    result: dict[str, Any] = {}
    if "rates" in options.parts:
        result |= rates(options)
    if "overlap" in options.parts:
        result |= overlap(options)
    if "storm" in options.parts:
        result |= storm(options)
    told = ("repeats", "workers", "records", "parts", "quick")
    return result | {name: getattr(options, name) for name in told} | {"environment": facts}


def rates(options: argparse.Namespace) -> dict[str, Any]:
    """Records per second of each scorer that works here."""
    from tools.bench.scoring_work import WARM_UP, measure, pool_of, rows_of

    not_here = {}
    code = _no_sandbox()
    if code is not None:
        say(f"code is left out: {code}")
        not_here["code"] = code

    def rate(name: str, rows: list) -> float:
        with pool_of(SCORERS[name], workers=options.workers) as pool:
            measure(pool, rows_of(name, WARM_UP, seed=0))
            done = measure(pool, rows)
        failed = [record.detail for record in done.records if record.total is None]
        if failed:
            raise RuntimeError(f"{name}: {len(failed)} records could not be scored: {failed[0]}")
        return len(rows) / done.seconds

    sides = {}
    for name in SCORERS:
        if name not in not_here:
            count = max(16, options.records // SLOW.get(name, 1))
            sides[name] = partial(rate, name, rows_of(name, count, seed=1))
    turns = interleaved(sides, options.repeats, say)
    result: dict[str, Any] = Spread.of([turn[HEADLINE] for turn in turns]).keys("records_per_s", 1)
    for name in sides:
        result |= Spread.of([turn[name] for turn in turns]).keys(f"records_per_s_{name}", 1)
    return result | {"left_out": not_here}


def _no_sandbox() -> str | None:
    """Why `code` cannot run here."""
    from megarl.rewards.sandbox_setup import find_maker

    try:
        find_maker()
    except ValueError as error:
        return str(error)
    return None


def overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Generation alone, grading alone and both, of the same responses."""
    folder = quickstart_model(options.model)
    plain = {"name": f"{GRADERS}:plain"}
    waiting = {"name": f"{GRADERS}:waiting"} | WAITS
    burning = {"name": f"{GRADERS}:burning", "seconds": CPU_SECONDS}

    def seconds(name: str, scorer: Mapping[str, Any], part: Sequence[str]) -> float:
        """Of generating and grading: the median iteration of those that count."""
        settings = {
            "world.ranks": 2,
            "actor.tp": 1,
            "data.eval": "null",
            "run.iterations": options.iterations,
            "rollout.prompts_per_iteration": options.prompts,
            "reward.scorers": "[" + repr(dict(scorer)) + "]",
        }
        rows = run_megarl(f"scoring-{name}", folder, settings, part=part)
        return statistics.median(row.get("time/generate", 0.0) + row["time/grade"] for row in rows)

    collect = ("--only", "rollout")
    sides = {
        "generate": partial(seconds, "generate", plain, collect),
        "waiting_both": partial(seconds, "waiting", waiting, collect),
        "burning_both": partial(seconds, "burning", burning, collect),
    }
    for name, scorer in (("waiting", waiting), ("burning", burning)):
        # Of the generator's run, which every turn makes first or has from the turn before.
        again = ("--only", "score", "--from", "scoring-generate")
        sides[f"{name}_grade"] = partial(seconds, f"{name}-grade", scorer, again)
    turns = interleaved(sides, options.repeats, say)
    return overlap_summary(turns)


def overlap_summary(turns: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Shares and added seconds, each within a turn."""
    result: dict[str, Any] = {}
    shares = [
        (turn["generate"] + turn["waiting_grade"] - turn["waiting_both"])
        / min(turn["generate"], turn["waiting_grade"])
        for turn in turns
    ]
    result |= Spread.of(shares).keys("overlap_share")
    added = [turn["burning_both"] - turn["generate"] for turn in turns]
    result |= Spread.of(added).keys("cpu_grader_added_s")
    own = [turn["burning_grade"] for turn in turns]
    result |= Spread.of(own).keys("cpu_grader_alone_s")
    for name in ("generate", "waiting_grade", "waiting_both", "burning_both"):
        result |= Spread.of([turn[name] for turn in turns]).keys(f"seconds_{name}")
    return result


def storm(options: argparse.Namespace) -> dict[str, Any]:
    """Many samples with graders that get stuck or kill themselves, against the same without."""
    from tools.bench import scoring_work as work

    stormy = work.storm_rows(options.storm, 0.01, seed=1)
    calm = [(text, answer, {"kind": "fine"}) for text, answer, _ in stormy]
    scorers = ({"name": "math"}, {"name": f"{GRADERS}:storming", "weight": 0.5})
    keys = {"workers": options.storm_workers, "deadline_seconds": options.deadline}

    def side(rows: list) -> dict[str, float]:
        before = work.descendants()
        with work.pool_of(*scorers, **keys) as pool:
            done = work.measure(pool, rows)
        told = work.account(rows, done.records)
        return {"seconds": done.seconds, "processes_left": work.left_since(before), **told}

    turns = interleaved(
        {"plain": partial(side, calm), "storm": partial(side, stormy)}, options.repeats, say
    )
    stuck = sum(more["kind"] == "stuck" for _, _, more in stormy)
    told = storm_summary(turns, stuck, options.storm_workers, options.deadline)
    return told | {"storm_samples": options.storm, "storm_stuck": stuck}


def storm_bound(plain: float, stuck: int, workers: int, deadline: float) -> float:
    """Seconds: those without the storm with some slack, and the deadlines that must be sat out."""
    return SLACK * plain + deadline * math.ceil(stuck / workers)


def storm_summary(
    turns: Sequence[Mapping[str, Mapping[str, float]]], stuck: int, workers: int, deadline: float
) -> dict[str, Any]:
    """Seconds against the bound, within a turn; the worst turn of what must be 0."""
    result: dict[str, Any] = {}
    bounds = [storm_bound(turn["plain"]["seconds"], stuck, workers, deadline) for turn in turns]
    over = [turn["storm"]["seconds"] / bound for turn, bound in zip(turns, bounds, strict=True)]
    result |= Spread.of(over).keys("storm_over_bound")
    for side in ("plain", "storm"):
        result |= Spread.of([turn[side]["seconds"] for turn in turns]).keys(f"storm_s_{side}")
    result["storm_bound_s"] = round(statistics.median(bounds), 4)
    for name in (
        "processes_left",
        "records_without_status",
        "zeros_that_should_not_be",
        "wrong_statuses",
    ):
        result[name] = max(int(turn[side][name]) for turn in turns for side in ("plain", "storm"))
    return result


BENCH = Bench(
    name="scoring",
    line="records per second by scorer, what of grading hides behind generation, a storm",
    text="""records_per_s_NAME     of NAME in --workers processes, from the first submission to the
                       last record; plain, batched and awaited are own functions. Responses have
                       300 to 1200 characters, eight to a prompt. records_per_s is that of math
overlap_share          of generation (SGLang, the quickstart's model, two replicas) and a grader
                       that waits 50 to 200 ms for each response: (generate + grade - both) / the
                       smaller of the two; 1: the shorter one costs nothing. Grading alone is
                       --only score of the same samples
cpu_grader_added_s     seconds that a grader of 5 ms CPU a response adds to generating while both
                       cores are busy; cpu_grader_alone_s: what it takes by itself
storm_over_bound       seconds for --storm samples of which 1 % get stuck and 1 % kill their grader,
                       over 1.3 x the seconds without those + deadline x ceil(stuck / workers)
processes_left, records_without_status, zeros_that_should_not_be, wrong_statuses
                       of the storm; all must be 0

Sides run in turn, ratios are taken within a turn. Of a run the median iteration is told, without
its first two and its last one. --quick is for seeing that all of it works.""",
    add_options=add_options,
    run=run,
)
