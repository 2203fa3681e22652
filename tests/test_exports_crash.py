"""A crash at any moment of an export leaves a `best` that is whole.

A crash is an exception out of an audit hook, before every single change of the file system in turn;
what a process does not clean up when the machine stops is not covered.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exporting import BEST, Run, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


class Crash(BaseException):
    """Passes every handler of the code under test, as the end of its process would."""


CHANGES = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")


class Crasher:
    """Raises `Crash` instead of the n-th change of the file system, opening a file included."""

    def __init__(self) -> None:
        self.left = 0
        self.event = ""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left and event in CHANGES:
            self.left -= 1
            if not self.left:
                self.event = event
                raise Crash(event)

    def reaches(self, number: int, act: Any) -> bool:
        """Whether `act` was stopped before its `number`-th change."""
        self.left = number
        try:
            act()
        except Crash:
            return True
        finally:
            self.left = 0
        return False


def _crashes(model: str) -> list[str]:
    """The kinds of change that a crash came before; `best` is looked at after each."""
    crasher = Crasher()
    events = []
    for number in range(1, 200):
        run = Run(model, BEST)
        shutil.rmtree(run.folder, ignore_errors=True)
        exports = run.folder / "exports"
        run.write(2, 0.5)
        position = run.exports.state

        def go_on(run: Run = run) -> None:
            run.write(4, 0.7)
            run.exports.settle(run.exports.state)

        if not crasher.reaches(number, go_on):
            assert run.seen() == (["best", "iter_000004"], "iter_000004")
            return events
        events.append(crasher.event)
        pointed = run.seen()[1]
        turned = pointed == "iter_000004"
        assert turned or pointed == "iter_000002"
        assert run.holds(exports / "best", 4 if turned else 2), (number, crasher.event)
        if not turned:  # what the best was is there whatever a resume goes on from
            assert run.holds(exports / "iter_000002", 2)
        # A resume from before the new best, where the former one was not yet on its way out.
        former = (exports / "iter_000002").exists()
        if former:
            if (exports / "iter_000004").exists():
                (exports / "iter_000004").rename(run.folder / f"aside{number}")
            run.exports = run.again()
            assert run.exports.restore(position) is None
            assert run.seen() == (["best", "iter_000002"], "iter_000002")
            assert run.holds(exports / "best", 2)
        else:
            run.exports = run.again()
            run.exports.restore({"accuracy": 0.7, "iteration": 4, "only_best": [2, 4]})
        run.write(4, 0.7)
        run.exports.settle(run.exports.state)
        assert run.seen() == (["best", "iter_000004"], "iter_000004")
        assert run.holds(exports / "best", 4)
    raise AssertionError("never came to an end")


@pytest.mark.dist
def test_a_crash_before_any_change_leaves_a_best_that_is_whole(ranks, model: Path) -> None:
    (events,) = ranks.run(1, _crashes, str(model))
    # Folder and files of the export, its rename, the link and its turning, the old one's way out.
    assert set(events) == set(CHANGES)
    assert events.count("os.rename") == 3
    assert len(events) >= 15
