"""A run that goes beyond a position, for tests that cut it back, and a process that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.checkpoint.cut_back import cut_back
from megarl.checkpoint.records import RecordPositions, present_files
from megarl.contracts.lines import LinesWriter
from megarl.observe.metrics import MetricsWriter, read_rows

POSITION, LAST = 2, 4
CALLS = {"open", "write", "flush", "fsync", "rename", "replace", "truncate", "mkdir", "__exit__"}
CALLS |= {"sendfile", "unlink", "rmdir"}
MEMORY = "/dev/shm"
EACH = ("journal", "versions", "updates", "ledger")

Tree = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run that went beyond its position, and what it was when it stood there."""

    folder: Path
    records: dict[str, dict[str, Any]]
    present: dict[str, list[str]]
    then: Tree
    """The folder at the position, without TensorBoard's files and `exports/best`."""
    later: Tree
    """The folder as the run left it."""

    def aside(self, folder: Path, number: int) -> Path:
        path = folder / "resumes" / f"{number:03d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "resume.json").write_text("{}")
        return path

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.folder, to, symlinks=True))

    def to_position(self, folder: Path, number: int = 1, reuse: int | None = None) -> list[str]:
        aside = self.aside(folder, number)
        return cut_back(folder, aside, self.records, POSITION, **self.present, reuse=reuse)

    def to_start(self, folder: Path, number: int = 1) -> list[str]:
        aside = self.aside(folder, number)
        return cut_back(folder, aside, None, 0, eval_files=(), export_names=(), reuse=None)

    def to_reuse(self, folder: Path, number: int = 1) -> list[str]:
        return self.to_position(folder, number, reuse=POSITION)


def put(path: Path, body: str | bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body if isinstance(body, bytes) else body.encode())


def iterations(folder: Path, first: int, last: int) -> None:
    """What a run writes in the iterations first … last − 1."""
    writers = [LinesWriter(folder / f"{name}.jsonl") for name in EACH]
    with MetricsWriter(folder, tensorboard=True) as metrics:
        for n in range(first, last):
            for writer in writers:
                writer.write({"iteration": n, "text": "x" * (37 * n)})
                writer.write({"iteration": n, "more": n})
            metrics.write({"iteration": n, "reward/mean": 1 / (n + 3), "ok": True, "why": "no"})
            sealed = folder / "experience" / f"iter_{n:06d}"
            for part in ("rollout_0", "scored_0", "derived_0", "derived_1", "selection"):
                put(sealed / f"{part}.safetensors", f"{part} of {n}")
            for name in ("manifest.json", "derived.json", "prompts.jsonl"):
                put(sealed / name, f"{name} of {n}")
            if n % 2:
                put(folder / "eval" / f"step_{n}.jsonl", f"eval {n}\n")
                put(folder / "exports" / f"iter_{n:06d}" / "config.json", f"{n}")
    for writer in writers:
        writer.close()


def checkpoint(folder: Path, iteration: int, whole: bool = True) -> None:
    path = folder / "checkpoints" / f"iter_{iteration:06d}"
    put(path / "actor" / "__0_0.distcp", f"weights {iteration}")
    put(path / "position.json", f"position {iteration}")
    if whole:
        put(path / "COMMIT.json", f"commit {iteration}")


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty folder on a file system of its own, in memory."""
    if not os.access(MEMORY, os.W_OK):
        pytest.skip(f"there is no {MEMORY} to write to, on which a sync costs nothing")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def is_events(name: str) -> bool:
    return name.startswith("tensorboard")


def tree(folder: Path, *, asides: bool = False) -> Tree:
    """Relative name → bytes, a link's end, or None for a folder; `resumes` only if asked for."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith("resumes") and not asides:
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def without_events(tree: Tree) -> Tree:
    return {name: body for name, body in tree.items() if not is_events(name)}


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, wall time), read by TensorBoard."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def of_rows(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard has to show of metrics.jsonl: numbers, as float32."""
    told: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(folder / "metrics.jsonl")[0]:
        for key, value in row.items():
            if key != "iteration" and not isinstance(value, str):
                told.setdefault(key, []).append((row["iteration"], float(np.float32(value))))
    return told


