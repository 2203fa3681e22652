"""Writes `experience/iter_N/`: parts by the ranks that have them, the manifest last, by rank 0.

    rollout()   while log-probs are computed, replica leaders write what was generated and scored
    seal()      every owner's log-probs and values, how the samples came about, then
                `manifest.json`: now it is EXPERIENCE_SEALED
    derive()    while the update runs, selection and advantages are written
    settle()    waits for them, then `derived.json`, before the update is committed

A folder without `manifest.json` was never sealed. Nothing sealed is written again; retention
removes whole iterations.
"""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from megarl.contracts.hashes import bytes_hash, contract_hash, file_hash
from megarl.contracts.records import Derived, Prompt, RewardRecord
from megarl.contracts.samples import Samples
from megarl.data.prepare import Prepared
from megarl.experience import parts
from megarl.experience.columns import (
    Encoded,
    Part,
    encode_columns,
    sync_folder,
    write_columns,
    write_lines,
)
from megarl.experience.drawn import DrawnFacts
from megarl.experience.manifest import (
    DERIVED_FILE,
    DRAWN_FILE,
    FOLDER,
    FORMAT,
    LOCK_FILE,
    MANIFEST_FILE,
    PROMPTS_FILE,
    SOURCE_FILE,
    SealHeader,
    facts_of,
    is_kept,
    iteration_folder,
    iteration_folders,
    json_bytes,
    sealed_iterations,
    write_json,
)
from megarl.experience.part_columns import check_columns
from megarl.rollout.selection import Selection
from megarl.world import World

WRITERS = 2
"""Threads that write on a rank: one file is hashed or written while another one is synced."""


class StoreError(RuntimeError):
    """Experience that cannot be written: names rank, file and why, on every rank."""


