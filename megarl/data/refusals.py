"""What loading says of rows and files that cannot be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.contracts.errors import InputError

SHOWN = 5
"""Reasons for refused rows that a source's error names, and rows of each."""
SHOWN_OF_KIND = 3
"""Refused rows of a kind that `Tally.first` has."""
KEPT = 10_000
"""Refused rows of a set that are kept; later ones are only counted."""
_SHOWN_KEY_SETS = 3
_MOST_KEY_SETS = 1000


class PromptError(InputError):
    """Prompts that cannot be used as asked; the message says why."""


class Refusal(NamedTuple):
    """One row that is left out."""

    where: str
    """`file:line`."""
    why: str


class Refused(Exception):
    """Raised inside the checks of one row: `kind` is counted, `why` is shown."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


@dataclass
class _Reason:
    """Rows of one source that are refused in the same words."""

    count: int = 0
    places: list[str] = field(default_factory=list)
    """`file:line` of the first."""

    def told(self, why: str) -> str:
        """`file:1, 2, 3 and 7 more: …`."""
        numbers = (where.rpartition(":")[2] for where in self.places[1:])
        more = self.count - len(self.places)
        return ", ".join([self.places[0], *numbers]) + f" and {more} more" * (more > 0) + f": {why}"


@dataclass
class Tally:
    """Rows of one source: kept, refused by kind, the first refusals, and which keys rows have."""

    path: str
    kept: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[Refusal]] = field(default_factory=dict)
    """Kind → its first rows."""
    reasons: dict[str, _Reason] = field(default_factory=dict)
    """The first reasons, in their words."""
    key_sets: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def refuse(self, refusal: Refusal, kind: str) -> None:
        """Count it."""
        self.kinds[kind] += 1
        first = self.first.setdefault(kind, [])
        if len(first) < SHOWN_OF_KIND:
            first.append(refusal)
        if refusal.why in self.reasons or len(self.reasons) < SHOWN:
            reason = self.reasons.setdefault(refusal.why, _Reason())
            reason.count += 1
            if len(reason.places) < SHOWN:
                reason.places.append(refusal.where)

    def keys(self, row: dict) -> None:
        """Count the keys that `row` has; of very many different sets only the first."""
        names = tuple(row)
        if names in self.key_sets or len(self.key_sets) < _MOST_KEY_SETS:
            self.key_sets[names] += 1

    def check(self, limit: float) -> None:
        """Raise `PromptError` where no row is usable or a larger share than `limit` is refused."""
        refused = self.kinds.total()
        total = self.kept + refused
        if not total:
            raise PromptError(f"{self.path} holds no rows")
        if self.kept and refused / total <= limit:
            return
        shown = "; ".join(reason.told(why) for why, reason in self.reasons.items())
        left = refused - sum(reason.count for reason in self.reasons.values())
        more = f"; and {left} more" * (left > 0)
        counts = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        why = f", data.max_refused_share is {limit:g}" if self.kept else ": no usable row is left"
        raise PromptError(
            f"{self.path}: {refused} of {total} rows refused ({counts}){why}: "
            f"{shown}{more}{self._mixed()}"
        )

    def _mixed(self) -> str:
        """The commonest sets of keys, where rows lack one that others may have."""
        sets: Counter[tuple[str, ...]] = Counter()
        for names, count in self.key_sets.items():
            sets[tuple(sorted(names))] += count
        if len(sets) < 2 or not any(kind.startswith("missing_") for kind in self.kinds):
            return ""
        told = "; ".join(
            f"{count} rows have {', '.join(names) or 'none'}"
            for names, count in sets.most_common(_SHOWN_KEY_SETS)
        )
        return f"; the rows' keys differ, most often: {told}"
