"""Runs that must stop: one line from one rank, every process gone in seconds, exit code not 0.

Not covered: a rank that hangs (its peers' time-out is world.timeout_seconds), Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.runs import ROOT, environment, launch, make_model, settings

pytestmark = pytest.mark.launch
MOST_SECONDS = 15
ENDLESS = {"run.iterations": 100000, "data.eval": "null"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture
def started(data: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """An endless run that has finished its first iteration."""
    command = ["bash", "launch/grpo.sh", "recipes/quickstart.yaml", "run.name=endless"]
    process = subprocess.Popen(
        [*command, *settings(data, tmp_path, **ENDLESS)],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    metrics = tmp_path / "endless" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "no iteration in two minutes"
        time.sleep(0.2)
    yield process, tmp_path / "endless"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _ends(process: subprocess.Popen, family: list[psutil.Process]) -> str:
    """What it printed; fails unless it and all its descendants are gone in time."""
    output, _ = process.communicate(timeout=MOST_SECONDS)
    _, alive = psutil.wait_procs(family, timeout=3)
    assert not alive, f"still alive: {alive}\n{output}"
    assert process.returncode != 0
    return output


def _errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("megarl: ")]


def test_a_killed_rank_ends_the_run_and_is_named(started) -> None:
    process, folder = started
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in family if "megarl.train" in p.cmdline() and p.environ().get("RANK") == "1"]
    ranks[0].kill()
    output = _ends(process, family)
    assert len(_errors(output)) in (1, 2), output
    assert any("rank 1" in line or "peer" in line for line in _errors(output)), output
    assert not (folder / "finished.json").exists()


def test_ctrl_c_ends_the_run(started) -> None:
    process, folder = started
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output = _ends(process, family)
    assert "Traceback" not in output
    assert not (folder / "finished.json").exists()


def test_scorers_that_fail_stop_the_run_and_are_no_low_reward(data: Path, tmp_path: Path) -> None:
    broken = {"reward.scorers": "[{name: 'tests.launch.scorers:broken'}]", "data.eval": "null"}
    done = launch("broken", settings(data, tmp_path, **broken), tmp_path)
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
