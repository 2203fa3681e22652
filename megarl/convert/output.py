"""A folder that appears under its name when it is whole, and leaves nothing when it is not."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.convert.boxes import ConvertError
from megarl.convert.processes import Processes
from megarl.convert.progress import human
from megarl.experience.columns import sync_folder

SPARE_BYTES = 2**20
"""For the small files beside the weights."""


def refuse_existing(folder: Path) -> None:
    """Raises `ConvertError`: it exists, or what should be a folder above it is a file."""
    if folder.exists() or folder.is_symlink():
        raise ConvertError(f"{folder}: exists; name another folder")
    above = next(place for place in folder.absolute().parents if os.path.lexists(place))
    if not above.is_dir():
        raise ConvertError(f"{folder}: {above} is no folder; name another place")


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
def only_writer(folder: Path) -> Iterator[Path]:
    """The empty place to write `folder` at, `partial_of` it, for this process alone.

    What an earlier attempt left there is removed, and so is what the block leaves where it raises.
    `.NAME.lock` is locked meanwhile; the kernel frees it when the process ends, however it ends.
    Raises `ConvertError`: another conversion is writing `folder`, it exists, or something that no
    conversion makes has the partial's name.
    """
    refuse_existing(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    descriptor = _locked(lock, folder)
    try:
        # One that was through since then has taken its lock's name away.
        refuse_existing(folder)
        partial = partial_of(folder)
        if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
            raise ConvertError(f"{partial}: is in the way, and no folder; remove it")
        shutil.rmtree(partial, ignore_errors=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path, folder: Path) -> int:
    """The open and locked file `lock`, made where there is none. A lock on a file that its last
    owner has removed holds off nobody: then it is taken again."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConvertError(
                f"{folder}: another conversion is writing it; wait for its end, or name another "
                "folder"
            ) from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def folder_when_whole(folder: Path, need: int, crew: Processes) -> Iterator[Path]:
    """The empty folder to write to; it gets its name when the block is through on every process.

    Raises `ConvertError` on every process as `only_writer` does, and where the disk has no room for
    `need` bytes. Whatever ends the block, what it wrote is removed.
    """
    partial = partial_of(folder)
    claim = ExitStack()

    def prepare() -> None:
        claim.enter_context(only_writer(folder))
        refuse_full_disk(folder, need)
        partial.mkdir()

    def rename() -> None:
        for path in partial.iterdir():
            _sync(path)
        sync_folder(partial)
        refuse_existing(folder)
        partial.rename(folder)
        sync_folder(folder.absolute().parent)

    with claim:
        crew.on_main(prepare)
        yield partial
        crew.on_main(rename)


def refuse_other_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises `ConvertError` naming a file of `folder` that does not have its bytes of `sizes`, or
    one of weights that is not in it."""
    held = {path.name: path.stat().st_size for path in folder.iterdir()}
    for name, size in sizes.items():
        if held.get(name) != size:
            found = "is gone" if name not in held else f"has {held[name]} bytes"
            raise ConvertError(f"{folder / name}: {found}, {size} were written; who else writes?")
    stray = sorted(name for name in held.keys() - sizes.keys() if Path(name).suffix == ".distcp")
    if stray:
        raise ConvertError(f"{folder / stray[0]}: was not written by this conversion")


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
