"""How an iteration's samples came about: what neither its samples nor its prompts tell.

    drawn.json   {"cursor": state of the prompt cursor after the draw,
                  "joined": {"duplicates", "late"}, "lost": {reason: responses}, "rounds"}

With it a run goes on from sealed facts as if it had generated them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.join import JoinCounts
from megarl.rollout.account import Drawn

_KEYS = frozenset({"cursor", "joined", "lost", "rounds"})
_CURSOR = {"fingerprint": str, "seed": int, "position": int, "back": list}


@dataclass(frozen=True)
class DrawnFacts:
    """Global facts of one iteration, the same on every rank."""

    rounds: int
    lost: Mapping[str, int]
    """Reason → responses that stayed lost after their retries."""
    joined: JoinCounts
    """Results that came again or late and changed nothing; their names are not sealed."""
    cursor: Mapping[str, Any]
    """`PromptCursor.state` once the prompts were drawn: where the next iteration begins."""

    @staticmethod
    def of(drawn: Drawn, joined: JoinCounts, cursor: Mapping[str, Any]) -> DrawnFacts:
        """What `drawn` knows besides the prompts, which are sealed on their own."""
        return DrawnFacts(drawn.rounds, dict(drawn.lost), joined, cursor)

    @property
    def line(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "cursor": dict(self.cursor),
            "joined": self.joined.account,
            "lost": dict(self.lost),
            "rounds": self.rounds,
        }

    @staticmethod
    def of_line(line: Any) -> DrawnFacts:
        """Raises `ValueError` naming the field for a JSON value that says no such thing."""
        _check_object("it", line, _KEYS)
        joined, cursor = line["joined"], line["cursor"]
        _check_object("joined", joined, JoinCounts().account.keys())
        _check_object("cursor", cursor, _CURSOR.keys())
        if not isinstance(line["lost"], dict):
            raise ValueError(f"lost is {line['lost']!r}, not counts by reason")
        counts = {"rounds": line["rounds"], "cursor.position": cursor["position"]}
        counts |= {f"joined.{name}": count for name, count in joined.items()}
        counts |= {f"lost.{reason}": count for reason, count in line["lost"].items()}
        for field, value in counts.items():
            least = 1 if field.partition(".")[0] in ("lost", "rounds") else 0
            if type(value) is not int or value < least:
                raise ValueError(f"{field} is {value!r}, not a whole number from {least}")
        for name, kind in _CURSOR.items():
            if type(cursor[name]) is not kind:
                raise ValueError(f"cursor.{name} is {cursor[name]!r}, not of type {kind.__name__}")
        if any(type(row) is not int or row < 0 for row in cursor["back"]):
            raise ValueError(f"cursor.back is {cursor['back']!r}, not numbers of rows")
        return DrawnFacts(line["rounds"], line["lost"], JoinCounts(**joined), cursor)

    def drawn(self, sources: Sequence[str]) -> Drawn:
        """As the ledger's account needs it; `sources` of each prompt, by draw index."""
        return Drawn(tuple(sources), self.rounds, self.lost)


def _check_object(what: str, value: Any, keys: Any) -> None:
    if not isinstance(value, dict) or value.keys() != set(keys):
        raise ValueError(f"{what} is {value!r}, not an object of {', '.join(sorted(keys))}")
