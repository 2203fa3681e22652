"""Planned faults: what is understood and refused. tests/launch/test_faults.py lets them strike."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megarl.faults import Fault, FaultRefused, InjectedFault, parse, planned


def test_a_fault_is_read() -> None:
    assert parse("kill@generate") == Fault("kill", "generate", rank=1, visit=1)
    read = parse("slow@vote ROLLOUT_READY:rank=0:visit=3:seconds=1.5")
    assert read == Fault("slow", "vote ROLLOUT_READY", 0, 3, 1.5)
    assert parse("kill_inside@checkpoint") == Fault("kill_inside", "checkpoint", seconds=0.05)


@pytest.mark.parametrize("text", ["kill", "kill@", "burn@generate", "kill@generate:rang=1", "@a"])
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(FaultRefused):
        parse(text)


def test_it_needs_permission_and_its_own_rank(monkeypatch) -> None:
    monkeypatch.delenv("MEGARL_FAULT", raising=False)
    assert planned(1) is None
    monkeypatch.setenv("MEGARL_FAULT", "kill@generate")
    monkeypatch.delenv("MEGARL_FAULT_TESTING", raising=False)
    with pytest.raises(FaultRefused, match="unset it"):
        planned(1)
    monkeypatch.setenv("MEGARL_FAULT_TESTING", "1")
    assert planned(0) is None
    assert planned(1) == Fault("kill", "generate")


def test_a_response_is_lost_as_long_as_the_planned_stage_lasts() -> None:
    fault = parse("lose@generate:visit=2")
    seen = []
    for stage in ("generate", "grade", "generate", "grade", "generate"):
        fault.strike(stage)
        seen.append(fault.is_losing)
    assert seen == [False, False, True, False, False]


def test_it_strikes_once_on_the_planned_visit() -> None:
    fault = parse("raise@update:visit=2")
    fault.strike("update")
    fault.strike("generate")
    with pytest.raises(InjectedFault, match="injected fault in update"):
        fault.strike("update")
    fault.strike("update")


INSIDE = """
import time
from megarl.faults import parse

fault = parse("kill_inside@checkpoint:rank=0:seconds=0.3")
fault.strike("update")
fault.strike("checkpoint")
fault.strike("generate")
print("works", flush=True)
time.sleep(60)
"""


def test_a_kill_inside_comes_while_the_rank_works() -> None:
    rank = subprocess.Popen([sys.executable, "-c", INSIDE], stdout=subprocess.PIPE, text=True)
    assert rank.stdout.readline().startswith("megarl: fault kill_inside@checkpoint ")
    began = time.monotonic()
    assert rank.stdout.readline() == "works\n"
    assert rank.wait(timeout=20) == -signal.SIGKILL
    assert 0.2 < time.monotonic() - began < 10
