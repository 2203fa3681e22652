"""An experience trains exactly once: in a process, in a later one, and on every rank alike.

Not covered: a whole run that is begun again in its folder.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.contracts.lines import LinesError, LinesWriter
from megarl.contracts.mesh import Mesh
from megarl.contracts.states import JOURNAL_FILE
from megarl.experience.consumed import AlreadyTrained, Consumed, Use
from megarl.experience.updates import UPDATES_FILE, Update, UpdateStep, finite, read_updates
from megarl.world import Disagreement, World

ROOT = Path(__file__).resolve().parents[2]
STEP = UpdateStep(0, True, None, -0.25, 1.5, 1e-4, 40, 8)
UPDATE = Update(3, "sha256:e", "blake3:d", "aaa", "bbb", (STEP,))


def _journal(folder: Path, *lines: dict) -> None:
    writer = LinesWriter(folder / JOURNAL_FILE)
    for line in lines:
        writer.write(line)
    writer.close()


def _updating(iteration: int, experience_hash: str) -> dict:
    return {
        "state": "UPDATING_FROM",
        "iteration": iteration,
        "version": "aaa",
        "experience_hash": experience_hash,
        "derived_hash": "blake3:d",
    }


def _updates(folder: Path, *updates: Update) -> None:
    writer = LinesWriter(folder / UPDATES_FILE)
    for update in updates:
        writer.write(update.line())
    writer.close()


def test_updates_come_back_as_written(tmp_path: Path) -> None:
    skipped = replace(
        STEP, stepped=False, skipped_reason="not finite: loss", loss=finite(float("nan"))
    )
    stopped = replace(STEP, epoch=1, minibatch=1, stepped=False, stopped=True)
    update = replace(
        UPDATE, steps=(STEP, skipped, stopped), critic=(replace(STEP, loss=0.5),), kl_beta=0.02
    )
    _updates(tmp_path, update)
    line = json.loads((tmp_path / UPDATES_FILE).read_text())
    head = ["iteration", "experience_hash", "derived_hash", "from", "to"]
    assert list(line) == [*head, "kl_beta", "steps", "critic"]
    assert (line["from"], line["to"]) == ("aaa", "bbb")
    assert line["steps"][0] == {
        "minibatch": 0,
        "stepped": True,
        "skipped_reason": None,
        "loss": -0.25,
        "grad_norm": 1.5,
        "lr": 1e-4,
        "tokens": 40,
        "sequences": 8,
        "epoch": 0,
        "stopped": False,
    }
    assert line["steps"][1]["loss"] is None
    assert line["critic"][0]["loss"] == 0.5 and line["kl_beta"] == 0.02
    assert read_updates(tmp_path) == ([update], False)
    (tmp_path / UPDATES_FILE).write_text('{"iteration": 1}\n')
    with pytest.raises(LinesError, match="updates.jsonl:1: not a line of an update: .*experience"):
        read_updates(tmp_path)


def test_lines_of_one_epoch_and_no_critic_are_read(tmp_path: Path) -> None:
    _updates(tmp_path, UPDATE)
    line = json.loads((tmp_path / UPDATES_FILE).read_text())
    for name in ("kl_beta", "critic"):
        del line[name]
    for name in ("epoch", "stopped"):
        del line["steps"][0][name]
    (tmp_path / UPDATES_FILE).write_text(json.dumps(line) + "\n")
    assert read_updates(tmp_path) == ([UPDATE], False)


def test_a_fresh_run_has_trained_on_nothing(tmp_path: Path) -> None:
    consumed = Consumed.read(tmp_path)
    assert consumed.use_of("sha256:e") is None and consumed.refusal("sha256:e", 0) is None


def test_a_second_use_in_one_process_is_refused() -> None:
    consumed = Consumed()
    consumed.use("sha256:e", Use(3, "in this process"))
    consumed.use("sha256:f", Use(4, "in this process"))
    with pytest.raises(AlreadyTrained) as error:
        consumed.use("sha256:e", Use(5, "in this process"))
    assert "iteration 5 would train on experience sha256:e" in str(error.value)
    assert "iteration 3 did already (in this process)" in str(error.value)


@pytest.mark.parametrize("journal, updates", [(True, True), (True, False), (False, True)])
def test_either_file_tells_of_a_use(tmp_path: Path, journal: bool, updates: bool) -> None:
    """An update that was begun and never committed counts, and one whose journal is lost."""
    if journal:
        _journal(tmp_path, {"state": "EXPERIENCE_SEALED"}, _updating(3, "sha256:e"))
    if updates:
        _updates(tmp_path, UPDATE)
    consumed = Consumed.read(tmp_path)
    where = f"{tmp_path}/{JOURNAL_FILE}:2" if journal else f"{tmp_path}/{UPDATES_FILE}:1"
    assert consumed.use_of("sha256:e") == Use(3, where)
    with pytest.raises(AlreadyTrained, match=f"iteration 3 did already \\({where}\\)"):
        consumed.use("sha256:e", Use(7, "in this process"))
    # Sealed, not trained on: another experience of the same iteration may be.
    consumed.use("sha256:f", Use(3, "in this process"))


def test_a_torn_last_line_was_never_acted_upon(tmp_path: Path) -> None:
    _journal(tmp_path, _updating(2, "sha256:e"))
    with open(tmp_path / JOURNAL_FILE, "a") as file:
        file.write(json.dumps(_updating(3, "sha256:f")))
    consumed = Consumed.read(tmp_path)
    assert consumed.use_of("sha256:e") and not consumed.use_of("sha256:f")


def test_files_that_tell_of_two_uses_are_refused(tmp_path: Path) -> None:
    _journal(tmp_path, _updating(3, "sha256:e"))
    _updates(tmp_path, replace(UPDATE, iteration=4))
    with pytest.raises(AlreadyTrained, match=r"updates.jsonl:1: iteration 4 .*journal.jsonl:1"):
        Consumed.read(tmp_path)
    (tmp_path / UPDATES_FILE).unlink()
    _updates(tmp_path, UPDATE, UPDATE)
    with pytest.raises(AlreadyTrained, match=r"updates.jsonl:2: iteration 3 .*updates.jsonl:1"):
        Consumed.read(tmp_path)
    (tmp_path / UPDATES_FILE).unlink()
    _journal(tmp_path, _updating(3, "sha256:e"))
    with pytest.raises(AlreadyTrained, match=r"journal.jsonl:2: iteration 3 .*journal.jsonl:1"):
        Consumed.read(tmp_path)


def test_an_unnamed_experience_and_a_broken_line_are_named(tmp_path: Path) -> None:
    _journal(tmp_path, {"state": "UPDATING_FROM", "iteration": 0})
    with pytest.raises(LinesError, match="journal.jsonl:1: UPDATING_FROM of an unnamed"):
        Consumed.read(tmp_path)
    (tmp_path / JOURNAL_FILE).write_text("{\n{}\n")
    with pytest.raises(LinesError, match="journal.jsonl:1: not JSON"):
        Consumed.read(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from megarl.contracts.states import Journal, State
from megarl.contracts.version import PolicyVersion

version = PolicyVersion("run", 0, 0, "sha256:w", "sha256:t", "sha256:m")
journal = Journal(Path(sys.argv[1]) / "journal.jsonl")
evidence = {"weight_manifest_hash": "sha256:w", "bytes_sent": 0, "verified": True, "samples": 8}
evidence |= {"experience_hash": "sha256:e", "derived_hash": "blake3:d"}
for state in list(State)[:8]:
    journal.enter(state, 5, version, **evidence)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_in_its_update_has_used_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(AlreadyTrained, match=r"iteration 6 .*iteration 5 did already .*jsonl:8"):
        Consumed.read(tmp_path).use("sha256:e", Use(6, "in this process"))


def _use(folder: str, again: bool, drifted: bool) -> list[str]:
    from megarl.run_records import RunRecords

    world = World(Mesh(dist.get_world_size(), tp=1), torch.device("cpu"), timeout=30)
    records = RunRecords(Path(folder), world)
    derived = f"blake3:{world.rank}" if drifted else "blake3:d"
    told = []
    for experience in ["sha256:f", "sha256:f"] if again else ["sha256:e"]:
        try:
            records.use(4, experience, derived)
            told.append("used")
        except (AlreadyTrained, Disagreement) as error:
            told.append(f"{type(error).__name__}: {error}")
    records.close()
    return told


@pytest.mark.dist
def test_every_rank_refuses_what_rank_0_has_read(ranks, tmp_path: Path) -> None:
    _journal(tmp_path, _updating(3, "sha256:e"))
    for (told,) in ranks.run(2, _use, str(tmp_path), False, False):
        assert "AlreadyTrained: iteration 4 would train on experience sha256:e" in told
        assert f"({tmp_path}/{JOURNAL_FILE}:1)" in told
    for first, second in ranks.run(2, _use, str(tmp_path), True, False):
        assert first == "used" and "iteration 4 did already (in this process)" in second
    for told, _ in ranks.run(2, _use, str(tmp_path), True, True):
        assert "Disagreement: iteration 4: ranks [1] derived other advantages" in told
