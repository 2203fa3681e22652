"""Rows as they come, and what they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
HEADS = (
    ("model", 17),
    ("ranks", 5),
    ("trainer", 32),
    ("generator", 12),
    ("digests", 10),
    ("gap trainer", 11),
    ("generator", 9),
    ("sent/bound", 19),
    ("s", 5),
)
MOST_PLACES = 4
"""Told of one reason; the JSON has all."""


def head() -> str:
    """The line above the rows."""
    return _line([name for name, _ in HEADS])


def line(row: Row) -> str:
    """One row of the table; what failed is told below it."""
    if row["kind"] == "round trip":
        told = f"HF → trainer → HF, {row['dtype']}: {_count(row, 'ok')}"
        parts = [row["model"], row["ranks"], row["train"], told]
        return _line(parts) + _why(row)
    equal = _count(row, "digests_equal")
    sent = f"{row['bytes_sent']}/{row['bytes_bound']}" if "bytes_sent" in row else "-"
    return _line(
        [
            row["model"],
            row["ranks"],
            row["train"],
            row["rollout"],
            equal,
            _gap(row, "trainer_gap"),
            _gap(row, "generator_gap"),
            sent,
            f"{row['seconds']:.1f}",
        ]
    ) + _why(row)


def summary(rows: Sequence[Row], refused: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Numbers over all rows: what passed, the largest gaps of each model."""
    pairs = [row for row in rows if row["kind"] == "handover"]
    trips = [row for row in rows if row["kind"] == "round trip"]
    models: dict[str, dict[str, Any]] = {}
    for row in pairs:
        told = models.setdefault(
            row["model"], {"pairs": 0, "trainer_gap": 0.0, "generator_gap": 0.0}
        )
        told["pairs"] += 1
        for side in ("trainer_gap", "generator_gap"):
            told[side] = max(told[side], row.get(side, 0.0))
    return {
        "pairs": len(pairs),
        "pairs_failed": sum(not row["ok"] for row in pairs),
        "round_trips": len(trips),
        "round_trips_failed": sum(not row["ok"] for row in trips),
        "refused": len(refused),
        "seconds": round(seconds, 1),
        "models": models,
    }


def closing(numbers: Mapping[str, Any], refused: Sequence[Row]) -> str:
    """Refusals by reason, the largest gaps by model, and the summary line."""
    lines = [""]
    reasons: dict[str, list[str]] = {}
    for row in refused:
        where = f"{row['model']} on {row['ranks']}: {row['layout']}"
        reasons.setdefault(row["why"], []).append(where)
    if reasons:
        lines.append("refused:")
    for why, places in reasons.items():
        more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
        lines.append(f"  {why}\n      {'; '.join(places[:MOST_PLACES])}{more}")
    lines.append("largest gaps to the HF model:")
    for model, told in numbers["models"].items():
        lines.append(
            f"  {model:<17} {told['pairs']:>4} pairs  trainer {told['trainer_gap']:.1e}  "
            f"generator {told['generator_gap']:.1e}"
        )
    failed = numbers["pairs_failed"] + numbers["round_trips_failed"]
    lines.append(
        f"{'FAILED' if failed else 'all right'}: {numbers['pairs']} pairs of layouts "
        f"({numbers['pairs_failed']} failed), {numbers['round_trips']} round trips "
        f"({numbers['round_trips_failed']} failed), {numbers['refused']} layouts refused, "
        f"{numbers['seconds']:.0f} s"
    )
    return "\n".join(lines)


def _line(parts: Sequence[Any]) -> str:
    sized = zip(parts, HEADS, strict=False)
    return " ".join(f"{part!s:<{width}}" for part, (_, width) in sized).rstrip()


def _count(row: Row, key: str) -> str:
    if not row.get(key):
        return "DIFFER"
    return f"equal {row['tensors']}"


def _gap(row: Row, key: str) -> str:
    return f"{row[key]:.1e}" if key in row else "-"


def _why(row: Row) -> str:
    return "" if row["ok"] else f"\n    FAILED: {row.get('why', 'no reason told')}"
