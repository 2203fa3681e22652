"""Scorers that fork, crash, eat memory, close descriptors and change their process, for real.

Each gets its status, the others are scored, nothing becomes 0, and no process is left. Not covered:
a scorer that means harm (one that writes frames of its own, or ends the keeper's other children).
"""

from __future__ import annotations

import psutil
import pytest

from megarl.contracts.records import RewardStatus
from megarl.rewards.scorer import ScorerError
from tests.rewards.make_pool import child_processes, left_of, score, scoring

RUDE = "tests.rewards.rude:rude"
GB = 0.3
"""Memory of the workers, so that little has to be eaten."""


@pytest.fixture(scope="module")
def processes():
    """Those that there are without the pool."""
    return child_processes()


@pytest.fixture(scope="module")
def rude(processes):
    with scoring(RUDE, workers=2, memory_gb=GB, deadline_seconds=20.0) as pool:
        yield pool
    assert left_of(processes) == [] and child_processes() <= processes


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise", "rude: IndexError: list index out of range (rude.py:"),
        ("nan", "rude: ValueError: returned nan, not a finite number"),
        ("none", "rude: TypeError: returned None, not a number"),
        ("list", "rude: TypeError: returned [1.0, 2.0], not a number"),
        ("generator", "rude: TypeError: returned a generator (it has a yield; a scorer returns)"),
        ("exit 3", "rude: SystemExit: 3"),
        ("end 7", "the scorer ended its process with exit code 7"),
        ("kill SIGKILL", "the scorer ended its process with exit code -9"),
        ("kill SIGTERM", "the scorer ended its process with exit code -15"),
        ("abort", "the scorer ended its process with exit code -6"),
        ("segfault", "the scorer ended its process with exit code -11"),
        ("array", "rude: MemoryError: Unable to allocate 8.00 GiB"),
        ("bytes", "rude: MemoryError:"),
        ("list_memory", "rude: MemoryError:"),
        ("close_all", "the scorer ended its process with exit code 1"),
        ("reuse /tmp", "the scorer ended its process with exit code 1"),
    ],
)
def test_a_failure_is_an_error_and_the_others_are_scored(rude, tmp_path, text, detail):
    failed, *fine = score(rude, [text.replace("/tmp", str(tmp_path)), "score 2", "score 3"])
    assert failed.status is RewardStatus.ERROR and failed.total is None
    assert detail in failed.detail, failed.detail
    assert [record.total for record in fine] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("input", 0.0),
        ("fork", 1.0),
        ("fork_and_raise", 1.0),
        ("daemon", 1.0),
        ("session", 1.0),
        ("multiprocessing", 1.0),
        ("threads", 1.0),
        ("close_streams", 1.0),
        ("told", 1.0),
        ("surroundings /", 1.0),
    ],
)
def test_what_a_scorer_does_beside_its_score_disturbs_nobody(rude, text, total, capfd):
    records = score(rude, [text, "score 2", "look", "look", text, "look", "score 3"])
    assert [record.total for record in records] == [total, 2.0, 1.0, 1.0, total, 1.0, 3.0], records
    assert capfd.readouterr().out == ""


def test_memory_that_a_scorer_keeps_replaces_its_worker_before_it_fails():
    with scoring(RUDE, memory_gb=0.1) as pool:
        records = score(pool, ["little"] * 20 + ["pid"])
    assert [record.total for record in records[:-1]] == [1.0] * 20


def test_a_stopped_process_and_one_that_sleeps_time_out():
    before = child_processes()
    with scoring(RUDE, workers=2, deadline_seconds=1.0) as pool:
        records = score(pool, ["stop", "sleep 3600", "score 2", "threads", "score 3"])
        details = [record.detail for record in records[:2]]
        assert details == ["no score within 1 s"] * 2
        assert [record.total for record in records] == [None, None, 2.0, 1.0, 3.0]
    assert left_of(before) == []


@pytest.mark.parametrize("text", ["bomb", "breed"])
def test_processes_that_multiply_end_at_the_deadline_or_with_their_worker(text):
    """216 processes that sleep; and a daemon that goes on starting others after it was scored."""
    before = child_processes()
    with scoring(RUDE, deadline_seconds=1.0) as pool:
        multiplied, killed, fine = score(pool, [text, "kill SIGKILL", "score 2"])
        assert killed.status is RewardStatus.ERROR and fine.total == 2.0
        status = RewardStatus.TIMEOUT if text == "bomb" else RewardStatus.OK
        assert multiplied.status is status
        # The keeper, the template and the worker: nothing else outlives the killed worker.
        assert len(left_of(before, seconds=0.0)) == 3
    assert left_of(before, seconds=0.0) == []


def test_a_worker_that_gathers_children_is_replaced():
    before = child_processes()
    with scoring(RUDE) as pool:
        first, *_, fine = score(pool, ["pid", "leave 200", "leave 30", "score 2"])
        assert len(left_of(before, seconds=0.0)) == 3 + 230
        few, last, many = score(pool, ["pid", "leave 30", "pid"])
        assert fine.total == 2.0 and first.total == few.total != many.total
        assert len(left_of(before, seconds=0.0)) == 3
    assert left_of(before, seconds=0.0) == []


def test_a_killed_worker_is_forked_again_and_nothing_is_loaded_anew():
    before = child_processes()
    with scoring(RUDE) as pool:
        keeper, template, worker = sorted(child_processes() - before)  # as they were started
        for _ in range(10):
            killed, fine = score(pool, ["kill SIGKILL", "score 1"])
            assert killed.status is RewardStatus.ERROR and fine.total == 1.0
        (replaced,) = child_processes() - before - {keeper, template}
        assert replaced != worker and {keeper, template} < child_processes()


def test_a_template_that_was_killed_is_started_anew_and_a_keeper_ends_the_run():
    before = child_processes()
    with scoring(RUDE) as pool:
        # In the order they were started.
        keeper, template, worker = sorted(child_processes() - before)
        psutil.Process(template).kill()
        killed, fine = score(pool, ["kill SIGKILL", "score 2"])
        assert killed.status is RewardStatus.ERROR and fine.total == 2.0
        assert template not in child_processes() and keeper in child_processes()
        with pytest.raises(ScorerError, match="a scorer that kills its parent does that"):
            score(pool, ["score 1", "parent"])
    assert left_of(before) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()", "threads"),
        ("HELD = socket.socketpair()", "sockets"),
        ("subprocess.Popen(['sleep', '3600'])", "children"),
        ("subprocess.run(['sh', '-c', 'setsid sleep 3600 &'])", "daemons"),
    ],
)
def test_scorers_that_cannot_be_forked_are_loaded_by_each_worker(tmp_path, monkeypatch, line, what):
    """Where loading starts threads, sockets or processes; the worker has them then."""
    (tmp_path / f"starting_{what}.py").write_text(
        "import os, socket, subprocess, threading, time\n"
        f"{line}\nLOADED_BY = os.getpid()\n"
        "def score(response):\n"
        "    if response.text == 'kill': os.kill(os.getpid(), 9)\n"
        "    return float(LOADED_BY == os.getpid())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = child_processes()
    with scoring(f"starting_{what}:score", workers=2) as pool:
        records = score(pool, ["x", "kill", "y"])
        assert [record.total for record in records] == [1.0, None, 1.0]
    assert left_of(before) == []
