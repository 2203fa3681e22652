"""A run's folder as an auditor reads it: every file on demand, nothing taken on trust.

What cannot be read is a problem to be told, never an exception that hides the rest: logs give
their good lines and their bad ones; a sealed iteration raises `SealError` where it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megarl.audit.again import Recomputed, recompute
from megarl.audit.logs import LEDGER_FILE, METRICS_FILE, Line, Log, read_log
from megarl.contracts.states import JOURNAL_FILE
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion, TensorEntry, WeightManifest
from megarl.experience.columns import Part, SealError, read_columns, read_lines
from megarl.experience.load import SealedIteration, load_iteration
from megarl.experience.manifest import (
    DERIVED_FILE,
    FOLDER,
    Manifest,
    fault,
    iteration_folder,
    iteration_folders,
    parts_of,
    read_json,
    read_manifest,
    sealed_iterations,
)
from megarl.experience.source import SOURCE_FILE
from megarl.experience.tokenizer import TOKENIZER_FOLDER
from megarl.experience.updates import UPDATES_FILE
from megarl.experience.versions import VERSION, VERSIONS_FILE
from megarl.observe.runfolder import FINISHED_FILE, RECIPE_FILE, NotARun
from megarl.recipe import Recipe, load_recipe
from megarl.run_folder import REPLAY_FILE


@dataclass(frozen=True)
class RawPart:
    """A part whose bytes are those that were sealed; `metadata` is empty for lists of lines."""

    part: Part
    columns: dict[str, np.ndarray]
    metadata: dict[str, Any]


class IterationView:
    """One sealed iteration. Properties raise `SealError` where a file is not what was sealed."""

    def __init__(self, run: RunView, number: int) -> None:
        self.run, self.number = run, number
        self.folder = iteration_folder(run.folder, number)

    def file(self, name: str) -> str:
        """A file's name for findings: relative to the run's folder."""
        return f"{FOLDER}/{self.folder.name}/{name}"

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.folder)

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """By draw index."""
        parts = [part for part in self.manifest.parts if part.kind == "prompts"]
        return [line for part in parts for line in read_lines(self.folder, part)]

    @cached_property
    def rollouts(self) -> list[RawPart]:
        return self._raw("rollout")

    @cached_property
    def scored(self) -> list[RawPart]:
        return self._raw("scored")

    @cached_property
    def derived(self) -> dict[str, Any] | None:
        """`derived.json` as it stands; None where the run ended before deriving."""
        path = self.folder / DERIVED_FILE
        if not path.exists():
            return None
        try:
            told, _ = read_json(path)
            return told | {"parts": parts_of(told)}
        except (TypeError, KeyError) as error:
            raise SealError(f"{path}: not a list of derived parts: {fault(error)}") from error

    @property
    def ended_in_update(self) -> bool:
        """The run ended in the middle of this iteration's update: `derived.json` is written last,
        shortly before the commit, and neither is there. So it can be for a run's last one only."""
        run = self.run
        if run.is_finished or self.number in run.trained or self.number in run.sources:
            return False
        last = max((line["iteration"] for line in run.journal), default=None)
        return self.number == last and not (self.folder / DERIVED_FILE).exists()

    @cached_property
    def sealed(self) -> SealedIteration:
        """All of it, joined by id."""
        return load_iteration(self.run.folder, self.number)

    @cached_property
    def again(self) -> Recomputed:
        """What the run's recipe makes of the facts. Raises `ValueError` where it cannot."""
        return recompute(self.sealed, self.run.recipe)

    def sample_id(self, draw_index: int, candidate: int) -> str:
        """As `Identities.sample_id`, and readable where the draw index is no prompt's."""
        known = 0 <= draw_index < len(self.prompts)
        prompt = self.prompts[draw_index]["prompt_id"] if known else f"draw {draw_index}"
        return f"{self.manifest.header.run_id}/{self.number}/{prompt}/{candidate}"

    def _raw(self, kind: str) -> list[RawPart]:
        parts = [part for part in self.manifest.parts if part.kind == kind]
        return [RawPart(part, *read_columns(self.folder, part)) for part in parts]


class RunView:
    """A run's folder. Made by `open_run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # One at a time: an iteration may be as large as memory allows.
        self.iteration = lru_cache(maxsize=1)(lambda number: IterationView(self, number))

    @cached_property
    def recipe(self) -> Recipe:
        """Raises `RecipeError`."""
        return load_recipe(self.folder / RECIPE_FILE)

    @cached_property
    def journal(self) -> Log:
        return read_log(self.folder, JOURNAL_FILE)

    @cached_property
    def versions(self) -> Log:
        return read_log(self.folder, VERSIONS_FILE)

    @cached_property
    def updates(self) -> Log:
        return read_log(self.folder, UPDATES_FILE)

    @cached_property
    def ledger(self) -> Log:
        return read_log(self.folder, LEDGER_FILE)

    @cached_property
    def tokens(self) -> Tokens:
        """The run's own copy of the tokenizer. Raises `TokensError`."""
        return Tokens.load(self.folder / TOKENIZER_FOLDER)

    @cached_property
    def metrics(self) -> Log:
        return read_log(self.folder, METRICS_FILE)

    @property
    def is_replay(self) -> bool:
        """It redoes updates of another run."""
        return (self.folder / REPLAY_FILE).exists()

    @property
    def is_finished(self) -> bool:
        return (self.folder / FINISHED_FILE).exists()

    @cached_property
    def folders(self) -> tuple[int, ...]:
        """Iterations that have a folder, rising; not all of them need be sealed."""
        return tuple(number for number, _ in iteration_folders(self.folder))

    @cached_property
    def sealed(self) -> tuple[int, ...]:
        """Iterations that have a manifest, rising."""
        return tuple(sealed_iterations(self.folder))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Iterations that are made of another run's sealed facts (`--only score`, `train`)."""
        folders = iteration_folders(self.folder)
        return tuple(number for number, path in folders if (path / SOURCE_FILE).exists())

    @property
    def only_scores(self) -> bool:
        """Sealed samples of another run with other rewards: no states, no version of its own."""
        return bool(self.sources) and bool(self.sealed) and not len(self.journal)

    @cached_property
    def only_collects(self) -> bool:
        """A run that updates nothing: its experience is for others to train on."""
        states = [line["state"] for line in self.journal]
        went_on = ("EXPERIENCE_SEALED", "ACTOR_COMMITTED") in zip(states, states[1:], strict=False)
        updates = any(line["state"] == "UPDATING_FROM" for line in self.journal)
        derived = any((path / DERIVED_FILE).exists() for _, path in iteration_folders(self.folder))
        return (self.is_finished or went_on) and not (updates or derived or len(self.updates))

    def journal_line(self, state: str, iteration: int) -> Line | None:
        """The first line of `state` in an iteration."""
        return self._journal_index.get((state, iteration))

    @cached_property
    def commits(self) -> dict[int, Line]:
        """Iteration → the journal's commit that ended its update."""
        found, updating = {}, None
        for line in self.journal:
            if line["state"] == "ACTOR_COMMITTED" and updating is not None:
                found.setdefault(updating, line)
            updating = line["iteration"] if line["state"] == "UPDATING_FROM" else None
        return found

    @property
    def trained(self) -> frozenset[int]:
        """Iterations whose update ended in a commit, by the journal."""
        return frozenset(self.commits)

    @cached_property
    def policy_versions(self) -> dict[str, PolicyVersion]:
        """By id, of lines that describe one; what is wrong with others, `versions` tells."""
        found = {}
        for line in self.versions:
            if line["kind"] == VERSION:
                try:
                    found[line["id"]] = version_of(line.told)
                except (KeyError, TypeError, ValueError):
                    continue
        return found

    @cached_property
    def _journal_index(self) -> dict[tuple[str, int], Line]:
        index: dict[tuple[str, int], Line] = {}
        for line in self.journal:
            index.setdefault((line["state"], line["iteration"]), line)
        return index


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


def open_run(folder: Path) -> RunView:
    """Raises `NotARun` in one line."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NotARun(f"{folder}: there is no such folder; give a run's, like runs/quickstart-s1")
    if not any((folder / name).exists() for name in (RECIPE_FILE, JOURNAL_FILE, FOLDER)):
        raise NotARun(f"{folder}: holds no recipe.yaml, journal.jsonl or experience: not a run")
    return RunView(folder)
