"""Moving a file or a folder to another file system, so that no moment shows half of it as whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.checkpoint.commit import COMMIT_FILE, check_room
from megarl.experience.columns import UNFINISHED, sync_folder
from megarl.experience.manifest import DERIVED_FILE, MANIFEST_FILE

MARKS = (COMMIT_FILE, MANIFEST_FILE, DERIVED_FILE)
"""Files by which a folder counts as whole: they are the first to go."""


def carry(entry: Path, target: Path) -> None:
    """Copy `entry` to `target`, which is free, then remove it. A process that is killed on the way
    leaves `entry` whole, or the copy whole and of `entry` what nobody takes for whole.

    Raises `CheckpointError` where there is no room for the copy, and `OSError`.
    """
    check_room(target.parent, _size(entry), f"what goes to {target}")
    unfinished = target.with_name(target.name + UNFINISHED)
    _remove(unfinished)  # of a process that was killed
    if entry.is_dir() and not entry.is_symlink():
        shutil.copytree(entry, unfinished, symlinks=True)
    else:
        shutil.copy2(entry, unfinished, follow_symlinks=False)
    for path in (unfinished, *unfinished.rglob("*")):
        _sync(path)
    os.rename(unfinished, target)
    sync_folder(target.parent)
    for mark in MARKS:
        if entry.is_dir() and (entry / mark).exists():
            (entry / mark).unlink()
            sync_folder(entry)
    _remove(entry)


def _size(entry: Path) -> int:
    files = (entry, *entry.rglob("*")) if not entry.is_symlink() else ()
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    if path.is_dir():
        sync_folder(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
