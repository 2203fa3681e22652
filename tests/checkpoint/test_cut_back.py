"""A run's folder brought back to a position, also by a process that is killed on the way.

The oracle is the folder itself as it was when it stood at the position, kept before the run went
on. Kills are real ones (SIGKILL), before every call that writes, renames, cuts or syncs.

Not covered: what a power failure leaves of calls that the kernel had not brought to the disk, and
a kill in the middle of one call.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.checkpoint import cut_back as module
from megarl.checkpoint.cut_back import cut_back
from megarl.checkpoint.records import RecordPositions, RecordsError, check_records, present_files
from megarl.observe.events import KEPT_FILE, cut_events
from megarl.observe.metrics import MetricsWriter
from tests.checkpoint.cut_runs import (
    LAST,
    POSITION,
    Run,
    check_in_the_middle,
    check_nothing_lost,
    checkpoint,
    in_memory,
    is_events,
    iterations,
    killed_at,
    make_run,
    of_rows,
    put,
    scalars,
    tree,
    without_events,
)


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory: a sync costs nothing there, and hundreds of cuts are made."""
    with in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run") / "r")


def test_the_folder_is_again_what_it_was_at_the_position(run: Run, tmp_path: Path) -> None:
    folder = run.copy(tmp_path / "r")
    wall_times = {tag: events[:POSITION] for tag, events in scalars(folder).items()}
    told = run.to_position(folder)
    assert without_events(tree(folder)) == run.then
    assert check_records(folder, run.records) == {}
    shown = scalars(folder)
    assert shown == wall_times
    assert {tag: [event[:2] for event in shown[tag]] for tag in shown} == of_rows(folder)
    check_nothing_lost(run, folder)
    half = len(b'{"iteration": 4, "torn')
    beyond = (run.folder / "journal.jsonl").stat().st_size - run.records["journal.jsonl"]["bytes"]
    assert told[:7] == [
        "finished.json",
        "checkpoints: 3 folders",
        "exports: 3 entries",
        "hf, report.html, timeline.json, environment.json",
        "eval: 2 entries",
        "experience: 2 iterations",
        "tensorboard: 2 events of 2 files, 31 bytes that cannot be read",
    ]
    assert told[-1] == f"journal.jsonl: 5 lines ({beyond} bytes)" and beyond > half
    assert "quarantine.jsonl: the whole file (19 bytes)" in told


def test_what_is_cut_lies_aside_under_its_own_name(run: Run, tmp_path: Path) -> None:
    folder = run.copy(tmp_path / "r")
    run.to_position(folder)
    before, aside = tree(folder), tree(folder / "resumes" / "001")
    for name, body in run.later.items():
        if name in run.records:
            assert before[name] + aside.pop(name, b"") == body
        elif is_events(name) and body is not None:
            assert aside.pop(name) == body
        elif name not in before:
            assert aside.pop(name) == body, name
    parents = {"checkpoints", "eval", "experience", "exports", "tensorboard"}
    assert aside.keys() == parents | {"resume.json"}


def test_from_the_start_nothing_of_an_iteration_stays(run: Run, tmp_path: Path) -> None:
    folder = run.copy(tmp_path / "r")
    run.to_start(folder)
    assert {name for name, body in tree(folder).items() if body is not None} == {
        "recipe.yaml",
        "data.json",
        "logs/rank_0.log",
        "tokenizer/tokenizer.json",
        "experience/.writer.lock",
    }
    check_nothing_lost(run, folder)


