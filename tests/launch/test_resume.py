"""Runs that are killed and go on, held bit by bit against the same run without a kill.

    python -m pytest tests/launch/test_resume.py -s -m "long or not long"       prints the table

One tiny model on two CPU ranks, with quarantine and rounds that leave state behind. The whole run,
the first kill and the full matrix are launched; the rest of the CI suite goes on by ranks of
`tests/warm.py`. Not covered:
GPUs, several machines, a disk that fails; a kill between any two writes of one save or one
cut-back (`tests/checkpoint`); a stop that was asked for (`test_stops.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.resumes import (
    BUSY,
    ITERATIONS,
    Runs,
    Story,
    but,
    check_prefix,
    copied,
    differences,
    lines_of,
    resumes,
    rows,
    sampled,
    steps,
    weights,
)
from tests.launch.runs import make_model

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]

USES = ("regenerate", "reuse_sealed")
POINTS = {
    # In the fourth iteration, which begins at position 3: it is lost, and the third one with it.
    "reshard": "kill@reshard:visit=4",
    "verify": "kill@verify:visit=4",
    "generate": "kill@generate:visit={generate}",
    "inside generate": "kill_inside@generate:visit={generate}:seconds=0.02",
    "grade": "kill@grade:visit=8",
    "exchange": "kill@exchange:visit=4",
    "log_probs": "kill@log_probs:visit=4",
    "before sealing": "kill@seal:visit=7",
    "vote EXPERIENCE_SEALED": "kill@vote EXPERIENCE_SEALED:visit=4",
    "before deriving": "kill@seal:visit=8",
    "update": "kill@update:visit=4",
    "inside update": "kill_inside@update:visit=4:seconds=0.02",
    "commit": "kill@commit:visit=5",
    "vote ACTOR_COMMITTED": "kill@vote ACTOR_COMMITTED:visit=5",
    # Position 4 is fixed, written while the fifth iteration goes on, and committed after it.
    "checkpoint": "kill@checkpoint:visit=3",
    "background write": "kill_inside@checkpoint:visit=3:seconds=0.1",
    "vote CHECKPOINT": "kill@vote CHECKPOINT:visit=2",
    "checkpoint_commit": "kill@checkpoint_commit:visit=2:rank=0",
    "inside checkpoint_commit": "kill_inside@checkpoint_commit:visit=2:rank=0:seconds=0.005",
    "after the commit": "kill@checkpoint:visit=5:rank=0",
    # Behind the last update.
    "last evaluation": "kill@evaluate:visit=3",
    "export": "kill@export",
    "last checkpoint_commit": "kill@checkpoint_commit:visit=3:rank=0",
    # Too early for any checkpoint.
    "first evaluation": "kill@evaluate",
    "first update": "kill@update",
}
"""Name → fault. Whole runs count visits from their start."""
IN_A_RESUME = {"after the cut-back": "kill@build_actor", "load": "kill@build_actor:visit=2"}
CHAIN = (
    # (resume.use, the fault that ends the link)
    ("regenerate", "kill@generate:visit={generate}"),
    ("regenerate", "kill_inside@update:visit=2:seconds=0.02"),
    ("reuse_sealed", "kill@build_actor:visit=2"),
    ("reuse_sealed", "kill@checkpoint_commit:rank=0"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, with its checkpoints 2, 4 and 5. Nobody writes into it."""
    return _runs(data, tmp_path_factory.mktemp("whole")).finish("run", **{"checkpoint.keep": 9})


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    told = Story()
    yield told
    told.show()


def _runs(data: Path, folder: Path, warm: bool = False) -> Runs:
    return Runs(data, folder, BUSY, warm=warm)


def _fault(template: str, whole: Path) -> str:
    rounds = [line["rounds"] for line in lines_of(whole, "ledger.jsonl")]
    return template.format(generate=sum(rounds[:3]) + 1)


def test_the_uninterrupted_run_leaves_state_behind(whole: Path) -> None:
    """Else the comparisons below would show less than they say."""
    assert lines_of(whole, "quarantine.jsonl")
    assert {line["rounds"] for line in lines_of(whole, "ledger.jsonl")} & {2}
    assert [row["iteration"] for row in rows(whole)] == list(range(ITERATIONS))
    assert all(step["stepped"] for _, line in steps(whole) for step in line)


