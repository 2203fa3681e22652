"""Reads a sealed iteration back: every hash checked, every part joined by id into one table.

What is read here may be trained on, scored again or explained, so nothing is taken on trust:
`SealError` names the file and what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megarl.contracts.hashes import file_hash
from megarl.contracts.records import Identities, RewardRecord, Scores
from megarl.contracts.samples import Samples, SamplingContract
from megarl.data.table import name_pairs, pair_keys
from megarl.experience import parts
from megarl.experience.columns import Part, SealError, read_columns, read_lines
from megarl.experience.store import (
    DERIVED_FILE,
    FOLDER,
    FORMAT,
    MANIFEST_FILE,
    SealHeader,
    experience_hash_of,
    iteration_folder,
)


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of a sealed iteration."""

    header: SealHeader
    experience_hash: str
    previous: str | None
    """Hash of the manifest before it in the run, None for the first."""
    sealed_at: float
    parts: tuple[Part, ...]
    hash: str
    """blake3 of this manifest's own file: what the next one calls `previous`."""


@dataclass(frozen=True)
class SealedDerived:
    """What was derived when the run trained. N rows, R response tokens, in canonical order."""

    recipe_hash: str
    verdict: np.ndarray  # int8 [N], an index into `VERDICTS`
    minibatch: np.ndarray  # int32 [N], −1 where the row did not train
    columns: dict[str, np.ndarray]
    """`advantages`, …: float32 [R], NaN on rows that no owner had."""


@dataclass(frozen=True)
class SealedIteration:
    """All ranks' facts of one iteration. N rows in canonical order, R response tokens in all."""

    folder: Path
    manifest: Manifest
    prompts: tuple[dict[str, Any], ...]
    """By draw index: prompt_id, source, text, answer, metadata."""
    samples: Samples
    scores: Scores
    records: tuple[RewardRecord, ...]
    """The raw reward records, one a row."""
    old_log_probs: np.ndarray  # float32 [R], NaN on rows that did not train
    ref_log_probs: np.ndarray | None  # float32 [R], likewise
    derived: SealedDerived | None
    """None where the run ended between sealing and deriving."""

    @cached_property
    def identities(self) -> Identities:
        names = tuple(prompt["prompt_id"] for prompt in self.prompts)
        return Identities(self.manifest.header.run_id, self.manifest.header.iteration, names)

    def sample_id(self, row: int) -> str:
        return self.identities.sample_id(
            int(self.samples.draw_index[row]), int(self.samples.candidate[row])
        )


def sealed_iterations(run_folder: Path) -> Iterator[int]:
    """Numbers of the iterations that were sealed, rising."""
    for path in sorted((run_folder / FOLDER).glob(f"iter_*/{MANIFEST_FILE}")):
        yield int(path.parent.name.removeprefix("iter_"))


def read_manifest(folder: Path) -> Manifest:
    """Raises `SealError`: no manifest, another format, or words that are not those sealed."""
    path = folder / MANIFEST_FILE
    told = _read_json(path)
    try:
        header = {item.name: told[item.name] for item in fields(SealHeader)}
        sampling = header["sampling"] | {
            "stop_token_ids": tuple(told["sampling"]["stop_token_ids"])
        }
        manifest = Manifest(
            header=SealHeader(**header | {"sampling": SamplingContract(**sampling)}),
            experience_hash=told["experience_hash"],
            previous=told["previous"],
            sealed_at=told["sealed_at"],
            parts=tuple(Part(**part) for part in told["parts"]),
            hash=file_hash(path),
        )
        listed = {part.file: part.content for part in manifest.parts}
        if told["contents"] != listed or experience_hash_of(told) != manifest.experience_hash:
            raise SealError(f"{path}: its experience_hash is not that of what it lists")
        if manifest.header.sampling.hash != told["sampling_hash"]:
            raise SealError(f"{path}: its sampling_hash is not that of its sampling contract")
    except (KeyError, TypeError) as error:
        raise SealError(f"{path}: not a manifest of sealed experience: {error!r}") from error
    return manifest


