"""How far a run's line files had come at a position: bytes and hash. Plain Python: no torch.

    positions = RecordPositions(run_folder)     rank 0's, lives with the run
    positions.take()                            {"metrics.jsonl": {"bytes": 812, "blake3": "…"}}
    check_records(run_folder, taken)            which of them are no longer what they were

A line counts once its line break is there, so a position ends at one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from megarl.checkpoint.commit import CheckpointError
from megarl.contracts.states import JOURNAL_FILE
from megarl.experience.columns import sync_folder
from megarl.experience.updates import UPDATES_FILE
from megarl.experience.versions import VERSIONS_FILE
from megarl.observe.metrics import METRICS_FILE
from megarl.rewards.quarantine import FILE as QUARANTINE_FILE

LEDGER_FILE = "ledger.jsonl"
"""Once more, for the module that writes it loads torch; a test holds the two equal."""
LINE_FILES = (
    VERSIONS_FILE,
    UPDATES_FILE,
    LEDGER_FILE,
    QUARANTINE_FILE,
    METRICS_FILE,
    JOURNAL_FILE,
)
"""A run's line files. The journal is cut last: it tells that an update was begun."""
EVAL_FOLDER = "eval"
EXPORTS_FOLDER = "exports"
BLOCK = 1 << 20
"""Bytes read at once."""
_SHOWN_DIGITS = 12


class RecordsError(CheckpointError):
    """Records of a run that are not those a position tells of; names the file."""


@dataclass
class _Running:
    """The whole lines of one file that were read so far."""

    bytes: int = 0
    hasher: Any = field(default_factory=blake3)

    def told(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "blake3": self.hasher.hexdigest()}


class RecordPositions:
    """The positions of a run's line files; reads what was appended since the last call only."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._files: dict[str, _Running] = {}

    def take(self) -> dict[str, dict[str, Any]]:
        """File → bytes and blake3 (hex) of its whole lines, of every line file that exists. They
        are on the disk when this returns.

        Raises `RecordsError` where a file is shorter than at the last call, or gone.
        """
        new = False
        for name in LINE_FILES:
            path = self._folder / name
            running = self._files.get(name)
            if running is None and not path.exists():
                continue
            if running is None:
                new = True
                running = self._files[name] = _Running()
            _advance(path, running)
        if new:
            sync_folder(self._folder)
        return {name: running.told() for name, running in self._files.items()}


def _advance(path: Path, running: _Running) -> None:
    """Sync the file, and hash its lines from where `running` stands."""
    try:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            if size < running.bytes:
                raise RecordsError(
                    f"{path}: {size} bytes, {running.bytes} were there before; "
                    "somebody else writes this run's records"
                )
            file.seek(running.bytes)
            since_break: list[bytes] = []
            left = size - running.bytes
            while left and (block := file.read(min(BLOCK, left))):
                left -= len(block)
                end = block.rfind(b"\n") + 1
                if end:
                    for part in (*since_break, block[:end]):
                        running.hasher.update(part)
                        running.bytes += len(part)
                    since_break = []
                since_break.append(block[end:])
    except FileNotFoundError as error:
        raise RecordsError(f"{path}: it was there before, and is gone") from error


def present_files(run_folder: Path) -> dict[str, list[str]]:
    """`eval_files`: the names in `eval/`, `export_names`: those in `exports/`, both sorted. What
    is half-written is not among them."""
    return {
        "eval_files": sorted(
            path.name
            for path in (run_folder / EVAL_FOLDER).glob("*")
            if path.suffix in (".json", ".jsonl")
        ),
        "export_names": sorted(
            path.name
            for path in (run_folder / EXPORTS_FOLDER).glob("*")
            if not path.name.startswith(".")
        ),
    }


def check_records(
    run_folder: Path, records: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Line file → (what was recorded, what is there), for each whose first bytes are not those
    recorded; empty where all are. What a file holds beyond its position does not matter."""
    differ = {}
    for name, record in records.items():
        there = _there(run_folder / name, record["bytes"], record["blake3"])
        if there is not None:
            differ[name] = (_shown(record["bytes"], record["blake3"]), there)
    return differ


def _there(path: Path, size: int, digest: str) -> str | None:
    """What lies in `path` instead of `size` bytes of that hash; None where it is those."""
    if not path.is_file():
        return None if size == 0 else "missing"
    found = path.stat().st_size
    if found < size:
        return f"{found} bytes"
    hasher = blake3()
    with open(path, "rb", buffering=0) as file:
        left = size
        while left and (block := file.read(min(BLOCK, left))):
            hasher.update(block)
            left -= len(block)
    return None if hasher.hexdigest() == digest else _shown(size, hasher.hexdigest())


def _shown(size: int, digest: str) -> str:
    return f"{size} bytes, blake3 {digest[:_SHOWN_DIGITS]}…"