def test_a_chain_of_kills_ends_as_if_nothing_had_happened(
    data: Path, whole: Path, tmp_path: Path, story: Story
) -> None:
    launched, runs = _runs(data, tmp_path), _runs(data, tmp_path, warm=True)
    for number, (use, template) in enumerate(CHAIN):
        chosen = runs if number else launched
        run = chosen.kill("run", _fault(template, whole), **{"resume.use": use})
        check_prefix(run, whole)
    run = runs.finish("run", **{"resume.use": "reuse_sealed"})
    differ = differences(run, whole)
    story.add("a chain of four", "both", run, differ)
    assert differ == []
    attempts = [line["attempt"] for line in resumes(run)]
    assert attempts == sorted(attempts) and attempts[0] == 1
    assert any(line["reused"] is not None for line in resumes(run))
    assert json.loads((run / "finished.json").read_text())["iterations"] == ITERATIONS


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_anywhere_goes_on_as_if_nothing_had_happened(
    point: str, use: str, data: Path, whole: Path, tmp_path: Path, story: Story
) -> None:
    runs = _runs(data, tmp_path)
    check_prefix(runs.kill("run", _fault(POINTS[point], whole)), whole)
    run = runs.finish("run", **{"resume.use": use})
    differ = differences(run, whole)
    story.add(point, use, run, differ)
    assert differ == []


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("point", IN_A_RESUME)
def test_a_resume_that_is_killed_itself_changes_nothing(
    point: str, use: str, data: Path, whole: Path, tmp_path: Path, story: Story
) -> None:
    runs = _runs(data, tmp_path)
    runs.kill("run", POINTS["update"])
    runs.kill("run", IN_A_RESUME[point], **{"resume.use": use})
    run = runs.finish("run", **{"resume.use": use})
    differ = differences(run, whole)
    story.add(f"update, then in the resume: {point}", use, run, differ)
    assert differ == []
    first, second = resumes(run)
    assert (first["iteration"], first["attempt"]) == (second["iteration"], second["attempt"])


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_data_parallel_ranks_too(use: str, data: Path, tmp_path: Path, story: Story) -> None:
    runs = Runs(data, tmp_path, BUSY | {"actor.tp": 1, "algorithm.kl.beta": 0.01})
    whole = runs.finish("whole")
    runs.kill("run", POINTS["inside update"])
    run = runs.finish("run", **{"resume.use": use})
    differ = differences(run, whole)
    story.add("inside update, DP2, with a reference", use, run, differ)
    assert differ == []


@pytest.mark.long
def test_without_a_checkpoint_it_starts_at_its_beginning(
    data: Path, whole: Path, tmp_path: Path, story: Story
) -> None:
    runs = _runs(data, tmp_path)
    runs.kill("run", "kill@update:visit=2", **{"checkpoint.every": 0})
    run = runs.finish("run", **{"checkpoint.every": 0})
    differ = differences(run, whole)
    story.add("second update, checkpoint.every 0", "regenerate", run, differ)
    assert differ == []
    (told,) = resumes(run)
    assert (told["checkpoint"], told["iteration"], told["attempt"]) == (None, 0, 1)


