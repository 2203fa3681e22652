"""The iteration's state machine: states, legal transitions and what completes each of them.

    ACTOR_COMMITTED(v) → EXPORTING(v) → ROLLOUT_LOADING(v) → ROLLOUT_READY(v) → GENERATING(v)
      → PREPARING(v) → EXPERIENCE_SEALED(v) → UPDATING_FROM(v) → ACTOR_COMMITTED(v+1)

Any state may go to FAILED. ACTOR_COMMITTED is in memory; a durable checkpoint is another thing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.contracts.lines import LinesWriter
from megarl.contracts.version import PolicyVersion

JOURNAL_FILE = "journal.jsonl"


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

COLLECTING: Mapping[State, frozenset[State]] = MappingProxyType(
    TRANSITIONS | {State.EXPERIENCE_SEALED: frozenset({State.ACTOR_COMMITTED})}
)
"""A run that only collects: an iteration ends with its experience, and the version stays."""

FROM_SEALED: Mapping[State, frozenset[State]] = MappingProxyType(
    dict.fromkeys(State, frozenset())
    | {
        State.ACTOR_COMMITTED: frozenset({State.EXPERIENCE_SEALED, State.ACTOR_COMMITTED}),
        State.EXPERIENCE_SEALED: frozenset({State.UPDATING_FROM}),
        State.UPDATING_FROM: frozenset({State.ACTOR_COMMITTED}),
    }
)
"""A run that only trains: it finds its experience sealed, and generates nothing."""

RESUMED: Mapping[State, frozenset[State]] = MappingProxyType(
    TRANSITIONS
    | {State.ACTOR_COMMITTED: TRANSITIONS[State.ACTOR_COMMITTED] | {State.EXPERIENCE_SEALED}}
)
"""A run that goes on: its first iteration may find its experience sealed."""

EVIDENCE: Mapping[State, tuple[str, ...]] = MappingProxyType(
    {
        State.ACTOR_COMMITTED: ("weight_manifest_hash",),
        State.EXPORTING: (),
        State.ROLLOUT_LOADING: ("bytes_sent",),
        State.ROLLOUT_READY: ("weight_manifest_hash", "verified"),
        State.GENERATING: ("samples",),
        State.PREPARING: ("samples",),
        State.EXPERIENCE_SEALED: ("experience_hash", "samples"),
        State.UPDATING_FROM: ("experience_hash", "derived_hash"),
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

    def __init__(
        self,
        path: Path | None,
        transitions: Mapping[State, frozenset[State]] = TRANSITIONS,
    ) -> None:
        """`path` is None on every rank but 0: the state is kept, nothing is written.

        `transitions`: the whole loop's, or those of a part of it (`COLLECTING`, `FROM_SEALED`).
        """
        self._transitions = transitions
        self.state: State | None = None
        self.iteration = -1
        self.version: PolicyVersion | None = None
        self._lines = None if path is None else LinesWriter(path)

    def enter(self, state: State, iteration: int, version: PolicyVersion, **evidence: Any) -> None:
        """Go to `state`.

        Raises `IllegalTransition` when `state` may not follow, when evidence is missing, or when
        the version changes anywhere but at ACTOR_COMMITTED.
        """
        if state is not State.FAILED:
            self._check(state, version, evidence)
        self.state, self.iteration, self.version = state, iteration, version
        if self._lines is not None:
            line = {
                "time": round(time.time(), 3),
                "iteration": iteration,
                "state": str(state),
                "version": version.id,
                "optimizer_step": version.optimizer_step,
                "update_attempt": version.update_attempt,
                **evidence,
            }
            self._lines.write(line)

    def _check(self, state: State, version: PolicyVersion, evidence: Mapping[str, Any]) -> None:
        missing = [key for key in EVIDENCE[state] if evidence.get(key) in (None, "")]
        if missing:
            raise IllegalTransition(f"{state} needs evidence: {', '.join(missing)}")
        if self.state is None:
            if state is not State.ACTOR_COMMITTED:
                raise IllegalTransition(f"a run starts at ACTOR_COMMITTED, not at {state}")
            return
        if state not in self._transitions[self.state]:
            legal = ", ".join(sorted(self._transitions[self.state])) or "none"
            raise IllegalTransition(f"{self.state} → {state} is not legal; legal: {legal}")
        if state is not State.ACTOR_COMMITTED and version != self.version:
            raise IllegalTransition(f"{state} names {version}, the run is at {self.version}")
        if self.state is State.EXPERIENCE_SEALED and version != self.version:
            raise IllegalTransition(f"{version} follows {self.version} without an update")
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
        if self._lines is not None:
            self._lines.close()
            self._lines = None
