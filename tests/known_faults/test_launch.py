"""Faults of launch and of ranks that stop: ports on the rules themselves, stops on real runs.

More real runs: tests/launch/test_faults.py, tests/launch/test_bad_input.py; what launch script
and Slurm do with exit code 75: tests/test_stop.py, tests/slurm. Not covered: several machines,
where the head node's address comes from Slurm and each launcher hears of a stop alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint.commit import whole_checkpoints
from megarl.launcher import PortError, rendezvous
from tests.launch.runs import make_model, read_lines, run_warm, settings
from tests.launch.stops import LAUNCH, end_of, failed_reason


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_f53_without_an_explicit_port_a_free_one_is_taken() -> None:
    assert rendezvous() == ["--standalone"]


def test_f53_an_explicit_address_and_port_are_respected(monkeypatch) -> None:
    port = _free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert rendezvous() == ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert rendezvous() == ["--master_addr", "localhost", "--master_port", str(port)]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
def test_f53_a_busy_port_is_an_error_at_once(monkeypatch, listens_on: str) -> None:
    with socket.create_server((listens_on, 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(PortError, match=f"MASTER_PORT={port} cannot be listened on here"):
            rendezvous()


@pytest.mark.parametrize("port", ["0", "70000", "auto", ""])
def test_f53_what_is_no_port_is_an_error(monkeypatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(PortError, match="is no port"):
        rendezvous()


def test_f53_another_machines_address_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # reserved for documentation
    with pytest.raises(PortError, match="MASTER_ADDR=192.0.2.1"):
        rendezvous()


LAST = 5
STOPPING = {
    "run.iterations": LAST,
    "checkpoint.every": 2,
    "data.eval": "null",
    "rollout.prompts_per_iteration": 4,
}
"""Saves begin at position 2, and so on."""
PLACES = {
    # Iteration 1 samples; the next boundary is position 2.
    "rollout": ("slow@generate:rank=1:visit=2:seconds=3", 2),
    # Position 2 is being saved.
    "save": ("slow@vote CHECKPOINT:rank=1:seconds=3", 3),
}
"""Where the signal comes, and the earliest position that the run may stop at."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


def _send(*numbers: signal.Signals) -> Callable[[subprocess.Popen], None]:
    def send(process: subprocess.Popen) -> None:
        for number in numbers:
            os.kill(process.pid, number)
            time.sleep(0.1)

    return send


def _goes_on(data: Path, runs: Path, position: int) -> None:
    """The same recipe ends well, from `position`, and each iteration is there once."""
    done = run_warm("run", settings(data, runs, **STOPPING), runs)
    assert done.code == 0, done.output + done.logs()
    assert [row["iteration"] for row in done.rows] == list(range(LAST))
    (resume,) = sorted(done.folder.glob("resumes/*/resume.json"))
    assert json.loads(resume.read_text())["iteration"] == position
    assert (done.folder / "finished.json").exists()


@pytest.mark.launch
@pytest.mark.parametrize("place", PLACES)
def test_f54_a_run_that_is_asked_stops_at_a_boundary_with_one_whole_checkpoint(
    place: str, data: Path, tmp_path: Path
) -> None:
    """SIGUSR1 to the launcher, twice; two ranks, of which one is behind."""
    fault, earliest = PLACES[place]
    folder = tmp_path / "run"
    ended = end_of(
        [*LAUNCH, "run.name=run", *settings(data, tmp_path, **STOPPING)],
        log=folder / "logs" / "rank_1.log",
        fault=fault,
        act=_send(signal.SIGUSR1, signal.SIGUSR1),
        timeout=200,
    )
    assert ended.code == 75 and ended.left == [], ended.output
    (line,) = ended.lines
    whole, half = whole_checkpoints(folder)
    position = max(commit.iteration for commit in whole)
    assert half == [] and earliest <= position < LAST
    assert line == (
        f"megarl: stopped after iteration {position - 1} as asked (SIGUSR1), saved in "
        f"{folder}/checkpoints/iter_{position:06d}; the same command goes on"
    )
    assert len(read_lines(folder / "metrics.jsonl")) == position
    assert failed_reason(folder) is None
    _goes_on(data, tmp_path, position)


@pytest.mark.launch
@pytest.mark.long
def test_f54_sigterm_during_a_save_leaves_the_checkpoint_before_it_in_charge(
    data: Path, tmp_path: Path
) -> None:
    """At once, also after SIGUSR1. Position 2 is whole, and position 4 is being saved."""
    folder = tmp_path / "run"
    ended = end_of(
        [*LAUNCH, "run.name=run", *settings(data, tmp_path, **STOPPING)],
        log=folder / "logs" / "rank_1.log",
        fault="slow@vote CHECKPOINT:rank=1:visit=2:seconds=30",
        act=_send(signal.SIGUSR1, signal.SIGTERM),
        timeout=200,
    )
    assert ended.code == 143 and ended.lines == ["megarl: ended by SIGTERM"], ended.output
    assert ended.seconds < 15 and ended.left == []
    assert [commit.iteration for commit in whole_checkpoints(folder)[0]] == [2]
    _goes_on(data, tmp_path, 2)