def test_the_facts_of_experience_that_is_used_again_stay(run: Run, tmp_path: Path) -> None:
    folder = run.copy(tmp_path / "r")
    told = run.to_reuse(folder)
    sealed = f"experience/iter_{POSITION:06d}"
    facts = {"rollout_0.safetensors", "scored_0.safetensors", "manifest.json", "prompts.jsonl"}
    derived = {"derived.json", "selection.safetensors"}
    derived |= {"derived_0.safetensors", "derived_1.safetensors"}
    assert set(os.listdir(folder / sealed)) == facts
    assert set(os.listdir(folder / "resumes" / "001" / sealed)) == derived
    rest = {k: body for k, body in tree(folder).items() if not k.startswith(sealed)}
    assert without_events(rest) == run.then
    assert f"{sealed}: 4 derived files" in told and "experience: 1 iteration" in told
    check_nothing_lost(run, folder)


@pytest.mark.parametrize("to", ["to_reuse", "to_start"])
def test_killed_before_any_call_the_next_start_comes_to_the_same_folder(
    run: Run, fast: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 100)  # so that a copy takes several writes
    whole = run.copy(fast / "whole")
    getattr(run, to)(whole)
    expected = tree(whole)
    getattr(run, to)(whole, 2)
    assert tree(whole) == expected
    assert os.listdir(whole / "resumes" / "002") == ["resume.json"]
    calls = 0
    while True:
        folder = run.copy(fast / f"r{calls}")
        run.aside(folder, 1)
        if not killed_at(calls + 1, lambda: getattr(run, to)(folder)):  # noqa: B023 - runs now
            break
        calls += 1
        check_in_the_middle(run, folder)
        # Into the same aside as well as into another one: nothing there is written over.
        getattr(run, to)(folder, 1 + calls % 2)
        assert tree(folder) == expected, f"killed before call {calls}"
        check_nothing_lost(run, folder)
        shutil.rmtree(folder)
    assert calls > 60  # or the hook saw nothing


def test_a_tail_is_on_the_disk_before_its_file_is_cut(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.copy(tmp_path / "r")
    path, kept = folder / "ledger.jsonl", run.records["ledger.jsonl"]["bytes"]
    size = path.stat().st_size
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.stat().st_size))

    monkeypatch.setattr(os, "fsync", spy)
    run.to_position(folder)
    aside = folder / "resumes" / "001"
    copied = synced.index((f"{aside}/ledger.jsonl.tmp", size))
    assert synced[copied + 1 : copied + 3] == [(str(aside), size), (str(path), kept)]


def test_killed_again_and_again(run: Run, fast: Path) -> None:
    whole = run.copy(fast / "whole")
    run.to_position(whole)
    draw = random.Random(5)
    for trial in range(6):
        folder = run.copy(fast / f"r{trial}")
        number = 1
        for _ in range(6):
            call = draw.randrange(1, 40)
            if not killed_at(call, lambda: run.to_position(folder, number)):  # noqa: B023
                break
            check_in_the_middle(run, folder)
            number += draw.randrange(2)
        run.to_position(folder, number)
        assert tree(folder) == tree(whole)
        check_nothing_lost(run, folder)


def test_a_name_that_lies_aside_already_is_not_written_over(run: Run, tmp_path: Path) -> None:
    """A whole second cut into the same aside, after the run went on as before."""
    folder = run.copy(tmp_path / "r")
    run.to_position(folder)
    first = tree(folder / "resumes" / "001")
    iterations(folder, POSITION, LAST)
    checkpoint(folder, LAST)
    run.to_position(folder)
    second = tree(folder / "resumes" / "001")
    assert {name: second.get(name) for name in first} == first
    assert second["checkpoints/iter_000004.2/COMMIT.json"] == b"commit 4"
    assert second["experience/iter_000002.2/manifest.json"] == b"manifest.json of 2"
    assert second["ledger.jsonl.2"] == first["ledger.jsonl"]
    assert without_events(tree(folder)) == run.then


def test_tensorboard_goes_on_after_a_cut_as_if_there_had_been_none(
    run: Run, tmp_path: Path
) -> None:
    folder = run.copy(tmp_path / "r")
    for _ in range(3):
        run.to_position(folder)
        iterations(folder, POSITION, LAST)
        shown = scalars(folder)
        assert {tag: [event[:2] for event in shown[tag]] for tag in shown} == of_rows(folder)
        assert len(shown["reward/mean"]) == LAST
        assert len(os.listdir(folder / "tensorboard")) == 2


