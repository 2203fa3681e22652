"""`sbatch launch/grpo.sh RECIPE` on a real Slurm of one node.

Not covered: several nodes, requeue, GPUs, accounting (`sacct` needs a database).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.faults import PERMISSION, STRUCK, VARIABLE
from tests.launch.runs import ROOT, make_model, settings
from tests.launch.stops import is_not_finished
from tests.slurm.cluster import Slurm, cluster, missing

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
SCRIPT = str(ROOT / "launch" / "grpo.sh")
SMALL = {"world.ranks": 1, "actor.tp": 1, "run.iterations": 1, "data.eval": "null"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"no Slurm: {reason}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


def _processes(mark: str) -> list[psutil.Process]:
    """Everything that runs with `mark` in its command line, and all below it."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or []):
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    return list(found.values())


def test_two_jobs_run_on_one_node_at_the_same_time(
    slurm: Slurm, data: Path, tmp_path: Path
) -> None:
    """The script is given once by its full path from elsewhere, once from the checkout."""
    both = {"first": (SCRIPT, tmp_path), "second": ("launch/ppo.sh", ROOT)}
    jobs = {}
    for name, (script, cwd) in both.items():
        arguments = settings(data, tmp_path, **(SMALL | {"run.name": name, "world.ranks": 2}))
        output = f"--output={tmp_path}/{name}.txt"
        jobs[name] = slurm.submit(output, script, RECIPE, *arguments, cwd=cwd)
    for job in jobs.values():
        slurm.wait(job, "RUNNING", seconds=30)
    for name, job in jobs.items():
        done = slurm.wait(job)
        output = (tmp_path / f"{name}.txt").read_text()
        assert (done.state, done.exit_code) == ("COMPLETED", 0), output
        assert "1/1" in output
        assert (tmp_path / name / "finished.json").exists()


@pytest.mark.parametrize(
    ("setting", "code", "says"),
    [
        ("rollout.grup_size=4", 2, "did you mean rollout.group_size?"),
        ("model.path=/none", 2, "megarl: error: /none"),
    ],
)
def test_a_failing_run_fails_the_job(
    setting: str, code: int, says: str, slurm: Slurm, data: Path, tmp_path: Path
) -> None:
    arguments = [*settings(data, tmp_path, **SMALL), setting]
    output = tmp_path / "out.txt"
    job = slurm.submit(f"--output={output}", SCRIPT, RECIPE, *arguments, cwd=tmp_path)
    done = slurm.wait(job)
    assert (done.state, done.exit_code) == ("FAILED", code)
    (line,) = output.read_text().splitlines()
    assert says in line


def test_scancel_ends_every_process(slurm: Slurm, data: Path, tmp_path: Path) -> None:
    name = tmp_path.name
    arguments = settings(data, tmp_path, **{"run.name": name, "data.eval": "null"})
    output, log = tmp_path / "out.txt", tmp_path / name / "logs" / "rank_1.log"
    planned = {VARIABLE: "slow@load_data:rank=1:seconds=200", PERMISSION: "1"}
    command = (f"--output={output}", SCRIPT, RECIPE, *arguments)
    job = slurm.submit(*command, cwd=tmp_path, **planned)
    until = time.monotonic() + 120
    while not (log.exists() and STRUCK in log.read_text()):
        assert time.monotonic() < until, output.read_text() if output.exists() else "no output"
        time.sleep(0.2)
    family = _processes(f"run.name={name}")
    assert len(family) >= 3, family  # the launcher and two ranks
    began = time.monotonic()
    slurm.call("scancel", job)
    done = slurm.wait(job, seconds=30)
    _, alive = psutil.wait_procs(family, timeout=max(1.0, 15 - (time.monotonic() - began)))
    assert not alive, alive
    assert done.state == "CANCELLED"
    assert "megarl: ended by SIGTERM" in output.read_text()
    assert is_not_finished(tmp_path / name)


def test_the_header_asks_for_one_node_and_one_task(slurm: Slurm, tmp_path: Path) -> None:
    """torchrun starts the ranks; a task per rank would start it as often."""
    job = slurm.submit("--hold", "--output=/dev/null", SCRIPT, RECIPE, cwd=tmp_path)
    shown = slurm.call("scontrol", "show", "job", job)
    slurm.call("scancel", job)
    assert "JobName=megarl" in shown
    assert "NumNodes=1" in shown and "NumTasks=1" in shown
