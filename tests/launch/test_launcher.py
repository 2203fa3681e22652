"""What the launcher says of ranks that could not speak, on torchrun's own record of failures.

Not covered: real processes (test_faults.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megarl.launcher import _failed
from megarl.torchrun import STAGE, TOLD

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


def _error(**codes: int) -> ChildFailedError:
    failures = {
        int(rank[1:]): ProcessFailure(int(rank[1:]), 100 + int(rank[1:]), code, "none")
        for rank, code in codes.items()
    }
    return ChildFailedError("megarl.train", failures)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for rank, stage in enumerate(("exchange", "generate")):
        folder = tmp_path / "run_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / STAGE).write_text(stage.ljust(64))
    return tmp_path


def _told(logs: Path) -> None:
    (logs / "run_x" / "attempt_0" / TOLD).touch()


@pytest.mark.parametrize(
    ("codes", "code", "line"),
    [
        ({"r1": -KILL}, 137, "error: rank 1 was killed by SIGKILL in generate"),
        ({"r0": 143, "r1": -KILL}, 137, "error: rank 1 was killed by SIGKILL in generate"),
        ({"r0": 130, "r1": 130}, 130, "interrupted"),
        ({"r0": -INT, "r1": 130}, 130, "interrupted"),
        ({"r0": 143, "r1": 143}, 143, "ended by SIGTERM"),
        ({"r0": -TERM, "r1": 143}, 143, "ended by SIGTERM"),
        ({"r0": 3, "r1": 143}, 3, "error: rank 0 ended with exit code 3 in exchange"),
    ],
)
def test_what_no_rank_told_is_told_here(
    codes: dict, code: int, line: str, logs: Path, capsys
) -> None:
    assert _failed(_error(**codes), logs) == code
    assert capsys.readouterr().err == f"megarl: {line}\n"


@pytest.mark.parametrize("codes", [{"r0": 75, "r1": 75}, {"r0": -TERM, "r1": 75}, {"r0": 75}])
def test_ranks_that_stopped_as_asked_need_no_word(codes: dict, logs: Path, capsys) -> None:
    """torchrun counts them as failed, and ends those that are a moment later."""
    assert _failed(_error(**codes), logs) == 75
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({"r0": 143, "r1": 1}, 1),
        ({"r0": -KILL, "r1": 1}, 1),  # did not hear SIGTERM, so torchrun killed it
        ({"r0": 2, "r1": -TERM}, 2),
        ({"r0": 1, "r1": 2}, 2),  # it lost the one that met wrong input
        ({"r0": -TERM, "r1": -KILL}, 1),
    ],
)
def test_what_a_rank_told_is_not_told_again(codes: dict, code: int, logs: Path, capsys) -> None:
    _told(logs)
    assert _failed(_error(**codes), logs) == code
    assert capsys.readouterr().err == ""
