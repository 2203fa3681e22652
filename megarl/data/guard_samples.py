"""Guards over one rank's rows: shapes, ids, masks, ends and numbers; and how findings are told.

n rows of this rank, R response tokens of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megarl.contracts.ids import pair_keys
from megarl.contracts.records import Identities, Scores
from megarl.contracts.samples import EndReason, Samples, SamplingContract
from megarl.data.prepare import Prepared
from megarl.data.table import SampleTable

MOST_NAMED = 3
"""Samples that one finding names; the rest are counted."""
LARGEST_LOG_PROB = 1e-6
"""Nats above 0 that rounding in fp32 can give; `Samples` has the same bound."""


@dataclass
class Findings:
    """What is wrong, one line per field and reason; sample ids are made here."""

    identities: Identities
    lines: list[str] = field(default_factory=list)

    def name(self, draw_index: int, candidate: int) -> str:
        """The sample's id, also for a draw that this iteration did not make."""
        if 0 <= draw_index < len(self.identities.prompt_ids):
            return self.identities.sample_id(int(draw_index), int(candidate))
        return f"draw {draw_index} candidate {candidate} (no such draw)"

    def add(self, column: str, names: Sequence[str], why: str, count: int | None = None) -> None:
        """`names` are what is wrong, the first of `count`; none adds nothing."""
        if names:
            more = (len(names) if count is None else count) - len(names[:MOST_NAMED])
            told = ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more else "")
            self.lines.append(f"{column} of {told}: {why}")

    def keys(self, column: str, keys: np.ndarray, why: str) -> None:
        """`keys` as `pair_keys` makes them."""
        names = [self.name(key >> 32, key & 0xFFFFFFFF) for key in keys[:MOST_NAMED].tolist()]
        self.add(column, names, why, len(keys))

    def rows(self, column: str, whose: Samples | SampleTable, bad: np.ndarray, why: str) -> None:
        """`bad` bool over the rows of `whose`."""
        if bad.any():
            self.keys(column, pair_keys(whose.draw_index[bad], whose.candidate[bad]), why)

    def tokens(self, column: str, samples: Samples, bad_R: np.ndarray, why: str) -> None:
        """`bad_R` bool over response tokens: names the first token of each sample that has one."""
        if not bad_R.any():
            return
        at = np.flatnonzero(bad_R)
        row = np.searchsorted(samples.response_offsets, at, side="right") - 1
        row, first = np.unique(row, return_index=True)
        token = at[first] - samples.response_offsets[row]
        names = [
            f"{self.name(int(samples.draw_index[r]), int(samples.candidate[r]))} response token {t}"
            for r, t in zip(row[:MOST_NAMED].tolist(), token[:MOST_NAMED].tolist(), strict=True)
        ]
        self.add(column, names, why, len(row))


def check_ids(
    found: Findings,
    samples: Samples,
    trained: np.ndarray,
    known_ids: np.ndarray,
    prompt_ids: Sequence[Sequence[int]],
) -> None:
    """Ids of the vocabulary, known where the row trains, and the prompts that were to run.

    `trained` bool [n], `known_ids` bool [vocabulary], `prompt_ids` by draw index.
    """
    vocabulary = len(known_ids)
    for name, ids, lengths in (
        ("prompt_ids", samples.prompt_ids, samples.prompt_lengths),
        ("response_ids", samples.response_ids, samples.response_lengths),
    ):
        row = np.repeat(np.arange(len(samples)), lengths)
        outside = (ids < 0) | (ids >= vocabulary)
        unknown = ~outside & ~known_ids[np.where(outside, 0, ids)] & trained[row]
        for bad, why in (
            (outside, f"an id outside the vocabulary of {vocabulary}"),
            (unknown, "an id that the tokenizer does not know"),
        ):
            found.rows(name, samples, np.bincount(row[bad], minlength=len(samples)) > 0, why)
    _check_prompts(found, samples, prompt_ids)


def _check_prompts(found: Findings, samples: Samples, prompt_ids: Sequence[Sequence[int]]) -> None:
    draws, which = np.unique(samples.draw_index, return_inverse=True)
    none = np.zeros(0, dtype=np.int32)
    drawn = [
        np.asarray(prompt_ids[draw], dtype=np.int32) if 0 <= draw < len(prompt_ids) else none
        for draw in draws.tolist()
    ]
    expected = np.concatenate([none, *(drawn[draw] for draw in which.tolist())])
    if not np.array_equal(samples.prompt_ids, expected):
        ends = zip(samples.prompt_offsets[:-1], samples.prompt_offsets[1:], which, strict=True)
        wrong = [not np.array_equal(samples.prompt_ids[a:b], drawn[draw]) for a, b, draw in ends]
        found.rows("prompt_ids", samples, np.array(wrong), "not the ids that were to run")


def check_masks(found: Findings, samples: Samples) -> None:
    """Actions are exactly what the engine sampled, from the first sampled token on."""
    first = samples.response_offsets[:-1]
    late = ~samples.action_mask[first]
    found.rows("action_mask", samples, late, "the first sampled token is no action")
    # No environment writes into a response, so the engine sampled every token of it.
    hole = ~samples.action_mask
    hole[first] = False
    why = "a token that the engine sampled is no action"
    found.tokens("action_mask", samples, hole, why)


