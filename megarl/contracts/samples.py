"""Samples of one iteration, columnar: flat arrays and offsets, `samples[i]` is a read-only view.

Ids are pairs (draw index, candidate); joins are by that pair, never by position, and canonical
order is its order. `records.py` turns pairs into id strings.

Example: two prompts, two candidates, responses of 3, 1, 2 and 2 tokens::

    draw_index       [0, 0, 1, 1]
    candidate        [0, 1, 0, 1]
    response_offsets [0, 3, 4, 6, 8]
    response_ids     [17, 4, 2, 2, 9, 2, 8, 2]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from megarl.contracts.fingerprint import fingerprints
from megarl.contracts.hashes import contract_hash
from megarl.contracts.ids import pair_keys
from megarl.contracts.ragged import gather_ragged, lengths_to_offsets


class End(IntEnum):
    """How a response ended. Only `terminated` is terminal for the return."""

    TERMINATED = 0
    TRUNCATED = 1
    ABORTED = 2


class EndReason(IntEnum):
    """What the engine or environment gave as the reason."""

    EOS = 0
    STOP = 1
    ENV_DONE = 2
    MAX_TOKENS = 3
    MAX_TURNS = 4
    TIMEOUT = 5
    ILLEGAL_ACTION = 6
    ABORT = 7


END_OF_REASON: dict[EndReason, End] = {
    EndReason.EOS: End.TERMINATED,
    EndReason.STOP: End.TERMINATED,
    EndReason.ENV_DONE: End.TERMINATED,
    EndReason.MAX_TOKENS: End.TRUNCATED,
    EndReason.MAX_TURNS: End.TRUNCATED,
    EndReason.TIMEOUT: End.TRUNCATED,
    EndReason.ILLEGAL_ACTION: End.TERMINATED,
    EndReason.ABORT: End.ABORTED,
}


@dataclass(frozen=True, slots=True)
class SamplingContract:
    """The distribution responses are drawn from. Temperature 0 is greedy (evaluation only)."""

    n: int
    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    dtype: str
    attention_backend: str
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def hash(self) -> str:
        return contract_hash(asdict(self))

    def check_trainable(self) -> None:
        """Raise `ValueError` unless log-probs of this contract are the trainer's.

        Truncated or penalised sampling draws from another distribution than the one the trainer
        scores, so every importance ratio would carry the log of the kept mass.
        """
        neutral = asdict(SamplingContract(1, 1.0, 1, (), 0, "", ""))
        filters = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
        bad = [k for k in (*filters, "repetition_penalty") if getattr(self, k) != neutral[k]]
        bad += ["temperature"] if self.temperature <= 0.0 else []
        named = [f"{key}={getattr(self, key)}" for key in bad]
        if named:
            raise ValueError(
                f"sampling with {', '.join(named)} cannot be trained on: the trainer scores the "
                "full distribution at a temperature above 0"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """Read-only view of one rollout. Masks run over `response_ids`."""

    draw_index: int
    candidate: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    action_mask: np.ndarray
    rollout_log_probs: np.ndarray
    end: End
    end_reason: EndReason
    seed: int
    started: float
    finished: float
    experts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))


_RAGGED = (
    (("prompt_ids",), "prompt_offsets"),
    (("experts",), "experts_offsets"),
    (("response_ids", "action_mask", "rollout_log_probs"), "response_offsets"),
)
_FLAT = {name: offsets for names, offsets in _RAGGED for name in names}
_DTYPES = {
    "draw_index": np.int32,
    "candidate": np.int32,
    "prompt_ids": np.int32,
    "prompt_offsets": np.int64,
    "response_ids": np.int32,
    "response_offsets": np.int64,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "end_reason": np.int8,
    "seed": np.int64,
    "started": np.float64,
    "finished": np.float64,
    "experts": np.int16,
    "experts_offsets": np.int64,
}


@dataclass(frozen=True)
class Samples:
    """Columnar samples; arrays are made read-only. N rows, P prompt and R response tokens in all.

    A read-only array that owns its memory and has the right dtype is shared, any other is copied.
    Raises `ValueError` when lengths disagree, a (draw index, candidate) pair appears twice or is
    negative, a prompt or response is empty, a reason is unknown, or a log-prob is positive or not
    finite.
    """

    draw_index: np.ndarray  # int32 [N]
    candidate: np.ndarray  # int32 [N]
    prompt_ids: np.ndarray  # int32 [P]
    prompt_offsets: np.ndarray  # int64 [N+1]
    response_ids: np.ndarray  # int32 [R], exactly as the engine returned them
    response_offsets: np.ndarray  # int64 [N+1]
    action_mask: np.ndarray  # bool [R], False where the token is not the policy's (tool output)
    rollout_log_probs: np.ndarray  # float32 [R], the generator's, at the sampling temperature
    end_reason: np.ndarray  # int8 [N], an `EndReason`
    seed: np.ndarray  # int64 [N]
    started: np.ndarray  # float64 [N], unix seconds
    finished: np.ndarray  # float64 [N]
    version_id: str
    """The policy version that generated every row."""
    experts: np.ndarray | None = None
    """int16, of each row [tokens − 1, layers, k] flat: to which experts the generator sent each
    token but the last, which it never read. None: told of no row."""
    experts_offsets: np.ndarray | None = None  # int64 [N+1]

    def __post_init__(self) -> None:
        if self.experts is None:
            object.__setattr__(self, "experts", np.zeros(0, np.int16))
            object.__setattr__(self, "experts_offsets", np.zeros(len(self.draw_index) + 1, int))
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if not _is_frozen(array, dtype):
                array = _frozen(np.array(array, dtype=dtype))
                object.__setattr__(self, name, array)
        self._check()

    def _check(self) -> None:
        rows = len(self.draw_index)
        for name in ("candidate", "end_reason", "seed", "started", "finished"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, expected {rows}")
        for name, offsets_name in _FLAT.items():
            offsets = getattr(self, offsets_name)
            least = 0 if name == "experts" else 1
            if len(offsets) != rows + 1 or offsets[0] != 0 or (np.diff(offsets) < least).any():
                raise ValueError(f"{offsets_name} must rise from 0 over {rows} non-empty rows")
            if len(getattr(self, name)) != offsets[-1]:
                raise ValueError(f"{name} has {len(getattr(self, name))} tokens, not {offsets[-1]}")
        if len(self.experts):
            told = np.diff(self.experts_offsets)
            read = self.prompt_lengths + self.response_lengths - 1
            if not told.all() or (told % read).any() or (told // read != told[0] // read[0]).any():
                raise ValueError("experts must be as many for every token but the last of each row")
        if (self.draw_index < 0).any() or (self.candidate < 0).any():
            raise ValueError("draw indices and candidates must be ≥ 0")
        steps = np.diff(self.keys)
        if not (steps > 0).all():  # rows in canonical order need no sort
            steps = np.diff(np.sort(self.keys))
        if (steps == 0).any():
            raise ValueError("a (draw index, candidate) pair appears twice")
        if ((self.end_reason < 0) | (self.end_reason >= len(EndReason))).any():
            raise ValueError(f"end_reason has values that are no EndReason: {self.end_reason}")
        log_probs = self.rollout_log_probs
        # Written so that a NaN fails both comparisons.
        if not (len(log_probs) == 0 or log_probs.min() > -np.inf and log_probs.max() <= 1e-6):
            raise ValueError("rollout log-probs must be finite numbers ≤ 0")

    def __len__(self) -> int:
        return len(self.draw_index)

    def __getitem__(self, row: int) -> Sample:
        row = range(len(self))[row]
        prompt = slice(self.prompt_offsets[row], self.prompt_offsets[row + 1])
        response = slice(self.response_offsets[row], self.response_offsets[row + 1])
        reason = EndReason(int(self.end_reason[row]))
        return Sample(
            draw_index=int(self.draw_index[row]),
            candidate=int(self.candidate[row]),
            prompt_ids=self.prompt_ids[prompt],
            response_ids=self.response_ids[response],
            action_mask=self.action_mask[response],
            rollout_log_probs=self.rollout_log_probs[response],
            end=END_OF_REASON[reason],
            end_reason=reason,
            seed=int(self.seed[row]),
            experts=self.experts[slice(*self.experts_offsets[row : row + 2])],
            started=float(self.started[row]),
            finished=float(self.finished[row]),
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        return np.diff(self.prompt_offsets)

    @cached_property
    def response_lengths(self) -> np.ndarray:
        return np.diff(self.response_offsets)

    @cached_property
    def experts_lengths(self) -> np.ndarray:
        return np.diff(self.experts_offsets)

    @cached_property
    def end(self) -> np.ndarray:
        """int8 [N], an `End` per row."""
        table = np.array([END_OF_REASON[reason] for reason in EndReason], dtype=np.int8)
        return table[self.end_reason]

    @cached_property
    def keys(self) -> np.ndarray:
        """int64 [N], `pair_keys`."""
        return pair_keys(self.draw_index, self.candidate)

    @cached_property
    def fingerprints(self) -> np.ndarray:
        """uint64 [N], one number per row over all its facts but the clock's."""
        return fingerprints(self)

    def select(self, rows: Sequence[int] | np.ndarray) -> Samples:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        columns: dict[str, np.ndarray] = {}
        for names, offsets_name in _RAGGED:
            offsets = getattr(self, offsets_name)
            flats = gather_ragged([getattr(self, name) for name in names], offsets, rows)
            columns |= dict(zip(names, flats, strict=True))
            columns[offsets_name] = lengths_to_offsets(np.diff(offsets)[rows])
        for name in _DTYPES.keys() - columns.keys():
            columns[name] = getattr(self, name)[rows]
        columns = {name: _frozen(column) for name, column in columns.items()}
        return Samples(**columns, version_id=self.version_id)

    def canonical(self) -> Samples:
        """The same rows in canonical order: (draw index, candidate)."""
        if (np.diff(self.keys) > 0).all():
            return self
        return self.select(np.argsort(self.keys, kind="stable"))

    @staticmethod
    def concat(parts: Sequence[Samples]) -> Samples:
        """All rows of `parts`; raises `ValueError` when they come from different versions."""
        versions = {part.version_id for part in parts if len(part)}
        if len(versions) > 1:
            raise ValueError(f"samples of several versions in one experience: {sorted(versions)}")
        parts = [part for part in parts if len(part)] or parts[:1]
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, np.ndarray] = {}
        for name in _DTYPES:
            if name.endswith("_offsets"):
                lengths = [np.diff(getattr(part, name)) for part in parts]
                columns[name] = lengths_to_offsets(np.concatenate(lengths))
            else:
                columns[name] = np.concatenate([getattr(part, name) for part in parts])
        columns = {name: _frozen(column) for name, column in columns.items()}
        return Samples(**columns, version_id=next(iter(versions), parts[0].version_id))

    @staticmethod
    def from_rows(rows: Sequence[Sample], version_id: str) -> Samples:
        """Columnar form of single samples (`end` is implied by `end_reason`).

        Raises `ValueError` when a sample's per-token columns have different lengths.
        """
        for row in rows:
            tokens = len(row.response_ids)
            if not len(row.action_mask) == len(row.rollout_log_probs) == tokens:
                raise ValueError(
                    f"sample {row.draw_index}/{row.candidate} has {tokens} response ids, "
                    f"{len(row.action_mask)} mask values and {len(row.rollout_log_probs)} log-probs"
                )

        def flat(name: str) -> np.ndarray:
            parts = [np.asarray(getattr(row, name)) for row in rows]
            return np.concatenate(parts) if parts else np.zeros(0)

        columns = {name: flat(name) for name in _FLAT}
        for names, offsets_name in _RAGGED:
            lengths = [len(getattr(row, names[0])) for row in rows]
            columns[offsets_name] = lengths_to_offsets(np.array(lengths, dtype=np.int64))
        for name in ("draw_index", "candidate", "end_reason", "seed", "started", "finished"):
            columns[name] = np.array([getattr(row, name) for row in rows])
        return Samples(**columns, version_id=version_id)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _is_frozen(array: object, dtype: type) -> bool:
    return (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.flags.owndata
        and not array.flags.writeable
    )
