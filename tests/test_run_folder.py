"""The run's folder: claimed once, never emptied. Not covered: file systems without locks (NFS)."""

from __future__ import annotations

import errno
import gc
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megarl import run_folder
from megarl.checkpoint.begin import begin
from megarl.checkpoint.commit import NoCheckpoint
from megarl.checkpoint.resume import Resume
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.run_folder import claim_folder, make_folder, settle

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"


def _recipe(folder: Path, *more: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"run.folder={folder}", "run.name=mine", *more])


def _trained(run: Path) -> None:
    """What a run with weights leaves at least."""
    (run / "journal.jsonl").write_text('{"state": "ACTOR_COMMITTED"}\n')


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _finished_run(folder: Path) -> Path:
    claim_folder(_recipe(folder))[0].release()
    run = folder / "mine"
    (run / "finished.json").write_text("{}")
    (run / "hf").mkdir()
    (run / "hf" / "model.safetensors").write_text("weights")
    return run


def test_an_overwritten_run_is_set_aside_whole(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    for n in (1, 2):
        claim_folder(_recipe(tmp_path, "run.overwrite=true"))[0].release()
        assert (tmp_path / f"mine.replaced-{n}" / "recipe.yaml").exists()
        _trained(run)
        settle(run)
        assert _names(run) == {"recipe.yaml", "logs", "journal.jsonl"}
    aside = tmp_path / "mine.replaced-1"
    assert (aside / "hf" / "model.safetensors").read_text() == "weights"
    assert (aside / "finished.json").exists()


def test_the_stored_recipe_does_not_overwrite_again(tmp_path: Path) -> None:
    claim_folder(_recipe(tmp_path, "run.overwrite=true"))[0].release()
    _trained(tmp_path / "mine")
    with pytest.raises(RecipeError, match="holds an unfinished run"):
        claim_folder(load_recipe(tmp_path / "mine" / "recipe.yaml"))


def test_a_run_that_is_going_on_is_not_overwritten(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    lock, _ = claim_folder(_recipe(tmp_path, "run.overwrite=true"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecipeError, match="going on"):
        claim_folder(_recipe(tmp_path, "run.overwrite=true"))
    assert sorted(tmp_path.rglob("*")) == before and run.exists()
    lock.release()


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"cannot be made \(Not a directory.*set run.folder"):
        make_folder(_recipe(tmp_path / "file"))


def _start(run: Path) -> None:
    """What a launch left that ended before it had weights: a mistyped scorer."""
    for name in ("journal", "metrics", "updates", "versions", "ledger"):
        (run / f"{name}.jsonl").touch()
    for name in ("data.json", "environment.json", "timeline.json"):
        (run / name).write_text("{}\n")
    for file in (
        "tokenizer/tokenizer.model",
        "tensorboard/events.out.tfevents.1",
        "logs/rank_0.log",
    ):
        (run / file).parent.mkdir(exist_ok=True)
        (run / file).write_text("not empty")
    (run / "experience").mkdir()
    (run / "experience" / ".writer.lock").touch()


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_run_that_had_no_weights_does_not_keep_its_name(tmp_path: Path, overwrite: str) -> None:
    claim_folder(_recipe(tmp_path))[0].release()
    run = tmp_path / "mine"
    _start(run)
    claim_folder(_recipe(tmp_path, f"run.overwrite={overwrite}", "seed=7"))[0].release()
    assert {entry.name for entry in run.iterdir()} == {"recipe.yaml", "logs"}
    assert load_recipe(run / "recipe.yaml").seed == 7
    assert (run / "logs" / "rank_0.log").read_text() == "not empty"
    assert not list(tmp_path.glob("mine.replaced-*"))


@pytest.mark.parametrize(
    "file",
    [
        "journal.jsonl",
        "versions.jsonl",
        "experience/iter_000000/rollout_0.safetensors",
        "eval/step_0.jsonl",
        "finished.json",
        "notes.txt",
    ],
)
def test_whatever_else_lies_there_is_kept(tmp_path: Path, file: str) -> None:
    claim_folder(_recipe(tmp_path))[0].release()
    run = tmp_path / "mine"
    _start(run)
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text("work")
    for may_resume in (False, file == "notes.txt"):
        with pytest.raises(RecipeError, match="holds .* run; set run.name"):
            claim_folder(_recipe(tmp_path), may_resume=may_resume)
    assert (run / file).read_text() == "work"


def test_a_recipe_written_by_hand_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "recipe.yaml"
    mine.parent.mkdir()
    mine.write_text(QUICKSTART.read_text())
    for may_resume in (False, True):
        with pytest.raises(RecipeError, match="holds an unfinished run; set run.name"):
            claim_folder(_recipe(tmp_path), may_resume=may_resume)
    assert mine.read_text() == QUICKSTART.read_text()


class Killed(BaseException):
    """The process is gone: nothing catches it."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many changes of files are left to a process until it is killed."""
    left = [10**6]

    def counted(of: Any, name: str) -> None:
        real = getattr(of, name)

        def change(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(of, name, change)

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "write_text"):
        counted(Path, name)
    counted(shutil, "rmtree")
    counted(run_folder, "write_whole")
    yield left


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims take a recipe that a run stored for what it is: reading one takes most of the time."""
    monkeypatch.setattr(run_folder, "_is_stored", lambda path: path.exists())


def _earlier(run: Path, recipe: str) -> None:
    """The earlier run lies there, whole, and nothing of it beside."""
    assert _names(run) - {"logs"} == {
        *("recipe.yaml", "journal.jsonl", "finished.json", "hf", "checkpoints")
    }
    assert (run / "hf" / "model.safetensors").read_text() == "weights"
    assert (run / "recipe.yaml").read_text() == recipe
    for beside in run.parent.glob("mine.replaced-*"):
        assert not _names(beside)


def _run_with_weights(folder: Path) -> tuple[Path, str]:
    """A run, and its stored recipe."""
    run = _finished_run(folder)
    _trained(run)
    (run / "checkpoints").mkdir()
    return run, (run / "recipe.yaml").read_text()


@pytest.mark.usefixtures("claims")
def test_a_launch_without_weights_replaces_nothing(tmp_path: Path, steps: list[int]) -> None:
    """Wherever it is killed, the next launch finds the earlier run."""
    run, stored = _run_with_weights(tmp_path)
    replacing, other = _recipe(tmp_path, "run.overwrite=true", "seed=7"), _recipe(tmp_path)
    for number in count():
        steps[0], killed = number, False
        try:
            lock, _ = claim_folder(replacing)
            _start(run)
            settle(run)
            lock.release()
        except Killed:
            killed = True
        steps[0], lock = 10**6, None  # without its process the lock is free
        if killed:
            with pytest.raises(RecipeError, match="holds a finished run"):
                claim_folder(other)
        _earlier(run, stored)
        if not killed:
            assert number > 30
            return


@pytest.mark.usefixtures("claims")
@pytest.mark.parametrize("killed", [True, False])
def test_a_launch_with_weights_has_replaced(tmp_path: Path, steps: list[int], killed: bool) -> None:
    """The earlier run stays aside, whole, also where nothing was settled."""
    run, stored = _run_with_weights(tmp_path)
    claim_folder(_recipe(tmp_path, "run.overwrite=true", "seed=7"))[0].release()
    _start(run)
    _trained(run)
    if killed:
        steps[0] = 0
        with pytest.raises(Killed):
            settle(run)
        steps[0] = 10**6
    else:
        settle(run)
    with pytest.raises(RecipeError, match="holds an unfinished run"):
        claim_folder(_recipe(tmp_path))
    aside = tmp_path / "mine.replaced-1"
    assert not (run / ".replaces").exists()
    assert load_recipe(run / "recipe.yaml").seed == 7
    aside.rename(tmp_path / "aside")
    _earlier(tmp_path / "aside", stored)


def test_a_launch_that_cannot_go_on_from_where_it_is_told_replaces_nothing(tmp_path: Path) -> None:
    run = _finished_run(tmp_path)
    before = _names(run)
    nowhere = ("run.overwrite=true", f"resume.from={tmp_path / 'nowhere'}")
    with pytest.raises(NoCheckpoint):
        claim_folder(_recipe(tmp_path, *nowhere), may_resume=True)
    assert _names(run) == before and not list(tmp_path.glob("mine.replaced-*"))


@pytest.mark.usefixtures("claims")
@pytest.mark.parametrize("settled", [True, False])
def test_a_launch_that_was_to_go_on_elsewhere_replaces_nothing_without_weights(
    tmp_path: Path, settled: bool
) -> None:
    """It tells of its resume, and sets its own start aside there, before it loads a checkpoint."""
    run, stored = _run_with_weights(tmp_path)
    replacing = _recipe(tmp_path, "run.overwrite=true", "seed=7")
    lock, _ = claim_folder(replacing)
    _start(run)
    resume = Resume(1, None, own=False, iteration=0, attempt=1, use="", allowed=())
    begin(replacing, resume, run, {"ranks": 1}, {})
    assert {"resume.json", "data.json", "environment.json"} <= _names(run / "resumes" / "001")
    if settled:
        settle(run)
        _earlier(run, stored)
    lock.release()
    with pytest.raises(RecipeError, match="holds a finished run"):
        claim_folder(_recipe(tmp_path))
    _earlier(run, stored)


@pytest.mark.usefixtures("claims")
@pytest.mark.parametrize("lasting", [True, False])
def test_a_run_that_cannot_be_set_aside_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Whichever of the moves fails; one line says so, also where nothing can be moved back."""
    run, stored = _run_with_weights(tmp_path)
    replacing, real = _recipe(tmp_path, "run.overwrite=true"), Path.rename
    moves = len(_names(run) - {"logs"}) + 2  # a mark before and behind them
    for number in range(moves):
        left = [number]

        def rename(path: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] == -1 or (lasting and left[0] < 0):
                raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(RecipeError, match=r"cannot be set aside .*Disk quota") as caught:
            claim_folder(replacing)
        message = str(caught.value)
        del caught  # whose frames hold the lock
        gc.collect()
        assert "\n" not in message
        monkeypatch.setattr(Path, "rename", real)
        assert left[0] < 0
        if lasting and number > 1:
            assert "the next launch of the name" in message
            with pytest.raises(RecipeError, match="holds a finished run"):
                claim_folder(_recipe(tmp_path))
        _earlier(run, stored)
    assert not list(tmp_path.glob("mine.replaced-*"))
