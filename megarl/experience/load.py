"""Reads a sealed iteration back: every hash checked, every part joined by id into one table.

What is read here may be trained on, scored again or explained, so nothing is taken on trust:
`SealError` names the file and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megarl.contracts.records import Identities, RewardRecord, Scores
from megarl.contracts.samples import Samples
from megarl.data.table import name_pairs, pair_keys
from megarl.experience import parts
from megarl.experience.columns import Part, SealError, read_columns, read_lines
from megarl.experience.drawn import DrawnFacts
from megarl.experience.manifest import (
    DERIVED_FILE,
    MANIFEST_FILE,
    Manifest,
    fault,
    iteration_folder,
    parts_of,
    read_json,
    read_manifest,
    sealed_iterations,
)
from megarl.experience.part_columns import check_columns

__all__ = [
    "Manifest",
    "SealError",
    "SealedDerived",
    "SealedIteration",
    "load_iteration",
    "read_manifest",
    "sealed_iterations",
]


@dataclass(frozen=True)
class SealedDerived:
    """What was derived when the run trained. N rows, R response tokens, in canonical order."""

    recipe_hash: str
    verdict: np.ndarray  # int8 [N], an index into `VERDICTS`
    minibatch: np.ndarray  # int32 [N], −1 where the row did not train
    columns: dict[str, np.ndarray]
    """`advantages`, …: float32 [R], NaN on rows that no owner had."""
    kl_beta: float | None = None
    """The weight of the KL penalty in this iteration; None where it is not told: the recipe's."""


@dataclass(frozen=True)
class SealedIteration:
    """All ranks' facts of one iteration. N rows in canonical order, R response tokens in all."""

    folder: Path
    manifest: Manifest
    prompts: tuple[dict[str, Any], ...]
    """By draw index: prompt_id, source, text, answer, metadata."""
    drawn: DrawnFacts
    samples: Samples
    scores: Scores
    records: tuple[RewardRecord, ...]
    """The raw reward records, one a row."""
    replica: np.ndarray  # int32 [N], the rollout replica that made the row
    owner: np.ndarray  # int32 [N], the data-parallel part that scored the row, −1 for none
    old_log_probs: np.ndarray  # float32 [R], NaN on rows without an owner
    ref_log_probs: np.ndarray | None  # float32 [R], likewise
    values: np.ndarray | None  # float32 [R], the critic's, likewise
    last_values: np.ndarray | None  # float32 [N], at each last token's own position, likewise
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


def load_iteration(run_folder: Path, iteration: int) -> SealedIteration:
    """Everything that iteration sealed, and what was derived of it then.

    Raises `SealError` naming file and field: a part that is missing, torn, changed or another's;
    rows doubled, or trained and owned by nobody; columns that are no samples or no rewards.
    """
    folder = iteration_folder(run_folder, iteration)
    manifest = read_manifest(folder)
    header = manifest.header
    if header.iteration != iteration:
        raise SealError(f"{folder / MANIFEST_FILE}: iteration is {header.iteration}")
    prompts = _read_prompts(folder, manifest.parts)
    told = {"version_id": header.producers.get("rollout"), "scorer_version": header.scorer_version}
    rollouts = _read_kind(folder, manifest.parts, "rollout", told)
    samples, scores, records, replica = _joined(rollouts)
    if len(samples) != header.samples:
        raise SealError(f"{folder}: {len(samples)} samples, {header.samples} were sealed")
    if (samples.draw_index >= len(prompts)).any():
        raise SealError(f"{folder}: samples of draw_index beyond the {len(prompts)} prompts")
    drawn = _read_drawn(folder, manifest, len(prompts))
    scored = _read_kind(folder, manifest.parts, "scored", {"producers": header.producers})
    owner = _owners(samples, scored)
    old = _spread(samples, scored, "old_log_probs")
    if ("ref" in header.producers) != any("ref_log_probs" in part.columns for part in scored):
        raise SealError(f"{folder}: ref_log_probs and their producer are not both there")
    ref = _spread(samples, scored, "ref_log_probs") if "ref" in header.producers else None
    values = last_values = None
    if ("critic" in header.producers) != any("values" in part.columns for part in scored):
        raise SealError(f"{folder}: values and their producer are not both there")
    if "critic" in header.producers:
        values = _spread(samples, scored, "values")
        last_values = _spread_rows(samples, scored, "last_values")
    return SealedIteration(
        folder=folder,
        manifest=manifest,
        prompts=prompts,
        drawn=drawn,
        samples=samples,
        scores=scores,
        records=records,
        replica=replica,
        owner=owner,
        old_log_probs=old,
        ref_log_probs=ref,
        values=values,
        last_values=last_values,
        derived=_load_derived(folder, manifest, samples, owner),
    )


