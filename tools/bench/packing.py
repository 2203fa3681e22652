"""`packing`: tokens computed and balance of megarl's packs, against padding and Karmarkar–Karp.

N samples; the work of a sample of n tokens is n · (1 + n / even), where at `even` tokens attention
costs as much as all else, or n.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.harness import Bench, BenchError, Spread, environment, say

CASES = (  # samples, median response, its longest, budget
    (256, 300, 2048, 4096),
    (1024, 300, 2048, 4096),
    (1024, 4000, 32768, 34816),
    (4096, 4000, 32768, 69632),
)
QUICK = CASES[:1]
SIGMA = 0.8
"""Of the logarithm of a response's length."""
PROMPT = (32, 1024)
EVEN = {"tokens": None, "attention": 16000}
"""What is balanced → `even_length`."""
LAYOUTS = ("plain", "one_length")
KEYS = tuple(
    f"{who}{name}"
    for name in (
        "over_bound",
        "over_bound_one_length",
        "balance",
        "computed_over_useful",
        "computed_over_useful_one_length",
    )
    for who in ("", "kk_")
) + ("padding_over_useful", "plan_seconds")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="drawn batches (default: 5)")
    parser.add_argument(
        "--dp", type=int, nargs="+", default=[1, 4, 8, 32], help="parts (default: 1 4 8 32)"
    )
    parser.add_argument("--quick", action="store_true", help="only the smallest batches")


def draw_lengths(samples: int, median: int, longest: int, seed: int) -> list[int]:
    """Prompt + response tokens: uniform prompts, log-normal responses cut at `longest`."""
    import numpy as np

    draw = np.random.default_rng(seed)
    responses = np.minimum(draw.lognormal(np.log(median), SIGMA, samples).astype(int) + 1, longest)
    return (draw.integers(*PROMPT, samples) + responses).tolist()


