"""One rank that is killed, raises, hangs or is frozen, and signals to the run, stage by stage.

    python -m pytest tests/launch/test_faults.py -s -m "long or not long"       prints the table

Not covered: GPUs, where a rank may hang in a synchronisation; several machines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.stages import STAGES
from tests.launch.runs import make_model, settings
from tests.launch.stops import (
    LAUNCH,
    MOST_SECONDS,
    Ended,
    Table,
    end_of,
    failed_reason,
    is_not_finished,
    shown,
    torchrun,
)

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]
LIMIT = 6
"""world.timeout_seconds of runs with a stuck rank."""
START_UP = STAGES[:4]
VOTES = ("vote ROLLOUT_READY", "vote EXPERIENCE_SEALED", "vote ACTOR_COMMITTED")
QUICK = {
    ("kill", "generate"),
    ("raise", "update"),
    ("stuck", "exchange"),
}
"""What stands for the whole matrix in the CI suite."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    with shown("Ranks that fail, and signals") as rows:
        yield rows


def _matrix() -> list:
    return [
        pytest.param(
            kind,
            stage,
            marks=[] if (kind, stage) in QUICK else [pytest.mark.long],
            id=f"{kind}-{stage}".replace(" ", "-"),
        )
        for kind in ("kill", "raise", "stuck")
        for stage in STAGES + VOTES
    ]


def _command(
    data: Path,
    runs: Path,
    start: tuple[str, ...] = LAUNCH,
    stage: str = "",
    **more: object,
) -> list[str]:
    """A run of two iterations whose stages, but for `stage`, may take long at start-up."""
    patient = ", ".join(f"{name}: 60" for name in START_UP if name != stage)
    values = {
        "run.name": "run",
        "run.iterations": 2,
        "world.timeout_seconds": LIMIT,
        "world.stage_timeouts": "{" + patient + "}",
    }
    return [*start, *settings(data, runs, **(values | more))]


def _check(ended: Ended, folder: Path, most: float = MOST_SECONDS) -> None:
    assert ended.code != 0, ended.output
    assert len(ended.lines) == 1, ended.output
    assert ended.seconds <= most, ended.output
    assert ended.left == []
    assert is_not_finished(folder)
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(("kind", "stage"), _matrix())
def test_a_rank_that_fails_ends_the_run(
    kind: str, stage: str, data: Path, tmp_path: Path, table: Table
) -> None:
    # The first commit is the journal's first line: FAILED needs a version, so the second one fails.
    visit = 2 if stage == "vote ACTOR_COMMITTED" else 1
    fault = f"{kind}@{stage}:rank=1:visit={visit}"
    folder = tmp_path / "run"
    command = _command(data, tmp_path, stage=stage)
    ended = end_of(command, log=folder / "logs" / "rank_1.log", fault=fault)
    table.add(fault, ended)
    _check(ended, folder, MOST_SECONDS + (LIMIT if kind == "stuck" else 0))
    says = {
        "kill": f"megarl: error: rank 1 was killed by SIGKILL in {stage}",
        "raise": f"megarl: error: rank 1: injected fault in {stage} (traceback in ",
        "stuck": f"megarl: error: rank 1 is stuck in {stage}, for ",
    }[kind]
    assert ended.lines[0].startswith(says)
    assert ended.code == {"kill": 137, "raise": 1, "stuck": 1}[kind]
    if kind == "stuck":
        assert "waiting: rank 0 in " in ended.lines[0]
    if stage not in START_UP and kind != "kill":
        assert says.removeprefix("megarl: error: ").partition(" (")[0] in failed_reason(folder)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_ends_the_run(rank: int, data: Path, tmp_path: Path, table: Table) -> None:
    fault = f"frozen@generate:rank={rank}"
    folder = tmp_path / "run"
    limit = 2 * LIMIT  # long enough for the silence to be told from slowness
    command = _command(data, tmp_path, **{"world.timeout_seconds": limit})
    ended = end_of(command, log=folder / "logs" / f"rank_{rank}.log", fault=fault)
    table.add(fault, ended)
    # torchrun waits ten seconds before it kills a process that does not hear SIGTERM.
    _check(ended, folder, limit + MOST_SECONDS + 5)
    assert f"rank {rank} does not answer any more, last seen in generate" in ended.lines[0]


