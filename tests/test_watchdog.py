"""Who is named when a run stands still: the rule on written-down situations, and with real ranks.

Not covered: whole runs (tests/launch/test_faults.py), GPUs.
"""

from __future__ import annotations

import sys
import threading
import time

import pytest

from megarl.stages import StageBoard
from megarl.watchdog import Seen, Sign, Watchdog, place, verdict

NOW = 1000.0


def _rank(count: int, stage: str, since: float, *, waits: bool = False, heard: float = 0.0) -> Seen:
    """A rank that has been in its `count`th stage for `since` seconds."""
    return Seen(Sign(1, count, stage, "a.py:1 f", waits), NOW - since, NOW - heard)


def _verdict(*ranks: Seen, limits: dict[str, float] | None = None) -> str | None:
    return verdict(ranks, NOW, lambda stage: (limits or {}).get(stage, 30.0), silence=5.0)


def test_nobody_is_named_within_the_limit() -> None:
    assert _verdict(_rank(4, "update", 29), _rank(4, "update", 29)) is None


def test_the_rank_that_is_behind_is_named_and_those_that_wait() -> None:
    told = _verdict(_rank(5, "exchange", 28, waits=True), _rank(4, "generate", 31))
    assert told == (
        "rank 1 is stuck in generate, for 31 s now (rank 1 at a.py:1 f); "
        "waiting: rank 0 in exchange"
    )


def test_a_rank_that_waits_is_never_late_itself() -> None:
    """Rank 0 waits for longer than its own stage may take: rank 1 is in a stage that may."""
    ranks = _rank(5, "exchange", 500, waits=True), _rank(4, "generate", 501)
    assert _verdict(*ranks, limits={"generate": 3600}) is None
    assert "rank 1 is stuck in generate" in _verdict(*ranks, limits={"generate": 400})


def test_within_one_stage_the_rank_outside_of_collectives_is_named() -> None:
    told = _verdict(
        _rank(4, "update", 31, waits=True),
        _rank(4, "update", 31),
        _rank(4, "update", 31, waits=True),
    )
    assert told.startswith("rank 1 is stuck in update")
    assert told.endswith("waiting: rank 0 in update, rank 2 in update")


def test_ranks_that_wait_for_each_other_are_all_named() -> None:
    told = _verdict(_rank(4, "update", 31, waits=True), _rank(4, "update", 40, waits=True))
    assert told.startswith("ranks 0, 1 are stuck in update, for 40 s now (rank 0 at ")
    assert "waiting" not in told


def test_a_silent_process_is_told_from_a_stuck_one() -> None:
    told = _verdict(_rank(5, "grade", 31, waits=True), _rank(4, "generate", 31, heard=25))
    assert told.startswith("rank 1 does not answer any more, last seen in generate (")


def test_a_place_is_our_own_line_and_says_whether_a_collective_waits() -> None:
    at, waits = place(sys._getframe())
    assert at.endswith(" test_a_place_is_our_own_line_and_says_whether_a_collective_waits")
    assert not waits
    event = threading.Event()
    thread = threading.Thread(target=lambda: event.wait(60))
    thread.start()
    time.sleep(0.2)
    frame = sys._current_frames()[thread.ident].f_back  # `event.wait(60)`, as `work.wait()` would
    assert place(frame)[1]
    event.set()
    thread.join()


def _watched(stuck: bool) -> list[str]:
    import torch.distributed as dist

    board, told, rank = StageBoard(), [], dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    limits = {"generate": 0.8}
    with Watchdog(board, store, rank, 2, lambda s: limits.get(s, 60.0), told.append, 0.1):
        board.enter("generate")
        if rank == 0 or not stuck:
            board.enter("exchange")
        time.sleep(2.5)
    return told


@pytest.mark.dist
@pytest.mark.parametrize("stuck", [False, True])
def test_ranks_see_each_other_through_the_store(ranks, stuck: bool) -> None:
    told = ranks.run(2, _watched, stuck)
    if not stuck:
        assert told == [[], []]
    else:
        (line,) = told[0]
        assert line.startswith("rank 1 is stuck in generate") and "rank 0 in exchange" in line
        assert told[1] == []  # leaves it to rank 0 first


def test_stages_are_counted_and_kept_for_the_launcher(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    board = StageBoard()
    board.enter("vote EXPERIENCE_SEALED")
    board.enter("update")
    assert (board.now.count, board.now.stage) == (2, "update")
    assert (tmp_path / "stage").read_text().strip() == "update"
    board.close()
