"""`logprobs`: log-probs, entropies and their gradients, against log_softmax + gather + entropy."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.harness import CACHE, ROOT, Bench, BenchError, Spread, environment, say
from tools.bench.runs import run_command

SHAPES = ("4096x32000", "2048x151936")
QUICK = ("512x8000", "256x37888")
THIN = 16
"""Hidden size at which the product costs next to nothing."""
SIDES = {"naive": "product", "given": "given"}
"""End of a key → the measurement that it is of."""
RATIOS = {"memory": "extra_bytes", "time": "seconds", "cpu": "cpu_seconds"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="turns of each case (default: 3)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="TxV",
        help=f"tokens and vocabulary (default: {' '.join(SHAPES)})",
    )
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes (default: 1 2)"
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument(
        "--chunk", type=int, default=1024, help="actor.logprob_chunk_tokens (default: 1024)"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"small shapes: {' '.join(QUICK)}, chunks of 128"
    )


def sizes_of(shape: str, tp: Sequence[int]) -> tuple[int, int]:
    """(tokens, vocabulary) of `TxV`; raises `BenchError` for anything else."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if found is None:
        raise BenchError(f"--shapes {shape}: tokens x vocabulary, as 4096x32000")
    tokens, vocab = int(found[1]), int(found[2])
    if any(vocab % size for size in tp):
        raise BenchError(f"--shapes {shape}: every --tp must divide {vocab}, the vocabulary")
    return tokens, vocab


def on_ranks(tp: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 of `tp` ranks tells; raises `BenchError` when one fails."""
    folder = CACHE / "runs" / "logprobs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = folder / "result.json"
    written = dict(job) | {"result": str(result)}
    (folder / "job.json").write_text(json.dumps(written), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={tp}", "-m", "tools.bench.logprobs_ranks"]
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run_command([*command, str(folder / "job.json")], started, CACHE / "runs" / "logprobs.log")
    told = json.loads(result.read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return told


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    shapes = options.shapes or (QUICK if options.quick else SHAPES)
    job = {
        "hidden": options.hidden,
        "thin": THIN,
        "chunk": min(options.chunk, 128) if options.quick else options.chunk,
        "repeats": options.repeats,
    }
    cases = {}
    for shape in shapes:
        tokens, vocab = sizes_of(shape, options.tp)
        for tp in options.tp:
            say(f"{shape} tp{tp}: {options.repeats} turns")
            cases[f"{shape}-tp{tp}"] = on_ranks(tp, job | {"tokens": tokens, "vocab": vocab})
    return summary(cases) | job | {"environment": facts}


def ratios(told: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of one case, within each turn."""
    return {
        f"{ratio}_over_{end}": [
            mine[cost] / plain[cost]
            for mine, plain in zip(told[side]["megarl"], told[side]["naive"], strict=True)
        ]
        for end, side in SIDES.items()
        for ratio, cost in RATIOS.items()
    }


def summary(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The worst case's median and extent of every ratio, and all of them by case."""
    by_case = {name: ratios(told) for name, told in cases.items()}
    result: dict[str, Any] = {}
    for ratio in next(iter(by_case.values())):
        spreads = [Spread.of(found[ratio]) for found in by_case.values()]
        result |= max(spreads, key=lambda spread: spread.median).keys(ratio)
    for at, name in enumerate(("max_error", "max_gradient_error")):
        result[name] = max(told["errors"][at] for told in cases.values())
        plain = [told["naive_errors"][at] for told in cases.values() if "naive_errors" in told]
        if plain:
            result[f"naive_{name}"] = max(plain)
    return result | {"cases": {name: of_case(told) for name, told in cases.items()}}


def of_case(told: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios, costs of both sides and errors of one case."""
    found: dict[str, Any] = {}
    for ratio, values in ratios(told).items():
        found |= Spread.of(values).keys(ratio)
    for end, side in SIDES.items():
        for name, label in (("megarl", f"beside_{end}"), ("naive", end)):
            costs = told[side][name]
            found |= Spread.of([one["seconds"] for one in costs]).keys(f"{label}_seconds")
            extra = Spread.of([one["extra_bytes"] / 1e6 for one in costs])
            found |= extra.keys(f"{label}_extra_mb", 1)
    return found | {"max_error": told["errors"][0], "max_gradient_error": told["errors"][1]}


BENCH = Bench(
    name="logprobs",
    line="log-probs, entropies and gradients: against log_softmax + gather + entropy",
    text="""Ranks of one thread each compute log-probability and entropy of T tokens over a
vocabulary of V, and the gradient of a weighted sum of both, in float32: megarl in chunks of tokens,
the plain side by log_softmax, gather and −Σ p log p over all logits at once, differentiated by
torch. megarl starts from hidden states and the output layer's weight and never has all logits, so
the plain side's product belongs to what it replaces. Two comparisons, in turn and within a turn:

…_over_naive     the product on both sides: from hidden states and weight (hidden size 256: a larger
                 one hides the rest behind the product, of which megarl makes 4 and torch 3) to the
                 gradients of both
…_over_given     the product left out of the plain side: it is given the logits and returns their
                 gradient. megarl's are made of hidden size 16, whose product costs next to nothing,
                 and stay on its side: harder than it is in a run

With tensor parallel 2 a rank has half of the vocabulary. The plain side then takes its half as if
there were no other and exchanges nothing: less than any right way costs.

memory_over_…    the most by which a rank's memory grows (VmHWM, begun anew) above the inputs and
                 above the bytes of what is returned, scores and gradients
time_over_…      seconds until the last rank is through; cpu_over_…: the busiest rank's CPU seconds,
                 which others on the machine do not lengthen
max_error        of a log-prob or entropy, in nats, against float64 on the same inputs, over all of
                 the vocabulary; max_gradient_error: ‖Δg‖/‖g‖; naive_…: torch's, tensor parallel 1

Each is the median of the worst case's turns with their extent; every case's own are in the JSON.
Before each measurement as much memory as the plain side takes is touched and freed, for a virtual
machine may have given it back to its host.""",
    add_options=add_options,
    run=run,
)
