"""Scorers that do to their process what no scorer should. Imported by scoring workers."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time

from megarl.rewards.scorer import Response

LONG = "3600"
KEPT: list[object] = []


def rude(response: Response) -> object:
    """Does what the response's text says."""
    what, _, rest = response.text.partition(" ")
    return RUDE[what](rest)


def cpu(response: Response) -> float:
    """About a millisecond of work; the text may ask for something worse."""
    if response.text.startswith("stuck"):
        time.sleep(3600)
    if response.text.startswith("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.thread_time() + 1e-3
    while time.thread_time() < until:
        pass
    return 1.0


def _fork(_: str) -> float:
    os.fork()
    return 1.0  # in both


def _fork_and_raise(_: str) -> float:
    if os.fork() == 0:
        sys.exit(3)
    return 1.0


def _daemon(_: str) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", LONG])
        os._exit(0)
    return 1.0


def _session(_: str) -> float:
    subprocess.Popen(["sleep", LONG], start_new_session=True)
    return 1.0


def _multiprocessing(_: str) -> float:
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        return float(sum(pool.map(abs, [-1, 1]))) / 2


def _bomb(_: str) -> float:
    """Each process starts two more, some in sessions of their own, and lives on: 216."""
    for depth in range(3):
        os.fork()
        if os.fork() == 0:
            if depth % 2:
                os.setsid()
            os.fork()
    time.sleep(float(LONG))
    return 1.0


def _breed(rest: str) -> float:
    """A child that goes on making children that make children, until it is killed."""
    if os.fork() == 0:
        until = time.monotonic() + 20.0  # a test that fails leaves the machine usable
        os.setsid()
        while time.monotonic() < until:
            if os.fork() == 0:
                os.setsid()
                time.sleep(0.5)
                os._exit(0)
            time.sleep(0.002)
        os._exit(0)
    return 1.0


def _leave(rest: str) -> float:
    for _ in range(int(rest)):
        if os.fork() == 0:
            time.sleep(float(LONG))
            os._exit(0)
    return 1.0


def _array(_: str) -> float:
    import numpy as np

    return float(np.ones(1 << 30, dtype=np.float64)[-1])


def _bytes(_: str) -> float:
    return float(len(bytearray(8 << 30)))


def _list(_: str) -> float:
    held = []
    while True:
        held.append([0] * 1000)


def _little(_: str) -> float:
    KEPT.append(bytearray(10 << 20))
    return 1.0


def _threads(_: str) -> float:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(float(LONG),)).start()
    return 1.0


def _surroundings(rest: str) -> float:
    os.chdir(rest)
    os.environ.clear()
    sys.path.clear()
    sys.setrecursionlimit(60)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def _look(_: str) -> float:
    def deep(left: int) -> int:
        return left and 1 + deep(left - 1)

    time.sleep(0.4)  # for a timer to end the process
    assert os.getcwd() != "/" and os.environ["PATH"]
    importlib.reload(queue)  # as good as importing it
    return float(deep(500) == 500)


def _close_streams(_: str) -> float:
    os.closerange(0, 3)
    return 1.0


def _close_all(_: str) -> float:
    os.closerange(0, 256)
    return 1.0


def _reuse(rest: str) -> float:
    """Closes all descriptors; files of its own get their numbers."""
    os.closerange(3, 256)
    for number in range(8):
        os.open(f"{rest}/{number}", os.O_WRONLY | os.O_CREAT)
    return 1.0


def _told(_: str) -> float:
    print("to the screen", flush=True)
    sys.stdout.close()
    return 1.0


def _parent(_: str) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10.0)
    return 1.0


RUDE = {
    "score": float,
    "raise": lambda rest: [][1],
    "nan": lambda _: float("nan"),
    "none": lambda _: None,
    "list": lambda _: [1.0, 2.0],
    "generator": lambda _: (one for one in [1.0]),
    "input": lambda _: float(len(sys.stdin.read())),
    "exit": lambda rest: sys.exit(int(rest)),
    "end": lambda rest: os._exit(int(rest)),
    "sleep": lambda rest: time.sleep(float(rest)) or 1.0,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda rest: os.kill(os.getpid(), getattr(signal, rest)),
    "abort": lambda _: os.abort(),
    "segfault": lambda _: ctypes.string_at(0),
    "fork": _fork,
    "fork_and_raise": _fork_and_raise,
    "daemon": _daemon,
    "session": _session,
    "multiprocessing": _multiprocessing,
    "bomb": _bomb,
    "breed": _breed,
    "leave": _leave,
    "array": _array,
    "bytes": _bytes,
    "list_memory": _list,
    "little": _little,
    "threads": _threads,
    "surroundings": _surroundings,
    "look": _look,
    "close_streams": _close_streams,
    "close_all": _close_all,
    "reuse": _reuse,
    "told": _told,
    "pid": lambda _: float(os.getpid()),
    "parent": _parent,
}
