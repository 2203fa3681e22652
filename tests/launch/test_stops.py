"""Runs that stop for what they meet: failing scorers, a folder that is taken, a wrong world.

Ranks that are killed or hang and signals: test_faults.py; bad inputs: test_bad_input.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import ROOT, environment, launch, make_model, run_warm, settings

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


def _errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("megarl: ")]


def test_scorers_that_fail_stop_the_run_and_are_no_low_reward(data: Path, tmp_path: Path) -> None:
    broken = {"reward.scorers": "[{name: 'tests.launch.scorers:broken'}]", "data.eval": "null"}
    done = run_warm("broken", settings(data, tmp_path, **broken), tmp_path)
    assert done.code == 1
    assert len(_errors(done.output)) == 1, done.output
    line = _errors(done.output)[0]
    assert "KeyError" in line and "reward.max_error_share" in line
    assert not (tmp_path / "broken" / "metrics.jsonl").exists() or not done.rows


def test_a_run_that_lies_there_is_not_written_over(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("kept")
    done = launch("mine", settings(data, tmp_path), tmp_path)
    assert done.code == 2
    assert len(_errors(done.output)) == 1 and "run.overwrite=true" in done.output
    # Another rank may have begun its log before rank 0 refused; logs are only ever appended to.
    assert {entry.name for entry in folder.iterdir()} <= {"recipe.yaml", "logs"}
    assert (folder / "recipe.yaml").read_text() == "kept"


def test_a_world_of_another_size_is_refused_in_one_line(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.train", "recipes/quickstart.yaml"]
    done = subprocess.run(
        [*command, *settings(data, tmp_path)],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 2
    assert "world.ranks" in done.stdout
    assert len(done.stdout.splitlines()) == 1