def karmarkar_karp(loads: Sequence[float], parts: int, *, equal: bool) -> list[list[int]]:
    """Rows of every part by the largest differencing method (Karmarkar and Karp, 1982), with
    `equal` as many rows in each: it then begins with sorted runs of `parts` rows.

    Raises `ValueError` where `equal` and `parts` does not divide the rows.
    """
    if equal and len(loads) % parts:
        raise ValueError(f"{parts} parts do not divide {len(loads)} rows")
    order = sorted(range(len(loads)), key=lambda row: (-loads[row], row))
    size = parts if equal else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), size):
        sets = [(loads[row], [row]) for row in order[start : start + size]]
        sets += [(0, [])] * (parts - len(sets))
        heap.append((sets[-1][0] - sets[0][0], start, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        joined = [
            (a + b, rows + more)
            for (a, rows), (b, more) in zip(heavy, reversed(light), strict=True)
        ]
        joined.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(parts)]


def equal_counts(lengths: Sequence[int], work: Sequence[float], dp: int, budget: int) -> list:
    """Rows by part and pack: as many rows on every part, then the fewest balanced packs that all
    parts have alike and that fit; both by Karmarkar–Karp."""
    parts = karmarkar_karp(work, dp, equal=True)
    packs = -(-max(sum(lengths[row] for row in rows) for rows in parts) // budget)
    while True:
        plan = [
            [
                [rows[at] for at in pack]
                for pack in karmarkar_karp([lengths[row] for row in rows], packs, equal=False)
            ]
            for rows in parts
        ]
        if all(sum(lengths[row] for row in pack) <= budget for own in plan for pack in own):
            return plan
        packs += max(1, packs // 32)


def least_work(work: Sequence[float], dp: int) -> float:
    """That the busiest of `dp` parts has however whole samples are spread: the mean, or for any k
    the k + 1 lightest of the k · dp + 1 heaviest samples, of which some part has k + 1."""
    heaviest = sorted(work, reverse=True)
    least = sum(work) / dp
    for k in range((len(work) - 1) // dp + 1):
        least = max(least, sum(heaviest[k * dp - k : k * dp + 1]))
    return least


def least_tokens(lengths: Sequence[int], dp: int, budget: int) -> float:
    """That the busiest part computes where its packs have one length: as `least_work`, or as many
    packs as the budget asks of all tokens, each as long as the longest sample."""
    return max(least_work(lengths, dp), -(-sum(lengths) // (dp * budget)) * max(lengths))


@dataclass(frozen=True)
class Cost:
    """Of one plan."""

    computed: list[int]
    """Tokens of every part, padding too."""
    work: list[float]
    """Of every part's samples."""
    packs: int
    """Of each part."""

    def over(self, useful: int) -> float:
        return sum(self.computed) / useful


def cost_of(plan: Sequence, lengths: Sequence[int], work: Sequence[float], layout: str) -> Cost:
    """`layout`: `plain`, packs as they come; `one_length`, every pack of a part as long as its
    longest, as pipeline stages need them (`data/pack_shape.py`)."""
    computed, worked = [], []
    for own in plan:
        totals = [sum(lengths[row] for row in pack) for pack in own]
        # A pack without samples holds one dummy token.
        totals = [max(total, 1) for total in totals]
        computed.append(sum(totals) if layout == "plain" else max(totals) * len(totals))
        worked.append(sum(work[row] for pack in own for row in pack))
    return Cost(computed, worked, len(plan[0]))


def busiest_over_mean(values: Sequence[float]) -> float:
    return max(values) / (sum(values) / len(values))


def measure(case: tuple[int, int, int, int], dp: int, seed: int) -> dict[str, float]:
    """Every number of one drawn batch on `dp` parts."""
    from megarl.data.packing import plan_packs

    samples, median, longest, budget = case
    lengths = draw_lengths(samples, median, longest, seed)
    useful = sum(lengths)
    told = {"padding_over_useful": samples * max(lengths) / useful}
    for balanced, even in EVEN.items():
        work = [n if even is None else n * (even + n) for n in lengths]
        began = time.perf_counter()
        made = plan_packs(lengths, dp, budget, even_length=even)
        told[f"{balanced}/plan_seconds"] = time.perf_counter() - began
        plans = {
            "": [[pack.tolist() for pack in own] for own in made],
            "kk_": equal_counts(lengths, work, dp, budget),
        }
        for who, plan in plans.items():
            plain, padded = (cost_of(plan, lengths, work, layout) for layout in LAYOUTS)
            least = least_tokens(lengths, dp, budget)
            told[f"{balanced}/{who}over_bound"] = max(plain.work) / least_work(work, dp)
            told[f"{balanced}/{who}over_bound_one_length"] = max(padded.computed) / least
            told[f"{balanced}/{who}balance"] = busiest_over_mean(plain.work)
            told[f"{balanced}/{who}computed_over_useful"] = plain.over(useful)
            told[f"{balanced}/{who}computed_over_useful_one_length"] = padded.over(useful)
            told[f"{balanced}/{who}packs"] = plain.packs
    return told


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    chosen = QUICK if options.quick else CASES
    odd = [f"{case[0]} by {dp}" for case in chosen for dp in options.dp if case[0] % dp]
    if odd:
        raise BenchError(f"--dp: equal counts are compared with, and cannot divide {odd[0]}")
    cases = {}
    for case in chosen:
        for dp in options.dp:
            say(f"{case[0]} samples of median {case[1]}, budget {case[3]}, dp {dp}")
            turns = [measure(case, dp, seed) for seed in range(options.repeats)]
            cases[f"n{case[0]}-median{case[1]}-budget{case[3]}-dp{dp}"] = {
                name: Spread.of([turn[name] for turn in turns]) for name in turns[0]
            }
    return summary(cases) | {"repeats": options.repeats, "environment": facts}


def summary(cases: Mapping[str, Mapping[str, Spread]]) -> dict[str, Any]:
    """The worst case's median and extent of every number, and all of them by case."""
    result: dict[str, Any] = {}
    for name in KEYS:
        spreads = [
            spread
            for found in cases.values()
            for full, spread in found.items()
            if full.rpartition("/")[2] == name
        ]
        result |= max(spreads, key=lambda spread: spread.median).keys(name)
    told = {
        case: {
            key: value for name, spread in found.items() for key, value in spread.keys(name).items()
        }
        for case, found in cases.items()
    }
    return result | {"cases": told}


BENCH = Bench(
    name="packing",
    line="packs of log-normal lengths: tokens computed and balance, against padding and KK",
    text="""Batches of drawn lengths, uniform prompts and log-normal responses, are cut into packs
of a token budget over data-parallel parts by megarl's plan_packs, told to balance tokens, or
tokens and attention (n · (1 + n / 16000) for a sample of n tokens); and by the usual way:
Karmarkar–Karp over the parts with as many samples on each, then Karmarkar–Karp into the fewest
packs that fit on every part (kk_…). Both are held to a bound that no plan can be below:

over_bound           work of the busiest part over the bound: the mean of all parts, or, where that
                     is more, for some k the k + 1 lightest of the k · dp + 1 heaviest samples, for
                     some part has k + 1 of them (k = 0: the heaviest sample)
over_bound_one_length  tokens computed by the busiest part where all packs of a part are padded to
                     its longest, as under pipeline parallelism, over the bound: as above of tokens,
                     or the fewest packs that the budget allows, all as long as the longest sample,
                     for a part with it has no shorter ones
balance              work of the busiest part over the mean
computed_over_useful tokens computed, with the dummy of an empty pack, over those of the samples;
                     …_one_length: with that padding too
padding_over_useful  tokens computed where every sample is padded to the batch's longest
plan_seconds         of one plan_packs
Each is the median over the drawn batches of the worst case; every case's own are in the JSON, by
what is balanced. Work of padding counts as tokens.""",
    add_options=add_options,
    run=run,
)
