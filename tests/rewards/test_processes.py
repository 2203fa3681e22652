"""The pool's processes: what a change of code does to them, and that none is left behind.

Not covered: other systems than Linux, where scoring is refused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.rewards.score import ScoringPool
from megarl.rewards.scorer import ScorerError
from tests.rewards.make_pool import (
    GRADERS,
    Characters,
    child_processes,
    is_running,
    left_of,
    prompt,
    sample,
    score,
    scoring,
    section,
)

OBEY = f"{GRADERS}:obey"

LOADED_BY_ALL = """
import os, threading, time
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
"""
"""A process with threads is not forked: each worker loads the scorers itself."""


NO_ROOM = """
import errno, os
fork, depth = os.fork, 1
def forking():
    global depth
    if depth == {depth}:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    pid = fork()
    depth += pid == 0
    return pid
os.fork = forking
"""
"""Forks fail at this depth below the keeper."""


def sockets_of(process: psutil.Process) -> set[str]:
    """Those it has open."""
    folder = Path(f"/proc/{process.pid}/fd")
    names = {os.readlink(file) for file in folder.iterdir()}
    return {name for name in names if name.startswith("socket:")}


def change_code(tmp_path, monkeypatch, head: str) -> list[float | None]:
    """Totals by workers that started before and after the scorer's file was changed."""
    module = tmp_path / f"changing_{bool(head)}.py"
    code = head + "import os\ndef score(response): return os._exit(1) if response.text else 2.0\n"
    module.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with scoring(f"{module.stem}:score") as pool:
        module.write_text("def score(response): return 1.0\n")
        return [record.total for record in score(pool, ["x", ""])]


def test_code_that_changes_is_not_seen_by_a_run(tmp_path, monkeypatch):
    """The worker that takes the dead one's place is a fork of the process that loaded it."""
    assert change_code(tmp_path, monkeypatch, "") == [None, 2.0]


def test_code_that_changes_under_a_run_stops_it_where_each_worker_loads_it(tmp_path, monkeypatch):
    with pytest.raises(ScorerError, match="code of a scorer changed while it is in use"):
        change_code(tmp_path, monkeypatch, LOADED_BY_ALL)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_machine_without_room_for_a_process_says_so(depth, tmp_path, monkeypatch):
    """The keeper cannot start the template, the template nobody, or who is between no worker."""
    (tmp_path / "sitecustomize.py").write_text(NO_ROOM.format(depth=depth))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = child_processes()
    told = "cannot start a scoring process: Resource temporarily unavailable; look at the limits"
    with pytest.raises(ScorerError, match=told):
        ScoringPool(section(OBEY), Characters())
    assert left_of(before) == []


def test_a_template_that_takes_anothers_place_holds_no_workers_socket():
    with scoring("tests.rewards.rude:rude") as pool:
        keeper = psutil.Process(pool._pool._keeper._process.pid)

        def template() -> psutil.Process:
            (record,) = score(pool, ["pid"])
            (found,) = (one for one in keeper.children() if one.pid != record.total)
            return found

        first = template()
        first.kill()
        score(pool, ["kill SIGKILL"])
        second = template()
        assert second.pid != first.pid
        assert len(sockets_of(second)) == 1  # to the keeper


def test_closing_ends_workers_and_what_they_started():
    before = child_processes()
    pool = ScoringPool(section(OBEY, workers=2, deadline_seconds=60.0), Characters())
    pool.submit(sample("child"), prompt())
    until = time.monotonic() + 10
    # The keeper, the template, two workers, and what one of them started.
    while len(child_processes() - before) < 5 and time.monotonic() < until:
        time.sleep(0.05)
    started = child_processes() - before
    assert len(started) == 5
    pool.close()
    pool.close()
    assert left_of(before) == [] and child_processes() <= before
    # The grandchild was reparented, and dies a moment after it is told to.
    until = time.monotonic() + 5
    while (alive := [pid for pid in started if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive


def test_nothing_stays_open_in_the_rank():
    before = len(os.listdir("/proc/self/fd"))
    with scoring(OBEY, workers=3) as pool:
        score(pool, ["exit 3", "score 1", "score 2"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_pool_says_so():
    with scoring(OBEY, workers=3) as pool:
        pass
    with pytest.raises(RuntimeError, match="the scoring pool is closed"):
        score(pool, ["score 1"])


def test_a_killed_rank_leaves_no_worker_not_even_a_stuck_one(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, time\n"
        "from tests.rewards.make_pool import *\n"
        "scorers = section(GRADERS + ':obey', deadline_seconds=600.0, workers=2)\n"
        "pool = ScoringPool(scorers, Characters())\n"
        "pool.submit(sample('tower'), prompt())\n"
        "pool.submit(sample('child', 1), prompt())\n"
        "while len(child_processes()) < 5: time.sleep(0.05)\n"
        "print(*child_processes(), flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).resolve().parents[2]
    rank = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 5
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    until = time.monotonic() + 5
    while any(map(is_running, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    rank.stdout.close()


def test_a_training_script_is_not_run_again_by_workers(tmp_path):
    """multiprocessing would import the parent's main script, with all its libraries."""
    script = tmp_path / "main_script.py"
    script.write_text(
        "print('main runs', flush=True)\n"
        "from tests.rewards.make_pool import *\n"
        "with scoring('exact_match') as pool:\n"
        "    (record,) = score(pool, ['46'])\n"
        "print(record.total)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=60,
        check=True,
    )
    assert done.stdout.split("\n") == ["main runs", "1.0", ""]
