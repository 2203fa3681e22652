"""`position.json`: the training position, all of it that is no tensor. Plain Python.

A checkpoint is a position and not a weights file: besides the tensors it says which iteration comes
next, under which version and contracts, where the prompt cursor and every record of the run stand,
and what is left over from the iterations before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megarl.checkpoint.commit import POSITION_FILE, CheckpointError, Commit
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.experience.columns import write_whole
from megarl.experience.versions import manifest_of, tensor_lines

FORMAT = 1
ADAM = "adam_steps"
"""The optimizer's own count, beside the trainer's."""
NONE = "none"
"""Told of a contract that there is not."""

NO_LEFTOVERS = "none: informative groups beyond those asked for are dropped and counted as surplus"
"""What dynamic sampling carries over to the next iteration."""
NO_UNCONSUMED = "none: every experience sealed before this position has been trained on"
"""Experience that is sealed later is what `resume.use` is about."""


@dataclass(frozen=True)
class RolePosition:
    """A megatron role and what its weights are."""

    version: PolicyVersion
    manifest: WeightManifest
    """What its weights digest to in the rollout's dtype, by logical tensor."""

    def told(self) -> dict[str, Any]:
        return {
            "version": asdict(self.version),
            "id": self.version.id,
            "weight_manifest_hash": self.manifest.hash,
            "tensors": tensor_lines(self.manifest),
        }

    @staticmethod
    def of(told: Mapping[str, Any]) -> RolePosition:
        version = PolicyVersion(**told["version"])
        if version.id != told["id"]:
            raise ValueError(f"version {told['id']}: its fields hash to {version.id}")
        return RolePosition(version, manifest_of(told))


@dataclass(frozen=True)
class LearnerPosition:
    """Where the training of one role stands."""

    trainer: dict[str, int]
    """Steps taken, refused and empty, refused in a row, and Adam's own count."""
    tensor_digests: dict[str, str]
    """Of every logical tensor of its weights in its own dtype and of its optimizer's state, as
    `weights/NAME`, `exp_avg/NAME`, …, in hex."""


@dataclass(frozen=True)
class Position:
    """Where a run stands between two iterations."""

    run_id: str
    iteration: int
    """Iterations finished, and so the number of the next one."""
    actor: RolePosition
    reference: RolePosition | None
    reference_refreshed_at: int
    """The iteration whose weights the reference has; 0 for those of the folder that the recipe
    declares."""
    attempt: int
    """The run's `update_attempt`."""
    trainer: dict[str, int]
    """The actor's, as `LearnerPosition.trainer`."""
    tensor_digests: dict[str, str]
    """The actor's, as `LearnerPosition.tensor_digests`."""
    cursor: dict[str, Any]
    """What the prompt cursor has consumed, and of which data (`PromptCursor.state`)."""
    quarantine: dict[str, Any]
    best: dict[str, Any] | None
    """The best held-out accuracy that was exported."""
    contracts: dict[str, str]
    """tokenizer (with chat template), model, critic, data, eval_data, sampling, scorer, algorithm
    and curriculum (functions of the recipe's own) → hash."""
    recipe: dict[str, Any]
    recipe_hash: str
    layout: dict[str, Any]
    """`Mesh.described`."""
    records: dict[str, dict[str, Any]]
    """Line file → bytes and blake3 of what it held."""
    eval_files: list[str]
    exports: list[str]
    seconds: float
    """That the run has taken, over all its starts."""
    packages: dict[str, str]
    model: dict[str, Any] = field(default_factory=dict)
    """The numbers of its config.json that megarl reads (`model_fit.numbers_of`)."""
    critic: RolePosition | None = None
    """None where the run has none, as are the three below then empty."""
    critic_trainer: dict[str, int] = field(default_factory=dict)
    """As `trainer`, of the critic."""
    critic_tensor_digests: dict[str, str] = field(default_factory=dict)
    """As `tensor_digests`, of the critic."""
    critic_model: dict[str, Any] = field(default_factory=dict)
    """As `model`, of the critic."""
    kl: dict[str, Any] = field(default_factory=dict)
    """What β of the KL penalty goes on from (`KlController.state`); empty: from the recipe's."""
    curriculum: dict[str, Any] = field(default_factory=dict)
    """How each prompt that was drawn went (`PromptHistory.state`); empty: without a curriculum."""
    dynamic_sampling: str = field(default=NO_LEFTOVERS)
    unconsumed_experience: str = field(default=NO_UNCONSUMED)

    def write(self, folder: Path) -> None:
        """Raises `OSError`."""
        told = {item.name: getattr(self, item.name) for item in fields(self)}
        told |= {
            "format": FORMAT,
            "actor": self.actor.told(),
            "reference": None if self.reference is None else self.reference.told(),
            "critic": None if self.critic is None else self.critic.told(),
        }
        text = json.dumps(told, indent=1, allow_nan=False) + "\n"
        write_whole(folder / POSITION_FILE, text.encode())


def read_position(commit: Commit) -> Position:
    """Positions that were written without a critic's keys are those of a run without one.

    Raises `CheckpointError` naming the file and what is wrong in it.
    """
    path = commit.folder / POSITION_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("format") != FORMAT:
            raise CheckpointError(f"{path}: another format than {FORMAT}")
        reference, critic = told.pop("reference"), told.pop("critic", None)
        position = Position(
            actor=RolePosition.of(told.pop("actor")),
            reference=None if reference is None else RolePosition.of(reference),
            critic=None if critic is None else RolePosition.of(critic),
            **told,
        )
        for name in ("critic_trainer", "critic_tensor_digests"):
            if (position.critic is None) == bool(getattr(position, name)):
                raise ValueError(f"critic and {name} do not belong together")
        return position
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a position: {type(error).__name__}: {error}") from error


def contract_differences(
    stored: Mapping[str, str], mine: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Contract → (the checkpoint's hash, this start's), where they differ."""
    return {
        name: (stored.get(name, NONE), mine.get(name, NONE))
        for name in sorted(stored.keys() | mine.keys())
        if stored.get(name) != mine.get(name)
    }
