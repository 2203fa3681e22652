"""Numbers as text: one-line sparklines and a small plot, for terminals and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars from their lowest to their highest; equal ones stay low.

    What is not finite is left out."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def text_plot(
    series: Mapping[str, Sequence[tuple[float, float]]], *, width: int = 60, height: int = 9
) -> list[str]:
    """Lines of a plot of (x, y) points on common axes; `series` maps a one-character mark to
    points, later marks drawn over earlier ones. Points that are not finite are
    left out; without any point the result is empty."""
    series = {
        mark: [(x, y) for x, y in values if math.isfinite(x) and math.isfinite(y)]
        for mark, values in series.items()
    }
    points = [point for values in series.values() for point in values]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    across = (width - 1) / (right - left) if right > left else 0.0
    up = (height - 1) / (high - low) if high > low else 0.0
    grid = [[" "] * width for _ in range(height)]
    for mark, values in series.items():
        for x, y in values:
            grid[height - 1 - round((y - low) * up)][round((x - left) * across)] = mark
    labels = {0: high, (height - 1) // 2: (low + high) / 2, height - 1: low}
    lines = [
        (f"{labels[row]:8.3g} ┤" if row in labels else " " * 8 + " │") + "".join(cells).rstrip()
        for row, cells in enumerate(grid)
    ]
    first, last = f"{left:g}", f"{right:g}"
    gap = " " * max(1, width - len(first) - len(last))
    return [*lines, " " * 9 + "└" + "─" * width, " " * 10 + first + gap + last]


def clock_text(seconds: float) -> str:
    """`seconds` as 0:07, 12:30 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    tail = f"{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{tail}" if hours else f"{minutes}:{tail}"
