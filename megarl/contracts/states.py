"""The iteration's state machine: states, legal transitions and what completes each of them.

    ACTOR_COMMITTED(v) → EXPORTING(v) → ROLLOUT_LOADING(v) → ROLLOUT_READY(v) → GENERATING(v)
      → PREPARING(v) → EXPERIENCE_SEALED(v) → UPDATING_FROM(v) → ACTOR_COMMITTED(v+1)

Any state may go to FAILED. ACTOR_COMMITTED is in memory; a durable checkpoint is another thing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.contracts.version import PolicyVersion


class State(StrEnum):
    ACTOR_COMMITTED = "ACTOR_COMMITTED"
    EXPORTING = "EXPORTING"
    ROLLOUT_LOADING = "ROLLOUT_LOADING"
    ROLLOUT_READY = "ROLLOUT_READY"
    GENERATING = "GENERATING"
    PREPARING = "PREPARING"
    EXPERIENCE_SEALED = "EXPERIENCE_SEALED"
    UPDATING_FROM = "UPDATING_FROM"
    FAILED = "FAILED"


class IllegalTransition(RuntimeError):
    """A step the state machine does not know, or one without its evidence."""


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.ACTOR_COMMITTED: frozenset({State.EXPORTING, State.ACTOR_COMMITTED}),
        State.EXPORTING: frozenset({State.ROLLOUT_LOADING}),
        State.ROLLOUT_LOADING: frozenset({State.ROLLOUT_READY}),
        # Evaluation generates and stays ready; so READY may be voted again for the same version.
        State.ROLLOUT_READY: frozenset({State.GENERATING, State.ACTOR_COMMITTED}),
        State.GENERATING: frozenset({State.PREPARING}),
        State.PREPARING: frozenset({State.EXPERIENCE_SEALED}),
        State.EXPERIENCE_SEALED: frozenset({State.UPDATING_FROM}),
        State.UPDATING_FROM: frozenset({State.ACTOR_COMMITTED}),
        State.FAILED: frozenset(),
    }
)
"""From each state, the states that may follow it (FAILED may follow any)."""

EVIDENCE: Mapping[State, tuple[str, ...]] = MappingProxyType(
    {
        State.ACTOR_COMMITTED: ("weight_manifest_hash",),
        State.EXPORTING: (),
        State.ROLLOUT_LOADING: ("bytes_sent",),
        State.ROLLOUT_READY: ("weight_manifest_hash", "verified"),
        State.GENERATING: ("samples",),
        State.PREPARING: ("samples",),
        State.EXPERIENCE_SEALED: ("experience_hash", "samples"),
        State.UPDATING_FROM: ("experience_hash",),
        State.FAILED: ("reason",),
    }
)
"""The completion condition of entering each state, as the evidence that must come with it."""

VOTED = frozenset({State.ROLLOUT_READY, State.EXPERIENCE_SEALED, State.ACTOR_COMMITTED})
"""States that every rank must agree on (`world.vote`); the others are journal lines."""


class Journal:
    """Keeps the state of this rank and, on rank 0, writes each transition as one JSON line.

    The file is `journal.jsonl`: time, iteration, state, version id, optimizer step, evidence.
    A line is flushed to the operating system before the transition counts.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None on every rank but 0: the state is kept, nothing is written."""
        self.state: State | None = None
        self.iteration = -1
        self.version: PolicyVersion | None = None
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives with the run

    def enter(self, state: State, iteration: int, version: PolicyVersion, **evidence: Any) -> None:
        """Go to `state`.

        Raises `IllegalTransition` when `state` may not follow, when evidence is missing, or when
        the version changes anywhere but at ACTOR_COMMITTED.
        """
        if state is not State.FAILED:
            self._check(state, version, evidence)
        self.state, self.iteration, self.version = state, iteration, version
        if self._file is not None:
            line = {
                "time": round(time.time(), 3),
                "iteration": iteration,
                "state": str(state),
                "version": version.id,
                "optimizer_step": version.optimizer_step,
                "update_attempt": version.update_attempt,
                **evidence,
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _check(self, state: State, version: PolicyVersion, evidence: Mapping[str, Any]) -> None:
        missing = [key for key in EVIDENCE[state] if evidence.get(key) in (None, "")]
        if missing:
            raise IllegalTransition(f"{state} needs evidence {missing}")
        if self.state is None:
            if state is not State.ACTOR_COMMITTED:
                raise IllegalTransition(f"a run starts at ACTOR_COMMITTED, not at {state}")
            return
        if state not in TRANSITIONS[self.state]:
            legal = sorted(TRANSITIONS[self.state])
            raise IllegalTransition(f"{self.state} → {state} is not legal; legal: {legal}")
        if state is not State.ACTOR_COMMITTED and version != self.version:
            raise IllegalTransition(f"{state} names {version}, the run is at {self.version}")
        if (
            state is State.ACTOR_COMMITTED
            and self.version is not None
            and (version.optimizer_step, version.update_attempt)
            < (self.version.optimizer_step, self.version.update_attempt)
        ):
            raise IllegalTransition(f"{version} is older than {self.version}")

    def fail(self, reason: str) -> None:
        """FAILED, once, where the run has come to a version."""
        if self.version is not None and self.state is not State.FAILED:
            self.enter(State.FAILED, self.iteration, self.version, reason=reason)

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