class ExperienceStore:
    """One run's sealed experience, written by every rank in step."""

    def __init__(self, run_folder: Path, world: World, keep: int | None, keep_every: int) -> None:
        """Collective. `keep` newest iterations stay (None: all), and every `keep_every`-th (0: no
        others). Iterations that an earlier attempt did not seal are removed, but not those that
        are made of another run's facts: what was derived of them lies here alone.

        Raises `StoreError` where another process writes there, or nobody can.
        """
        self._run_folder, self._world = run_folder, world
        self._keep, self._keep_every = keep, keep_every
        self._writer = ThreadPoolExecutor(WRITERS, thread_name_prefix="experience")
        self._pending: list[Future[Part]] = []
        self._deriving: list[Future[Part]] = []
        self._derived: tuple[int, dict[str, Any]] | None = None
        self._previous: str | None = None
        self._lock = FileLock(run_folder / FOLDER / LOCK_FILE)
        self._on_main(self._take_over)

    def _take_over(self) -> None:
        folder = self._run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(
                f"{folder} is being written by another process; wait for its end"
            ) from None
        sealed = list(sealed_iterations(self._run_folder))
        for number, left in iteration_folders(self._run_folder):
            if number not in sealed and not (left / SOURCE_FILE).exists():
                shutil.rmtree(left)
        if sealed:
            newest = iteration_folder(self._run_folder, sealed[-1])
            self._previous = file_hash(newest / MANIFEST_FILE)

    def rollout(
        self,
        iteration: int,
        samples: Samples,
        records: Sequence[RewardRecord],
        scorer_version: str,
        prompts: Sequence[Prompt],
    ) -> None:
        """Start writing this replica's facts (on its leader), and the prompts (on rank 0).

        `samples` and `records` are the replica's, in any order. Returns at once; `seal` waits.
        Nothing is raised here, where other ranks would not know: an iteration that was sealed
        before, like a file that cannot be written, is told to all ranks by `seal`.
        """
        world, folder = self._world, iteration_folder(self._run_folder, iteration)
        if world.leads_replica:
            path = folder / f"rollout_{world.replica}.safetensors"
            self._submit(
                _write_rollout, path, world.replica, samples, list(records), scorer_version
            )
        if world.is_main:
            lines = parts.prompt_lines(prompts)
            self._submit(write_lines, folder / PROMPTS_FILE, "prompts", 0, lines)

    def seal(self, header: SealHeader, prepared: Prepared, drawn: DrawnFacts) -> str:
        """Write the trainer's facts, `drawn` (on rank 0) and the manifest; returns the experience's
        hash. Collective.

        The hash is over every part's content, without what clocks said, and the header; the same
        on every rank. When this returns, all facts are on the disk. Raises `StoreError` on every
        rank where one of them could not be written.
        """
        self.settle()
        world = self._world
        folder = iteration_folder(self._run_folder, header.iteration)
        if world.leads_owners:
            columns = parts.scored_part(prepared)
            path = folder / f"scored_{world.dp_index}.safetensors"
            made_by = {"producers": header.producers}
            self._submit(_write_checked, path, "scored", world.dp_index, columns, made_by)
        if world.is_main:
            self._submit(_write_drawn, folder / DRAWN_FILE, drawn)
        jobs, self._pending = self._pending, []
        listed = self._written(jobs)
        facts = facts_of(header, listed)
        experience_hash = contract_hash(facts)
        manifest = facts | {
            "format": FORMAT,
            "experience_hash": experience_hash,
            "previous": self._previous,
            "sealed_at": time.time() if world.is_main else 0.0,
            "parts": [asdict(part) for part in listed],
        }
        self._on_main(partial(self._write_manifest, folder, manifest))
        return experience_hash

    def _write_manifest(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self._previous = write_json(folder / MANIFEST_FILE, manifest)
        sync_folder(folder)

    def derive(
        self,
        iteration: int,
        experience_hash: str,
        recipe_hash: str,
        selection: Selection,
        minibatch: np.ndarray,
        samples: Samples,
        derived: Derived,
    ) -> str:
        """Start writing what was derived of the sealed facts, under the recipe's hash. Collective.

        Returns the hash that `derived.json` will have, the same on every rank; `settle` waits.

        `minibatch` int [N] is each row's minibatch, −1 where it does not train; `samples` are this
        rank's rows, `derived` what it trains on besides facts; its `kl_beta` is told with them.
        """
        world, folder = self._world, iteration_folder(self._run_folder, iteration)
        made_of = {
            "experience_hash": experience_hash,
            "recipe_hash": recipe_hash,
            "kl_beta": float(derived.kl_beta),
        }
        mine = []
        if world.leads_owners:
            file = f"derived_{world.dp_index}.safetensors"
            columns = parts.derived_part(samples, derived)
            mine.append((file, "derived", world.dp_index, columns, made_of))
        if world.is_main:
            columns = parts.selection_part(selection, minibatch)
            mine.append(("selection.safetensors", "selection", 0, columns, made_of))
        problem, encoded = None, []
        try:
            # Copies: what was hashed is what is written, whatever the update does to its arrays.
            encoded = [_encode_checked(*arguments).copied() for arguments in mine]
        except ValueError as error:
            problem = error
        answers = self._agreed([one.part for one in encoded], problem)
        self._deriving = [self._writer.submit(_write_derived, folder, one) for one in encoded]
        told = {"format": FORMAT} | made_of
        told["parts"] = [asdict(part) for part in _by_name(answers)]
        self._derived = (iteration, told)
        return bytes_hash([json_bytes(told)])

    def settle(self) -> None:
        """What `derive` started is on the disk, `derived.json` last; then retention. Collective.

        Raises `StoreError` on every rank where one of them could not write.
        """
        if self._derived is None:
            return
        (iteration, told), self._derived = self._derived, None
        jobs, self._deriving = self._deriving, []
        self._written(jobs)
        self._on_main(partial(self._close_derived, iteration, told))

    def _close_derived(self, iteration: int, told: Mapping[str, Any]) -> None:
        write_json(iteration_folder(self._run_folder, iteration) / DERIVED_FILE, told)
        self._forget_old(iteration)

    def close(self) -> None:
        """Waits for what is being written; another process may write then."""
        self._writer.shutdown(wait=True)
        self._lock.release()

    def _submit(self, write: Callable[..., Part], path: Path, *arguments: Any) -> None:
        self._pending.append(self._writer.submit(_write_fact, write, path, *arguments))

    def _written(self, jobs: Sequence[Future[Part]]) -> list[Part]:
        """Every rank's parts, by name, once all of them are on the disk. Collective."""
        errors = [job.exception() for job in jobs]
        problem = next((error for error in errors if error is not None), None)
        mine = [] if problem is not None else [job.result() for job in jobs]
        return _by_name(self._agreed(mine, problem))

    def _on_main(self, do: Callable[[], None]) -> None:
        """Rank 0 does it, and every rank raises where it could not. Collective."""
        problem = None
        if self._world.is_main:
            try:
                do()
            except (OSError, StoreError) as error:
                problem = error
        self._agreed(None, problem)

    def _agreed(self, value: Any, problem: BaseException | None) -> list[Any]:
        """Every rank's value. Raises `StoreError` on every rank when one has a problem."""
        told = "" if problem is None else _one_line(problem)
        answers = self._world.gather((value, told))
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if problems:
            raise StoreError("experience cannot be written: " + "; ".join(problems)) from problem
        return [answer for answer, _ in answers]

    def _forget_old(self, newest: int) -> None:
        """Retention: whole iterations go, the manifest first, so that none is half there."""
        if self._keep is None:
            return
        for number, folder in iteration_folders(self._run_folder):
            if not is_kept(number, newest, self._keep, self._keep_every):
                manifest = folder / MANIFEST_FILE
                if manifest.exists():
                    manifest.unlink()
                    sync_folder(folder)
                shutil.rmtree(folder)


def _one_line(error: BaseException) -> str:
    """An OSError by its errno's name and file, another error by its words."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.filename}: {error.strerror} ({name})"
    kind = "" if isinstance(error, (StoreError, ValueError)) else f"{type(error).__name__}: "
    return kind + str(error)


def _write_fact(write: Callable[..., Part], path: Path, *arguments: Any) -> Part:
    """In the writer's thread. Only the iteration's own folder is made: a run folder that was moved
    away meanwhile is an error."""
    folder = path.parent
    if (folder / MANIFEST_FILE).exists():
        raise StoreError(f"{folder} is sealed; an iteration's facts are written once")
    is_new = not folder.is_dir()
    folder.mkdir(exist_ok=True)
    part = write(path, *arguments)
    if is_new:
        sync_folder(folder.parent)
    return part


def _write_derived(folder: Path, encoded: Encoded) -> Part:
    if (folder / DERIVED_FILE).exists():
        raise StoreError(f"{folder} has a {DERIVED_FILE}; an iteration is derived once")
    return encoded.write(folder)


def _write_rollout(
    path: Path,
    replica: int,
    samples: Samples,
    records: Sequence[RewardRecord],
    scorer_version: str,
) -> Part:
    columns, metadata = parts.rollout_part(samples, records, scorer_version)
    return _write_checked(path, "rollout", replica, columns, metadata)


def _write_drawn(path: Path, drawn: DrawnFacts) -> Part:
    try:
        DrawnFacts.of_line(drawn.line)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return write_lines(path, "drawn", 0, [drawn.line])


def _write_checked(
    path: Path, kind: str, index: int, columns: parts.Columns, metadata: Mapping[str, Any]
) -> Part:
    _check(path.name, kind, columns)
    return write_columns(path, kind, index, columns, metadata)


def _encode_checked(
    file: str, kind: str, index: int, columns: parts.Columns, metadata: Mapping[str, Any]
) -> Encoded:
    _check(file, kind, columns)
    return encode_columns(file, kind, index, columns, metadata)


def _check(file: str, kind: str, columns: parts.Columns) -> None:
    """What `load.py` would refuse is not written."""
    try:
        check_columns(kind, columns)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _by_name(answers: Sequence[Sequence[Part]]) -> list[Part]:
    return sorted((part for listed in answers for part in listed), key=lambda part: part.file)
