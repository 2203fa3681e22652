"""What the pool, the keeper of its processes and the workers tell each other.

A message is a frame: 4-byte length, pickle. It goes over a Unix socket, which also carries file
descriptors.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megarl.rewards.scorer import Response
from megarl.rewards.sources import Sources

HEADER = struct.Struct("<I")
READ_BYTES = 1 << 16
MOST_DESCRIPTORS = 4


@dataclass(frozen=True)
class ScorerSetup:
    """One scorer of the recipe."""

    title: str
    """Name of its component."""
    name: str
    options: dict[str, Any]
    only: frozenset[str] = frozenset()
    """Reward names it scores; empty: all."""
    batch: int = 1


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know before its first response."""

    sys_path: tuple[str, ...]
    scorers: tuple[ScorerSetup, ...]
    deadline_seconds: float
    memory_bytes: int | None = None
    """What it may use beyond what it has when its scorers are loaded; None: no limit."""
    concurrency: int = 1
    """Responses an `async` scorer works on at once in a worker."""

    @property
    def names(self) -> str:
        return ", ".join(scorer.name for scorer in self.scorers)


@dataclass(frozen=True)
class Ready:
    """The scorers are loaded, from these sources."""

    sources: Sources
    takes: int
    """Responses a worker takes at once; 1: one after the other, as many as it is sent."""
    flows: bool
    """It takes others while it works on some: a scorer is `async`."""
    unsafe: str | None = None
    """Why a process with these scorers cannot be forked: what they started while loading."""


@dataclass(frozen=True)
class Start:
    """To the keeper, with a socket: start a worker that talks over it. Answered by `Started`, with
    a pidfd of the worker, or a `str` that says why there is none."""


@dataclass(frozen=True)
class Started:
    pid: int


@dataclass(frozen=True)
class End:
    """To the keeper: end the worker and all that descends from it. Answered by `Ended`."""

    pid: int


@dataclass(frozen=True)
class Ended:
    exit_code: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Scores of one response, or the failure of one scorer."""

    components: dict[str, float]
    detail: str
    error: str | None
    seconds: float
    steps: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Scorer → its step scores, of those that gave any."""
    times: dict[str, float] = field(default_factory=dict)
    """Scorer → seconds it took for this response (of a batch: its share)."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The response took longer than the deadline."""

    deadline: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """The worker ended while scoring the response."""

    exit_code: int
    seconds: float


Outcome = Verdict | TimedOut | Died
Task = tuple[int, Response]
"""(the pool's number of a response, the response)."""


@dataclass(frozen=True, slots=True)
class Began:
    """From a worker that takes several responses at once: it works on these from here on. Without
    any: it is alive and waits for them."""

    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's verdict on the response `number`."""

    number: int
    outcome: Verdict | TimedOut
    spent: bool
    """The worker is to be replaced after it: its memory is used up, or it has too many children."""


class Channel:
    """One end of a socket on which frames travel. Used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        self._inode = os.fstat(end.fileno()).st_ino
        self._received = bytearray()
        self.descriptors: list[int] = []
        """Received and not yet taken by their user."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def is_whole(self) -> bool:
        """Whether its descriptor is still this socket's: foreign code may close and reuse it."""
        try:
            return os.fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False

    def send(self, value: Any, *descriptors: int, seconds: float | None = None) -> None:
        """Raises `BrokenPipeError` or `ConnectionResetError` when the other side is gone.

        With `seconds` what the other side sends is read meanwhile, so that two who both send do not
        wait for each other; raises `TimeoutError` when it neither takes nor says anything so long.
        """
        body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        rest = memoryview(HEADER.pack(len(body)) + body)
        if descriptors:
            rest = rest[socket.send_fds(self._socket, [rest], descriptors) :]
        if seconds is None:
            self._socket.sendall(rest)
            return
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._read_until_writable(seconds)

    def _read_until_writable(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        events = dict(poller.poll(seconds * 1e3))
        if not events:
            raise TimeoutError
        if events[self.fileno()] & select.POLLIN:
            try:
                self.read()
            except EOFError as error:
                raise BrokenPipeError from error

    def receive(self, seconds: float | None = None, watched: int | None = None) -> Any | None:
        """The next frame; None when there is none for `seconds` (None: wait).

        Raises `EOFError` when the other side is gone, or the process whose pidfd is `watched` is
        and has left no frame.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            value = self.take()
            if value is not None:
                return value
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            if watched is not None:
                poller.register(watched, select.POLLIN)
            left = None if until is None else max(0.0, until - time.monotonic()) * 1e3
            ready = {descriptor for descriptor, _ in poller.poll(left)}
            if not ready:
                return None
            if self._socket.fileno() not in ready:
                raise EOFError
            self.read()

    def read(self) -> None:
        """Read what is there, or the next bytes; raises `EOFError` when there can be none."""
        try:
            read, descriptors, _, _ = socket.recv_fds(
                self._socket, READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError as error:  # it ended with frames unread
            raise EOFError from error
        self.descriptors += descriptors
        if not read:
            raise EOFError
        self._received += read

    def take(self) -> Any | None:
        """The next frame of those read, None when none is complete."""
        if len(self._received) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._received)
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        value = pickle.loads(memoryview(self._received)[HEADER.size : end])
        del self._received[:end]
        return value

    def shut(self) -> None:
        """Whoever reads at either end, in this or another process, finds the end."""
        with suppress(OSError):  # the other side is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def say(text: str) -> None:
    """For people, on standard error."""
    print(text, file=sys.stderr, flush=True)
