"""Scorers that end in ways no scorer should: what is told is theirs, and the pool goes on.

Not covered: a scorer that damages its worker's own frames on purpose.
"""

from __future__ import annotations

import pytest

from megarl.contracts.records import RewardStatus
from megarl.rewards.scorer import ScorerError
from tests.rewards.make_pool import GRADERS, child_processes, left_of, score, scoring

UNRULY = f"{GRADERS}:unruly"


@pytest.fixture(scope="module")
def unruly():
    with scoring(UNRULY) as pool:
        yield pool


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("interrupt", "unruly: KeyboardInterrupt: stop (graders.py:"),
        ("base", "unruly: Unruly: its text cannot be had: RuntimeError in __str__ (graders.py:"),
        ("detail", "unruly: RuntimeError: no text (graders.py:"),
        ("generator", "unruly: GeneratorExit: "),
    ],
)
def test_whatever_is_raised_is_told_as_it_is(unruly, text, detail):
    failed, fine = score(unruly, [text, "fine"])
    assert failed.status is RewardStatus.ERROR and failed.total is None
    assert failed.detail.startswith(detail)
    assert fine.total == 1.0


@pytest.mark.parametrize(("text", "code"), [("slow exit 3", 3), ("abort", -6)])
def test_a_worker_that_ends_by_itself_is_told_with_its_own_code(unruly, text, code):
    """`slow exit` closes the worker's pipe a while before it ends."""
    before = child_processes()
    failed, fine = score(unruly, [text, "fine"])
    assert failed.detail == f"the scorer ended its process with exit code {code}"
    assert fine.total == 1.0
    assert len(left_of(before)) == 1  # the worker that took the dead one's place


def test_one_that_closes_its_pipe_and_stays_is_killed(unruly):
    failed, fine = score(unruly, ["slow exit 60", "fine"])
    assert failed.detail == "the scorer ended its process with exit code -9"
    assert fine.total == 1.0


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("raise KeyboardInterrupt", "cannot import bad_scorer:score: KeyboardInterrupt: $"),
        ("raise SystemExit(4)", "cannot import bad_scorer:score: SystemExit: 4$"),
    ],
)
def test_a_module_that_ends_while_it_is_imported_is_named(tmp_path, monkeypatch, ending, says):
    (tmp_path / "bad_scorer.py").write_text(f"{ending}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ScorerError, match=says), scoring("bad_scorer:score"):
        pass
