"""Runs that are killed and go on: the points, the launches, and all that must come out the same.

What is compared leaves out what tells of time and of attempts: `time/…`, versions' ids and the
hashes of facts that name a version.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from megarl.experience.load import load_iteration
from megarl.faults import PERMISSION, VARIABLE
from tests.launch.runs import ROOT, read_lines, run_warm, settings
from tests.launch.stops import LAUNCH, Ended, end_of

ITERATIONS = 5
EVERY = 2
"""Saves begin at positions 2, 4 and, at the run's end, 5."""
BASE = {
    "run.iterations": ITERATIONS,
    "checkpoint.every": EVERY,
    "world.timeout_seconds": 120,
}
BUSY = {
    # Whose answers end in 7 cannot be scored, and even ones teach nothing: prompts go into
    # quarantine, and most iterations sample in two rounds.
    "reward.scorers": "[{name: 'tests.launch.scorers:choosy'}]",
    "reward.max_error_share": 0.9,
    "reward.quarantine_after": 4,
    "algorithm.dynamic_sampling.max_rounds": 2,
}
VARYING_LEDGER = frozenset({"version", "experience_hash"})


@dataclass(frozen=True)
class Runs:
    """Launches into one folder of runs, on one data folder, with one set of values."""

    data: Path
    folder: Path
    values: Mapping[str, object] = field(default_factory=dict)
    modules: Path = ROOT
    """Where scorers of the test's own can be imported from, besides the checkout."""
    warm: bool = False
    """By ranks of `tests/warm.py`, without the launch script."""

    def launch(self, name: str, fault: str = "", **values: object) -> Ended:
        """The whole launch script, or `warm` ranks, with `fault` planned; ends by itself."""
        chosen = settings(self.data, self.folder, **(BASE | dict(self.values) | values))
        modules = f"{ROOT}:{self.modules}"
        if not self.warm:
            command = [*LAUNCH, f"run.name={name}", *chosen]
            return end_of(command, fault=fault, timeout=600, PYTHONPATH=modules)
        planned = {VARIABLE: fault, PERMISSION: "1"} if fault else {}
        began = time.time()
        done = run_warm(name, chosen, self.folder, 600, PYTHONPATH=modules, **planned)
        return Ended(done.output, done.code, time.time() - began)

    def finish(self, name: str, **values: object) -> Path:
        """A launch that runs to its end."""
        ended = self.launch(name, **values)
        assert ended.code == 0, ended.output + logs(self.folder / name)
        return self.folder / name

    def kill(self, name: str, fault: str, **values: object) -> Path:
        """A launch that dies of `fault`: what follows would show nothing if it had not."""
        ended = self.launch(name, fault, **values)
        where = f"{fault}: {ended.output}{logs(self.folder / name)}"
        assert ended.code == 137 and not ended.left, where
        return self.folder / name


def logs(run: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(run.glob("logs/rank_*.log")))


def copied(run: Path, runs: Path, name: str | None = None) -> Path:
    """A copy of a run's folder, for a test of its own."""
    return shutil.copytree(run, runs / (name or run.name), symlinks=True)


def rows(run: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times; none where there is no file yet."""
    return [but(row, "time/") for row in lines_of(run, "metrics.jsonl")]


def but(row: Mapping[str, Any], *prefixes: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(prefixes)}


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    return read_lines(path) if path.exists() else []


def ledger(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in VARYING_LEDGER}
        for line in lines_of(run, "ledger.jsonl")
    ]


def steps(run: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """(iteration, steps with loss, gradient norm, tokens …) of every update, as written."""
    return [(line["iteration"], line["steps"]) for line in lines_of(run, "updates.jsonl")]


def sampled(run: Path, iteration: int) -> bytes:
    """Digest of the prompts and response ids of one sealed iteration, and of what trained there.

    `load_iteration` holds the files to their hashes.
    """
    sealed = load_iteration(run, iteration)
    hasher = blake3(json.dumps([prompt["prompt_id"] for prompt in sealed.prompts]).encode())
    columns = [sealed.samples.response_ids, sealed.samples.draw_index, sealed.samples.candidate]
    columns += [sealed.old_log_probs, sealed.derived.verdict, sealed.derived.minibatch]
    columns += [sealed.derived.columns["advantages"]]
    for column in columns:
        hasher.update(np.ascontiguousarray(column).tobytes())
    return hasher.digest()


def weights(run: Path) -> dict[str, str]:
    """File of `hf/` → blake3."""
    return {path.name: blake3(path.read_bytes()).hexdigest() for path in (run / "hf").iterdir()}


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's own view: tag → (step, value) in order, times left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def committed(run: Path) -> list[tuple[int, str]]:
    """(optimizer step, weight manifest) of the actor's versions, one each, in order."""
    versions = [line for line in lines_of(run, "versions.jsonl") if line.get("role") == "actor"]
    return list(
        dict.fromkeys((line["optimizer_step"], line["weight_manifest_hash"]) for line in versions)
    )


def differences(run: Path, other: Path, iterations: Iterable[int] = range(ITERATIONS)) -> list[str]:
    """What of a finished run is not what it is in the `other`; empty where all is."""
    found = [
        name
        for name, part in {
            "metrics": rows,
            "ledger": ledger,
            "updates": steps,
            "quarantine": lambda run: lines_of(run, "quarantine.jsonl"),
            "TensorBoard": scalars,
            "versions": committed,
            "weights": weights,
        }.items()
        if part(run) != part(other)
    ]
    found += [f"samples of {n}" for n in iterations if sampled(run, n) != sampled(other, n)]
    evals = [{path.name for path in (each / "eval").glob("*")} for each in (run, other)]
    return found + ([] if evals[0] == evals[1] else ["evaluations"])


def check_prefix(run: Path, whole: Path) -> None:
    """The records of a run that died are the beginning of what the `whole` one has."""
    for part in (rows, ledger, steps):
        mine = part(run)
        assert mine == part(whole)[: len(mine)], part.__name__


def resumes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.glob("resumes/*/resume.json"))]


def tree(run: Path) -> dict[str, str]:
    """Every file of a run but its logs → blake3."""
    return {
        str(path.relative_to(run)): blake3(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.relative_to(run).parts[0] != "logs"
    }


@dataclass
class Story:
    """A printed table: where a run was killed, where it went on, what came of it."""

    lines: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, point: str, use: str, run: Path, differ: list[str]) -> None:
        told = resumes(run)
        begun = [line["iteration"] for line in told]
        reused = [line["reused"] for line in told if line["reused"] is not None]
        attempts = [line["attempt"] for line in told]
        verdict = ", ".join(differ) or "equal"
        self.lines.append((point, use, begun, attempts, reused, verdict))

    def show(self) -> None:
        print("\n\n| killed at | resume.use | goes on at | attempt | reused | outcome |")
        print("| --- | --- | --- | --- | --- | --- |")
        for line in self.lines:
            print("| " + " | ".join(map(str, line)) + " |")
