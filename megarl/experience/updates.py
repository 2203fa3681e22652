"""`updates.jsonl`: what each update learnt from and led to, one line after its commit.

    {"iteration", "experience_hash", "derived_hash", "from": version id, "to": version id,
     "kl_beta", "steps": [{"epoch", "minibatch", "stepped", "skipped_reason", "stopped", "loss",
                           "grad_norm", "lr", "tokens", "sequences"}],
     "critic": [steps]}

`steps` are the actor's, in their order; `critic` the critic's, all of them before the actor's.
Loss, tokens and sequences are those of all ranks. A number that was not finite is null: its step
was skipped, and `skipped_reason` says so. `stopped`: the step was not taken because the policy had
moved too far (`algorithm.target_kl`), and none follows it.

Lines without `epoch`, `stopped`, `critic` or `kl_beta` are of one epoch, without a stop, a critic
or a penalty that was told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megarl.contracts.lines import LinesError, read_json_lines

UPDATES_FILE = "updates.jsonl"


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One minibatch of one epoch: an optimizer step, or none and why."""

    minibatch: int
    stepped: bool
    skipped_reason: str | None
    loss: float | None
    """The minibatch's loss before its step; None where it was not finite."""
    grad_norm: float | None
    """Global L2 norm before clipping; 0 for an empty minibatch, None where it was not finite."""
    lr: float
    tokens: int
    """Action tokens with a weight: the denominator of a token mean."""
    sequences: int
    epoch: int = 0
    stopped: bool = False
    """It was not taken, and none came after it: the policy had moved too far."""


@dataclass(frozen=True, slots=True)
class Update:
    """One iteration's update of the actor and, where there is one, of the critic."""

    iteration: int
    experience_hash: str
    derived_hash: str
    """Of `derived.json`: the advantages and minibatches that were used."""
    from_version: str
    to_version: str
    steps: tuple[UpdateStep, ...]
    critic: tuple[UpdateStep, ...] = ()
    kl_beta: float = 0.0
    """Weight of the KL penalty that the update used."""

    def line(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "iteration": self.iteration,
            "experience_hash": self.experience_hash,
            "derived_hash": self.derived_hash,
            "from": self.from_version,
            "to": self.to_version,
            "kl_beta": self.kl_beta,
            "steps": [asdict(step) for step in self.steps],
            "critic": [asdict(step) for step in self.critic],
        }


def finite(value: float) -> float | None:
    """`value`, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def read_updates(run_folder: Path) -> tuple[list[Update], bool]:
    """The updates line by line, and whether a torn last line was left out.

    Raises `LinesError` naming the line for one that is no update.
    """
    path = run_folder / UPDATES_FILE
    lines, torn = read_json_lines(path)
    return [_update(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)], torn


def _update(where: str, line: Mapping[str, Any]) -> Update:
    try:
        return Update(
            iteration=line["iteration"],
            experience_hash=line["experience_hash"],
            derived_hash=line["derived_hash"],
            from_version=line["from"],
            to_version=line["to"],
            steps=tuple(map(_step, line["steps"])),
            critic=tuple(map(_step, line.get("critic", ()))),
            kl_beta=float(line.get("kl_beta", 0.0)),
        )
    except (KeyError, TypeError) as error:
        raise LinesError(f"{where}: not a line of an update: {error!r}") from error


def _step(told: Mapping[str, Any]) -> UpdateStep:
    wanted = {item.name: item.default is MISSING for item in fields(UpdateStep)}
    return UpdateStep(**{n: told[n] for n, needed in wanted.items() if needed or n in told})
