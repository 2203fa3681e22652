"""Makers of sandboxes for tests, in each way that works here, programs run in them, a busy CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from megarl.rewards.code_runner import EXITED
from megarl.rewards.sandbox import ROOT, USER, Ended, Limits, Maker
from megarl.rewards.sandbox_setup import why_not
from megarl.rewards.sandbox_users import can_be_others

SMALL = Limits(case_seconds=30.0, cpu_seconds=5, memory_mb=128, file_mb=2, processes=8)
USUAL, OTHER = (ROOT, USER) if can_be_others() else (USER, ROOT)
"""The way in which the scorer makes sandboxes here, and the other one."""

TRY = """
import os
def attempt(what, *args):
    try:
        return what(*args)
    except BaseException as error:
        return type(error).__name__
"""
"""Begins programs that try what should fail."""


@cache
def maker(way: str) -> Maker:
    """Skips the test where the way does not work.

    Another user cannot read an interpreter in root's home: the system's is taken if it is the same.
    """
    if way == ROOT and not can_be_others():
        pytest.skip("only root makes sandboxes this way")
    tried = [Maker(way)]
    system = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    if way == USER and system.exists():
        tried.append(Maker(way, os.path.realpath(system), ("/usr",)))
    reasons = [why_not(one) for one in tried]
    if None not in reasons:
        pytest.skip(f"no sandbox as {way}: {reasons[-1]}")
    return tried[reasons.index(None)]


def case(text: str = "", *args: object, seconds: float = 60.0) -> dict[str, object]:
    return {"input": text.encode(), "key": b"key", "seconds": seconds, "args": args, "kwargs": {}}


def run(one: Maker, program: str, text: str = "", limits: Limits = SMALL) -> Ended:
    """The program as a script, once."""
    with one.start(program, "", limits) as sandbox:
        return sandbox.run(case(text))


OTHERS: frozenset[int] = frozenset()
"""Processes that were there before the test."""


def below() -> list[psutil.Process]:
    """What the test has started."""
    return [each for each in psutil.Process().children(recursive=True) if each.pid not in OTHERS]


def said(one: Maker, program: str, **keys: object) -> list[str]:
    """Lines of a script that ends well."""
    ended = run(one, program, **keys)
    assert (ended.how, ended.code) == (EXITED, 0), ended
    return ended.output.decode().splitlines()


@contextlib.contextmanager
def one_cpu(busy: int) -> Iterator[None]:
    """This thread and what it starts share one CPU, with so many processes that always want it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    # Sessions of their own: where the kernel groups processes by session, each has a share.
    loop = ["sh", "-c", "while :; do :; done"]
    hogs = [subprocess.Popen(loop, start_new_session=True) for _ in range(busy)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for hog in hogs:
            hog.kill()
            hog.wait()