@pytest.mark.long
def test_a_slow_rank_is_waited_for(data: Path, tmp_path: Path) -> None:
    """Its own stage's limit counts, not that of the ranks that wait for it elsewhere."""
    more = {"world.stage_timeouts": "{generate: 60}", "world.timeout_seconds": 5}
    ended = end_of(
        _command(data, tmp_path, **more),
        log=tmp_path / "run" / "logs" / "rank_1.log",
        fault="slow@generate:rank=1:seconds=15",
    )
    assert ended.code == 0, ended.output


def _to_group(number: int):
    return lambda process: os.killpg(process.pid, number)


def _to_launcher(number: int):
    return lambda process: os.kill(process.pid, number)


def test_a_launcher_that_is_killed_leaves_nobody(data: Path, tmp_path: Path, table: Table) -> None:
    folder = tmp_path / "run"
    ended = end_of(
        _command(data, tmp_path),
        log=folder / "logs" / "rank_1.log",
        fault="slow@load_data:rank=1:seconds=40",
        act=_to_launcher(signal.SIGKILL),
    )
    table.add("SIGKILL to the launcher", ended)
    assert ended.code == -signal.SIGKILL and ended.left == []
    assert is_not_finished(folder)


SIGNALS = {
    "Ctrl-C": (_to_group(signal.SIGINT), 130, "megarl: interrupted"),
    "SIGTERM to the launcher": (_to_launcher(signal.SIGTERM), 143, "megarl: ended by SIGTERM"),
    "SIGTERM to the group": (_to_group(signal.SIGTERM), 143, "megarl: ended by SIGTERM"),
}


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=[] if stage == "generate" else [pytest.mark.long])
        for stage in ("load_data", "build_actor", "start_generator", "generate", "update", "export")
    ],
)
def test_a_signal_ends_the_run(
    name: str, stage: str, data: Path, tmp_path: Path, table: Table, request
) -> None:
    if stage == "generate" and name != "Ctrl-C" and not _long(request):
        pytest.skip("in the full matrix")
    act, code, says = SIGNALS[name]
    folder = tmp_path / "run"
    ended = end_of(
        _command(data, tmp_path, **{"world.timeout_seconds": 60}),
        log=folder / "logs" / "rank_1.log",
        fault=f"slow@{stage}:rank=1:seconds=40",
        act=act,
    )
    table.add(f"{name} in {stage}", ended)
    _check(ended, folder)
    assert ended.lines == [says]
    assert ended.code == code


def _long(request: pytest.FixtureRequest) -> bool:
    return "not long" not in request.config.getoption("-m")


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("seconds", [0.3, 1.5, 3.0, 5.0])
@pytest.mark.long
def test_a_signal_at_start_up_ends_the_run(
    name: str, seconds: float, data: Path, tmp_path: Path, table: Table
) -> None:
    act, code, says = SIGNALS[name]

    def later(process: subprocess.Popen) -> None:
        time.sleep(seconds)
        act(process)

    ended = end_of(_command(data, tmp_path), act=later)
    ended.seconds -= seconds
    table.add(f"{name} after {seconds} s", ended)
    # A shell or Python that has barely started dies of the signal itself.
    assert ended.code in (code, 128 - code), ended.output
    assert ended.seconds <= MOST_SECONDS and ended.left == []
    assert "Traceback" not in ended.output
    assert [line for line in ended.lines if line != says] == [] and len(ended.lines) <= 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kill", "raise", "stuck"])
def test_the_persons_own_torchrun_ends_too(
    kind: str, data: Path, tmp_path: Path, table: Table
) -> None:
    """torchrun adds its own summary, after ours where a rank could still speak."""
    folder = tmp_path / "run"
    ended = end_of(
        _command(data, tmp_path, torchrun(2, "--shutdown_timeout", "10")),
        log=folder / "logs" / "rank_1.log",
        fault=f"{kind}@update:rank=1",
    )
    table.add(f"{kind}@update:rank=1, own torchrun", ended)
    assert ended.code != 0 and ended.left == [] and is_not_finished(folder)
    assert ended.seconds <= MOST_SECONDS + (LIMIT if kind == "stuck" else 0)
    assert len(ended.lines) == (0 if kind == "kill" else 1), ended.output
    assert "rank 1" in ended.lines[0] if ended.lines else "SIGKILL" in ended.output
