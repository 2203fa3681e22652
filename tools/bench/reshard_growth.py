"""`reshard-growth`: how the seconds of a transfer and of its plan grow."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

from tools.bench.harness import Bench, Spread, environment, say
from tools.bench.reshard import add_model_options, numbers, on_ranks

WORLDS = (1, 2, 4)
PLAN_WORLD = 512
PLANS = {
    "70b": {
        "model": {
            "family": "llama",
            "layers": 80,
            "hidden": 8192,
            "heads": 64,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 28672,
            "vocab": 128256,
        },
        "mesh": {"tp": 8, "pp": 4, "rollout_tp": 8},
    },
    "235b": {
        "model": {
            "family": "qwen3_moe",
            "layers": 94,
            "hidden": 4096,
            "heads": 64,
            "kv_heads": 4,
            "head_dim": 128,
            "ffn": 12288,
            "vocab": 151936,
            "qk_norm": True,
        },
        "moe": {"experts": 128, "per_token": 8, "ffn": 1536, "normalize": True},
        "mesh": {
            "tp": 4,
            "pp": 2,
            "ep": 32,
            "expert_tp": 1,
            "rollout_tp": 8,
            "rollout_ep": 8,
        },
    },
}
"""Numbers of Llama-3-70B and Qwen3-235B-A22B, and a layout over `PLAN_WORLD` ranks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="of everything (default: 5)")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[1, 3, 6, 12],
        help="of the models whose transfers are timed (default: 1 3 6 12: 63 to 478 MB)",
    )
    add_model_options(parser)
    parser.set_defaults(hidden=1024, ffn=2048, vocab=3072)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["parameters", "ranks", "plan"],
        default=["parameters", "ranks", "plan"],
        help="what is measured (default: all)",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    result: dict[str, Any] = {}
    if "parameters" in options.parts:
        result |= by_parameters(options)
    if "ranks" in options.parts:
        result |= by_ranks(options)
    if "plan" in options.parts:
        for name in PLANS:
            say(f"plan of the {name} model on {PLAN_WORLD} ranks")
            taken = [plan_seconds(name, options.bucket_bytes) for _ in range(options.repeats)]
            result |= Spread.of([wall for wall, _ in taken]).keys(f"plan_seconds_{name}")
            result |= Spread.of([cpu for _, cpu in taken]).keys(f"plan_cpu_seconds_{name}")
    return result | {"repeats": options.repeats, "environment": facts}


def _job(options: argparse.Namespace, world: int, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "what": "growth",
        "tp": world,
        "pp": 1,
        "rollout_tp": max(1, world // 2),
        "models": [numbers(options, each) for each in layers],
        "repeats": options.repeats,
        "bucket_bytes": options.bucket_bytes,
    }


def by_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Two ranks, tensor parallel 2 to two replicas; the sizes in turn."""
    told = on_ranks("reshard-growth", 2, _job(options, 2, options.layers))
    result: dict[str, Any] = {}
    if len(options.layers) > 1:
        exponents = [exponent(told["bytes"], turn) for turn in zip(*told["seconds"], strict=True)]
        result |= Spread.of(exponents).keys("parameters_exponent")
    for size, seconds in zip(told["bytes"], told["seconds"], strict=True):
        result |= Spread.of(seconds).keys(f"seconds_{round(size / 1e6)}_mb")
    return result


def by_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """The largest of the models, tensor parallel over all ranks to half as many."""
    result: dict[str, Any] = {}
    for world in WORLDS:
        told = on_ranks("reshard-growth", world, _job(options, world, [max(options.layers)]))
        result |= Spread.of(told["seconds"][0]).keys(f"seconds_{world}_ranks")
    return result


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The least-squares slope of log seconds over log sizes: 1 is proportional."""
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - mean_x) ** 2 for a in x)


def plan_seconds(name: str, bucket_bytes: int) -> tuple[float, float]:
    """From a model's numbers to one rank's copies and buckets in bfloat16, nothing remembered.

    (seconds on the clock, of this process's CPU).
    """
    from megarl.contracts.mesh import Mesh
    from megarl.reshard.families import family_rules
    from megarl.reshard.families.spec import ModelSpec, MoESpec
    from megarl.reshard.layout import megatron_placement, sglang_placement
    from megarl.reshard.plan import make_plan

    for cached in (family_rules, megatron_placement, sglang_placement, make_plan):
        cached.cache_clear()
    asked = PLANS[name]
    model = asked["model"]
    moe = asked.get("moe")
    spec = ModelSpec(
        **model,
        norm_eps=1e-5,
        rope_theta=1e6,
        tied=False,
        qkv_bias=False,
        max_positions=8192,
        config_hash="sha256:bench",
        moe=MoESpec(layers=tuple(range(model["layers"])), **moe) if moe else None,
    )
    mesh = Mesh(PLAN_WORLD, **asked["mesh"])
    rank = PLAN_WORLD // 2
    began = time.perf_counter(), time.process_time()
    plan = make_plan(megatron_placement(spec, mesh), sglang_placement(spec, mesh), 8)
    plan.of(rank)
    plan.buckets(bucket_bytes // 4, rank)  # half a bucket of 2-byte elements, as an exchange asks
    return time.perf_counter() - began[0], time.process_time() - began[1]


BENCH = Bench(
    name="reshard-growth",
    line="how a transfer's seconds grow with parameters and ranks, and its plan's with the model",
    text="""parameters_exponent   of a transfer's seconds as a power of the model's bytes (1:
                      proportional), on two ranks of one thread, from tensor parallel 2 to two
                      replicas; the sizes run in turn and the exponent is taken within a turn
seconds_N_mb          of each size
seconds_N_ranks       of the largest model, from tensor parallel over all N ranks to replicas of
                      half as many; more ranks than cores take turns on them
plan_seconds_70b      one rank's part of the plan, from nothing but a model's numbers to its copies
plan_seconds_235b     and buckets: Llama-3-70B (tp 8, pp 4 to tp 8) and Qwen3-235B-A22B (tp 4, pp 2,
                      ep 32 to tp 8, ep 8), on 512 simulated ranks; plan_cpu_seconds_…: of them,
                      those that the process computed""",
    add_options=add_options,
    run=run,
)
