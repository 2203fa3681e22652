"""The checks of `audit verify`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.audit import (
    check_checkpoints,
    check_contracts,
    check_files,
    check_outputs,
    check_resumes,
    check_run,
    check_samples,
    check_scores,
    check_training,
    check_versions,
)
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RunView


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
        "read_back",
        "weights were read back from the generator as often as the recipe says",
        check_versions.read_back,
        needs_recipe=True,
    ),
    RunCheck(
        "updates",
        "steps lead from the version that generated to the next one",
        check_versions.updates,
        needs_recipe=True,
    ),
    RunCheck(
        "handovers",
        "no version is told more often than the journal committed or loaded it",
        check_versions.handovers,
    ),
    RunCheck("once", "no experience trains twice", check_versions.once),
    RunCheck("chain", "each manifest names the one before it", check_files.chain),
    RunCheck("strays", "nothing lies among iterations but iterations", check_files.strays),
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
    RunCheck(
        "contracts",
        "recipe, sampling, data and tokenizer change only where a resume was allowed to",
        check_contracts.contracts,
    ),
    RunCheck("times", "the journal's clock does not jump back", check_run.clocks_of_journal),
    RunCheck(
        "finished", "finished.json names the last commit", check_run.finished, needs_recipe=True
    ),
    RunCheck(
        "resumes",
        "resumes are numbered, and went on as they say",
        check_resumes.resumes,
    ),
    RunCheck(
        "attempts",
        "versions carry the attempt of their start, a redone update a new one",
        check_resumes.attempts,
        needs_recipe=True,
    ),
    RunCheck(
        "aside",
        "what resumes set aside is there, and begins at the position",
        check_resumes.set_aside,
        needs_recipe=True,
    ),
    RunCheck(
        "checkpoints",
        "checkpoints have the files committed: tensors by size, others by hash",
        check_checkpoints.checkpoints,
        needs_recipe=True,
    ),
    RunCheck(
        "positions",
        "a position is that of the run at its iteration",
        check_checkpoints.positions,
        needs_recipe=True,
    ),
    RunCheck("rows", "metrics.jsonl has one row of each iteration", check_outputs.rows),
    RunCheck("setting", "data.json and environment.json are there", check_outputs.setting),
    RunCheck("export", "hf/ holds the version committed last", check_outputs.export),
)
EARLIER = ("records", "recipe", "journal", "versions", "digests", "updates", "handovers", "once")
EARLIER += ("retention", "times", "finished", "rows", "tokenizer", "scorer", "contracts")
"""Checks of a run that what resumes set aside must pass too, joined with what it was cut from."""
COLUMNS = ("recipe", "manifest", "parts", "ids", "columns")
_SEALED = (*COLUMNS, "sealed")
_AGAIN = (*_SEALED, "again")
_CHECKED = (*_AGAIN, "groups", "tokens", "ends", "log_probs", "scores", "parity", "selection")
_CHECKED += ("ledger", "denominators", "advantages")
"""Facts that something was found in lead to other numbers: one cause is told once."""
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
        "versions of log-probs and values are known, and those of then in their roles",
        check_versions.producers,
        ("recipe", "manifest"),
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
        "groups", "groups are whole and answer one prompt", check_samples.groups, COLUMNS
    ),
    IterationCheck(
        "tokens",
        "ids lie in the vocabulary, lengths within limits, masks are whole",
        check_samples.tokens,
        (*COLUMNS, "tokens"),
    ),
    IterationCheck(
        "seeds", "every sample has its own request's seed", check_samples.seeds, COLUMNS
    ),
    IterationCheck("ends", "responses end as their tokens say", check_samples.ends, COLUMNS),
    IterationCheck(
        "log_probs",
        "log-probs are finite and not above 0, values finite",
        check_scores.log_probs,
        COLUMNS,
    ),
    IterationCheck(
        "clocks",
        "samples start, finish and are sealed in this order",
        check_samples.clocks,
        COLUMNS,
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
        "advantages, token rewards and returns follow from the facts, bit for bit",
        check_training.advantages,
        _AGAIN,
    ),
    IterationCheck(
        "beta",
        "the KL term's weight follows from the recipe, iteration by iteration",
        check_training.beta,
        _CHECKED,
    ),
    IterationCheck(
        "losses",
        "the first steps' recorded losses are what the facts give",
        check_training.first_losses,
        _CHECKED,
    ),
    IterationCheck(
        "metrics",
        "metrics.jsonl has the numbers that the facts and updates give",
        check_outputs.metrics,
        _CHECKED,
    ),
)
