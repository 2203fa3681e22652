"""Writes `experience/iter_N/`: parts by the ranks that have them, the manifest last, by rank 0.

    rollout()   while log-probs are computed, replica leaders write what was generated and scored
    seal()      every owner's log-probs, then `manifest.json`: now it is EXPERIENCE_SEALED
    derive()    selection and advantages, then `derived.json`

A folder without `manifest.json` was never sealed. Nothing sealed is written again; retention
removes whole iterations.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.contracts.hashes import bytes_hash, canonical_json, contract_hash
from megarl.contracts.records import Derived, Prompt, RewardRecord
from megarl.contracts.samples import Samples, SamplingContract
from megarl.data.prepare import Prepared
from megarl.experience import parts
from megarl.experience.columns import (
    Part,
    SealError,
    sync_folder,
    write_columns,
    write_lines,
    write_whole,
)
from megarl.rollout.groups import Selection
from megarl.world import World

FOLDER = "experience"
MANIFEST_FILE = "manifest.json"
DERIVED_FILE = "derived.json"
FORMAT = 1


def iteration_folder(run_folder: Path, iteration: int) -> Path:
    return run_folder / FOLDER / f"iter_{iteration:06d}"


@dataclass(frozen=True)
class SealHeader:
    """What holds for all rows of one iteration; the same on every rank."""

    run_id: str
    iteration: int
    producers: dict[str, str]
    """Role (`rollout`, `old`, `ref`, `critic`) → id of the version that made its column."""
    tokenizer_hash: str
    recipe_hash: str
    sampling: SamplingContract
    scorer_version: str
    samples: int
    """Rows over all replicas."""


class ExperienceStore:
    """One run's sealed experience, written by every rank in step."""

    def __init__(self, run_folder: Path, world: World, keep: int | None, keep_every: int) -> None:
        """`keep` newest iterations stay (None: all), and every `keep_every`-th (0: no more)."""
        self._run_folder, self._world = run_folder, world
        self._keep, self._keep_every = keep, keep_every
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="experience")
        self._pending: list[Future[Part]] = []
        self._previous: str | None = None

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
        Raises `SealError` where the iteration was sealed before.
        """
        folder = iteration_folder(self._run_folder, iteration)
        if (folder / MANIFEST_FILE).exists():
            raise SealError(f"{folder} is sealed already; an iteration's facts are written once")
        world = self._world
        folder.mkdir(parents=True, exist_ok=True)
        if world.leads_replica:
            path = folder / f"rollout_{world.replica}.safetensors"
            job = (path, world.replica, samples, records, scorer_version)
            self._pending.append(self._writer.submit(_write_rollout, *job))
        if world.is_main:
            lines = parts.prompt_lines(prompts)
            path = folder / "prompts.jsonl"
            self._pending.append(self._writer.submit(write_lines, path, "prompts", 0, lines))

    def seal(self, header: SealHeader, prepared: Prepared) -> str:
        """Write the trainer's facts and the manifest; returns the experience's hash. Collective.

        The hash is over every part's content, without what clocks said, and the header; the same
        on every rank.
        """
        world = self._world
        folder = iteration_folder(self._run_folder, header.iteration)
        if world.leads_owners:
            columns = parts.scored_part(
                prepared.samples, prepared.old_log_probs, prepared.ref_log_probs
            )
            path = folder / f"scored_{world.dp_index}.safetensors"
            job = (path, "scored", world.dp_index, columns, {"producers": header.producers})
            self._pending.append(self._writer.submit(write_columns, *job))
        listed = self._all_parts()
        facts = _facts(header, listed)
        experience_hash = contract_hash(facts)
        manifest = facts | {
            "format": FORMAT,
            "experience_hash": experience_hash,
            "previous": self._previous,
            "sealed_at": time.time() if world.is_main else 0.0,
            "parts": [asdict(part) for part in listed],
        }
        if world.is_main:
            self._previous = _write_json(folder / MANIFEST_FILE, manifest)
            sync_folder(folder.parent)
        return experience_hash

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
        """Write what was derived of the sealed facts, under the recipe's hash. Collective.

        Returns the hash of `derived.json`, the same on every rank.

        `minibatch` int [N] is each row's minibatch, −1 where it does not train; `samples` are this
        rank's rows, `derived` what it trains on besides facts.
        """
        world, folder = self._world, iteration_folder(self._run_folder, iteration)
        made_of = {"experience_hash": experience_hash, "recipe_hash": recipe_hash}
        if world.leads_owners:
            path = folder / f"derived_{world.dp_index}.safetensors"
            columns = parts.derived_part(samples, derived)
            job = (path, "derived", world.dp_index, columns, made_of)
            self._pending.append(self._writer.submit(write_columns, *job))
        if world.is_main:
            columns = parts.selection_part(selection, minibatch)
            job = (folder / "selection.safetensors", "selection", 0, columns, made_of)
            self._pending.append(self._writer.submit(write_columns, *job))
        listed = self._all_parts()
        told = {"format": FORMAT} | made_of | {"parts": [asdict(part) for part in listed]}
        if world.is_main:
            _write_json(folder / DERIVED_FILE, told)
            self._forget_old(iteration)
        return bytes_hash([_json_bytes(told)])

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _all_parts(self) -> list[Part]:
        """Every rank's parts since the last call, once they are on the disk; by name."""
        pending, self._pending = self._pending, []
        mine = [job.result() for job in pending]
        everyone = [part for listed in self._world.gather(mine) for part in listed]
        return sorted(everyone, key=lambda part: part.file)

    def _forget_old(self, newest: int) -> None:
        """Retention: whole iterations go, the manifest first, so that none is half there."""
        if self._keep is None:
            return
        for folder in sorted((self._run_folder / FOLDER).glob("iter_*")):
            number = int(folder.name.removeprefix("iter_"))
            if not is_kept(number, newest, self._keep, self._keep_every):
                (folder / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(folder)


def _write_rollout(
    path: Path,
    replica: int,
    samples: Samples,
    records: Sequence[RewardRecord],
    scorer_version: str,
) -> Part:
    columns, metadata = parts.rollout_part(samples, records, scorer_version)
    return write_columns(path, "rollout", replica, columns, metadata)


def is_kept(iteration: int, newest: int, keep: int | None, keep_every: int) -> bool:
    """Whether retention keeps an iteration once `newest` is there."""
    if keep is None or iteration > newest - keep:
        return True
    return keep_every > 0 and iteration % keep_every == 0


def _facts(header: SealHeader, listed: Sequence[Part]) -> dict[str, Any]:
    """What the experience's hash is over, and the first keys of its manifest."""
    return asdict(header) | {
        "sampling": asdict(header.sampling),
        "sampling_hash": header.sampling.hash,
        "contents": {part.file: part.content for part in listed},
    }


def experience_hash_of(manifest: Mapping[str, Any]) -> str:
    """The hash that a manifest's own words lead to."""
    names = [*SealHeader.__dataclass_fields__, "sampling_hash", "contents"]
    return contract_hash({name: manifest[name] for name in names})


def _json_bytes(value: Any) -> bytes:
    return (canonical_json(value) + "\n").encode()


def _write_json(path: Path, value: Any) -> str:
    """Returns the hash of the file's bytes."""
    body = _json_bytes(value)
    write_whole(path, body)
    sync_folder(path.parent)
    return bytes_hash([body])