def test_a_run_killed_before_its_last_write_only_has_that_to_do(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    for name in ("finished.json", "report.html"):
        (run / name).unlink()
    shutil.rmtree(run / "hf")
    _runs(data, tmp_path, warm=True).finish("run")
    assert differences(run, whole) == []
    assert (run / "finished.json").exists() and (run / "report.html").exists()
    assert resumes(run)[0]["iteration"] == ITERATIONS and resumes(run)[0]["attempt"] == 0


@pytest.mark.long
def test_a_finished_run_is_extended(data: Path, whole: Path, tmp_path: Path) -> None:
    runs = _runs(data, tmp_path)
    runs.finish("run", **{"run.iterations": 3})
    run = runs.finish("run")
    (told,) = resumes(run)
    assert (told["iteration"], told["attempt"]) == (3, 0)
    mine, theirs = rows(run), rows(whole)
    # The former end was evaluated; the longer run did not look there, or looked before the update.
    assert but(mine[2], "eval/") == but(theirs[2], "eval/")
    assert mine[:2] + mine[3:] == theirs[:2] + theirs[3:]
    assert steps(run) == steps(whole) and weights(run) == weights(whole)
    assert [sampled(run, n) for n in range(5)] == [sampled(whole, n) for n in range(5)]


@pytest.mark.long
def test_another_run_goes_on_from_a_checkpoint(data: Path, whole: Path, tmp_path: Path) -> None:
    before = rows(whole)
    fork = _runs(data, tmp_path).finish(
        "fork", **{"resume.from": whole / "checkpoints/iter_000002"}
    )
    assert rows(fork) == rows(whole)[2:] and rows(whole) == before
    assert weights(fork) == weights(whole)
    assert [sampled(fork, n) for n in range(2, 5)] == [sampled(whole, n) for n in range(2, 5)]
    (told,) = resumes(fork)
    assert (told["iteration"], told["own"], told["attempt"]) == (2, False, 0)


@pytest.mark.long
def test_a_rollback_is_done_once(data: Path, whole: Path, tmp_path: Path, story: Story) -> None:
    """Killed after it and started again by the same command, it goes on; it comes out the same."""
    run = copied(whole, tmp_path)
    runs = _runs(data, tmp_path)
    back = {"resume.from": run / "checkpoints/iter_000002", "checkpoint.keep": 9}
    # Position 4 is committed again, position 5 is about to be saved.
    runs.kill("run", "kill@checkpoint:visit=3:rank=0", **back)
    check_prefix(run, whole)
    runs.finish("run", **back)
    differ = differences(run, whole)
    story.add("after the commit, after a rollback to 2", "regenerate", run, differ)
    assert differ == []
    told = [(line["iteration"], line["attempt"]) for line in resumes(run)]
    assert told == [(2, 1), (4, 2)]
    assert (run / "resumes/001/checkpoints/iter_000005/COMMIT.json").exists()


@pytest.mark.long
def test_checkpoints_behind_a_link(data: Path, whole: Path, tmp_path: Path, story: Story) -> None:
    """Linked before the first start; killed in an update, then after a rollback."""
    place, disk, runs = tmp_path / "run/checkpoints", tmp_path / "disk", _runs(data, tmp_path)
    for folder in (place.parent, disk):
        folder.mkdir()
    place.symlink_to(disk)
    run = runs.kill("run", POINTS["update"])
    back = {"resume.from": place / "iter_000002", "checkpoint.keep": 9}
    runs.kill("run", "kill@update:visit=2", **back)
    runs.finish("run", **back)
    differ = differences(run, whole)
    story.add("update, checkpoints/ is a link", "regenerate", run, differ)
    assert differ == []
    told = [(line["own"], line["checkpoint"]) for line in resumes(run)]
    assert told == [(True, "checkpoints/iter_000002")] * 2
    assert place.readlink() == disk and (disk / "iter_000005/COMMIT.json").exists()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"actor.tp": 1}, id="DP2"),
        pytest.param({"world.ranks": 1, "actor.tp": 1}, id="one rank", marks=pytest.mark.long),
        pytest.param({"actor.tp": 1, "actor.pp": 2}, id="PP2", marks=pytest.mark.long),
    ],
)
def test_another_layout_goes_on_close_by(
    layout: dict, data: Path, whole: Path, tmp_path: Path
) -> None:
    """It loads only what digests to what was saved; from there on sums are in another order."""
    run = copied(whole, tmp_path)
    back = {"resume.from": run / "checkpoints/iter_000004"}
    _runs(data, tmp_path, warm=True).finish("run", **layout, **back)
    mine, theirs = rows(run), rows(whole)
    assert mine[:4] == theirs[:4] and len(mine) == ITERATIONS
    for key in ("policy/entropy", "update/grad_norm"):
        assert mine[4][key] == pytest.approx(theirs[4][key], rel=1e-3), key
    for key in ("response/tokens", "reward/mean", "groups/samples_trained"):
        assert mine[4][key] == theirs[4][key], key
    (told,) = resumes(run)
    assert told["layout"]["before"]["tp"] == 2 and told["layout"]["after"]["tp"] == 1