@dataclass(frozen=True)
class _Read:
    """One part of columns that `check_columns` let pass."""

    path: Path
    index: int
    columns: dict[str, np.ndarray]
    metadata: dict[str, Any]

    @cached_property
    def keys(self) -> np.ndarray:
        return pair_keys(self.columns["draw_index"], self.columns["candidate"])


def _read_kind(
    folder: Path, listed: Sequence[Part], kind: str, expected: dict[str, Any]
) -> list[_Read]:
    """All parts of a kind, by index; their metadata must say what is `expected`."""
    found = []
    for part in sorted((p for p in listed if p.kind == kind), key=lambda part: part.index):
        columns, metadata = read_columns(folder, part)
        path = folder / part.file
        for field, value in expected.items():
            if metadata.get(field) != value:
                raise SealError(
                    f"{path}: {field} {metadata.get(field)}, the iteration's is {value}"
                )
        try:
            check_columns(kind, columns)
        except ValueError as error:
            raise SealError(f"{path}: {error}") from error
        found.append(_Read(path, part.index, columns, metadata))
    if [read.index for read in found] != list(range(len(found))) or not found:
        raise SealError(
            f"{folder}: the {kind} parts listed are {[read.index for read in found]}, not 0 …"
        )
    return found


def _read_prompts(folder: Path, listed: Sequence[Part]) -> tuple[dict[str, Any], ...]:
    path, lines = _read_list(folder, listed, "prompts")
    for number, line in enumerate(lines):
        if not isinstance(line, dict) or parts.PROMPT_NEEDED - line.keys():
            raise SealError(f"{path}: line {number + 1} is no prompt")
    names = [line["prompt_id"] for line in lines]
    if len(set(names)) != len(names):
        raise SealError(f"{path}: a prompt_id is drawn twice")
    return tuple(lines)


def _read_drawn(folder: Path, manifest: Manifest, prompts: int) -> DrawnFacts:
    path, lines = _read_list(folder, manifest.parts, "drawn")
    try:
        (line,) = lines
        drawn = DrawnFacts.of_line(line)
    except ValueError as error:
        raise SealError(f"{path}: not how samples were drawn: {error}") from error
    missing = prompts * manifest.header.sampling.n - manifest.header.samples
    if sum(drawn.lost.values()) != missing:
        raise SealError(
            f"{path}: lost are {dict(drawn.lost)}, but {missing} responses of {prompts} groups are "
            "missing"
        )
    return drawn


def _read_list(folder: Path, listed: Sequence[Part], kind: str) -> tuple[Path, list[Any]]:
    """(file, its JSON values) of the one part of a kind that is lines."""
    found = [part for part in listed if part.kind == kind]
    if len(found) != 1:
        raise SealError(f"{folder}: {len(found)} {kind} parts, one is sealed")
    return folder / found[0].file, read_lines(folder, found[0])


def _joined(
    rollouts: Sequence[_Read],
) -> tuple[Samples, Scores, tuple[RewardRecord, ...], np.ndarray]:
    """All replicas' rows in canonical order, and int32 [N], whose each is."""
    every = {}
    for read in rollouts:
        doubled = np.array([key for key in read.keys.tolist() if key in every], dtype=np.int64)
        if len(doubled):
            other = every[int(doubled[0])]
            raise SealError(f"{read.path}: samples {name_pairs(doubled)} are in {other} too")
        every |= dict.fromkeys(read.keys.tolist(), read.path.name)
    order = np.argsort(np.concatenate([read.keys for read in rollouts]))
    samples, scores, records = [], [], []
    for read in rollouts:
        try:
            samples.append(parts.samples_of(read.columns, read.metadata["version_id"]))
            scores.append(parts.scores_of(read.columns, read.metadata))
            records += parts.records_of(read.columns, read.metadata)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise SealError(f"{read.path}: no samples with rewards: {fault(error)}") from error
    return (
        Samples.concat(samples).select(order),
        Scores.concat(scores).select(order),
        tuple(records[row] for row in order.tolist()),
        np.repeat(
            np.array([read.index for read in rollouts], dtype=np.int32),
            [len(read.keys) for read in rollouts],
        )[order],
    )


