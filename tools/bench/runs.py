"""Real runs of megarl for benchmarks: start one, wait for it, read its metrics."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.harness import CACHE, ROOT, BenchError, say

RECIPE = "recipes/quickstart.yaml"
WARM_UP_ITERATIONS = 2
"""Left out: the first iterations allocate, and the first one also evaluates."""


def quickstart_model(given: Path | None, seed: int = 1) -> Path:
    """The folder with `model/` and `data/`; made when there is none and none is given."""
    folder = given or ROOT / f"models/quickstart-s{seed}"
    if given is None:
        subprocess.run(
            [sys.executable, str(ROOT / "tools/make_tiny_model.py"), "--seed", str(seed)],
            cwd=ROOT,
            check=True,
            stdout=sys.stderr,
        )
    for name in ("model/config.json", "data/train.jsonl"):
        if not (folder / name).is_file():
            raise BenchError(f"{folder} has no {name}; give a folder of tools/make_tiny_model.py")
    return folder.absolute()


def run_megarl(
    name: str,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    recipe: str = RECIPE,
    module: str = "megarl.train",
    part: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, float]]:
    """Train as `recipe` with `settings` says; rows of metrics.jsonl without warm-up and the last.

    The last iteration also evaluates and exports. `module` is started in place of `megarl.train`,
    with `environment` added to this process's, and with `part` (`--only …`) after the recipe.
    """
    run = CACHE / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    fixed = {
        "run.name": name,
        "run.folder": str(CACHE / "runs"),
        "run.overwrite": "true",
        "model.path": folder / "model",
        "data.train": folder / "data/train.jsonl",
        "observe.tensorboard": "false",
    }
    arguments = [f"{key}={value}" for key, value in (fixed | dict(settings)).items()]
    ranks = settings.get("world.ranks", 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", module, recipe, *part, *arguments]
    started = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run_command(command, started | dict(environment or {}), CACHE / "runs" / f"{name}.log")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP_ITERATIONS:-1]
    if not rows:
        raise BenchError(f"at least {WARM_UP_ITERATIONS + 2} iterations are needed")
    return rows


def run_command(command: Sequence[str], environment: Mapping[str, str] | None, log: Path) -> None:
    """Run in the checkout, `environment` None: this process's.

    Raises `BenchError`, after the last lines of `log`, when the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as out:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment and dict(environment),
            stdout=out,
            stderr=out,
            check=False,
        )
    if done.returncode:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
            say(line)
        raise BenchError(f"exit code {done.returncode}, all of its output is in {log}")
