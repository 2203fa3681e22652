"""Where the checkpoints of a run lie, links included. Plain Python: imports no torch.

A person may put `checkpoints/`, or one folder in it, on another disk and a link in its place. So
a checkpoint is a run's own by what `checkpoints/` lists, never by how its path is spelled.
"""

from __future__ import annotations

import os
from pathlib import Path

from megarl.checkpoint.commit import FOLDER, checkpoint_folders
from megarl.contracts.errors import InputError


class OutOfReach(InputError):
    """Checkpoints that may be there and cannot be looked at; names what to mount or to remove."""


def own_entry(run_folder: Path, checkpoint: Path) -> Path | None:
    """The folder in `run_folder`'s `checkpoints/` that is `checkpoint`, however both are spelled;
    None for one that lies elsewhere."""
    for _, folder in checkpoint_folders(run_folder):
        if folder.samefile(checkpoint):
            return folder
    return None


def check_place(run_folder: Path) -> None:
    """That what lies where checkpoints do can be looked at: a disk that is not there must not pass
    for a run without checkpoints.

    Raises `OutOfReach` in one line: a link that leads nowhere, no folder, one that cannot be read.
    """
    place = run_folder / FOLDER
    if not os.path.lexists(place):
        return
    _check_link(place)
    if not place.is_dir():
        raise OutOfReach(f"{place} is no folder, and checkpoints belong there; move it away")
    try:
        entries = sorted(place.iterdir())
    except OSError as error:
        raise OutOfReach(
            f"{place} cannot be read ({error.strerror}); make it readable, or set run.name=… for "
            "a run of its own"
        ) from error
    for entry in entries:
        if entry.name.startswith("iter_"):
            _check_link(entry)


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise OutOfReach(
            f"{path} leads to {os.readlink(path)}, which is not there; mount that disk or put the "
            "folder back, or remove the link to go on without what lay there"
        )
