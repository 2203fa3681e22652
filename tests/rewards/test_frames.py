"""Frames between the pool and a worker: large ones, at both ends at once.

Not covered: frames of more than 4 GiB, which their header cannot tell.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest

from megarl.rewards.frames import Channel

LARGE = bytes(8 << 20)
"""Far more than a socket holds."""


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_two_who_send_large_frames_do_not_wait_for_each_other(ends):
    """The worker only sends; the lane, which gives a limit, reads meanwhile."""
    ours, theirs = ends
    got = []
    worker = threading.Thread(
        target=lambda: (theirs.send(LARGE), theirs.send("more"), got.append(theirs.receive()))
    )
    worker.start()
    time.sleep(0.05)  # until its frame fills the socket
    ours.send(LARGE, seconds=5.0)
    worker.join()
    assert [len(got[0]), len(ours.receive()), ours.receive()] == [len(LARGE), len(LARGE), "more"]


def test_one_who_neither_reads_nor_speaks_is_given_up(ends):
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send(LARGE, seconds=0.1)


def test_one_who_speaks_has_time_to_read(ends):
    """A worker that is at a plain scorer does not read, and says with what it begins."""
    ours, theirs = ends

    def work() -> None:
        for number in range(6):
            time.sleep(0.1)
            theirs.send(number)
        theirs.receive()

    worker = threading.Thread(target=work)
    worker.start()
    ours.send(LARGE, seconds=0.3)
    worker.join()
    assert [ours.receive(0.0) for _ in range(7)] == [*range(6), None]


def test_what_was_said_before_the_end_is_heard(ends):
    ours, theirs = ends
    theirs.send("last")
    theirs.shut()
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send(LARGE, seconds=5.0)
    assert ours.receive() == "last"
    with pytest.raises(EOFError):
        ours.receive()