def check_nothing_lost(run: Run, folder: Path, other: Path | None = None) -> None:
    """Every file of the run before the cut lies somewhere: in place, or in some aside, or, of a
    line file, its beginning in place and the rest in an aside. `other`: where links lead to."""
    now = tree(folder, asides=True)
    bodies = set(now.values()) | set(tree(other).values() if other else ())
    for name, body in run.later.items():
        if body is None or body in bodies:
            continue
        assert name in run.records, name
        start = len(now[name])
        assert body[:start] == now[name] and body[start:] in bodies, name


def check_in_the_middle(run: Run, folder: Path) -> None:
    """What must hold of the folder after a kill at any moment."""
    before, now = run.later, tree(folder)
    for path in (folder / "checkpoints").iterdir():
        name = path.relative_to(folder).as_posix()
        ours = {key: body for key, body in now.items() if key.startswith(name)}
        assert ours == {key: body for key, body in before.items() if key.startswith(name)}
    for path in (folder / "experience").glob("iter_*/derived.json"):
        name = path.parent.relative_to(folder).as_posix()
        gone = {key for key in before if key.startswith(name)} - now.keys()
        assert not gone, "derived.json tells of files that are gone"
    if "finished.json" in now:
        assert now == before, "it looks finished and is cut already"
    changed = any(now.get(name) != before[name] for name in run.records)
    newer = [path.name for path in (folder / "checkpoints").iterdir() if path.name > "iter_000002"]
    assert not (changed and newer), "records were cut under a newer checkpoint"
    check_nothing_lost(run, folder)


def killed_at(call: int, cut: Callable[[], Any]) -> bool:
    """Run `cut` in a process of its own that is killed before its `call`-th writing call; whether
    it came to that. Only calls from the modules under test and the standard library count."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(frame: FrameType, event: str, function: Any) -> None:
            nonlocal count
            if event == "c_call" and function.__name__ in CALLS:
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(hook)
            cut()
        except BaseException:
            sys.setprofile(None)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the cut failed"
    return os.WIFSIGNALED(status)


def make_run(folder: Path) -> Run:
    """Stands at POSITION, goes on to LAST, finishes, and leaves torn and half-written files."""
    for name in ("recipe.yaml", "data.json", "logs/rank_0.log", "tokenizer/tokenizer.json"):
        put(folder / name, name)
    (folder / "experience").mkdir()
    put(folder / "experience" / ".writer.lock")
    checkpoint(folder, 1)
    iterations(folder, 0, POSITION)
    best = folder / "exports" / "best"
    best.symlink_to("iter_000001")
    positions = RecordPositions(folder).take()
    present = present_files(folder)
    checkpoint(folder, POSITION)
    then = without_events(tree(folder))
    del then["exports/best"]  # turned below to an export that goes: then it leads nowhere, and goes
    iterations(folder, POSITION, LAST)
    checkpoint(folder, 3)
    checkpoint(folder, LAST)
    checkpoint(folder, 5, whole=False)
    best.unlink()
    best.symlink_to("iter_000003")
    put(folder / "quarantine.jsonl", b'{"prompt_id": "p"}\n')
    put(folder / "eval" / "step_9.tmp", "half")
    put(folder / "exports" / ".iter_000005.partial" / "config.json", "half")
    for name in ("finished.json", "report.html", "timeline.json", "environment.json"):
        put(folder / name, name)
    put(folder / "hf" / "model.safetensors", "weights")
    for name in ("journal.jsonl", "metrics.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b'{"iteration": 4, "torn')
    events = sorted((folder / "tensorboard").iterdir())
    assert len(events) == 2
    with open(events[-1], "ab") as file:
        file.write(events[-1].read_bytes()[-40:-9])
    return Run(folder, positions, present, then, tree(folder))
