"""Brings a run's folder back to a position. Nothing is deleted: what is cut lies aside.

    finished.json            first, so that a run that is being cut back never looks finished
    checkpoints/iter_M       M > position, then exports, hf/, eval files, report, environment
    experience/iter_M        M >= position
    tensorboard/             events from the position on
    *.jsonl                  each beyond its recorded bytes, the journal last

Every step is a rename, or a copy that is on the disk before the original is cut or removed. So a
process may be killed between any two of them: the next `cut_back` to the same position, with an
`aside` of its own or the same one, comes to the same folder. Newer checkpoints go before any record
is cut, so that the newest one that is left always fits the records. Plain Python: no torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoint import commit as commits
from megarl.checkpoint.carry import carry
from megarl.checkpoint.place import own_entry
from megarl.checkpoint.records import BLOCK, EVAL_FOLDER, EXPORTS_FOLDER, LINE_FILES, RecordsError
from megarl.experience import manifest as sealed
from megarl.experience.columns import UNFINISHED, sync_folder
from megarl.observe.environment import ENVIRONMENT_FILE
from megarl.observe.events import KEPT_FILE, CutEvents, cut_events
from megarl.observe.metrics import TENSORBOARD_FOLDER
from megarl.observe.report import REPORT_FILE
from megarl.observe.runfolder import FINISHED_FILE, TIMELINE_FILE

HF_FOLDER = "hf"
OUTPUTS = (HF_FOLDER, REPORT_FILE, TIMELINE_FILE, ENVIRONMENT_FILE)
"""What a start or an end of the run writes anew."""
DERIVED_STEMS = ("derived", "selection")
"""Of the files of a sealed iteration that can be computed again, `derived.json` among them."""


class Aside:
    """A folder that takes in what is cut; nothing in it is ever overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def move(self, entries: Iterable[Path], inside: str = "") -> int:
        """Move files and folders that share one parent to `inside`; returns how many. On the disk
        when this returns.

        What lies on another file system, behind a link that a person made, is copied there and
        then removed. Raises `CheckpointError` where there is no room for that, and `OSError`.
        """
        entries = list(entries)
        if not entries:
            return 0
        folder = self._made(inside)
        for entry in entries:
            target = _free(folder, entry.name)
            try:
                os.rename(entry, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                carry(entry, target)
        sync_folder(folder)
        for parent in {entry.parent for entry in entries}:
            sync_folder(parent)
        return len(entries)

    def copy(self, file: Path, start: int, inside: str = "") -> int:
        """Copy the bytes of `file` from `start` on; returns the lines, a torn one included. Under
        its name, and on the disk, when this returns."""
        folder = self._made(inside)
        unfinished = folder / (file.name + UNFINISHED)
        lines, last = 0, b"\n"
        with open(file, "rb") as source, open(unfinished, "wb") as target:
            source.seek(start)
            while block := source.read(BLOCK):
                target.write(block)
                lines += block.count(b"\n")
                last = block[-1:]
            target.flush()
            os.fsync(target.fileno())
        os.rename(unfinished, _free(folder, file.name))
        sync_folder(folder)
        return lines + (last != b"\n")

    def _made(self, inside: str) -> Path:
        folder = self.folder / inside
        if not folder.is_dir():
            folder.mkdir(parents=True)
            above = folder.parent
            while above != self.folder.parent:
                sync_folder(above)
                above = above.parent
        return folder


def _free(folder: Path, name: str) -> Path:
    """`name`, or `name.2` and so on where that is taken."""
    path, number = folder / name, 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{name}.{number}"
    return path


def cut_back(
    run_folder: Path,
    aside: Path,
    records: Mapping[str, Mapping[str, Any]] | None,
    iteration: int,
    *,
    eval_files: Collection[str],
    export_names: Collection[str],
    reuse: int | None,
    source: Path | None = None,
) -> list[str]:
    """Bring `run_folder` to the position `iteration` (the next one to run); for one process, while
    nobody writes there. Returns a line for people on everything that was set aside.

    `aside` exists. `records` is what `RecordPositions.take` told at the position, None at a run's
    start: a line file that is not in it goes aside whole. `eval_files` and `export_names` are the
    names that stay in `eval/` and `exports/`. Of the sealed experience of iteration `reuse` the
    facts stay, and what was derived from them goes. `source` is the checkpoint, of this run or
    another, that is loaded afterwards.

    Raises `RecordsError` before anything is touched: a line file that is shorter than recorded or
    not known, experience to be used again that was never sealed, a `source` that would go aside.
    """
    records = records or {}
    _check(run_folder, records, reuse)
    _check_source(run_folder, source, iteration)
    out = Aside(aside)
    told = _entries(out, run_folder, [FINISHED_FILE])
    told += _checkpoints(out, run_folder, iteration)
    told += _unlisted(out, run_folder / EXPORTS_FOLDER, export_names)
    told += _entries(out, run_folder, OUTPUTS)
    told += _unlisted(out, run_folder / EVAL_FOLDER, eval_files)
    told += _experience(out, run_folder, iteration, reuse)
    told += _tensorboard(out, cut_events(run_folder, iteration), run_folder)
    for name in LINE_FILES:
        told += _lines(out, run_folder / name, records.get(name))
    return told


def _check(run_folder: Path, records: Mapping[str, Mapping[str, Any]], reuse: int | None) -> None:
    unknown = sorted(set(records) - set(LINE_FILES))
    if unknown:
        raise RecordsError(
            f"the position records {', '.join(unknown)}, which this megarl does not know; resume "
            "with the version that saved it"
        )
    for name, record in records.items():
        path = run_folder / name
        size = path.stat().st_size if path.exists() else 0
        if size < record["bytes"]:
            raise RecordsError(
                f"{path}: {size} bytes, the position was at {record['bytes']}; "
                "resume from an older checkpoint, or put the file back"
            )
    if reuse is not None:
        folder = sealed.iteration_folder(run_folder, reuse)
        if not (folder / sealed.MANIFEST_FILE).exists():
            raise RecordsError(f"{folder}: never sealed; set resume.use=regenerate")


def _check_source(run_folder: Path, source: Path | None, iteration: int) -> None:
    entry = None if source is None else own_entry(run_folder, source)
    newer = (folder for _, folder in _newer(run_folder, iteration))
    if entry is not None and entry in newer:
        raise RecordsError(
            f"{source}: this start goes on from it, and would set it aside as beyond iteration "
            f"{iteration}; see where {run_folder / commits.FOLDER} leads, and name the checkpoint "
            "there in resume.from"
        )


def _entries(out: Aside, run_folder: Path, names: Iterable[str]) -> list[str]:
    there = [run_folder / name for name in names if os.path.lexists(run_folder / name)]
    out.move(there)
    return [", ".join(entry.name for entry in there)] if there else []


def _checkpoints(out: Aside, run_folder: Path, iteration: int) -> list[str]:
    """The newest first: what is left at any moment ends with one that was whole before."""
    newer = _newer(run_folder, iteration)
    out.move((folder for _, folder in reversed(newer)), commits.FOLDER)
    return [f"{commits.FOLDER}: {_counted(newer, 'folder')}"] if newer else []


def _newer(run_folder: Path, iteration: int) -> list[tuple[int, Path]]:
    return [item for item in commits.checkpoint_folders(run_folder) if item[0] > iteration]


def _unlisted(out: Aside, folder: Path, names: Collection[str]) -> list[str]:
    """Entries that the position does not list, then links whose end went with them."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    count = out.move((entry for entry in entries if entry.name not in names), folder.name)
    count += out.move((link for link in entries if _is_broken_link(link)), folder.name)
    return [f"{folder.name}: {_counted(range(count), 'entry', 'entries')}"] if count else []


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _experience(out: Aside, run_folder: Path, iteration: int, reuse: int | None) -> list[str]:
    late = [item for item in sealed.iteration_folders(run_folder) if item[0] >= iteration]
    told = []
    whole = [folder for number, folder in late if number != reuse]
    if out.move(whole, sealed.FOLDER):
        told.append(f"{sealed.FOLDER}: {_counted(whole, 'iteration')}")
    for folder in (folder for number, folder in late if number == reuse):
        # `derived.json` is written last, and so goes first: without it nothing counts as derived.
        first = [folder / sealed.DERIVED_FILE]
        rest = (entry for entry in sorted(folder.iterdir()) if entry not in first)
        derived = [entry for entry in rest if entry.name.startswith(DERIVED_STEMS)]
        inside = f"{sealed.FOLDER}/{folder.name}"
        count = out.move((entry for entry in first if entry.exists()), inside)
        count += out.move(derived, inside)
        if count:
            told.append(f"{inside}: {_counted(range(count), 'derived file')}")
    return told


def _tensorboard(out: Aside, cut: CutEvents, run_folder: Path) -> list[str]:
    """What is kept comes in first, then the files it is from go. In between an event is there
    twice; the next cut knows it again by its bytes."""
    if not cut.is_due:
        return []
    kept = run_folder / TENSORBOARD_FOLDER / KEPT_FILE
    old = [path for path in cut.files if path != kept or not cut.body]
    if cut.body and not (kept in cut.files and kept.read_bytes() == cut.body):
        if kept in cut.files:
            out.copy(kept, 0, TENSORBOARD_FOLDER)
        unfinished = out.folder / (KEPT_FILE + UNFINISHED)
        with open(unfinished, "wb") as file:
            file.write(cut.body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, kept)
        sync_folder(kept.parent)
        sync_folder(out.folder)
    out.move(old, TENSORBOARD_FOLDER)
    told = _counted(range(cut.dropped), "event") + f" of {_counted(cut.files, 'file')}"
    if cut.unread_bytes:
        told += f", {cut.unread_bytes} bytes that cannot be read"
    return [f"{TENSORBOARD_FOLDER}: {told}"]


def _lines(out: Aside, path: Path, record: Mapping[str, Any] | None) -> list[str]:
    if not path.exists():
        return []
    size = path.stat().st_size
    if record is None:
        out.move([path])
        return [f"{path.name}: the whole file ({size} bytes)"]
    start = record["bytes"]
    if size == start:
        return []
    lines = out.copy(path, start)
    with open(path, "r+b") as file:
        file.truncate(start)
        os.fsync(file.fileno())
    return [f"{path.name}: {_counted(range(lines), 'line')} ({size - start} bytes)"]


def _counted(things: Collection[Any], word: str, words: str | None = None) -> str:
    return f"{len(things)} {word if len(things) == 1 else words or word + 's'}"
