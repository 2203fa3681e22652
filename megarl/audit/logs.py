"""A run's JSON Lines files as an auditor reads them: good lines, and what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.contracts.states import JOURNAL_FILE
from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest
from megarl.experience.updates import UPDATES_FILE
from megarl.experience.versions import VERSIONS_FILE
from megarl.observe.metrics import METRICS_FILE

LEDGER_FILE = "ledger.jsonl"

_NUMBER = (int, float)
FIELDS: Mapping[str, Mapping[str, Any]] = {
    JOURNAL_FILE: {
        "time": _NUMBER,
        "iteration": int,
        "state": str,
        "version": str,
        "optimizer_step": int,
        "update_attempt": int,
    },
    VERSIONS_FILE: {"kind": str, "id": str, "iteration": int, "tensors": list},
    UPDATES_FILE: {
        "iteration": int,
        "experience_hash": str,
        "derived_hash": str,
        "from": str,
        "to": str,
        "steps": list,
    },
    LEDGER_FILE: {
        "iteration": int,
        "version": str,
        "experience_hash": str,
        "sampled": int,
        "trained": int,
        "dropped": dict,
        "refused": dict,
        "lost": int,
    },
    METRICS_FILE: {"iteration": int},
}
"""Of each log, the fields that every line has, with their JSON types."""


@dataclass(frozen=True)
class Line:
    """One JSON object of a log."""

    file: str
    number: int
    """From 1."""
    told: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"

    def __getitem__(self, key: str) -> Any:
        return self.told[key]


@dataclass(frozen=True)
class Log:
    """A JSON Lines file: the lines that can be read, and (line number, what is wrong) of others."""

    file: str
    lines: tuple[Line, ...]
    problems: tuple[tuple[int, str], ...]
    torn: bool
    """The last line is cut off, as the end of a process leaves it; it is none of `problems`."""

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def of(self, iteration: int) -> list[Line]:
        """The lines about an iteration."""
        return self._by_iteration.get(iteration, [])

    def before(self, iteration: int) -> Log:
        """The lines about iterations before `iteration`, of a file that is being cut back there
        and may be set aside whole."""
        lines = tuple(line for line in self.lines if line["iteration"] < iteration)
        problems = tuple((number, what) for number, what in self.problems if number)
        return Log(self.file, lines, problems, self.torn)

    @cached_property
    def _by_iteration(self) -> dict[int, list[Line]]:
        found: dict[int, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line["iteration"], []).append(line)
        return found


def read_log(folder: Path, file: str, name: str | None = None) -> Log:
    """A missing file has the one problem that it is missing. `name` is told in its place."""
    name = file if name is None else name
    try:
        text = (folder / file).read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        return Log(name, (), ((0, f"cannot be read: {error.strerror}"),), False)
    lines, problems = [], []
    raw = text.split("\n")
    torn = bool(raw.pop())
    for number, body in enumerate(raw, start=1):
        told, problem = _parse(body, FIELDS[file])
        if problem is None:
            lines.append(Line(name, number, told))
        else:
            problems.append((number, problem))
    return Log(name, tuple(lines), tuple(problems), torn)


def read_bytes(path: Path) -> bytes:
    """Nothing where there is no such file."""
    return path.read_bytes() if path.is_file() else b""


SINCE: Mapping[str, Any] = {"critic": (list, str), "kl_beta": _NUMBER}
"""Fields that not every line has, with their types where they are there."""


def _parse(body: str, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return {}, "is not JSON"
    if not isinstance(told, dict):
        return {}, "is no JSON object"
    for key, kind in wanted.items():
        if key not in told:
            return {}, f"has no field {key!r}"
        if not isinstance(told[key], kind) or isinstance(told[key], bool):
            return {}, f"field {key!r} is {type(told[key]).__name__}"
    for key, kind in SINCE.items():
        if key in told and (not isinstance(told[key], kind) or isinstance(told[key], bool)):
            return {}, f"field {key!r} is {type(told[key]).__name__}"
    return told, None


def version_of(told: Mapping[str, Any]) -> PolicyVersion:
    """Raises `KeyError`, `TypeError` and `ValueError` for a line that describes none."""
    names = PolicyVersion.__dataclass_fields__
    return PolicyVersion(**{name: told[name] for name in names})


def tensors_of(told: Mapping[str, Any]) -> WeightManifest:
    """The manifest that a line of versions.jsonl spells out; errors as `version_of`."""
    return WeightManifest(
        tuple(
            TensorEntry(name, tuple(shape), dtype, int(digest, 16))
            for name, shape, dtype, digest in told["tensors"]
        )
    )
