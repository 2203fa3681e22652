"""Reads what a run left in its folder, for the summary and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megarl.contracts.states import JOURNAL_FILE
from megarl.observe import metrics
from megarl.observe.environment import ENVIRONMENT_FILE

FINISHED_FILE = "finished.json"
"""Written last: a run folder with it is whole."""
RECIPE_FILE = "recipe.yaml"
DATA_FILE = "data.json"
TIMELINE_FILE = "timeline.json"
TOKENIZER_FOLDER = "tokenizer"
REPLAY_FILE = "replay.json"
"""Marks the folder of a replay from its start on; in the end it tells what was compared."""


class NotARun(ValueError):
    """A folder that holds no run, or one that cannot be read."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run as its files tell it.

    `rows` are those of metrics.jsonl by iteration, `torn` says its last line is cut off;
    `recipe` and `environment` are empty where their file is missing.
    """

    folder: Path
    rows: tuple[dict[str, Any], ...]
    torn: bool
    recipe: dict[str, Any]
    environment: dict[str, Any]
    replay: dict[str, Any] = field(default_factory=dict)
    """What a finished replay compared; empty for other runs, and while it goes on."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def iterations(self) -> int | None:
        """How many the recipe asks for."""
        return self.setting("run", "iterations")

    def setting(self, *keys: str) -> Any:
        """A value of the resolved recipe, None where there is none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def points(self, key: str) -> list[tuple[float, float]]:
        """(iteration, value) of the rows that have the metric `key`."""
        return [(row[metrics.ITERATION], row[key]) for row in self.rows if key in row]

    def evaluations(self, key: str) -> list[tuple[float, float]]:
        """(iterations before, value) of the evaluations that have the metric `key`, final ones
        too; in order, one for each number of iterations.

        A run that was extended keeps the final one of its earlier end; where the row behind it
        has one of the same weights, that one counts.
        """
        final, values = metrics.final_name(key), dict[float, float]()
        for row in self.rows:
            if key in row:
                values[row[metrics.ITERATION]] = row[key]
            if final in row:
                values[row[metrics.ITERATION] + 1] = row[final]
        return sorted(values.items())

    def sources(self) -> list[str]:
        """Sources that iterations tell apart, by name; none where they drew from one alone."""
        keys = {key for row in self.rows for key in row if key.startswith(metrics.PROMPTS_OF)}
        return sorted(key.removeprefix(metrics.PROMPTS_OF) for key in keys)

    def replayed(self) -> str | None:
        """What a finished replay found, in words; None for other runs."""
        if not self.replay:
            return None
        told = f"replay of {self.replay.get('run')}@{self.replay.get('iteration')}"
        verdict = "within" if self.replay.get("within") is True else "beyond"
        return f"{told}: {verdict} tolerance"

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of the whole run by outermost stage, the longest first, `other` last."""
        totals: dict[str, float] = {}
        for row in self.rows:
            for key, value in row.items():
                if is_stage(key):
                    name = key.removeprefix(metrics.STAGE_PREFIX)
                    totals[name] = totals.get(name, 0.0) + value
        ordered = dict(sorted(totals.items(), key=lambda item: -item[1]))
        whole = sum(seconds for _, seconds in self.points(metrics.SECONDS))
        return ordered | {"other": max(0.0, whole - sum(ordered.values()))}

    def unfinished(self) -> str | None:
        """Why the run counts as incomplete, None when it ended as it should."""
        if self.replay or (self.folder / FINISHED_FILE).exists():
            return None
        done = f"{len(self.rows)} of {self.iterations or '?'} iterations are there"
        reason = self._failure()
        return f"{done}; it failed: {reason}" if reason else f"{done}; still going, or it was ended"

    def _failure(self) -> str | None:
        path = self.folder / JOURNAL_FILE
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.splitlines()
        try:
            last = json.loads(lines[-1]) if lines else {}
        except ValueError:  # cut off by the end of the process
            return None
        if not isinstance(last, dict):
            return None
        return str(last.get("reason", "unknown")) if last.get("state") == "FAILED" else None


def is_stage(key: str) -> bool:
    """True for `time/<stage>`, false for nested stages, the iteration and rates."""
    inner = key.removeprefix(metrics.STAGE_PREFIX)
    rate = inner.endswith("_per_second")
    return key != inner and "/" not in inner and not rate and key != metrics.SECONDS


def read_run(folder: Path) -> RunFiles:
    """The run in `folder`; raises `NotARun` in one line when there is none."""
    path = folder / metrics.METRICS_FILE
    if not folder.is_dir():
        raise NotARun(f"{folder}: there is no such folder; give a run's, like runs/quickstart-s1")
    if not path.is_file():
        raise NotARun(f"{folder}: no {metrics.METRICS_FILE} in it; give a run's folder")
    try:
        rows, torn = metrics.read_rows(path)
    except metrics.MetricsError as error:
        raise NotARun(str(error)) from error
    return RunFiles(
        folder=folder,
        rows=tuple(rows),
        torn=torn,
        recipe=_read(folder / RECIPE_FILE),
        environment=_read(folder / ENVIRONMENT_FILE),
        replay=_read(folder / REPLAY_FILE),
    )


def write_finished(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `finished.json`; it appears only when whole."""
    whole = folder / (FINISHED_FILE + ".tmp")
    whole.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    whole.replace(folder / FINISHED_FILE)


def accuracy_before_after(
    rows: Sequence[dict[str, Any]], key: str
) -> tuple[float | None, float | None]:
    """The first evaluation's value of `key` and the last one's, None where there is none.

    A final one is in the row of a run's end, under `eval/final/…`.
    """
    final = metrics.final_name(key)
    firsts = [row[key] for row in rows if key in row]
    lasts = [row.get(final, row.get(key)) for row in rows if key in row or final in row]
    several = len(firsts) > 1 or any(final in row for row in rows)
    return (firsts[0] if firsts else None), (lasts[-1] if several else None)


def _read(path: Path) -> dict[str, Any]:
    """A mapping in YAML or JSON, empty where there is none."""
    if not path.is_file():
        return {}
    body = path.read_bytes()
    try:
        text = body.decode("utf-8")
        value = json.loads(text) if path.suffix == ".json" and text.strip() else _yaml(text)
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise NotARun(f"{path}:{line}: cannot be read: not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise NotARun(f"{path}:{error.lineno}: cannot be read: not JSON: {error.msg}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = " ".join((error.problem or error.context or "not YAML").split())
        raise NotARun(f"{where}: cannot be read: {what}") from error
    except (YAMLError, ValueError, RecursionError) as error:  # a date's 13th month is a ValueError
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotARun(f"{path}: cannot be read: {what}") from error
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> Any:
    return YAML(typ="safe").load(text)
