"""Runs that are meant to end badly: what they say, how long they take, what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megarl.faults import PERMISSION, STRUCK, VARIABLE
from tests.launch.runs import ROOT, environment, read_lines

MOST_SECONDS = 15.0
"""From the fault to the end of the last process."""
LAUNCH = ("bash", "launch/grpo.sh", "recipes/quickstart.yaml")


def torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    """The person's own torchrun."""
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks))
    return (*command, *options, "launch/grpo.sh", "recipes/quickstart.yaml")


@dataclass
class Ended:
    """A run that is over."""

    output: str
    code: int
    seconds: float
    """From the fault, or from the start where there was none."""
    left: list[str] = field(default_factory=list)
    """Processes of the run that outlived it by more than a second."""

    @property
    def lines(self) -> list[str]:
        """What megarl said about the end."""
        return [line for line in self.output.splitlines() if line.startswith("megarl: ")]


class _Family:
    """All descendants that a process ever had: one that loses its parent is not forgotten."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.seen: dict[int, psutil.Process] = {}
        self._root, self._over = psutil.Process(process.pid), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            try:
                found = self._root.children(recursive=True)
            except psutil.NoSuchProcess:
                return
            self.seen |= {child.pid: child for child in found}

    def end(self) -> None:
        for one in self.seen.values():
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def left(self) -> list[str]:
        self._over.set()
        self._thread.join()
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=1)
        return [told for told in map(_described, alive) if told is not None]


def _described(process: psutil.Process) -> str | None:
    """None for one that is gone, or dead and only not yet collected by process 1."""
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:80]}"
    except psutil.NoSuchProcess:  # ZombieProcess is one
        return None


def end_of(
    command: Sequence[str],
    *,
    log: Path | None = None,
    act: Callable[[subprocess.Popen], None] | None = None,
    fault: str = "",
    timeout: float = 120,
    **variables: str,
) -> Ended:
    """Run `command` until it ends, with `fault` planned. `log` is the log of the rank that has it.

    `act` is called with the process once the fault struck (without a fault: at once), and the
    seconds count from there.
    """
    planned = {VARIABLE: fault, PERMISSION: "1"} if fault else {}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment() | planned | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    family, began = _Family(process), time.time()
    try:
        if act is not None:
            if log is not None:
                began = struck(log, process, timeout)
            began = max(began, time.time())
            act(process)
        output, _ = process.communicate(timeout=timeout)
        ended = time.time()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            family.end()
            print(process.communicate()[0])
    if log is not None and act is None:
        began = struck(log, process, timeout)
    return Ended(output, process.returncode, ended - began, family.left())


def struck(log: Path, process: subprocess.Popen, timeout: float) -> float:
    """When the fault happened, by the rank's log; waits for it while the process lives."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        over = process.poll() is not None
        if log.exists():
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith(STRUCK):
                    return float(line.rsplit(" ", 1)[1])
        if over:
            break
        time.sleep(0.1)
    told = process.communicate()[0] if process.poll() is not None else "still running"
    raise AssertionError(f"no fault in {log}: {told}")


def is_not_finished(folder: Path) -> bool:
    """Nothing of the run may be taken for whole."""
    return not (folder / "finished.json").exists() and not (folder / "hf").exists()


def failed_reason(folder: Path) -> str | None:
    """The journal's last word."""
    last = read_lines(folder / "journal.jsonl")[-1]
    return last["reason"] if last["state"] == "FAILED" else None


@dataclass
class Table:
    """Rows of (input, message, seconds, exit code), printed at the end."""

    title: str
    rows: list[tuple[str, str, float, int]] = field(default_factory=list)

    def add(self, what: str, ended: Ended) -> None:
        said = ended.lines or [line for line in ended.output.splitlines() if line.strip()][-1:]
        self.rows.append((what, " | ".join(said), ended.seconds, ended.code))

    def show(self) -> None:
        print(f"\n\n{self.title}\n\n| input | message | seconds | exit code |")
        print("| --- | --- | --- | --- |")
        for what, message, seconds, code in self.rows:
            print(f"| {what} | {message} | {seconds:.1f} | {code} |")


@contextmanager
def shown(title: str) -> Iterator[Table]:
    table = Table(title)
    yield table
    table.show()
