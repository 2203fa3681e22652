"""Jobs that are asked to stop are requeued and go on, on a real Slurm of one node.

The ranks do not train (tests/stand_in.py); launch script, header and launcher are the real ones. A
real run that is requeued: the last test, which needs the loop to stop and resume.

Not covered: pre-emption by a higher partition (the same signal), several nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.runs import ROOT, make_model, read_lines, settings
from tests.slurm.cluster import Slurm, cluster, missing
from tests.stand_in import ITERATIONS

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
STOPPED = "megarl: stopped after iteration "


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"no Slurm: {reason}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def _submit(slurm: Slurm, folder: Path, *options: str, seconds: float) -> str:
    """A job of stand-ins by a copy of the launch scripts, which differs in the module it starts."""
    (folder / "launch").mkdir()
    for name in ("grpo.sh", "env.sh"):
        text = (ROOT / "launch" / name).read_text()
        (folder / "launch" / name).write_text(text.replace(" megarl.train ", " tests.stand_in "))
    return slurm.submit(
        f"--output={folder}/out.txt",
        *options,
        f"{folder}/launch/grpo.sh",
        RECIPE,
        f"run.folder={folder}",
        "world.ranks=2",
        cwd=folder,
        STAND_IN_SECONDS=str(seconds),
        MEGARL_PYTHON=sys.executable,
        PYTHONPATH=str(ROOT),
    )


def _position(folder: Path, at_least: int, seconds: float = 90) -> int:
    """The finished iterations of rank 0, once there are `at_least` so many."""
    until, file = time.monotonic() + seconds, folder / "position_0"
    while not file.exists() or int(file.read_text() or 0) < at_least:
        assert time.monotonic() < until, _output(folder)
        time.sleep(0.1)
    return int(file.read_text())


def _output(folder: Path) -> str:
    file = folder / "out.txt"
    return file.read_text() if file.exists() else "no output"


def _told(folder: Path) -> list[str]:
    return [line for line in _output(folder).splitlines() if line.startswith("megarl: ")]


def test_a_job_that_is_asked_to_stop_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = _submit(slurm, tmp_path, seconds=1.0)
    _position(tmp_path, 1)
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(job, "PENDING", "COMPLETING", seconds=30)
    stopped = _position(tmp_path, 1)
    assert stopped < ITERATIONS
    done = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert (done.state, done.exit_code) == ("COMPLETED", 0), _output(tmp_path)
    # --open-mode=append keeps what the first attempt said; Slurm may add a line of its own.
    stop, requeued = _told(tmp_path)
    assert stop.startswith(f"{STOPPED}{stopped - 1} as asked (SIGUSR1), saved in ")
    assert requeued == f"megarl: job {job} is requeued"
    log = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line for line in log if line.startswith("starts at")] == [
        "starts at 0",
        f"starts at {stopped}",
    ]


@pytest.mark.long
def test_the_time_limit_asks_a_job_to_stop(slurm: Slurm, tmp_path: Path) -> None:
    """A minute's limit with the header's 120 s: Slurm signals as soon as it looks, every 30 s."""
    job = _submit(slurm, tmp_path, "--time=1", seconds=6.0)
    slurm.wait(job, "RUNNING", seconds=60)
    slurm.wait(job, "PENDING", "COMPLETING", seconds=90)
    assert f"{STOPPED}" in _output(tmp_path)
    assert "is requeued" in _output(tmp_path)
    slurm.call("scancel", job)
    slurm.wait(job)


@pytest.mark.parametrize("how", [("--full",), ("--batch", "--signal=TERM"), ()])
def test_scancel_ends_a_job_at_once_and_does_not_requeue_it(
    how: tuple[str, ...], slurm: Slurm, tmp_path: Path
) -> None:
    job = _submit(slurm, tmp_path, seconds=20.0)
    slurm.wait(job, "RUNNING", seconds=60)
    until = time.monotonic() + 60
    while not (tmp_path / "rank_0.log").exists():
        assert time.monotonic() < until, _output(tmp_path)
        time.sleep(0.1)
    time.sleep(1)
    slurm.call("scancel", *how, job)
    done = slurm.wait(job, "FAILED", "CANCELLED", "COMPLETED", "PENDING", seconds=30)
    assert done.state == ("FAILED" if "--batch" in how else "CANCELLED")
    if "--batch" in how:
        assert done.exit_code == 143
    assert _told(tmp_path) == ["megarl: ended by SIGTERM"], _output(tmp_path)


def test_a_job_that_cannot_be_requeued_says_so(slurm: Slurm, tmp_path: Path) -> None:
    job = _submit(slurm, tmp_path, "--no-requeue", seconds=1.0)
    _position(tmp_path, 1)
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    done = slurm.wait(job, seconds=30)
    assert (done.state, done.exit_code) == ("FAILED", 75)
    assert (
        _told(tmp_path)[-1] == f"megarl: job {job} is not requeued; submit the same command again"
    )


def test_the_header_asks_to_be_stopped_and_requeued(slurm: Slurm, tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "grpo.sh")
    job = slurm.submit("--hold", "--output=/dev/null", script, RECIPE, cwd=tmp_path)
    shown = slurm.call("scontrol", "show", "job", job)
    slurm.call("scancel", job)
    assert "Requeue=1" in shown
    own = slurm.submit("--hold", "--signal=B:USR1@600", "--output=/dev/null", script, cwd=tmp_path)
    slurm.call("scancel", own)
    assert "NumNodes=1" in shown and "NumTasks=1" in shown


@pytest.mark.long
def test_a_real_run_goes_on_after_it_was_requeued(slurm: Slurm, tmp_path: Path) -> None:
    data = make_model(tmp_path / "data")
    values = {"run.name": "run", "run.iterations": 6, "world.ranks": 2, "data.eval": "null"}
    arguments = settings(data, tmp_path, **values)
    script = str(ROOT / "launch" / "grpo.sh")
    job = slurm.submit(f"--output={tmp_path}/out.txt", script, RECIPE, *arguments, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text().count("\n"):
        assert time.monotonic() < until, _output(tmp_path)
        time.sleep(0.2)
    slurm.call("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(job, "PENDING", "COMPLETING", seconds=60)
    first = len(read_lines(metrics))
    assert 0 < first < 6
    done = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", seconds=200)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), _output(tmp_path)
    assert _output(tmp_path).count(f"{STOPPED}{first - 1} as asked (SIGUSR1)") == 1
    assert [row["iteration"] for row in read_lines(metrics)] == list(range(6))
    assert (tmp_path / "run" / "finished.json").exists()
