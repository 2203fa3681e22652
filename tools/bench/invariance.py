"""`invariance`: one minibatch's loss and whole gradient, however it is cut over ranks and packs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tools.bench.harness import CACHE, ROOT, Bench, environment, say
from tools.bench.runs import run_command

MODELS = ("qwen3", "qwen3_moe")
WORLDS = (1, 2, 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        help="tiny random models (default: both)",
    )
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="+",
        choices=WORLDS,
        default=list(WORLDS),
        help="numbers of ranks; 1 is always there (default: 1 2 4)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer layouts and losses, each kind once or more"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    facts = environment()
    folder = CACHE / "runs" / "invariance"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write = "import sys; from tools.layouts.models import make_models; make_models(*sys.argv[1:2], "
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", f"{write}sys.argv[2:])", str(folder), *options.models],
        cwd=ROOT,
        env=started,
        check=True,
        stdout=sys.stderr,
    )
    rows: list[dict[str, Any]] = []
    for world in sorted({1, *options.worlds}):
        say(f"{world} ranks")
        rows += on_ranks(world, {"models": options.models, "quick": options.quick})
    shutil.rmtree(folder)
    return summary(rows) | {"environment": facts}


def on_ranks(world: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Differences of every cut of `world` ranks; raises `BenchError` when one fails."""
    folder = CACHE / "runs" / "invariance"
    result = folder / f"result{world}.json"
    written = job | {"folder": str(folder), "result": str(result)}
    (folder / "job.json").write_text(json.dumps(written), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "-m", "tools.bench.invariance_ranks"]
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = CACHE / "runs" / f"invariance{world}.log"
    run_command([*command, str(folder / "job.json")], started, log)
    return json.loads(result.read_text(encoding="utf-8"))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest differences, over all and by cut and loss. The whole of each model is a cut too,
    the one that the others are compared with."""
    cuts = {row["cut"] for row in rows}
    models = {cut.partition(":")[0] for cut in cuts}
    result: dict[str, Any] = {
        "cuts": len(cuts) + len(models),
        "losses": len({row["loss"] for row in rows}),
        "max_rel_loss": max(row["rel_loss"] for row in rows),
        "max_rel_grad": max(row["rel_grad"] for row in rows),
    }
    for part in ("cut", "loss"):
        result[f"by_{part}"] = {
            name: {
                key: max(row[key] for row in rows if row[part] == name)
                for key in ("rel_loss", "rel_grad")
            }
            for name in sorted({row[part] for row in rows})
        }
    return result


BENCH = Bench(
    name="invariance",
    line="one minibatch's loss and gradient under every cut: packs, padding, DP, TP, PP, experts",
    text="""A minibatch of 12 ragged samples, with tokens that are no action, is cut in many ways:
all in one pack on one rank; by token budgets, shuffled, each sample alone, padded with dummy
sequences; over data, tensor (and sequence), pipeline (and virtual) and expert parallel ranks, gloo,
float32. A tiny dense model and one with experts, both random. Sealed log-probs are the first cut's,
shifted by seeded noise of 0.3, so that ratios lie on both sides of every clip; the same for all
cuts. Of each cut the losses of every objective (ppo_clip, with dual clip, gspo, cispo), alone and
with KL in the loss, entropy and importance weights, by every reduction, and of the critic with and
without value clip; with each the gradient after all reductions, gathered in Hugging Face shapes.
Nobody steps.

cuts             how many, of all models
losses           objective × reduction × what it is taken with, and the critic's
max_rel_loss     |difference of the loss from the first cut's| over Σ |weight · a token's term|, the
                 mean size of a token's term under the reduction
max_rel_grad     ‖difference of the gradient‖₂ / ‖gradient‖₂ over all of the model
by_cut, by_loss  the largest of both (JSON)""",
    add_options=add_options,
    run=run,
)
