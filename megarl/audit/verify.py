"""`audit verify RUN`: every check there is, over one run's folder.

Checks run from the outside in. Where a file cannot be read, the check that reads it tells so and
deeper ones skip that iteration. Hashes find changes, not forgers: who rewrites facts, hashes, the
chain, journal, ledger and updates alike is only found by what does not follow from them any more
(seeds, verdicts, totals, advantages, digests), or by a manifest's hash that was kept elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.audit import (
    check_files,
    check_run,
    check_samples,
    check_scores,
    check_training,
    check_versions,
)
from megarl.audit.findings import Found, Outcome, Progress, Report
from megarl.audit.view import IterationView, RunView, open_run
from megarl.contracts.tokens import TokensError
from megarl.experience.columns import SealError
from megarl.experience.manifest import MANIFEST_FILE
from megarl.recipe import RecipeError


@dataclass(frozen=True, slots=True)
class RunCheck:
    """A check over the run as a whole; `line` says what it makes sure of."""

    name: str
    line: str
    find: Callable[[RunView], Iterator[Found]]
    needs_recipe: bool = False


@dataclass(frozen=True, slots=True)
class IterationCheck:
    """A check over every sealed iteration; it is skipped where what it needs cannot be read."""

    name: str
    line: str
    find: Callable[[IterationView], Iterator[Found]]
    needs: tuple[str, ...] = ()
    """Of `recipe`, `tokens`, `manifest`, `parts`, `columns` (sound ones), `sealed` (joined),
    `again` (the recipe applied to them)."""


RUN_CHECKS = (
    RunCheck("records", "every line of every log has its fields", check_run.records),
    RunCheck("recipe", "recipe.yaml is a whole recipe", check_run.recipe),
    RunCheck(
        "journal",
        "a legal walk through the states, one whole cycle after another",
        check_run.journal,
    ),
    RunCheck(
        "versions",
        "ids are hashes of their fields, and all that records name are here",
        check_versions.versions,
        needs_recipe=True,
    ),
    RunCheck(
        "digests",
        "the generator's own weights digest to what the trainer committed",
        check_versions.digests,
    ),
    RunCheck(
        "updates",
        "steps lead from the version that generated to the next one",
        check_versions.updates,
        needs_recipe=True,
    ),
    RunCheck("once", "no experience trains twice", check_versions.once),
    RunCheck("chain", "each manifest names the one before it", check_files.chain),
    RunCheck(
        "retention",
        "only iterations are missing that the recipe lets go",
        check_files.retention,
        needs_recipe=True,
    ),
    RunCheck(
        "tokenizer",
        "the run's tokenizer is the one that records were made with",
        check_run.tokenizer,
    ),
    RunCheck("scorer", "one scorer version scored the whole run", check_scores.scorer),
    RunCheck("times", "the journal's clock does not jump back", check_run.clocks_of_journal),
    RunCheck(
        "finished", "finished.json names the last commit", check_run.finished, needs_recipe=True
    ),
)
_COLUMNS = ("recipe", "manifest", "parts", "ids", "columns")
_SEALED = (*_COLUMNS, "sealed")
_AGAIN = (*_SEALED, "again")
ITERATION_CHECKS = (
    IterationCheck("manifest", "manifests lead to their own hashes", check_files.manifest),
    IterationCheck(
        "parts", "every file has the bytes that were sealed", check_files.parts, ("manifest",)
    ),
    IterationCheck(
        "anchors",
        "journal, ledger and updates hold the hashes of the files",
        check_files.anchors,
        ("manifest",),
    ),
    IterationCheck(
        "origin",
        "records are of this run, iteration, recipe and version",
        check_files.origin,
        ("recipe", "manifest", "parts"),
    ),
    IterationCheck(
        "producers",
        "versions of log-probs are known, in their roles",
        check_versions.producers,
        ("manifest",),
    ),
    IterationCheck(
        "ids", "no two records have one id", check_samples.ids, ("recipe", "manifest", "parts")
    ),
    IterationCheck(
        "columns",
        "columns have their dtype, length and order",
        check_samples.columns,
        ("manifest", "parts", "ids"),
    ),
    IterationCheck(
        "groups", "groups are whole and answer one prompt", check_samples.groups, _COLUMNS
    ),
    IterationCheck(
        "tokens",
        "ids lie in the vocabulary, lengths within limits, masks are whole",
        check_samples.tokens,
        (*_COLUMNS, "tokens"),
    ),
    IterationCheck(
        "seeds", "every sample has its own request's seed", check_samples.seeds, _COLUMNS
    ),
    IterationCheck("ends", "responses end as their tokens say", check_samples.ends, _COLUMNS),
    IterationCheck(
        "log_probs", "log-probs are finite and not above 0", check_scores.log_probs, _COLUMNS
    ),
    IterationCheck(
        "clocks",
        "samples start, finish and are sealed in this order",
        check_samples.clocks,
        _COLUMNS,
    ),
    IterationCheck("scores", "totals follow from components", check_scores.scores, _SEALED),
    IterationCheck(
        "parity",
        "trainer and generator agree within the recipe's bounds",
        check_scores.parity,
        _SEALED,
    ),
    IterationCheck(
        "selection",
        "verdicts and minibatches follow from the facts",
        check_training.selection,
        _AGAIN,
    ),
    IterationCheck(
        "ledger",
        "the ledger closes and is the account of the facts",
        check_training.ledger_of,
        _AGAIN,
    ),
    IterationCheck(
        "denominators",
        "updates counted their minibatches' tokens",
        check_training.denominators,
        _AGAIN,
    ),
    IterationCheck(
        "advantages",
        "advantages follow from the facts, bit for bit",
        check_training.advantages,
        _AGAIN,
    ),
)
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
    return Report(str(run.folder), list(outcomes.values()), _notes(run))


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
        if check.name == LAST_BEFORE_JOIN and readable.issuperset(_COLUMNS):
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
        _ = run.recipe
        readable.add("recipe")
    except RecipeError:
        pass  # `recipe` tells it
    try:
        _ = run.tokens
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
    if run.sources:
        told = f"{len(run.sources)} iterations are made of another run's sealed facts"
        notes.append(f"{told} (source.json): verify that run too")
    return notes


LINE = "every hash, id, state, version and derived number of a run is what it must be"
HELP = f"""{LINE}

Checks bytes, hashes and their chain, the journal's walk, versions and their digests on both
sides, ids, seeds, ends, clocks and rewards; and, made again from the sealed facts, verdicts,
ledger, denominators and advantages. A finding is one line: CHECK: file: what, sample id, field.

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
