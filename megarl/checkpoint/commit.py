"""Which checkpoints of a run are whole, and how one becomes so. Plain Python: imports no torch.

    checkpoints/iter_000010/    the position after 10 iterations: actor/, position.json, and critic/
                                and reference/ where the position tells of them
        COMMIT.json             written last, on the disk with all that it lists before it counts

A folder without `COMMIT.json`, or one whose files are not those that it lists, or that lists none
of a role that its position tells of, is not whole: it is reported and never resumed from. Tensor
files are held to their sizes, all others to their hashes.
What was never committed is removed by the next start; what was committed and is damaged stays for a
person to look at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megarl.contracts.errors import InputError
from megarl.contracts.hashes import file_hash
from megarl.experience.columns import sync_folder, write_whole

FOLDER = "checkpoints"
COMMIT_FILE = "COMMIT.json"
POSITION_FILE = "position.json"
TENSORS_SUFFIX = ".distcp"
"""Of the files that tensors lie in. They are large, and loading them proves every tensor."""
FORMAT = 1
ROLES = ("actor", "reference", "critic")
"""Keys of a position, and folders with the tensors of those that it tells of."""
_NAME = re.compile(r"iter_(\d{6,})")
SPARE_BYTES = 16 * 2**20
"""Left free for the run's own records while a checkpoint is written."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded; names the folder."""


class NoCheckpoint(InputError):
    """A folder that was named as a checkpoint and holds no whole one."""


@dataclass(frozen=True)
class Commit:
    """`COMMIT.json`, read from a checkpoint that is whole as far as can be told without
    reading tensors."""

    folder: Path
    run_id: str
    iteration: int
    """Iterations finished, and so the number of the next one."""
    version: str
    """Id of the policy version."""
    committed_at: float
    position_hash: str
    """blake3 of `position.json`."""
    files: dict[str, int]
    """Every file besides `COMMIT.json`, relative to the folder → bytes."""
    hashes: dict[str, str] = field(default_factory=dict)
    """blake3 of those of them that hold no tensors; empty where `COMMIT.json` has none."""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def checkpoint_folder(run_folder: Path, iteration: int) -> Path:
    return run_folder / FOLDER / f"iter_{iteration:06d}"


def checkpoint_folders(run_folder: Path) -> list[tuple[int, Path]]:
    """(iteration, folder) of everything that lies where checkpoints do, rising."""
    found = ((_NAME.fullmatch(path.name), path) for path in (run_folder / FOLDER).glob("iter_*"))
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def read_commit(folder: Path) -> Commit:
    """Raises `CheckpointError`: not committed, another format, a file that is missing or has
    another size or, where it holds no tensors, another hash; nothing of a role that the position
    tells of; a folder named as another iteration's."""
    path = folder / COMMIT_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {told['format']}, this megarl reads {FORMAT}")
        commit = Commit(
            folder=folder,
            run_id=str(told["run_id"]),
            iteration=int(told["iteration"]),
            version=str(told["version"]),
            committed_at=float(told["committed_at"]),
            position_hash=str(told["position_hash"]),
            files={str(name): int(size) for name, size in told["files"].items()},
            hashes={str(name): str(hash_) for name, hash_ in told.get("hashes", {}).items()},
        )
    except FileNotFoundError as error:
        what = f"half-written, there is no {COMMIT_FILE}" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {what}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not readable: {type(error).__name__}: {error}") from error
    for name, size in commit.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, {COMMIT_FILE} lists it")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes, {size} were committed")
    if POSITION_FILE not in commit.files:
        raise CheckpointError(f"{path}: lists no {POSITION_FILE}")
    _check_hashes(folder, commit.hashes | {POSITION_FILE: commit.position_hash})
    try:
        _check_roles(folder, commit.files)
    except (OSError, ValueError, AttributeError) as error:
        where = folder / POSITION_FILE
        raise CheckpointError(f"{where}: not readable: {type(error).__name__}: {error}") from error
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != commit.iteration:
        raise CheckpointError(f"{folder}: {COMMIT_FILE} is of iteration {commit.iteration}")
    return commit


def _check_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    """Raises `CheckpointError` for the first file that has another, or cannot be read."""
    for name, hash_ in sorted(hashes.items()):
        try:
            same = file_hash(folder / name) == hash_
        except OSError as error:
            raise CheckpointError(f"{folder / name}: not readable: {error}") from error
        if not same:
            raise CheckpointError(f"{folder / name}: not the one that was committed")


