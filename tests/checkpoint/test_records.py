"""Positions of a run's line files: bytes and hash of the whole lines, and what no longer fits them.

The oracle is blake3 over the file's bytes up to its last line break, read at once.
Not covered: that fsync reaches the disk's own platters.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from megarl.checkpoint import records
from megarl.checkpoint.records import (
    LINE_FILES,
    RecordPositions,
    RecordsError,
    check_records,
    present_files,
)


def _oracle(folder: Path) -> dict[str, dict]:
    told = {}
    for path in folder.glob("*.jsonl"):
        whole = path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        told[path.name] = {"bytes": len(whole), "blake3": blake3(whole).hexdigest()}
    return told


def _append(path: Path, body: bytes) -> None:
    with open(path, "ab") as file:
        file.write(body)


def test_the_files_are_those_that_the_run_writes() -> None:
    from megarl.contracts.states import JOURNAL_FILE
    from megarl.experience.updates import UPDATES_FILE
    from megarl.experience.versions import VERSIONS_FILE
    from megarl.observe.metrics import METRICS_FILE
    from megarl.rewards.quarantine import FILE
    from megarl.run_records import LEDGER_FILE

    written = {JOURNAL_FILE, UPDATES_FILE, VERSIONS_FILE, METRICS_FILE, FILE, LEDGER_FILE}
    assert set(LINE_FILES) == written and len(LINE_FILES) == len(written)
    assert LINE_FILES[-1] == JOURNAL_FILE


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys, megarl.checkpoint.cut_back, megarl.checkpoint.records; "
        "loaded = {'torch', 'megatron', 'sglang', 'tensorboard'} & set(sys.modules); "
        "sys.exit(', '.join(loaded) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"they load {done.stderr}"


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_the_running_hash_is_that_of_the_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, seed: int
) -> None:
    """Lines of any length, appended in pieces that do not end where lines do."""
    monkeypatch.setattr(records, "BLOCK", block)
    draw = random.Random(seed)
    positions = RecordPositions(tmp_path)
    assert positions.take() == {}
    for _ in range(12):
        for name in draw.sample(LINE_FILES, 3):
            sizes = [draw.choice([0, 1, 5, 63, 64, 200]) for _ in range(draw.randrange(4))]
            body = b"".join(draw.randbytes(size).replace(b"\n", b"-") + b"\n" for size in sizes)
            _append(tmp_path / name, body + b"x" * draw.choice([0, 0, 3, 70]))
        taken = positions.take()
        assert taken == _oracle(tmp_path)
        assert check_records(tmp_path, taken) == {}
        assert positions.take() == taken
    assert RecordPositions(tmp_path).take() == positions.take()


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    """Bytes that were read once may change unseen; the next start's check sees it."""
    path = tmp_path / "versions.jsonl"
    path.write_bytes(b"first\n")
    positions = RecordPositions(tmp_path)
    positions.take()
    path.write_bytes(b"FIRST\nsecond\n")
    assert positions.take()["versions.jsonl"] == {
        "bytes": 13,
        "blake3": blake3(b"first\nsecond\n").hexdigest(),
    }


def test_every_file_is_synced_and_the_folder_when_one_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    (tmp_path / "metrics.jsonl").write_bytes(b"1\n")
    (tmp_path / "journal.jsonl").write_bytes(b"1\n")
    positions = RecordPositions(tmp_path)
    positions.take()
    assert sorted(synced) == sorted(["metrics.jsonl", "journal.jsonl", tmp_path.name])
    synced.clear()
    positions.take()
    assert sorted(synced) == ["journal.jsonl", "metrics.jsonl"]


def test_a_file_that_shrinks_or_goes_between_two_positions_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"one\ntwo\n")
    positions = RecordPositions(tmp_path)
    positions.take()
    os.truncate(path, 4)
    with pytest.raises(RecordsError, match=r"ledger\.jsonl: 4 bytes, 8 were there before"):
        positions.take()
    path.unlink()
    with pytest.raises(RecordsError, match=r"ledger\.jsonl: it was there before, and is gone"):
        positions.take()


def test_what_no_longer_fits_is_told_by_file(tmp_path: Path) -> None:
    for name in ("journal", "metrics", "updates", "ledger"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"one\ntwo\n")
    (tmp_path / "versions.jsonl").write_bytes(b"")
    taken = RecordPositions(tmp_path).take()
    _append(tmp_path / "journal.jsonl", b"three\nfo")
    os.truncate(tmp_path / "metrics.jsonl", 7)
    (tmp_path / "updates.jsonl").unlink()
    (tmp_path / "ledger.jsonl").write_bytes(b"one\nTwo\nthree\n")
    (tmp_path / "versions.jsonl").unlink()
    whole, other = (blake3(body).hexdigest()[:12] for body in (b"one\ntwo\n", b"one\nTwo\n"))
    recorded = f"8 bytes, blake3 {whole}…"
    assert check_records(tmp_path, taken) == {
        "metrics.jsonl": (recorded, "7 bytes"),
        "updates.jsonl": (recorded, "missing"),
        "ledger.jsonl": (recorded, f"8 bytes, blake3 {other}…"),
    }


def test_files_that_are_present_are_whole_ones(tmp_path: Path) -> None:
    assert present_files(tmp_path) == {"eval_files": [], "export_names": []}
    (tmp_path / "eval").mkdir()
    for name in ("step_8.jsonl", "step_10.jsonl", "step_12.tmp"):
        (tmp_path / "eval" / name).touch()
    for name in ("iter_000004", "iter_000002", ".iter_000006.partial"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    (tmp_path / "exports" / "best").symlink_to("iter_000002")
    assert present_files(tmp_path) == {
        "eval_files": ["step_10.jsonl", "step_8.jsonl"],
        "export_names": ["best", "iter_000002", "iter_000004"],
    }
