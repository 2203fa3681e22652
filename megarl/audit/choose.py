"""Which samples of a run somebody wants to read: filters, order, and one light row a sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from megarl.audit.group import sealed_mean, tokens_of, verdict_of
from megarl.audit.source import Words
from megarl.audit.text import none_if_nan
from megarl.experience.load import SealedIteration

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    "!=": lambda value, bound: value != bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
    "=": lambda value, bound: value == bound,
}


@dataclass(frozen=True)
class Row:
    """One sample as people read it. Numbers are None where there is none."""

    sample_id: str
    iteration: int
    draw_index: int
    candidate: int
    prompt: dict[str, Any]
    reward: float | None
    components: dict[str, float]
    status: str
    detail: str
    end: str
    end_reason: str
    tokens: int
    verdict: str | None
    minibatch: int | None
    advantage: float | None
    """Mean over its action tokens, as are the two below."""
    value: float | None
    """The critic's."""
    returned: float | None
    """What the critic learnt."""
    gap: float | None
    """Largest |old − rollout| log-prob of an action token."""
    response_ids: np.ndarray
    words: Words = field(repr=False)

    @property
    def group_id(self) -> str:
        return self.sample_id.rpartition("/")[0]

    @property
    def text(self) -> str:
        """The response, as ids where there is no tokenizer."""
        told = self.words.text(self.response_ids)
        return " ".join(map(str, self.response_ids.tolist())) if told is None else told

    def as_json(self) -> dict[str, Any]:
        names = [name for name in type(self).__dataclass_fields__ if name != "words"]
        told = {name: getattr(self, name) for name in names}
        return told | {"response_ids": self.response_ids.tolist(), "response": self.text}


@dataclass(frozen=True)
class Choice:
    """Which rows are wanted; what is None or empty does not limit."""

    reward: Sequence[str] = ()
    length: Sequence[str] = ()
    status: str | None = None
    end: str | None = None
    verdict: str | None = None
    trained: bool | None = None
    prompt: str | None = None
    source: str | None = None
    contains: str | None = None

    def __post_init__(self) -> None:
        for name in ("reward", "length"):
            for bound in getattr(self, name):
                within(bound, 0.0)  # raises for what cannot be read

    def wants(self, row: Row) -> bool:
        return (
            all(within(bound, row.reward) for bound in self.reward)
            and all(within(bound, row.tokens) for bound in self.length)
            and self.status in (None, row.status)
            and self.end in (None, row.end, row.end_reason)
            and self.verdict in (None, row.verdict)
            and self.trained in (None, row.verdict == "trained")
            and (self.prompt is None or fnmatchcase(row.prompt["prompt_id"], self.prompt))
            and (self.source is None or fnmatchcase(row.prompt["source"], self.source))
            and (self.contains is None or self.contains.casefold() in row.text.casefold())
        )


def within(bound: str, value: float | None) -> bool:
    """Whether `value` is in `>=0.5`, `<10`, `=1`, `1`, `0.2..0.8` or `none`.

    Raises `ValueError` for a bound that cannot be read.
    """
    text = bound.strip().replace("==", "=")
    if text == "none":
        return value is None
    match = re.fullmatch(r"(>=|<=|!=|>|<|=)?\s*(\S+)", text)
    try:
        if ".." in text:
            low, high = (float(end) if end else None for end in text.split("..", 1))
            low, high = -math.inf if low is None else low, math.inf if high is None else high
            return value is not None and low <= value <= high
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise ValueError(f"range {bound!r}: write >=0.5, <10, 1, 0.2..0.8 or none")
    return value is not None and _OPERATORS[match[1] or "="](value, limit)


def rows_of(sealed: SealedIteration, words: Words) -> Iterator[Row]:
    """Every sample of an iteration, in canonical order."""
    gaps = np.abs(sealed.old_log_probs.astype(np.float64) - sealed.samples.rollout_log_probs)
    offsets = sealed.samples.response_offsets.tolist()
    derived = sealed.derived
    for at, sample in enumerate(sealed.samples):
        record, verdict = sealed.records[at], verdict_of(sealed, at)
        gap = gaps[offsets[at] : offsets[at + 1]][sample.action_mask]
        minibatch = -1 if derived is None else int(derived.minibatch[at])
        yield Row(
            sample_id=sealed.sample_id(at),
            iteration=sealed.manifest.header.iteration,
            draw_index=sample.draw_index,
            candidate=sample.candidate,
            prompt=sealed.prompts[sample.draw_index],
            reward=record.total,
            components=record.components,
            status=str(record.status),
            detail=record.detail,
            end=sample.end.name.lower(),
            end_reason=sample.end_reason.name.lower(),
            tokens=len(sample.response_ids),
            verdict=None if verdict is None else str(verdict),
            minibatch=None if minibatch < 0 else minibatch,
            advantage=sealed_mean(sealed, at, "advantages") if minibatch >= 0 else None,
            value=_mean_value(sealed, at),
            returned=sealed_mean(sealed, at, "returns") if minibatch >= 0 else None,
            gap=none_if_nan(gap.max()) if len(gap) else None,
            response_ids=np.array(sample.response_ids),
            words=words,
        )


def _mean_value(sealed: SealedIteration, row: int) -> float | None:
    """Mean of the critic's values over the row's action tokens; None without a critic."""
    if sealed.values is None:
        return None
    span = tokens_of(sealed, row)
    values = sealed.values[span][sealed.samples.action_mask[span]]
    return none_if_nan(values.astype(np.float64).mean()) if len(values) else None


SORTS: dict[str, Callable[[Row], float | None]] = {
    "reward": lambda row: row.reward,
    "length": lambda row: row.tokens,
    "advantage": lambda row: row.advantage,
    "value": lambda row: row.value,
    "gap": lambda row: row.gap,
}


def in_order(
    groups: Sequence[Sequence[Row]], sort: str | None, reverse: bool
) -> list[Sequence[Row]]:
    """Groups (or single samples, as groups of one) by the mean of a value; those without one last.

    Without `sort` in the given order, or the reverse of it.
    """
    if sort is None:
        return list(reversed(groups)) if reverse else list(groups)
    value = SORTS[sort]

    def mean(rows: Sequence[Row]) -> float | None:
        known = [told for row in rows if (told := value(row)) is not None]
        return sum(known) / len(known) if known else None

    known = [rows for rows in groups if mean(rows) is not None]
    unknown = [rows for rows in groups if mean(rows) is None]
    return sorted(known, key=mean, reverse=reverse) + unknown


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by group, groups and rows in the order in which they come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    return list(groups.values())