def check_ends(found: Findings, samples: Samples, sampling: SamplingContract) -> None:
    """A stop token ends a response and nothing comes after it; a cut one is as long as may be.

    So no id was put behind a response that was cut, and none was taken from its end.
    """
    last = samples.response_offsets[1:] - 1
    stops = np.isin(samples.response_ids, sampling.stop_token_ids)
    stopped = np.isin(samples.end_reason, (EndReason.EOS, EndReason.STOP))
    cut = samples.end_reason == EndReason.MAX_TOKENS
    limit = sampling.max_response_tokens
    for bad, why in (
        (stopped & ~stops[last], "it stopped, but its last id is no stop token"),
        (cut & stops[last], "it was cut off, but its last id is a stop token"),
        (cut & (samples.response_lengths != limit), f"it was cut off, but not at {limit}"),
    ):
        found.rows("end_reason", samples, bad, why)
    stops[last] = False
    found.tokens("response_ids", samples, stops, "ids go on behind a stop token")
    found.rows(
        "response_ids", samples, samples.response_lengths > limit, f"more than {limit} tokens"
    )


def check_log_probs(found: Findings, prepared: Prepared, trained: np.ndarray) -> None:
    """Finite and ≤ 0 in every column, on every row that trains."""
    samples = prepared.samples
    counted = np.repeat(trained, samples.response_lengths)
    for name, column in _log_prob_columns(prepared):
        if column is None:
            continue
        with np.errstate(invalid="ignore"):
            bad = counted & ~(np.isfinite(column) & (column <= LARGEST_LOG_PROB))
        found.tokens(name, samples, bad, "a log-prob must be a finite number ≤ 0")


def check_values(found: Findings, prepared: Prepared, trained: np.ndarray, needed: bool) -> None:
    """The critic's values, where there is a critic: finite on every row that trains."""
    samples = prepared.samples
    everyone = np.ones(len(samples), dtype=bool)
    if (prepared.values is not None) != needed:
        why = "none there, the critic learns from them" if needed else "there is no critic"
        found.rows("values", samples, everyone, why)
    if prepared.values is not None:
        counted = np.repeat(trained, samples.response_lengths)
        bad = counted & ~np.isfinite(prepared.values)
        found.tokens("values", samples, bad, "a value must be a finite number")
    if prepared.last_values is not None:
        bad = trained & ~np.isfinite(prepared.last_values)
        found.rows("last_values", samples, bad, "a value must be a finite number")


def _log_prob_columns(prepared: Prepared) -> tuple[tuple[str, np.ndarray | None], ...]:
    return (
        ("rollout_log_probs", prepared.samples.rollout_log_probs),
        ("old_log_probs", prepared.old_log_probs),
        ("ref_log_probs", prepared.ref_log_probs),
    )


def check_shapes(found: Findings, prepared: Prepared, scores: Scores) -> bool:
    """Whether all columns have as many rows and tokens as they must; nothing else is safe to ask
    before."""
    samples, before = prepared.samples, len(found.lines)
    rows = len(samples.draw_index)
    for name in ("candidate", "end_reason", "seed"):
        if len(getattr(samples, name)) != rows:
            why = f"{len(getattr(samples, name))} values for {rows} samples"
            found.add(name, ["this rank's samples"], why)
    if len(found.lines) > before:
        return False
    everyone = np.ones(rows, dtype=bool)
    for name in ("prompt_offsets", "response_offsets"):
        ends = getattr(samples, name)
        if len(ends) != rows + 1 or ends[0] != 0:
            found.rows(name, samples, everyone, f"they must go from 0 over {rows} samples")
        else:
            found.rows(name, samples, np.diff(ends) <= 0, "it has no token")
    if len(found.lines) > before:
        return False
    for name, ends in (
        ("prompt_ids", samples.prompt_offsets),
        ("response_ids", samples.response_offsets),
        ("action_mask", samples.response_offsets),
    ):
        if len(getattr(samples, name)) != ends[-1]:
            why = f"{len(getattr(samples, name))} values for {ends[-1]} tokens"
            found.rows(name, samples, everyone, why)
    for name, column in (*_log_prob_columns(prepared), ("values", prepared.values)):
        if column is not None:
            is_column(found, name, column, samples)
    last = prepared.last_values
    if (last is None) != (prepared.values is None):
        found.rows("last_values", samples, everyone, "values and last_values are not both there")
    if last is not None and (last.dtype != np.float32 or last.shape != (rows,)):
        why = f"{last.dtype}{list(last.shape)}, float32[{rows}] is needed"
        found.rows("last_values", samples, everyone, why)
    pairs = [pair_keys(part.draw_index, part.candidate) for part in (samples, scores)]
    if not np.array_equal(*pairs):
        found.keys("reward.total", np.setxor1d(*pairs), "rewards and samples are of other ids")
        if set(pairs[0].tolist()) == set(pairs[1].tolist()):
            found.keys("reward.total", pairs[0], "rewards and samples are in another order")
    return len(found.lines) == before


def is_column(found: Findings, name: str, column: np.ndarray, samples: Samples) -> bool:
    """Whether `column` is float32 [R]."""
    tokens = int(samples.response_offsets[-1])
    if column.dtype == np.float32 and column.shape == (tokens,):
        return True
    why = f"{column.dtype}{list(column.shape)}, float32[{tokens}] is needed"
    found.rows(name, samples, np.ones(len(samples), dtype=bool), why)
    return False


def check_column(
    found: Findings, name: str, column: np.ndarray, samples: Samples, trained: np.ndarray
) -> None:
    """Finite everywhere; 0 on tokens that are no action and on samples that do not train."""
    finite = np.isfinite(column)
    found.tokens(name, samples, ~finite, "not a finite number")
    off = finite & (column != 0)
    found.tokens(name, samples, off & ~samples.action_mask, "not 0 on a token that is no action")
    idle = np.repeat(~trained, samples.response_lengths)
    if name == "advantages":
        found.tokens(name, samples, off & idle, "not 0 on a sample that does not train")
