"""`peer-trl`: samples per second of whole GRPO steps, megarl against TRL's GRPOTrainer."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.harness import CACHE, Bench, Spread, environment, interleaved, say
from tools.bench.loop import stage_seconds
from tools.bench.peer.lengths import LENGTHS_VARIABLE, LONGEST_OVER_MEAN, facts, long_tailed
from tools.bench.peer.trl_env import RUNNER, trl_python
from tools.bench.runs import WARM_UP_ITERATIONS, quickstart_model, run_command, run_megarl

PROMPTS, GROUP, MINIBATCHES, LEARNING_RATE = 32, 8, 2, 2e-4
PATTERN = r"(?:^|so )(\d+)$"
FORCED = "tools.bench.peer.forced"
TRL_LAYOUTS = {"2 processes": (2, 1), "1 process, 2 threads": (1, 2)}
"""Name → (processes, threads of each)."""


@dataclass(frozen=True)
class Setting:
    """What responses look like. `lengths` None: they end where the model ends them."""

    name: str
    max_tokens: int
    lengths: tuple[int, ...] | None
    reward: str


def settings_of(options: argparse.Namespace) -> list[Setting]:
    samples = options.prompts * GROUP
    tail = tuple(long_tailed(samples, options.tail_mean))
    fixed = (options.fixed_tokens,) * samples
    every = [
        Setting("fixed", options.fixed_tokens, fixed, "digits"),
        Setting("quickstart", 32, None, "exact"),
        Setting("longtail", max(tail), tail, "digits"),
    ]
    return [setting for setting in every if setting.name in options.settings]


def megarl_side(setting: Setting, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of megarl: TP1·DP2, one generator per rank."""
    samples = options.prompts * GROUP
    keys: dict[str, Any] = {
        "actor.tp": 1,
        "run.iterations": options.iterations + WARM_UP_ITERATIONS + 1,
        "data.eval": "null",
        "rollout.prompts_per_iteration": options.prompts,
        "rollout.max_response_tokens": setting.max_tokens,
        "rollout.max_running_requests": max(2, samples // 2),
        "rollout.max_total_tokens": max(8192, samples // 2 * (32 + setting.max_tokens)),
        # TRL learns from groups without variance, too: the same work on both sides.
        "algorithm.zero_variance": "keep",
    }
    module, environment_ = "megarl.train", {}
    if setting.reward == "digits":
        keys["reward.scorers"] = "[{name: 'tools.bench.peer.reward:digits'}]"
    if setting.lengths is not None:
        path = CACHE / "runs" / f"lengths-{setting.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(setting.lengths), encoding="utf-8")
        module, environment_ = FORCED, {LENGTHS_VARIABLE: str(path)}
    name = f"peer-{setting.name}"
    rows = run_megarl(name, folder, keys, module=module, environment=environment_)
    seconds = stage_seconds(rows)
    tokens = statistics.fmean(row["response/tokens"] for row in rows)
    return {"seconds": seconds, "tokens": tokens}


def trl_side(
    setting: Setting, folder: Path, options: argparse.Namespace, python: Path, layout: str
) -> dict[str, Any]:
    """One run of TRL."""
    processes, threads = TRL_LAYOUTS[layout]
    out = CACHE / "runs" / f"trl-{setting.name}"
    out.mkdir(parents=True, exist_ok=True)
    fixed = setting.lengths is not None and len(set(setting.lengths)) == 1
    job = {
        "folder": str(out),
        "result": str(out / "rows.json"),
        "model": str(folder / "model"),
        "data": str(folder / "data/train.jsonl"),
        "iterations": options.iterations + WARM_UP_ITERATIONS + 1,
        "minibatches": MINIBATCHES,
        "samples": options.prompts * GROUP,
        "group_size": GROUP,
        "max_tokens": setting.max_tokens,
        "fixed": fixed,
        "lengths": None if fixed else setting.lengths,
        "reward": setting.reward,
        "pattern": PATTERN,
        "lr": LEARNING_RATE,
        "seed": 1,
        "threads": threads,
    }
    path = out / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [str(python)]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    started = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started.pop("PYTHONPATH", None)
    run_command([*command, str(RUNNER), str(path)], started, out / "log")
    rows = json.loads((out / "rows.json").read_text(encoding="utf-8"))[WARM_UP_ITERATIONS:-1]
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    tokens = means.pop("tokens")
    means["log_probs"] = means["prepare"] - means["generate"] - means["grade"]
    means["update"] = means["iteration"] - means.pop("prepare")
    return {"seconds": means, "tokens": tokens}


def best_trl_layout(
    folder: Path, options: argparse.Namespace, python: Path
) -> tuple[str, dict[str, float]]:
    """The layout with which TRL's quickstart iteration is shorter, and both numbers."""
    probe = Setting("probe", 32, None, "exact")
    sides = {name: partial(trl_side, probe, folder, options, python, name) for name in TRL_LAYOUTS}
    turns = interleaved(sides, 1, lambda text: say(f"TRL's layouts, {text}"))
    seconds = {name: turns[0][name]["seconds"]["iteration"] for name in TRL_LAYOUTS}
    return min(seconds, key=seconds.__getitem__), seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of tools/make_tiny_model.py")
    parser.add_argument("--repeats", type=int, default=3, help="turns per setting (default: 3)")
    parser.add_argument("--iterations", type=int, default=12, help="measured ones (default: 12)")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=["fixed", "quickstart", "longtail"],
        default=["fixed", "quickstart", "longtail"],
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts per iteration")
    parser.add_argument("--fixed-tokens", type=int, default=64, help="response length of `fixed`")
    parser.add_argument(
        "--tail-mean",
        type=int,
        default=24,
        help=f"mean response of `longtail`; the longest is {LONGEST_OVER_MEAN} times it",
    )
    parser.add_argument(
        "--trl-layout", choices=["best", *TRL_LAYOUTS], default="best", help="best: tries both"
    )
    parser.add_argument("--torch-index", help="where TRL's environment gets torch from")
    parser.add_argument("--trl-env", type=Path, help="its folder (default: .bench/trl)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = quickstart_model(options.model)
    python = trl_python(options.trl_env, options.torch_index)
    result: dict[str, Any] = {}
    layout, probed = options.trl_layout, None
    if layout == "best":
        layout, probed = best_trl_layout(folder, options, python)
    described = {}
    facts_before = environment()
    for setting in settings_of(options):
        sides = {
            "megarl": partial(megarl_side, setting, folder, options),
            "trl": partial(trl_side, setting, folder, options, python, layout),
        }
        say(f"{setting.name}:")
        turns = interleaved(sides, options.repeats, say)
        numbers, text = _compared(setting, turns, options.prompts * GROUP)
        result |= numbers
        described[setting.name] = text
    return result | {
        "settings": described,
        "trl_layout": layout,
        "trl_layouts_seconds": probed,
        "megarl_layout": "TP1·DP2, 2 generator replicas",
        "repeats": options.repeats,
        "iterations": options.iterations,
        "environment": facts_before,
    }


def _compared(
    setting: Setting, turns: Sequence[Mapping[str, Any]], samples: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Flat keys (megarl's samples per second over TRL's), and what stands behind them."""
    ratios = [
        turn["trl"]["seconds"]["iteration"] / turn["megarl"]["seconds"]["iteration"]
        for turn in turns
    ]
    numbers = Spread.of(ratios).keys(f"ratio_{setting.name}")
    text: dict[str, Any] = {"lengths": None if setting.lengths is None else facts(setting.lengths)}
    for side in ("megarl", "trl"):
        runs = [turn[side] for turn in turns]
        rates = [samples / run["seconds"]["iteration"] for run in runs]
        name = f"{side}_samples_per_second_{setting.name}"
        numbers |= Spread.of(rates).keys(name, 1)
        text[side] = {
            "tokens_per_iteration": statistics.median(run["tokens"] for run in runs),
            "seconds": {
                stage: round(statistics.median(run["seconds"][stage] for run in runs), 4)
                for stage in runs[0]["seconds"]
            },
        }
    return numbers, text


BENCH = Bench(
    name="peer-trl",
    line="whole GRPO steps against TRL's GRPOTrainer: samples per second, as a ratio",
    text="""The quickstart's model and task, group size, prompts, optimizer and loss on both sides,
in fp32 on this machine, in turn. TRL runs in an environment of its own, made on the first call.

ratio_fixed       every response has --fixed-tokens tokens
ratio_quickstart  responses end where the model ends them
ratio_longtail    log-normal lengths, the same list on both sides

Above 1, megarl makes more samples per second; whole steps: generation, rewards, updates.""",
    add_options=add_options,
    run=run,
)
