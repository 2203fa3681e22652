"""The folder of an evaluation by itself: whom it belongs to, and what becomes of an earlier one.

Not covered: several ranks (`tests/launch/test_evaluate.py`), folders on network file systems.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.evaluation.arguments import Asked
from megarl.evaluation.folder import claim, settle
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