def test_events_that_were_kept_before_lie_aside_when_they_are_cut_again(
    run: Run, tmp_path: Path
) -> None:
    folder = run.copy(tmp_path / "r")
    run.to_position(folder)
    before = (folder / "tensorboard" / KEPT_FILE).read_bytes()
    aside = run.aside(folder, 2)
    cut_back(folder, aside, run.records, 1, **run.present, reuse=None)
    assert (aside / "tensorboard" / KEPT_FILE).read_bytes() == before
    assert {tag: len(events) for tag, events in scalars(folder).items()} == {
        "ok": 1,
        "reward/mean": 1,
    }


def test_events_that_all_stay_are_left_as_they_are(tmp_path: Path) -> None:
    """One file; several are joined, and a file in a folder of its own is not the run's."""
    iterations(tmp_path, 0, 3)
    put(tmp_path / "tensorboard" / "plugins" / "a.tfevents", "of another tool")
    aside = tmp_path / "resumes" / "001"
    aside.mkdir(parents=True)
    records = RecordPositions(tmp_path).take()
    present = present_files(tmp_path)
    before = tree(tmp_path)
    assert cut_back(tmp_path, aside, records, 3, **present, reuse=None) == []
    assert tree(tmp_path) == before
    shown = scalars(tmp_path)
    MetricsWriter(tmp_path, tensorboard=True).close()  # a start that died before its first row
    told = cut_back(tmp_path, aside, records, 3, **present, reuse=None)
    assert told == ["tensorboard: 0 events of 2 files"]
    names = ["tensorboard", f"tensorboard/{KEPT_FILE}"]
    plugins = ["tensorboard/plugins", "tensorboard/plugins/a.tfevents"]
    assert [name for name in tree(tmp_path) if is_events(name)] == names + plugins
    assert scalars(tmp_path) == shown


@pytest.mark.parametrize("lost", [1, 5, 17, 40])
def test_a_torn_event_is_left_out_and_those_before_it_stay(tmp_path: Path, lost: int) -> None:
    iterations(tmp_path, 0, 3)
    (path,) = (tmp_path / "tensorboard").iterdir()
    whole = cut_events(tmp_path, 3)
    assert (whole.body, whole.is_due, whole.unread_bytes) == (path.read_bytes(), False, 0)
    os.truncate(path, path.stat().st_size - lost)
    cut = cut_events(tmp_path, 3)
    assert cut.body == cut_events(tmp_path, 2).body and whole.body.startswith(cut.body)
    assert cut.is_due and cut.dropped == 0
    assert len(cut.body) + cut.unread_bytes == len(whole.body) - lost


def test_what_does_not_fit_is_refused_before_anything_is_touched(run: Run, tmp_path: Path) -> None:
    folder = run.copy(tmp_path / "r")
    size = run.records["updates.jsonl"]["bytes"]
    os.truncate(folder / "updates.jsonl", size - 1)
    (folder / "experience" / "iter_000003" / "manifest.json").unlink()
    before, aside = tree(folder), run.aside(folder, 1)
    wanted = f"updates.jsonl: {size - 1} bytes, the position was at {size}"
    with pytest.raises(RecordsError, match=wanted):
        run.to_position(folder)
    present = {"eval_files": (), "export_names": ()}
    with pytest.raises(RecordsError, match=r"iter_000003: never sealed"):
        cut_back(folder, aside, {}, 3, **present, reuse=3)
    with pytest.raises(RecordsError, match=r"records later\.jsonl, which this megarl does not"):
        record = {"later.jsonl": {"bytes": 0, "blake3": ""}}
        cut_back(folder, aside, record, 3, **present, reuse=None)
    assert tree(folder) == before
