"""Text plots against pictures drawn by hand. Not covered: terminals without UTF-8."""

from __future__ import annotations

from megarl.observe.plots import clock_text, sparkline, text_plot


def test_sparkline_shows_the_last_values_from_lowest_to_highest() -> None:
    assert sparkline([9, 0, 7, 3.5], 3) == "▁█▅"
    assert sparkline([0.5, 0.5], 8) == "▁▁"
    assert sparkline([], 8) == ""


def test_text_plot_puts_points_where_they_belong() -> None:
    lines = text_plot({"·": [(0, 0.0), (5, 0.5), (10, 1.0)], "●": [(10, 0.0)]}, width=11, height=5)
    assert lines == [
        "       1 ┤          ·",
        "         │",
        "     0.5 ┤     ·",
        "         │",
        "       0 ┤·         ●",
        "         └───────────",
        "          0        10",
    ]


def test_text_plot_of_little_or_nothing() -> None:
    assert text_plot({"·": []}) == []
    assert any("·" in line for line in text_plot({"·": [(3, -2.0)]}))


def test_clock_text() -> None:
    assert [clock_text(s) for s in (-1, 7.4, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]
