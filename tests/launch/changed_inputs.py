"""Changes of what a run was made with, in a folder of data, model and own scorer with the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Place(Protocol):
    """Where they lie."""

    folder: Path

    @property
    def run(self) -> Path: ...


def edit_json(file: str, **values: object) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        path = place.folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def other_row(name: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        path = place.folder / f"{name}.jsonl"
        first, *others = path.read_text().splitlines(keepends=True)
        row = json.loads(first)
        row["answer"] = str(int(row["answer"]) + 1)
        path.write_text("".join([json.dumps(row) + "\n", *others]))

    return change


def other_tokenizer(place: Place) -> None:
    (path,) = (place.folder / "model").glob("tokenizer_config.json")
    told = json.loads(path.read_text())
    told["chat_template"] = "{{ messages[0]['content'] }} "
    path.write_text(json.dumps(told))


def other_code(place: Place) -> None:
    path = place.folder / "own_scorer.py"
    path.write_text(path.read_text().replace("max(1,", "max(2,"))


def shorter_records(place: Place) -> None:
    path = place.run / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
