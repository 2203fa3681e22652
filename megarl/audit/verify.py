"""`audit verify RUN`: every check there is, over one run's folder.

Checks run from the outside in. Where a file cannot be read, the check that reads it tells so and
deeper ones skip that iteration. Hashes find changes, not forgers: who rewrites facts, hashes, the
chain, journal, ledger and updates alike is only found by what does not follow from them any more
(seeds, verdicts, totals, advantages, digests), or by a manifest's hash that was kept elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megarl.audit import check_checkpoints, check_files, check_outputs, check_run
from megarl.audit.check_contracts import tokenizer_folders
from megarl.audit.checks import COLUMNS, EARLIER, ITERATION_CHECKS, RUN_CHECKS
from megarl.audit.earlier import EarlierView, earlier
from megarl.audit.findings import Found, Outcome, Progress, Report
from megarl.audit.losses import not_comparable
from megarl.audit.view import IterationView, RunView, open_run
from megarl.contracts.tokens import TokensError
from megarl.experience.columns import SealError
from megarl.experience.manifest import DERIVED_FILE, MANIFEST_FILE
from megarl.observe.runfolder import RECIPE_FILE
from megarl.recipe import RecipeError, load_recipe

JOINS, LAST_BEFORE_JOIN = "joins", "clocks"


def verify(run: RunView, progress: Callable[[str], None] = lambda told: None) -> Report:
    """All checks over one run; reads every sealed byte once or twice."""
    outcomes = {check.name: Outcome(check.name, check.line) for check in RUN_CHECKS}
    outcomes |= {check.name: Outcome(check.name, check.line) for check in ITERATION_CHECKS}
    outcomes[JOINS] = Outcome(JOINS, "parts join by id, and the recipe applies to them")
    readable = _readable(run)
    for check in RUN_CHECKS:
        progress(check.name)
        if check.needs_recipe and "recipe" not in readable:
            outcomes[check.name].skipped += 1
        else:
            outcomes[check.name].take(check.find(run))
    for number in run.sealed:
        progress(f"iteration {number}")
        _verify_iteration(run.iteration(number), readable, outcomes)
    for view in earlier(run):
        progress(f"before resume {view.resumed.number}")
        _verify_earlier(view, outcomes)
    return Report(str(run.folder), list(outcomes.values()), _notes(run))


def _verify_earlier(view: EarlierView, outcomes: dict[str, Outcome]) -> None:
    """What a resume set aside, as the run that it was: its own files alone, others were told."""
    readable = _readable(view)
    for check in RUN_CHECKS:
        if check.name in EARLIER and (not check.needs_recipe or "recipe" in readable):
            outcomes[check.name].add(item for item in check.find(view) if view.holds(item.file))
    for number in view.set_aside:
        _verify_iteration(view.iteration(number), readable, outcomes)


def _verify_iteration(
    view: IterationView, of_run: frozenset[str], outcomes: dict[str, Outcome]
) -> None:
    readable, before = set(of_run), _count(outcomes)
    for check in ITERATION_CHECKS:
        outcome = outcomes[check.name]
        if not readable.issuperset(check.needs):
            outcome.skipped += 1
            continue
        found = len(outcome.findings)
        outcome.take(check.find(view))
        if len(outcome.findings) == found:
            readable.add(check.name)
        if check.name == LAST_BEFORE_JOIN and readable.issuperset(COLUMNS):
            told = _join(view, readable)
            # What keeps rows from joining was mostly told by name already.
            outcomes[JOINS].take(told if _count(outcomes) == before else [])


def _join(view: IterationView, readable: set[str]) -> list[Found]:
    """Add `sealed` and `again` to what is readable, or say why they are not."""
    try:
        _ = view.sealed
        readable.add("sealed")
        _ = view.again
        readable.add("again")
    except SealError as error:
        return [Found(view.file(MANIFEST_FILE), check_files.told_by(error))]
    except ValueError as error:
        return [Found(view.file(MANIFEST_FILE), f"the recipe does not fit the facts: {error}")]
    return []


def _count(outcomes: dict[str, Outcome]) -> int:
    return sum(len(outcome.findings) for outcome in outcomes.values())


def _readable(run: RunView) -> frozenset[str]:
    readable = set()
    try:
        for path in {run.folder / RECIPE_FILE} | {part.recipe for part in run.segments}:
            load_recipe(path)
        readable.add("recipe")
    except RecipeError:
        pass  # `recipe` tells it
    try:
        for folder in tokenizer_folders(run):
            run.tokens_in(folder)
        readable.add("tokens")
    except TokensError:
        pass  # `tokenizer` tells it
    return frozenset(readable)


def _notes(run: RunView) -> list[str]:
    notes = []
    if (told := check_run.unfinished(run)) is not None:
        notes.append(told)
    let_go = sorted(
        line["iteration"]
        for line in run.journal
        if line["state"] == "EXPERIENCE_SEALED" and line["iteration"] not in run.folders
    )
    if let_go:
        notes.append(f"{len(let_go)} iterations are not kept: {let_go[0]} … {let_go[-1]}")
    for segment in run.segments:
        if segment.start is not None:
            start = segment.start
            told = f"from {start.checkpoint}" if start.checkpoint else "from the start"
            notes.append(f"resume {start.number}: iteration {segment.first} {told}")
    if run.cut is not None:
        told = f"resume {run.resumes[-1].number} had come to no state of its own"
        notes.append(f"{told}: what lies beyond iteration {run.cut} is told of what it set aside")
    for folder in check_checkpoints.half_written(run):
        notes.append(f"{folder.relative_to(run.root)} is half-written: nothing resumes from it")
    notes += check_checkpoints.damaged_aside(run)
    if run.sources:
        told = f"{len(run.sources)} iterations are made of another run's sealed facts"
        notes.append(f"{told} (source.json): verify that run too")
    begun = (number for number in run.sealed if run.journal_line("UPDATING_FROM", number))
    for number in begun:
        if run.iteration(number).ended_in_update:
            told = f"its update had begun and was not committed; {DERIVED_FILE} was not written"
            notes.append(f"iteration {number}: {told}")
    if (told := check_outputs.export_note(run)) is not None:
        notes.append(told)
    if (told := _losses_note(run)) is not None:
        notes.append(told)
    return notes


def _losses_note(run: RunView) -> str | None:
    try:
        reason = not_comparable(run.recipe)
    except RecipeError:  # `recipe` tells it
        return None
    return None if reason is None else f"first losses are not compared: {reason}"


LINE = "every hash, id, state, version and derived number of a run is what it must be"
HELP = f"""{LINE}

Checks bytes, hashes and their chain, the journal's walk, versions and their digests on both
sides, ids, seeds, ends, clocks and rewards; and, made again from the sealed facts, verdicts,
ledger, denominators, advantages, first losses and metrics. A finding is one line:
CHECK: file: what, sample id, field.

examples:
  python tools/audit.py verify runs/quickstart-s1
  python tools/audit.py verify runs/quickstart-s1 --json | jq '.findings[] | .check'

Who rewrites a whole run consistently is not found: keep the hash of the last manifest elsewhere.

exit codes: 0 nothing found; 1 findings; 2 not a run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, like runs/quickstart-s1")
    parser.add_argument("--json", action="store_true", help="one JSON object, with all findings")


def run(arguments: argparse.Namespace) -> int:
    """Raises `NotARun`. Returns the exit code."""
    report = verify(open_run(arguments.run), Progress())
    if arguments.json:
        print(report.to_json())
    else:
        report.write(sys.stdout)
    return 1 if report.findings else 0
