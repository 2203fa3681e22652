"""Cases on a CPU that others keep busy: their waiting is not held against them, and only theirs.

Not covered: kernels without CONFIG_SCHED_INFO, CPU quotas of containers, real-time processes, and
what sandbox_waits.py names as not seen.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from megarl.rewards import code, sandbox_waits
from megarl.rewards.code_runner import EXITED, TIME
from megarl.rewards.sandbox import Ended, Maker, SandboxError
from megarl.rewards.sandbox_waits import Waits
from megarl.rewards.scorer import Response, RewardParts
from tests.rewards.make_sandbox import SMALL, USUAL, case, maker, one_cpu

COMPUTE = (
    "import time\n"
    "def f(seconds):\n"
    "    until = time.process_time() + seconds\n"
    "    while time.process_time() < until: pass\n"
    "    return 7\n"
)
CHILD = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    while time.process_time() < 0.2: pass\n"
    "    os._exit(0)\n"
    "os.wait(); print('fine')\n"
)
LOOPS = "while True: pass\n"
FORKS = "import os\nfor _ in range(4): os.fork()\n" + LOOPS
BUSY_SIBLINGS = (
    "import os, time\n"
    "for _ in range(15):\n"
    "    if os.fork() == 0:\n"
    "        while True: pass\n"
    "time.sleep(60)\n"
)
SHORT_LIVES = (
    "import os, time\n"
    "while True:\n"
    "    for _ in range(6):\n"
    "        if os.fork() == 0:\n"
    "            while time.process_time() < 0.005: pass\n"
    "            os._exit(0)\n"
    "    for _ in range(6): os.wait()\n"
)


@pytest.fixture(scope="module")
def one() -> Maker:
    return maker(USUAL)


def run(one: Maker, program: str, case_seconds: float, most: float, busy: int) -> Ended:
    limits = replace(SMALL, case_seconds=case_seconds, processes=20)
    with one_cpu(busy), one.start(program, "", limits) as sandbox:
        return sandbox.run(case("", seconds=most))


@pytest.mark.parametrize(
    "program", [COMPUTE + "f(0.2); print('fine')", CHILD], ids=["itself", "child"]
)
def test_a_right_program_that_waits_for_a_cpu_gets_its_time(one: Maker, program: str) -> None:
    ended = run(one, program, 0.4, 30.0, busy=4)
    assert (ended.how, ended.output) == (EXITED, b"fine\n")
    assert ended.counted < 0.4 < ended.seconds


@pytest.mark.parametrize(
    ("program", "busy"),
    [
        ("import time\ntime.sleep(60)", 3),
        (LOOPS, 3),
        (FORKS, 0),
        (BUSY_SIBLINGS, 0),
        (SHORT_LIVES, 0),
    ],
    ids=["sleeps", "loops", "forks", "busy siblings", "short lives"],
)
def test_whoever_takes_too_long_is_late(one: Maker, program: str, busy: int) -> None:
    ended = run(one, program, 0.15, 20.0, busy)
    assert ended.how == TIME and ended.counted >= 0.15
    # Sixteen that shared the CPU among themselves waited sixteen times as long as each ran.
    assert busy or ended.seconds < 1.8


def test_what_counts_of_a_loop_is_what_it_ran() -> None:
    waits = Waits()
    with one_cpu(2):
        loop = subprocess.Popen([sys.executable, "-c", LOOPS], start_new_session=True)
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 0.5:
            waits.look([loop.pid])
            time.sleep(0.05)
        ran = sum(psutil.Process(loop.pid).cpu_times()[:2])
        loop.kill()
        loop.wait()
    assert waits.counted(seconds) == pytest.approx(ran, abs=0.15) and ran < 0.6 * seconds


class Told:
    """What Linux would tell of threads, each its process's only one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, str] = {}
        monkeypatch.setattr(sandbox_waits, "_read", lambda path: self.files.get(path, ""))
        monkeypatch.setattr(sandbox_waits, "_listed", lambda pid: [pid])

    def tell(self, pid: int, ran: float, waited: float, state: str = "S", ended: float = 0) -> None:
        """Seconds; `ended`: CPU time of children that it waited for."""
        ticks = [round(seconds / sandbox_waits.TICK) for seconds in (ran, 0, ended, 0)]
        stat = f"{pid} (a) b) {state} " + "0 " * 10 + " ".join(map(str, ticks)) + " 20 0"
        self.files[f"/proc/{pid}/stat"] = self.files[f"/proc/{pid}/task/{pid}/stat"] = stat
        times = f"{round(ran * 1e9)} {round(waited * 1e9)} 3\n"
        self.files[f"/proc/{pid}/task/{pid}/schedstat"] = times


def test_waiting_counts_less_what_siblings_ran_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    told, waits = Told(monkeypatch), Waits()
    told.tell(5, 0.1, 0.2)
    told.tell(6, 0.15, 0.0)
    waits.look([5, 6])
    assert waits.counted(1.0) == pytest.approx(0.95)  # 5 waited 0.05 s longer than 6 ran
    told.tell(6, 0.15, 0.3)
    waits.look([5, 6])
    assert waits.counted(1.0) == pytest.approx(0.65)
    told.tell(5, 0.9, 0.2)
    told.tell(6, 0.15, 1.1)
    waits.look([5, 6])
    assert waits.counted(2.0) == pytest.approx(1.65)
    assert waits.counted(1.1) == pytest.approx(1.05)  # what both ran counts in any case
    assert waits.more(2.0, limit=1.9, most=9.0) == pytest.approx(0.25)
    assert waits.more(2.0, limit=1.9, most=2.1) == pytest.approx(0.1)
    assert waits.more(2.0, limit=1.6, most=9.0) == waits.more(2.0, limit=1.9, most=2.0) == 0.0


def test_what_ended_children_ran_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    told, waits = Told(monkeypatch), Waits()
    told.tell(5, 0.1, 0.5, ended=0.32)
    waits.look([5])
    assert waits.counted(1.0) == pytest.approx(1.0 - (0.5 - 0.3))


def test_a_wait_that_goes_on_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told, waits, other = Told(monkeypatch), Waits(), Waits()
    told.tell(5, 0.1, 0.0, "R")
    told.tell(6, 0.1, 0.0, "S")
    for _ in range(2):
        waits.look([5])
        other.look([6])
        time.sleep(0.03)
    waits.look([5])
    other.look([6])
    assert waits.counted(1.0) <= 1.0 - 0.06 and other.counted(1.0) == 1.0
    told.tell(5, 0.1, 0.6, "R")
    waits.look([5])
    assert waits.counted(1.0) == pytest.approx(0.4)


def test_a_process_of_which_nothing_is_told_waits_for_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    waits = Waits()
    waits.look([gone.pid])
    assert waits.counted(3.0) == 3.0 and waits.more(3.0, limit=3.0, most=9.0) == 0.0


def test_a_machine_too_busy_is_an_error_and_no_score() -> None:
    one = code.make(case_seconds=0.3, total_seconds=0.4, score="share", memory_mb=128)
    cases = [{"args": [seconds], "output": 7} for seconds in (0.01, 0.2, 0.01)]
    tests = {"tests": {"style": "call", "function": "f", "cases": cases}}
    given = Response(f"```\n{COMPUTE}```", "", "?", True, "eos", metadata=tests)
    assert code.make(total_seconds=30.0, memory_mb=128)(given) == RewardParts(1.0, "")
    why = r"the machine was too busy: the program waited 0\.\d of 0\.\d s for a CPU; lower reward\."
    with one_cpu(4), pytest.raises(SandboxError, match=why):
        one(given)
