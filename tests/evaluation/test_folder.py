"""The folder of an evaluation by itself: whom it belongs to, and what becomes of an earlier one.

Not covered: several ranks (`tests/launch/test_evaluate.py`), folders on network file systems.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megarl.evaluation.arguments import Asked
from megarl.evaluation.folder import claim, refuse_folder, settle
from megarl.evaluation.targets import EvaluationError
from megarl.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asked() -> Asked:
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["seed=7"])
    return Asked(recipe, (), overwrite=False, json=False)


def test_one_that_was_cut_off_makes_room(tmp_path: Path, asked: Asked) -> None:
    out = tmp_path / "a" / "out"
    claim(out, asked).release()
    (out / "unfinished" / "iter_000001.jsonl").write_text("{}\n")
    (out / "iter_000002.jsonl").write_text("cut off as it came to its place\n")
    (out / "logs" / "rank_1.log").write_text("")
    claim(out, asked).release()
    assert sorted(path.name for path in out.iterdir()) == ["logs", "unfinished"]
    assert (out / "logs" / "rank_1.log").exists()
    assert [path.name for path in (out / "unfinished").iterdir()] == ["recipe.yaml"]
    assert load_recipe(out / "unfinished" / "recipe.yaml") == asked.recipe


def test_a_finished_one_is_set_aside_only_when_asked_and_by_results(
    tmp_path: Path, asked: Asked
) -> None:
    out = tmp_path / "out"
    for number in (1, 2):
        claim(out, replace(asked, overwrite=True)).release()  # which never comes to its results
        claim(out, replace(asked, overwrite=True)).release()
        assert number == 1 or (out / "results.json").read_text() == "1"
        assert not (tmp_path / "out.replaced-1").exists()
        (out / "unfinished" / "results.json").write_text(str(number))
        settle(out)
        assert sorted(path.name for path in out.iterdir()) == [
            "logs",
            "recipe.yaml",
            "results.json",
        ]
    with pytest.raises(EvaluationError, match="holds a finished evaluation; --overwrite sets"):
        claim(out, asked)
    assert (out / "results.json").read_text() == "2"
    assert (tmp_path / "out.replaced-1" / "results.json").read_text() == "1"


class Killed(BaseException):
    """The process is gone: nothing catches it."""


def _finish(out: Path, asked: Asked, number: str) -> None:
    """An evaluation up to its end; two of its files are named as those of the next one."""
    claim(out, asked).release()
    for name in ("versions.jsonl", f"of_{number}.jsonl", "results.json"):
        (out / "unfinished" / name).write_text(number)
    settle(out)


def _whole(folder: Path) -> dict[str, str]:
    """What lies in the folder of an evaluation, but for its recipe and logs."""
    files = {path.name: path.read_text() for path in folder.iterdir() if path.name != "logs"}
    assert files.pop("recipe.yaml").startswith("# evaluation\n")
    return files


def _files(number: str) -> dict[str, str]:
    return dict.fromkeys(("versions.jsonl", f"of_{number}.jsonl", "results.json"), number)


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_that_is_killed_as_its_results_come_to_their_places_is_kept(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """Before each change of files; the next launch finds the results and the earlier ones."""
    left = [10**6]

    def counted(name: str) -> None:
        real = getattr(Path, name)

        def change(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **options)

        monkeypatch.setattr(Path, name, change)

    for name in ("rename", "mkdir", "rmdir"):
        counted(name)
    replacing = replace(asked, overwrite=True)
    for number in count():
        out = tmp_path / str(number) / "out"
        _finish(out, asked, "1")
        lock, killed = claim(out, replacing), False
        for name, text in _files("2").items():
            (out / "unfinished" / name).write_text(text)
        left[0] = number
        try:
            settle(out)
        except Killed:
            killed = True
        left[0] = 10**6
        lock.release()
        if overwrite:  # the third takes the place, and keeps both
            refuse_folder(out, replacing)
            claim(out, replacing).release()
            assert [path.name for path in (out / "unfinished").iterdir()] == ["recipe.yaml"]
            shutil.rmtree(out / "unfinished")
        else:
            with pytest.raises(EvaluationError, match="holds a finished evaluation"):
                refuse_folder(out, asked)
                claim(out, asked)
        if (out / "unfinished").exists():  # killed before it could be removed: it is empty
            (out / "unfinished").rmdir()
        assert _whole(out) == _files("2")
        assert _whole(out.with_name("out.replaced-1")) == _files("1")
        assert not out.with_name("out.replaced-2").exists()
        if not killed:
            assert number > 9
            return


def test_a_signal_does_not_part_an_evaluation(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(path, target)

    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        monkeypatch.setattr(Path, "rename", rename)
        _finish(tmp_path / "out", asked, "1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == []
    assert _whole(tmp_path / "out") == _files("1")


def test_a_move_that_fails_is_told_in_one_line(tmp_path: Path, asked: Asked) -> None:
    out = tmp_path / "out"
    claim(out, asked).release()
    (out / "unfinished" / "results.json").write_text("1")
    (out / "recipe.yaml").mkdir()
    (out / "recipe.yaml" / "in the way").touch()
    with pytest.raises(EvaluationError, match=r"cannot come to their places \(.*; nothing is lost"):
        settle(out)
    assert (out / "unfinished" / "results.json").read_text() == "1"


def test_one_that_goes_on_is_left_alone(tmp_path: Path, asked: Asked) -> None:
    lock = claim(tmp_path / "out", asked)
    with pytest.raises(EvaluationError, match="an evaluation that is going on writes there"):
        claim(tmp_path / "out", replace(asked, overwrite=True))
    lock.release()


@pytest.mark.parametrize("name", ["recipe.yaml", "notes.txt", "results.json"])
def test_other_things_are_never_touched(tmp_path: Path, asked: Asked, name: str) -> None:
    (tmp_path / name).write_text("mine: true\n")
    with pytest.raises(EvaluationError, match=rf"something else than an evaluation \({name}\)"):
        claim(tmp_path, replace(asked, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "file").touch()
    with pytest.raises(EvaluationError, match="something else than an evaluation; give another"):
        claim(tmp_path / "file", asked)
