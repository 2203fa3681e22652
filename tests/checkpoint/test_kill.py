"""SIGKILL of one rank or both at any moment of saving: the newest committed checkpoint is whole,
it is what a resume finds, and it holds bit for bit what a writer that nobody killed has there.

Two gloo ranks train a tiny actor and save through the real `Checkpointer`; each round goes on from
what the one before left in the same folder. Not covered: power loss (a killed process leaves the
page cache), and a run's records, which `test_cut_back.py` and the tests of whole runs hold.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.commit import (
    COMMIT_FILE,
    checkpoint_folder,
    checkpoint_folders,
    clean,
    newest_whole,
)
from tests.models.support import write_hf_model
from tests.warm import forking

pytestmark = pytest.mark.launch

VICTIMS = ((0,), (1,), (0, 1))
SURVIVES = 0.3
"""Seconds that a survivor has at most: in a run its launcher ends it."""


def start(context: Any, name: str, *arguments: Any) -> list[tuple[Any, Connection]]:
    """Two ranks of `killed_ranks.NAME(rank, *arguments, pipe)`."""
    from tests.checkpoint import killed_ranks

    crew, target = [], getattr(killed_ranks, name)
    for rank in range(2):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(rank, *arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        crew.append((process, mine))
    return crew


@dataclass
class Round:
    """What the ranks of one round told until they were killed."""

    crew: list[tuple[Any, Connection]]
    at: dict[int, int] = field(default_factory=dict)
    """Rank → the iteration that it began at."""
    committed: int = 0
    seconds: float = 0.2
    """From "begun" to "committed", of the last save that got there."""
    bits: dict[tuple[int, int], str] = field(default_factory=dict)
    """(iteration, rank) → fingerprint."""
    saves: int = 0
    began: float = 0.0

    def hear(self, until: Callable[[], bool], seconds: float) -> None:
        """Take what is told until then; raises `AssertionError` for a rank that ends by itself."""
        ends = time.perf_counter() + seconds
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.crew)}
        while not until() and pipes and time.perf_counter() < ends:
            for pipe in wait(list(pipes), timeout=max(0.0, min(0.01, ends - time.perf_counter()))):
                try:
                    self._take(pipes[pipe], *pipe.recv())
                except EOFError:
                    del pipes[pipe]

    def _take(self, rank: int, kind: str, iteration: int, bits: str) -> None:
        assert self.bits.setdefault((iteration, rank), bits) == bits
        if kind == "at":
            self.at[rank] = iteration
        elif rank == 0 and kind == "begun":
            self.saves, self.began = self.saves + 1, time.perf_counter()
        elif kind == "committed":
            self.committed = max(self.committed, iteration)
            self.seconds = time.perf_counter() - self.began

    def kill(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self.crew[rank][0].kill()

    def bury(self) -> None:
        """All are dead, and all that they told is heard."""
        self.kill((0, 1))
        for process, _ in self.crew:
            process.join()
        self.hear(lambda: False, 5.0)


def one_round(context: Any, draw: random.Random, *arguments: Any) -> tuple[Round, str]:
    """Ranks that go on from what is there, and their end; with a line that tells it."""
    found = Round(start(context, "save_again_and_again", *arguments))
    found.hear(lambda: len(found.at) == 2, 60.0)
    assert len(found.at) == 2, "a rank did not load what was there"
    number = draw.randint(1, 3)
    found.hear(lambda: found.saves >= number, 60.0)
    assert found.saves >= number
    aimed = draw.random() < 0.8
    delay = draw.random() * (found.seconds if aimed else 3 * found.seconds)
    found.hear(lambda: False, delay)
    victims = draw.choice(VICTIMS)
    found.kill(victims)
    found.hear(lambda: False, draw.random() * SURVIVES)
    found.bury()
    return found, f"save {number} of the round, {delay:.3f} s in it, ranks {victims}"


def rounds(tmp_path: Path, count: int, seed: int, tp: int, background: bool) -> int:
    """How many half-written checkpoints were found."""
    context = forking()
    write_hf_model(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    draw = random.Random(seed)
    bits: dict[tuple[int, int], str] = {}
    newest, halves = 0, 0
    for number in range(count):
        store = str(tmp_path / f"store{number}")
        ended, line = one_round(context, draw, store, tmp_path / "model", run, tp, background)
        assert set(ended.at.values()) == {newest}, "a resume finds what the last round left"
        for key, value in ended.bits.items():
            assert bits.setdefault(key, value) == value, (key, "another round had other bits")
        told = max(newest, ended.committed)
        commit = newest_whole(run)
        newest = 0 if commit is None else commit.iteration
        begun = max(iteration for iteration, _ in ended.bits)
        assert newest == told or told < newest == begun, (newest, told, begun)
        half = [f for _, f in checkpoint_folders(run) if not (f / COMMIT_FILE).exists()]
        assert clean(run) == [f"{folder}: half-written, removed" for folder in half]
        assert not any(folder.exists() for folder in half)
        assert (newest_whole(run) or commit) == commit
        halves += bool(half)
        print(f"seed {seed} round {number}: {line}: at {newest}, {len(half)} half-written")
    _compare(context, tmp_path, tp, bits)
    return halves


def _compare(context: Any, tmp_path: Path, tp: int, bits: dict[tuple[int, int], str]) -> None:
    """Every step of every round is that of a writer that nobody killed."""
    steps = max(iteration for iteration, _ in bits)
    crew = start(context, "step_only", str(tmp_path / "store"), tmp_path / "model", tp, steps)
    wanted = [pipe.recv() for _, pipe in crew]
    for process, _ in crew:
        process.join()
    for (iteration, rank), value in bits.items():
        assert value == wanted[rank][iteration], (iteration, rank)
    assert len(set(wanted[0])) == steps + 1, "a step that moves nothing proves nothing"


@pytest.mark.parametrize("background, tp, count", [(True, 2, 3), (False, 1, 2)])
def test_a_killed_writer_leaves_the_newest_committed_one(tmp_path, background, tp, count) -> None:
    rounds(tmp_path, count, seed=5, tp=tp, background=background)


def test_killed_between_the_actors_and_the_critics_files(tmp_path) -> None:
    context = forking()
    write_hf_model(tmp_path / "actor")
    write_hf_model(tmp_path / "critic", task="SequenceClassification", num_hidden_layers=1)
    run = tmp_path / "run"
    run.mkdir()
    found = []
    for number in range(2):
        store = str(tmp_path / f"store{number}")
        crew = start(context, "die_before_the_critics_files", store, tmp_path, run)
        found.append([pipe.recv() for _, pipe in crew])
        for process, _ in crew:
            process.join(60)
            assert process.exitcode == -9
        assert newest_whole(run).iteration == 1
        half = checkpoint_folder(run, 2)
        assert {path.name for path in half.glob("actor/*")} == {"__0_0.distcp", "__1_0.distcp"}
        assert half.joinpath("critic").is_dir() and not list(half.glob("critic/*"))
        assert clean(run) == [f"{half}: half-written, removed"] and not half.exists()
    assert found[0] == found[1], "the second start has what the first one had saved"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("background, tp", [(True, 2), (False, 1), (True, 1), (False, 2)])
def test_a_hundred_kills(tmp_path, background: bool, tp: int) -> None:
    halves = rounds(tmp_path, 25, seed=6, tp=tp, background=background)
    assert halves >= 5, "the kills did not meet saves that were going on"
