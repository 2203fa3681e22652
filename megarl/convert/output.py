"""A folder that appears under its name when it is whole, and leaves nothing when it is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.convert.boxes import ConvertError
from megarl.convert.processes import Processes
from megarl.convert.progress import human
from megarl.experience.columns import sync_folder

SPARE_BYTES = 2**20
"""For the small files beside the weights."""


def refuse_existing(folder: Path) -> None:
    """Raises `ConvertError`."""
    if folder.exists() or folder.is_symlink():
        raise ConvertError(f"{folder}: exists; name another folder")


def refuse_full_disk(folder: Path, need: int) -> None:
    """Raises `ConvertError` where the disk that `folder` is to lie on has no room for it."""
    place = folder.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need + SPARE_BYTES:
        raise ConvertError(f"{folder}: needs {human(need)}, {place} has {human(free)} free")


def partial_of(folder: Path) -> Path:
    """Its name until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def folder_when_whole(folder: Path, need: int, crew: Processes) -> Iterator[Path]:
    """The empty folder to write to; it gets its name when the block is through on every process.

    What an earlier attempt left is removed first. Raises `ConvertError` on every process where
    `folder` exists, or the disk has no room for `need` bytes. Whatever ends the block, what it
    wrote is removed.
    """
    partial = partial_of(folder)

    def prepare() -> None:
        refuse_existing(folder)
        shutil.rmtree(partial, ignore_errors=True)
        refuse_full_disk(folder, need)
        partial.mkdir(parents=True)

    def rename() -> None:
        for path in partial.iterdir():
            _sync(path)
        sync_folder(partial)
        refuse_existing(folder)
        partial.rename(folder)
        sync_folder(folder.absolute().parent)

    crew.on_main(prepare)
    try:
        yield partial
        crew.on_main(rename)
    except BaseException:
        if crew.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def copy_companions(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Those of `names` that the folder `source` has. Raises `OSError`."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
