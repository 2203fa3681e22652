"""Which weights: manifests of logical tensors and the policy version that every record names.

A version is its content. Two versions with one `id` have the same weights, tokenizer and model
config; a step redone after a rollback keeps its number and raises `update_attempt`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property

from megarl.contracts.hashes import contract_hash, short_id


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical (HF-named) tensor of a manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype the digest was taken in, after any declared cast: the rollout's."""
    digest: int
    """Layout-independent sum over the raw bits, modulo 2^64 (`reshard/digest.py`)."""


@dataclass(frozen=True)
class WeightManifest:
    """The logical tensors of one model, sorted by name.

    Raises `ValueError` when a name appears twice: a digest must have one owner.
    """

    tensors: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda entry: entry.name))
        names = [entry.name for entry in ordered]
        twice = (
            {name for name in names if names.count(name) > 1}
            if len(set(names)) < len(names)
            else set()
        )
        if twice:
            raise ValueError(f"manifest names tensors twice: {sorted(twice)}")
        object.__setattr__(self, "tensors", ordered)

    @cached_property
    def hash(self) -> str:
        return contract_hash([asdict(entry) for entry in self.tensors])

    def differences(self, other: WeightManifest) -> list[str]:
        """One line per tensor that is missing, unexpected or different in `other`."""
        mine = {entry.name: entry for entry in self.tensors}
        theirs = {entry.name: entry for entry in other.tensors}
        lines = [f"{name}: missing" for name in mine.keys() - theirs.keys()]
        lines += [f"{name}: unexpected" for name in theirs.keys() - mine.keys()]
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            if a != b:
                lines.append(
                    f"{name}: {a.dtype}{list(a.shape)} digest {a.digest:#x}"
                    f" against {b.dtype}{list(b.shape)} digest {b.digest:#x}"
                )
        return sorted(lines)


@dataclass(frozen=True)
class PolicyVersion:
    """Identity of the weights that produced something. `id` is what records carry."""

    run_id: str
    optimizer_step: int
    update_attempt: int
    weight_manifest_hash: str
    tokenizer_hash: str
    model_config_hash: str
    role: str = field(default="actor")

    def __post_init__(self) -> None:
        if self.optimizer_step < 0 or self.update_attempt < 0:
            raise ValueError(f"version with negative step or attempt: {self}")
        for name in ("run_id", "weight_manifest_hash", "tokenizer_hash", "model_config_hash"):
            if not getattr(self, name):
                raise ValueError(f"version without {name}")

    @cached_property
    def id(self) -> str:
        return short_id(contract_hash(asdict(self)))

    def __str__(self) -> str:
        return f"{self.role}@{self.optimizer_step}.{self.update_attempt} ({self.id})"