def _owners(samples: Samples, owned: Sequence[_Read]) -> np.ndarray:
    """int32 [N], which part has each row, −1 for none."""
    owner = np.full(len(samples), -1, dtype=np.int32)
    keys = pair_keys(samples.draw_index, samples.candidate)
    for read in owned:
        unknown = np.setdiff1d(read.keys, keys)
        if len(unknown):
            raise SealError(f"{read.path}: samples {name_pairs(unknown)} that nobody generated")
        rows = np.searchsorted(keys, read.keys)
        doubled = read.keys[owner[rows] >= 0]
        if len(doubled):
            raise SealError(f"{read.path}: samples {name_pairs(doubled)} have another owner too")
        lengths = np.diff(read.columns["response_offsets"])
        other = read.keys[lengths != samples.response_lengths[rows]]
        if len(other):
            raise SealError(
                f"{read.path}: response_offsets of samples {name_pairs(other)} are not those of "
                "their responses"
            )
        owner[rows] = read.index
    return owner


def _spread(samples: Samples, owned: Sequence[_Read], name: str) -> np.ndarray:
    """One float32 [R] column over all rows from the owners' parts, NaN where nobody owns a row.
    The parts have passed `_owners`."""
    whole = np.full(len(samples.response_ids), np.nan, dtype=np.float32)
    keys = pair_keys(samples.draw_index, samples.candidate)
    for read in owned:
        if name not in read.columns:
            raise SealError(f"{read.path}: {name} is missing, other owners have it")
        offsets = read.columns["response_offsets"]
        shifts = samples.response_offsets[np.searchsorted(keys, read.keys)] - offsets[:-1]
        whole[np.repeat(shifts, np.diff(offsets)) + np.arange(offsets[-1])] = read.columns[name]
    return whole


def _spread_rows(samples: Samples, owned: Sequence[_Read], name: str) -> np.ndarray:
    """As `_spread`, of a column with one value a row: float32 [N]."""
    whole = np.full(len(samples), np.nan, dtype=np.float32)
    keys = pair_keys(samples.draw_index, samples.candidate)
    for read in owned:
        if name not in read.columns:
            raise SealError(f"{read.path}: {name} is missing, other owners have it")
        whole[np.searchsorted(keys, read.keys)] = read.columns[name]
    return whole


def _load_derived(
    folder: Path, manifest: Manifest, samples: Samples, owner: np.ndarray
) -> SealedDerived | None:
    path = folder / DERIVED_FILE
    if not path.exists():
        return None
    told, _ = read_json(path)
    try:
        listed = parts_of(told)
        made_of = {name: told[name] for name in ("experience_hash", "recipe_hash")}
        kl_beta = None if "kl_beta" not in told else float(told["kl_beta"])
    except (KeyError, TypeError, ValueError) as error:
        raise SealError(f"{path}: not derived experience: {fault(error)}") from error
    if kl_beta is not None:
        made_of["kl_beta"] = kl_beta
    if made_of["experience_hash"] != manifest.experience_hash:
        raise SealError(f"{path}: experience_hash {made_of['experience_hash']} is another's")
    chosen = _read_kind(folder, listed, "selection", made_of)[0]
    owned = _read_kind(folder, listed, "derived", made_of)
    if not np.array_equal(chosen.keys, pair_keys(samples.draw_index, samples.candidate)):
        raise SealError(f"{chosen.path}: draw_index, candidate are of other samples")
    if not np.array_equal(_owners(samples, owned), owner):
        raise SealError(f"{folder}: derived parts have other rows than the scored ones")
    unowned = chosen.keys[(chosen.columns["minibatch"] >= 0) & (owner < 0)]
    if len(unowned):
        raise SealError(f"{chosen.path}: samples {name_pairs(unowned)} trained and have no owner")
    names = [n for n in parts.DERIVED_COLUMNS if any(n in read.columns for read in owned)]
    return SealedDerived(
        recipe_hash=made_of["recipe_hash"],
        verdict=chosen.columns["verdict"],
        minibatch=chosen.columns["minibatch"],
        columns={name: _spread(samples, owned, name) for name in names},
        kl_beta=kl_beta,
    )
