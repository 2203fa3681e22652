"""Seconds per stage against a clock set by hand, and the trace file.

Not covered: that Perfetto draws the trace (its format is checked, not its picture).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.observe.timeline import Stopwatch


class Clock:
    """Seconds that only the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_add_up_within_an_iteration_and_start_anew_in_the_next() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock=clock)
    clock.now += 50.0  # start-up
    stopwatch.begin(0)
    for seconds in (1.0, 2.0):
        with stopwatch("generate"):
            clock.now += seconds
            with stopwatch("flush"):
                clock.now += 0.25
    with stopwatch("update"):
        clock.now += 4.0
    clock.now += 0.5
    assert stopwatch.take() == {
        "time/iteration": 8.0,
        "time/generate": 3.5,
        "time/generate/flush": 0.5,
        "time/update": 4.0,
    }
    clock.now += 1.0
    assert stopwatch.take() == {"time/iteration": 1.0}


def test_an_open_stage_or_a_bad_name_is_refused() -> None:
    stopwatch = Stopwatch()
    with stopwatch("update"):
        with pytest.raises(RuntimeError, match="inside the stage 'update'"):
            stopwatch.take()
        with pytest.raises(RuntimeError, match="inside the stage 'update'"):
            stopwatch.begin(1)
    for name in ("", "a/b", "iteration"):
        with pytest.raises(ValueError, match="no stage name"), stopwatch(name):
            pass


def test_a_stage_that_raises_is_counted_and_closed() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock=clock)
    with pytest.raises(KeyError), stopwatch("update"):
        clock.now += 2.0
        raise KeyError("x")
    assert stopwatch.take()["time/update"] == 2.0


def test_the_trace_is_json_with_iteration_role_version_and_counters(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "timeline.json"
    with Stopwatch(path, rank=3, clock=clock) as stopwatch:
        stopwatch.begin(7, "abc123")
        with stopwatch("generate", samples=256):
            clock.now += 1.5
        stopwatch.counter("reward/mean", 0.5)
        with pytest.raises(ValueError), stopwatch("odd", role="critic"):
            raise ValueError
        stopwatch.take()
    events = json.loads(path.read_text())
    assert {event["pid"] for event in events} == {3}
    (generate,) = [event for event in events if event["name"] == "generate"]
    assert (generate["ph"], generate["ts"], generate["dur"]) == ("X", 0.0, 1.5e6)
    assert generate["args"] == {
        "iteration": 7,
        "version": "abc123",
        "role": "rollout",
        "samples": 256,
    }
    (odd,) = [event for event in events if event["name"] == "odd"]
    assert odd["args"]["error"] == "ValueError"
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[generate["tid"]] == "rollout" and tracks[odd["tid"]] == "critic"
    (curve,) = [event for event in events if event["ph"] == "C"]
    assert curve["args"] == {"value": 0.5}


def test_a_run_that_dies_leaves_an_array_that_only_lacks_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    stopwatch = Stopwatch(path)
    for iteration in range(2):
        stopwatch.begin(iteration)
        with stopwatch("update"):
            pass
        stopwatch.take()
    text = path.read_text()  # taken while the file is open: what a killed process leaves
    events = json.loads(text.rstrip().rstrip(",") + "]")
    assert [event["args"]["iteration"] for event in events if event["name"] == "update"] == [0, 1]
    stopwatch.close()
