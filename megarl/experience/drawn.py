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
_DATA = {"fingerprint": str, "seed": int}
_CONSUMED = {"position": int, "back": list}
_ONE = _DATA | _CONSUMED
"""Of a cursor that goes through all rows alike."""
_SEVERAL = _DATA | {"streams": list}
"""Of one with weighted sources."""
_STREAM = {"source": str} | _CONSUMED | {"taken": int, "stood_in": int}


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
        _check_cursor(cursor)
        if not isinstance(line["lost"], dict):
            raise ValueError(f"lost is {line['lost']!r}, not counts by reason")
        counts = {"rounds": line["rounds"]}
        counts |= {f"joined.{name}": count for name, count in joined.items()}
        counts |= {f"lost.{reason}": count for reason, count in line["lost"].items()}
        for field, value in counts.items():
            least = 1 if field.partition(".")[0] in ("lost", "rounds") else 0
            _check_count(field, value, least)
        return DrawnFacts(line["rounds"], line["lost"], JoinCounts(**joined), cursor)

    def drawn(self, sources: Sequence[str]) -> Drawn:
        """As the ledger's account needs it; `sources` of each prompt, by draw index."""
        return Drawn(tuple(sources), self.rounds, self.lost)


def _check_cursor(cursor: Any) -> None:
    weighted = isinstance(cursor, dict) and "streams" in cursor
    _check_fields("cursor", cursor, _SEVERAL if weighted else _ONE)
    if not weighted:
        _check_consumed("cursor", cursor)
        return
    for number, stream in enumerate(cursor["streams"]):
        what = f"cursor.streams[{number}]"
        _check_fields(what, stream, _STREAM)
        _check_consumed(what, stream)
        for name in ("taken", "stood_in"):
            _check_count(f"{what}.{name}", stream[name], 0)


def _check_fields(what: str, value: Any, kinds: Mapping[str, type]) -> None:
    _check_object(what, value, kinds.keys())
    for name, kind in kinds.items():
        if type(value[name]) is not kind:
            raise ValueError(f"{what}.{name} is {value[name]!r}, not of type {kind.__name__}")


def _check_consumed(what: str, value: Mapping[str, Any]) -> None:
    _check_count(f"{what}.position", value["position"], 0)
    if any(type(row) is not int or row < 0 for row in value["back"]):
        raise ValueError(f"{what}.back is {value['back']!r}, not numbers of rows")


def _check_count(what: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{what} is {value!r}, not a whole number from {least}")


def _check_object(what: str, value: Any, keys: Any) -> None:
    if not isinstance(value, dict) or value.keys() != set(keys):
        raise ValueError(f"{what} is {value!r}, not an object of {', '.join(sorted(keys))}")
