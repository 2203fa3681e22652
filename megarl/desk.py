"""What every launch has, whichever part of the loop it runs: console, clocks, its own records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.contracts.states import JOURNAL_FILE, TRANSITIONS, Journal, State
from megarl.experience.store import ExperienceStore
from megarl.failure import Failure
from megarl.observe.console import Console
from megarl.observe.metrics import MetricsWriter
from megarl.observe.runfolder import TIMELINE_FILE
from megarl.observe.timeline import Stopwatch
from megarl.recipe import Recipe
from megarl.run_records import RunRecords
from megarl.world import World


@dataclass(frozen=True)
class Desk:
    """Files of the run's folder are written on rank 0; `metrics` is None on the others."""

    recipe: Recipe
    folder: Path
    world: World
    console: Console
    stopwatch: Stopwatch
    metrics: MetricsWriter | None
    records: RunRecords
    journal: Journal
    store: ExperienceStore

    def announce(self, stage: str) -> None:
        """This rank is in `stage` of its start."""
        announce(self.world, self.console, stage)


def announce(world: World, console: Console, stage: str) -> None:
    """This rank is in `stage` of its start."""
    world.enter(stage)
    console.stage(stage.replace("_", " "))


@contextmanager
def console_of(recipe: Recipe, world: World, failure: Failure) -> Iterator[Console]:
    """What a person sees, from the start on."""
    mode = recipe.observe.console if world.is_main else "off"
    with Console(mode, recipe.run.iterations, title=recipe.run.name) as console:
        failure.attach(None, console)
        yield console


@contextmanager
def desk_of(
    recipe: Recipe,
    world: World,
    failure: Failure,
    console: Console,
    transitions: Mapping[State, frozenset[State]] = TRANSITIONS,
) -> Iterator[Desk]:
    """Opens the run's records: they stand where the run goes on. `transitions` are those that the
    run's journal allows."""
    folder, main = recipe.run_folder, world.is_main
    with ExitStack() as stack:
        stopwatch = stack.enter_context(Stopwatch(folder / TIMELINE_FILE if main else None))
        metrics = None
        if main:
            metrics = stack.enter_context(MetricsWriter(folder, recipe.observe.tensorboard))
        # What the run has trained on is read before the journal is written on.
        records = RunRecords(folder, world)
        stack.callback(records.close)
        journal = Journal(folder / JOURNAL_FILE if main else None, transitions)
        stack.callback(journal.close)
        failure.attach(journal, console)
        section = recipe.experience
        store = ExperienceStore(folder, world, section.keep, section.keep_every)
        stack.callback(store.close)
        yield Desk(recipe, folder, world, console, stopwatch, metrics, records, journal, store)
