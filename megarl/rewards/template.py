"""Forked processes that load scorers: the template, which forks workers, and workers of their own.

See `keeper.py` for who starts and ends them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from megarl.rewards.frames import Channel, Ready, Setup, Started
from megarl.rewards.judge import Judge, Loaded, load
from megarl.rewards.limits import children_of, die_with
from megarl.rewards.scorer import ScorerError
from megarl.rewards.worker import main as work

ADOPTION_SECONDS = 10.0


def never_return(body: Callable[..., NoReturn], *arguments: Any) -> NoReturn:
    """The life of a forked process: whatever goes wrong, it does not go on as its parent."""
    try:
        body(*arguments)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def no_process(error: OSError) -> str:
    """Why there is no worker: the machine, or a limit on it, has no room for a process."""
    return (
        f"reward.scorers: cannot start a scoring process: {error.strerror}; look at the limits on "
        "processes, memory and open files, or lower reward.workers"
    )


def load_and_work(descriptor: int, setup: Setup, keeper: int) -> NoReturn:
    """A worker that loads the scorers itself."""
    os.setsid()
    channel = Channel(socket.socket(fileno=descriptor))
    scorers, ready = _load_into(channel, setup)
    work(channel, setup, scorers, ready, keeper)


def _load_into(channel: Channel, setup: Setup) -> tuple[list[Loaded], Ready]:
    """Load the scorers into this process; it ends, having said why, where they cannot be."""
    pid, descriptors = os.getpid(), _sockets()
    sys.path[:] = setup.sys_path
    try:
        scorers, sources = load(setup)
    except ScorerError as error:
        channel.send(str(error))
        os._exit(0)
    if os.getpid() != pid:  # a module forked, and this is what it left
        os._exit(0)
    judge = Judge(scorers)
    if judge.awaited:
        import megarl.rewards.flow  # noqa: F401  once, not in every worker
    left = []
    if len(os.listdir("/proc/self/task")) > 1:
        left.append("threads")
    if children_of(pid):
        left.append("child processes")
    if _sockets() - descriptors:
        left.append("open sockets")
    flows = bool(judge.awaited)
    takes = max(judge.takes, setup.concurrency) if flows else judge.takes
    return scorers, Ready(sources, takes, flows, ", ".join(left) or None)


def _sockets() -> set[int]:
    """Descriptors that two processes cannot share: sockets and pipes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "pipe:")):
                found.add(int(name))
    return found


def be_template(channel: Channel, setup: Setup, keeper: int) -> NoReturn:
    """Load the scorers, then fork a worker for each `Start`, until the keeper is gone."""
    os.setsid()
    die_with(keeper)
    scorers, ready = _load_into(channel, setup)
    channel.send(ready)
    if ready.unsafe:
        os._exit(0)
    gc.collect()
    gc.freeze()  # the collector of a worker then leaves these pages shared
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a module may have set it
    while True:
        try:
            channel.receive()
        except EOFError:
            os._exit(0)
        descriptor = channel.descriptors.pop(0)
        try:
            pid = _fork_for(keeper, channel, descriptor, setup, scorers, ready, handler)
        except OSError as error:
            channel.send(no_process(error))
        else:
            channel.send(Started(pid))
        os.close(descriptor)


def _fork_for(
    keeper: int,
    channel: Channel,
    descriptor: int,
    setup: Setup,
    scorers: list[Loaded],
    ready: Ready,
    handler: signal.Handlers | None,
) -> int:
    """The pid of a worker whose parent is the keeper: the one in between has ended.

    Raises `OSError` when there can be no process.
    """
    reader, writer = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if between:
        os.close(writer)
        pid = int(os.read(reader, 32))
        os.close(reader)
        os.waitpid(between, 0)  # from here on the keeper is the worker's parent
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid
    os.close(reader)
    try:
        pid = os.fork()
    except OSError as error:
        pid = -error.errno
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    channel.close()
    os.setsid()
    until = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != keeper and time.monotonic() < until:
        time.sleep(0.0001)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    work(Channel(socket.socket(fileno=descriptor)), setup, scorers, ready, keeper)
