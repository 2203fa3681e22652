"""What loading says of rows and files that cannot be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from megarl.contracts.errors import InputError

SHOWN = 5
"""Refused rows of a source that its error names."""
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
class Tally:
    """Rows of one source: kept, refused by kind, the first refusals, and which keys rows have."""

    path: str
    kept: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[Refusal] = field(default_factory=list)
    key_sets: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def refuse(self, refusal: Refusal, kind: str) -> None:
        """Count it."""
        self.kinds[kind] += 1
        if len(self.first) < SHOWN:
            self.first.append(refusal)

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
        shown = "; ".join(f"{where}: {why}" for where, why in self.first)
        more = f"; and {refused - SHOWN} more" * (refused > SHOWN)
        counts = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        raise PromptError(
            f"{self.path}: {refused} of {total} rows refused ({counts}), "
            f"data.max_refused_share is {limit:g}: {shown}{more}{self._mixed()}"
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