def _check_roles(folder: Path, files: Iterable[str]) -> None:
    """Raises `CheckpointError` where the position tells of a role of which there is no file, and
    `OSError`; `ValueError` and `AttributeError` for what is no position."""
    told = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
    there = {name.partition("/")[0] for name in files}
    for role in ROLES:
        if told.get(role) is not None and role not in there:
            raise CheckpointError(f"{folder / role}: missing, {POSITION_FILE} tells of the {role}")


def whole_checkpoints(run_folder: Path) -> tuple[list[Commit], list[str]]:
    """The whole ones, rising, and a line for each of the others that says why it is not."""
    whole, others = [], []
    for _, folder in checkpoint_folders(run_folder):
        try:
            whole.append(read_commit(folder))
        except CheckpointError as error:
            others.append(str(error))
    return whole, others


def newest_whole(run_folder: Path) -> Commit | None:
    """The last position that the run can go on from."""
    whole, _ = whole_checkpoints(run_folder)
    return whole[-1] if whole else None


def find_checkpoint(path: Path) -> Commit:
    """The checkpoint that a person named: its folder, or the newest whole one of a run's folder.

    Raises `NoCheckpoint` in one line.
    """
    if (path / COMMIT_FILE).exists() or _NAME.fullmatch(path.name):
        try:
            return read_commit(path)
        except CheckpointError as error:
            raise NoCheckpoint(f"resume.from: {error}") from error
    if not path.is_dir():
        raise NoCheckpoint(f"resume.from: there is no folder {path}")
    whole, others = whole_checkpoints(path)
    if not whole:
        why = f" ({others[-1]})" if others else ""
        raise NoCheckpoint(
            f"resume.from: {path} holds no whole checkpoint{why}; name a run's folder, or "
            f"one of its {FOLDER}/iter_N"
        )
    return whole[-1]


def commit_folder(folder: Path, run_id: str, iteration: int, version: str) -> Commit:
    """Make `folder` whole: everything in it is on the disk, then `COMMIT.json` is.

    The ranks have synced the tensors they wrote. Raises `OSError`, and `CheckpointError` where
    there is nothing of a role that the position tells of.
    """
    files, hashes = {}, {}
    for path in _files(folder):
        name = str(path.relative_to(folder))
        files[name] = path.stat().st_size
        if path.suffix != TENSORS_SUFFIX:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            hashes[name] = file_hash(path)
    _check_roles(folder, files)
    for inner in {path.parent for path in _files(folder)} | {folder}:
        sync_folder(inner)
    commit = Commit(
        folder=folder,
        run_id=run_id,
        iteration=iteration,
        version=version,
        committed_at=round(time.time(), 3),
        position_hash=hashes[POSITION_FILE],
        files=files,
        hashes=hashes,
    )
    told = {"format": FORMAT} | asdict(commit)
    del told["folder"]
    write_whole(folder / COMMIT_FILE, (json.dumps(told, indent=1) + "\n").encode())
    sync_folder(folder)
    sync_folder(folder.parent)
    return commit


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def clean(run_folder: Path) -> list[str]:
    """Remove what was never committed; a line for each, and for each damaged one that stays.

    Raises `CheckpointError` for one that cannot be removed.
    """
    told = []
    for _, folder in checkpoint_folders(run_folder):
        if not (folder / COMMIT_FILE).exists():
            try:
                _remove(folder)
            except OSError as error:
                raise CheckpointError(
                    f"{folder}: half-written, and cannot be removed: {error.strerror}; remove it"
                ) from error
            told.append(f"{folder}: half-written, removed")
    _, others = whole_checkpoints(run_folder)
    return told + [f"{line}; ignored" for line in others]


def retain(run_folder: Path, keep: int, keep_every: int) -> list[int]:
    """Remove whole checkpoints beyond the newest `keep`, but for every `keep_every`-th iteration
    (0: none); the newest always stays. Returns the iterations removed. Raises `OSError`."""
    whole, _ = whole_checkpoints(run_folder)
    removed = []
    for commit in whole[: -max(keep, 1)]:
        if keep_every and commit.iteration % keep_every == 0:
            continue
        # Without its COMMIT.json first: a half-removed folder must not be taken for whole.
        (commit.folder / COMMIT_FILE).unlink()
        sync_folder(commit.folder)
        _remove(commit.folder)
        removed.append(commit.iteration)
    return removed


def _remove(folder: Path) -> None:
    """A person may have put the folder on another disk and a link in its place."""
    shutil.rmtree(folder.resolve())
    folder.unlink(missing_ok=True)


def check_room(folder: Path, need: int, what: str) -> None:
    """Raises `CheckpointError` where the disk of `folder` has less than `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need + SPARE_BYTES:
        raise CheckpointError(
            f"{folder}: {what} needs {_size(need)}, {_size(free)} are free; make room, lower "
            "checkpoint.keep, or set run.folder to another disk"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