def load_iteration(run_folder: Path, iteration: int) -> SealedIteration:
    """Everything that iteration sealed, and what was derived of it then.

    Raises `SealError` naming file and field: a part that is missing, torn, changed or another's;
    rows doubled, or owned by nobody; columns that are no samples or no rewards.
    """
    folder = iteration_folder(run_folder, iteration)
    manifest = read_manifest(folder)
    if manifest.header.iteration != iteration:
        raise SealError(f"{folder}: holds iteration {manifest.header.iteration}")
    rollouts = [read_columns(folder, part) for part in _kind(manifest.parts, "rollout")]
    prompts = [read_lines(folder, part) for part in _kind(manifest.parts, "prompts")]
    if len(prompts) != 1:
        raise SealError(f"{folder}: {len(prompts)} lists of prompts, one is sealed")
    for _, metadata in rollouts:
        _check_metadata(folder, manifest.header, metadata)
    try:
        samples, scores, records = _joined(rollouts)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SealError(f"{folder}: rollout parts do not join: {error}") from error
    if len(samples) != manifest.header.samples:
        raise SealError(f"{folder}: {len(samples)} samples, {manifest.header.samples} were sealed")
    scored = [read_columns(folder, part)[0] for part in _kind(manifest.parts, "scored")]
    old = _spread(folder, samples, scored, "old_log_probs")
    with_ref = bool(scored) and all("ref_log_probs" in columns for columns in scored)
    return SealedIteration(
        folder=folder,
        manifest=manifest,
        prompts=tuple(prompts[0]),
        samples=samples,
        scores=scores,
        records=tuple(records),
        old_log_probs=old,
        ref_log_probs=_spread(folder, samples, scored, "ref_log_probs") if with_ref else None,
        derived=_load_derived(folder, manifest, samples),
    )


def _joined(
    rollouts: list[tuple[dict[str, np.ndarray], dict[str, Any]]],
) -> tuple[Samples, Scores, list[RewardRecord]]:
    samples = Samples.concat([parts.samples_of(c, m["version_id"]) for c, m in rollouts])
    scores = Scores.concat([parts.scores_of(c, m) for c, m in rollouts])
    records = [record for c, m in rollouts for record in parts.records_of(c, m)]
    order = np.lexsort((samples.candidate, samples.draw_index))
    return samples.select(order), scores.select(order), [records[row] for row in order.tolist()]


def _check_metadata(folder: Path, header: SealHeader, metadata: Mapping[str, Any]) -> None:
    for field, told in (
        ("version_id", header.producers.get("rollout")),
        ("scorer_version", header.scorer_version),
    ):
        if metadata[field] != told:
            where = f"{folder}/rollout_{metadata['index']}.safetensors"
            raise SealError(f"{where}: {field} {metadata[field]}, the manifest says {told}")


def _spread(
    folder: Path, samples: Samples, owned: list[dict[str, np.ndarray]], name: str
) -> np.ndarray:
    """One float32 [R] column over all rows from the owners' parts, NaN where nobody owns a row."""
    whole = np.full(len(samples.response_ids), np.nan, dtype=np.float32)
    keys = pair_keys(samples.draw_index, samples.candidate)
    taken = np.zeros(len(samples), dtype=bool)
    for columns in owned:
        mine = pair_keys(columns["draw_index"], columns["candidate"])
        rows = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
        wrong = (keys[rows] != mine) | taken[rows]
        lengths = np.diff(columns["response_offsets"])
        if wrong.any() or len(np.unique(mine)) < len(mine):
            raise SealError(f"{folder}: {name} of samples unknown or twice: {name_pairs(mine)}")
        if not np.array_equal(lengths, samples.response_lengths[rows]):
            raise SealError(f"{folder}: {name} of other lengths than the responses")
        taken[rows] = True
        starts = np.repeat(
            samples.response_offsets[rows] - columns["response_offsets"][:-1], lengths
        )
        whole[starts + np.arange(len(starts))] = columns[name]
    return whole


def _load_derived(folder: Path, manifest: Manifest, samples: Samples) -> SealedDerived | None:
    if not (folder / DERIVED_FILE).exists():
        return None
    told = _read_json(folder / DERIVED_FILE)
    try:
        listed = [Part(**part) for part in told["parts"]]
        if told["experience_hash"] != manifest.experience_hash:
            raise SealError(f"{folder / DERIVED_FILE}: derived of {told['experience_hash']}")
        chosen = [read_columns(folder, part)[0] for part in _kind(listed, "selection")]
        owned = [read_columns(folder, part)[0] for part in _kind(listed, "derived")]
        names = sorted({name for columns in owned for name in columns} - _ROWS)
        verdict = chosen[0]["verdict"]
        pairs = (chosen[0]["draw_index"], chosen[0]["candidate"])
        recipe_hash, minibatch = told["recipe_hash"], chosen[0]["minibatch"]
    except (KeyError, TypeError, IndexError) as error:
        raise SealError(f"{folder / DERIVED_FILE}: not derived experience: {error!r}") from error
    if not np.array_equal(pair_keys(*pairs), pair_keys(samples.draw_index, samples.candidate)):
        raise SealError(f"{folder}: the selection is of other samples")
    columns = {name: _spread(folder, samples, owned, name) for name in names}
    return SealedDerived(recipe_hash, verdict, minibatch, columns)


_ROWS = {"draw_index", "candidate", "response_offsets"}


def _kind(listed: tuple[Part, ...] | list[Part], kind: str) -> list[Part]:
    return [part for part in listed if part.kind == kind]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SealError(f"{path}: {error.strerror}: the iteration was never sealed") from error
    except ValueError as error:
        raise SealError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise SealError(f"{path}: not format {FORMAT} of sealed experience")
    return value
