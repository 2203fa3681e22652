"""Metrics rows: what is refused, what the file holds, that TensorBoard reads the same numbers.

Not covered: reading an events file while it is written, and cutting files back on resume.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.observe.metrics import MetricsError, MetricsWriter, read_rows


def test_rows_are_lines_with_the_iteration_first_and_sorted_keys(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        row = {"time/iteration": 1.5, "reward/mean": np.float64(0.25), "iteration": np.int64(0)}
        writer.write(row)
        # Already there before the writer closes: a run that dies loses no finished iteration.
        text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"iteration": 0, "reward/mean": 0.25, "time/iteration": 1.5}\n'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"iteration": 3, "loss": float("nan")}, "metric 'loss' is nan"),
        ({"iteration": 3, "loss": float("inf")}, "metric 'loss' is inf"),
        ({"iteration": 3, "loss": np.float32("-inf")}, "metric 'loss' is -inf"),
        ({"iteration": 3, "loss": [1.0]}, "metric 'loss' is a list"),
        ({"iteration": 3, "loss": None}, "metric 'loss' is a NoneType"),
        ({"iteration": 2}, "iteration 2 after the row of iteration 2"),
        ({"iteration": 1}, "iteration 1 after the row of iteration 2"),
        ({"iteration": True}, "whole number"),
        ({"iteration": -1}, "whole number"),
        ({"reward/mean": 1.0}, "whole number"),
    ],
)
def test_a_bad_row_is_refused_by_name_and_leaves_no_trace(
    tmp_path: Path, row: dict, message: str
) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"iteration": 2})
        with pytest.raises(MetricsError, match=message):
            writer.write(row)
        writer.write({"iteration": 3})
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")[0]] == [2, 3]


def test_a_file_that_is_there_is_continued_but_never_repeated(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"iteration": 4})
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(MetricsError, match="iteration 4 after"):
            writer.write({"iteration": 4})
        writer.write({"iteration": 5})
    assert len(read_rows(tmp_path / "metrics.jsonl")[0]) == 2


def test_a_cut_off_last_line_is_left_out_by_the_reader_and_refused_by_the_writer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"iteration": 1, "rew')
    assert read_rows(path) == ([{"iteration": 0}], True)
    with pytest.raises(MetricsError, match="cut off"):
        MetricsWriter(tmp_path, tensorboard=False)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 0}\n{"loss": 1}\n{"iteration": 2}\n')
    with pytest.raises(MetricsError, match=r"metrics\.jsonl:2"):
        read_rows(path)


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    rows = [
        {"iteration": index, "reward/mean": index / 8, "stepped": True, "note": "a text"}
        for index in range(3)
    ]
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for row in rows:
            writer.write(row)
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # before the writer ends
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "stepped"]
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(0, 0.0), (1, 0.125), (2, 0.25)]
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows
