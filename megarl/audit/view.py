"""A run's folder as an auditor reads it: every file on demand, nothing taken on trust.

What cannot be read is a problem to be told, never an exception that hides the rest: logs give
their good lines and their bad ones; a sealed iteration raises `SealError` where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megarl.audit.again import Recomputed, recompute
from megarl.audit.logs import LEDGER_FILE, METRICS_FILE, Line, Log, read_bytes, read_log, version_of
from megarl.checkpoint.segments import (
    Resumed,
    Segment,
    facts_recipe,
    read_resumes,
    segment_of,
    segments,
)
from megarl.contracts.states import JOURNAL_FILE
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion
from megarl.experience.columns import Part, SealError, read_columns, read_lines
from megarl.experience.load import SealedIteration, load_iteration
from megarl.experience.manifest import (
    DERIVED_FILE,
    FOLDER,
    MANIFEST_FILE,
    Manifest,
    fault,
    iteration_folder,
    iteration_folders,
    parts_of,
    read_json,
    read_manifest,
)
from megarl.experience.source import SOURCE_FILE
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
        self.home = run.homes.get(number, run.folder)
        self.folder = iteration_folder(self.home, number)

    def file(self, name: str) -> str:
        """A file's name for findings: relative to the run's folder."""
        return str((self.folder / name).relative_to(self.run.root))

    @property
    def recipe(self) -> Recipe:
        """Under which it trained. Raises `RecipeError`."""
        return self.run.recipe_of(self.number)

    @property
    def facts_recipe(self) -> Recipe:
        """Under which it was sealed: another one where a resume used its facts."""
        return self.run.facts_recipe_of(self.number)

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
        return load_iteration(self.home, self.number)

    @cached_property
    def again(self) -> Recomputed:
        """What its recipe makes of the facts. Raises `ValueError` where it cannot."""
        return recompute(self.sealed, self.recipe)

    def sample_id(self, draw_index: int, candidate: int) -> str:
        """As `Identities.sample_id`, and readable where the draw index is no prompt's."""
        known = 0 <= draw_index < len(self.prompts)
        prompt = self.prompts[draw_index]["prompt_id"] if known else f"draw {draw_index}"
        return f"{self.manifest.header.run_id}/{self.number}/{prompt}/{candidate}"

    def _raw(self, kind: str) -> list[RawPart]:
        parts = [part for part in self.manifest.parts if part.kind == kind]
        return [RawPart(part, *read_columns(self.folder, part)) for part in parts]


class RunView:
    """A run's folder, as the last start left it. Made by `open_run`."""

    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        """`whole`: also what a resume that is cutting the folder back has not set aside yet."""
        self.folder = self.root = folder
        self._whole = whole
        # One at a time: an iteration may be as large as memory allows.
        self.iteration = lru_cache(maxsize=1)(lambda number: IterationView(self, number))
        self._recipes = lru_cache(maxsize=None)(load_recipe)
        self._tokens = lru_cache(maxsize=None)(Tokens.load)
        self._earlier: list[Any] | None = None

    def file(self, name: str) -> str:
        """A file's name for findings: relative to the run's folder."""
        return str((self.folder / name).relative_to(self.root))

    @cached_property
    def recipe(self) -> Recipe:
        """The last one. Raises `RecipeError`."""
        return self._recipes(self.folder / RECIPE_FILE)

    def recipe_file(self, iteration: int) -> Path:
        """Of the recipe under which it trained."""
        return segment_of(self.segments, iteration).recipe

    def recipe_of(self, iteration: int) -> Recipe:
        """Raises `RecipeError`."""
        return self._recipes(self.recipe_file(iteration))

    def facts_recipe_of(self, iteration: int) -> Recipe:
        """Raises `RecipeError`."""
        return self._recipes(facts_recipe(self.resumes, self.root, iteration, self.begun))

    @cached_property
    def resumes(self) -> list[Resumed]:
        """All of the run, by number; what is wrong with others, `resumes` tells."""
        return read_resumes(self.root)[0]

    @cached_property
    def begun(self) -> int:
        """How many of them came to a state: others at the end may still set things aside."""
        latest = max((line["time"] for line in read_log(self.folder, JOURNAL_FILE)), default=0.0)
        count = len(self.resumes)
        while count and self.resumes[count - 1].time > latest:
            count -= 1
        return count

    @cached_property
    def cut(self) -> int | None:
        """From which iteration on all goes aside now; None where no resume is cutting back."""
        return min((item.cut for item in self.resumes[self.begun :]), default=None)

    @cached_property
    def segments(self) -> list[Segment]:
        """The starts that the run's iterations are from."""
        return segments(self.resumes, self.root, self.begun)

    @property
    def first(self) -> int:
        """The first iteration there ever was: that of the checkpoint where it is another run's."""
        return self.segments[0].first

    def log(self, file: str) -> Log:
        """A line file as far as it is this run's."""
        log = read_log(self.folder, file)
        return log if self.cut is None or self._whole else log.before(self.cut)

    def bytes_of(self, file: str) -> bytes:
        return read_bytes(self.folder / file)

    def earlier_states(self, make: Callable[[int, RunView], RunView]) -> list[Any]:
        """What `make(index of a resume, state after it)` makes for each, the last one first."""
        if self._earlier is None:
            self._earlier, later = [], RunView(self.folder, whole=True)
            for at in reversed(range(len(self.resumes))):
                later = make(at, later)
                self._earlier.insert(0, later)
        return self._earlier

    @cached_property
    def journal(self) -> Log:
        return self.log(JOURNAL_FILE)

    @cached_property
    def versions(self) -> Log:
        return self.log(VERSIONS_FILE)

    @cached_property
    def updates(self) -> Log:
        return self.log(UPDATES_FILE)

    @cached_property
    def ledger(self) -> Log:
        return self.log(LEDGER_FILE)

    @cached_property
    def metrics(self) -> Log:
        return self.log(METRICS_FILE)

    @cached_property
    def homes(self) -> dict[int, Path]:
        """Iteration → the folder whose `experience/` holds it; not all need be sealed."""
        there = (number for number, _ in iteration_folders(self.folder))
        end = None if self._whole else self.cut
        return {number: self.folder for number in there if end is None or number < end}

    def tokens_in(self, folder: Path) -> Tokens:
        """A copy of the tokenizer that the run kept. Raises `TokensError`."""
        return self._tokens(folder)

    @property
    def is_replay(self) -> bool:
        """It redoes updates of another run."""
        return (self.folder / REPLAY_FILE).exists()

    @property
    def is_finished(self) -> bool:
        return (self.folder / FINISHED_FILE).exists()

    @property
    def folders(self) -> tuple[int, ...]:
        """Iterations that have a folder, rising."""
        return tuple(self._places)

    @cached_property
    def sealed(self) -> tuple[int, ...]:
        """Iterations that have a manifest, rising."""
        return tuple(n for n, path in self._places.items() if (path / MANIFEST_FILE).exists())

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Iterations that are made of another run's sealed facts (`--only score`, `train`)."""
        return tuple(n for n, path in self._places.items() if (path / SOURCE_FILE).exists())

    @cached_property
    def _places(self) -> dict[int, Path]:
        return {n: iteration_folder(home, n) for n, home in sorted(self.homes.items())}

    @cached_property
    def reused(self) -> frozenset[int]:
        """Iterations that went on, after a resume, from the facts they had sealed before it."""
        starts = (segment.start for segment in self.segments if segment.start is not None)
        return frozenset(start.reused for start in starts if start.reused is not None)

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
        derived = any((path / DERIVED_FILE).exists() for path in self._places.values())
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


def open_run(folder: Path) -> RunView:
    """Raises `NotARun` in one line."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NotARun(f"{folder}: there is no such folder; give a run's, like runs/quickstart-s1")
    if not any((folder / name).exists() for name in (RECIPE_FILE, JOURNAL_FILE, FOLDER)):
        raise NotARun(f"{folder}: holds no recipe.yaml, journal.jsonl or experience: not a run")
    return RunView(folder)
