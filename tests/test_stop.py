"""A graceful stop (`megarl.stop`): which signals ask for it, where, and what the exit code is.

Ranks are stand-ins that do not train (tests/stand_in.py), under the real launcher, launch script
and torchrun. Whole runs: tests/known_faults/test_launch.py; Slurm: tests/slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megarl.stop import EXIT_CODE
from tests.launch.runs import ROOT, environment, read_lines
from tests.stand_in import ITERATIONS

RANKS = "tests.stand_in"
USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
QUIET = {"TORCHELASTIC_LOG_LEVEL": "CRITICAL"}


def _command(how: str, folder: Path) -> list[str]:
    settings = [f"run.folder={folder}", "world.ranks=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return {
        "launcher": [sys.executable, "-m", "megarl.launcher", "2", RANKS, *settings],
        "script": ["bash", "-c", SCRIPT, str(ROOT / "recipes" / "quickstart.yaml"), *settings],
        "torchrun": [*torchrun, "--nproc_per_node", "2", "-m", RANKS, *settings],
        "alone": [sys.executable, "-m", RANKS, *settings],
    }[how]


SCRIPT = f'source {ROOT}/launch/env.sh; megarl_launch {RANKS} "$0" "$@"'


def _start(how: str, folder: Path, **variables: str) -> subprocess.Popen:
    kept = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        _command(how, folder),
        cwd=ROOT,
        env=kept | {"MEGARL_PYTHON": sys.executable} | QUIET | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _running(process: subprocess.Popen, folder: Path) -> list[psutil.Process]:
    """The ranks, once each of them has finished an iteration."""
    until = time.monotonic() + 60
    while len(list(folder.glob("position_*"))) < 2:
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.05)
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if RANKS in child.cmdline() and "megarl.launcher" not in child.cmdline()
    ]


def _positions(folder: Path) -> set[int]:
    return {int(file.read_text()) for file in folder.glob("position_*")}


def _states(folder: Path) -> list[str]:
    return [line["state"] for line in read_lines(folder / "journal.jsonl")]


Send = Callable[[subprocess.Popen, list[psutil.Process]], None]


def _to_main(process: subprocess.Popen, ranks: list[psutil.Process]) -> None:
    process.send_signal(USR1)


def _to_rank(process: subprocess.Popen, ranks: list[psutil.Process]) -> None:
    for rank in ranks:  # stand-ins decide alone; in a run one of them is enough
        rank.send_signal(USR1)


def _to_all(process: subprocess.Popen, ranks: list[psutil.Process]) -> None:
    os.killpg(process.pid, USR1)


def _to_main_often(process: subprocess.Popen, ranks: list[psutil.Process]) -> None:
    for _ in range(20):
        process.send_signal(USR1)
        time.sleep(0.01)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "send"),
    [
        ("launcher", _to_main_often),
        ("launcher", _to_rank),
        ("script", _to_main),
        ("script", _to_all),
    ],
)
def test_a_run_that_is_asked_stops_at_a_boundary(how: str, send: Send, tmp_path: Path) -> None:
    process = _start(how, tmp_path)
    send(process, _running(process, tmp_path))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE == 75, output
    (line,) = output.splitlines()
    assert line.startswith("megarl: stopped after iteration ")
    assert f"as asked (SIGUSR1), saved in {tmp_path}/position_0; the same command goes on" in line
    assert all(0 < position < ITERATIONS for position in _positions(tmp_path))
    assert _states(tmp_path) == ["ACTOR_COMMITTED"]
    again = _start(how, tmp_path)
    output, _ = again.communicate(timeout=60)
    assert (again.returncode, output) == (0, "")
    assert _positions(tmp_path) == {ITERATIONS}


@pytest.mark.launch
@pytest.mark.parametrize("seconds", [0.3, 0.9])
def test_a_request_before_there_are_ranks_is_kept(seconds: float, tmp_path: Path) -> None:
    """The launch script checks Python and the recipe; the launcher imports torch."""
    process = _start("script", tmp_path)
    time.sleep(seconds)
    process.send_signal(USR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE, output
    assert "stopped after iteration 0 as asked" in output
    assert _positions(tmp_path) == {1}


@pytest.mark.launch
def test_under_the_persons_own_torchrun_ranks_are_asked(tmp_path: Path) -> None:
    """torchrun's exit code for any rank that ended with another than 0 is 1."""
    process = _start("torchrun", tmp_path)
    _to_rank(process, _running(process, tmp_path))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    told = [line for line in output.splitlines() if line.startswith("megarl: ")]
    assert len(told) == 1 and "as asked (SIGUSR1)" in told[0], output
    assert all(0 < position < ITERATIONS for position in _positions(tmp_path))


@pytest.mark.launch
def test_a_rank_alone_is_asked(tmp_path: Path) -> None:
    process = _start("alone", tmp_path)
    while not (tmp_path / "position_0").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(USR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE and output.count("\n") == 1


@pytest.mark.launch
@pytest.mark.parametrize(
    ("number", "code", "says"), [(TERM, 143, "ended by SIGTERM"), (INT, 130, "interrupted")]
)
def test_other_signals_end_a_run_that_was_asked_to_stop(
    number: signal.Signals, code: int, says: str, tmp_path: Path
) -> None:
    process = _start("launcher", tmp_path, STAND_IN_SECONDS="3")  # longer than the signals take
    _running(process, tmp_path)
    process.send_signal(USR1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert output == f"megarl: {says}\n"
    assert _states(tmp_path)[-1] == "FAILED"


@pytest.mark.launch
def test_a_second_sigterm_to_the_launcher_says_nothing_more(tmp_path: Path) -> None:
    """Slurm signals all of a job, and the script passes it on."""
    process = _start("launcher", tmp_path)
    _running(process, tmp_path)
    while process.poll() is None:
        process.send_signal(TERM)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert output == "megarl: ended by SIGTERM\n"


WAITS = """
    import os, signal, sys, threading, time
    from megarl.stop import StopRequest, hold

    hold()
    # A library's call that never comes back to Python, in the main thread.
    request = StopRequest()
    request.listen()

    def watch():
        while not request.asked:
            time.sleep(0.01)
        os._exit(7)

    threading.Thread(target=watch, daemon=True).start()
    print("waits", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_it_is_heard_while_the_main_thread_waits() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WAITS)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout.readline() == "waits\n"
    rank.send_signal(USR1)
    assert rank.wait(timeout=20) == 7


HELD = """
    import os, signal, subprocess, sys, time
    from megarl.stop import StopRequest, hold

    hold()
    os.kill(os.getpid(), signal.SIGUSR1)
    sleeper = subprocess.Popen(["sleep", "1"])
    sleeper.send_signal(signal.SIGUSR1)
    request = StopRequest()
    assert not request.asked
    request.listen()
    until = time.monotonic() + 10
    while not request.asked and time.monotonic() < until:
        time.sleep(0.01)
    sys.exit(0 if request.asked and sleeper.wait() == 0 else 1)
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_it_is_held_until_somebody_listens_and_no_child_dies_of_it(ignored: bool) -> None:
    """The launch script starts Python with the signal ignored."""

    def ignore() -> None:
        if ignored:
            signal.signal(USR1, signal.SIG_IGN)

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HELD)],
        cwd=ROOT,
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
