"""`audit recompute`: derived numbers from sealed facts alone, as trained or with other settings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.audit import text
from megarl.audit.again import (
    Difference,
    Recomputed,
    differences,
    recompute,
    scored_under,
    sealed_beta,
)
from megarl.audit.losses import TOLERANCE, FirstLoss, first_loss, first_value_loss
from megarl.audit.recompute_text import as_trained, what_if
from megarl.audit.source import open_sealed, updates_of
from megarl.audit.terms import terms, token_kl, value_losses
from megarl.audit.view import RunView
from megarl.audit.whatif import Refused, check_recomputable, told
from megarl.experience.columns import SealError, write_columns
from megarl.experience.load import SealedIteration
from megarl.experience.parts import DERIVED_COLUMNS
from megarl.experience.store import FOLDER
from megarl.observe.output import prepare_output
from megarl.observe.runfolder import RECIPE_FILE, NotARun
from megarl.recipe import Recipe, RecipeError, load_recipe

LINE = "selection, minibatches and advantages again from sealed facts; as trained, or what if"
HELP = f"""{LINE}

Without key=value: what the run trained on is computed again from prompts, samples, rewards and
log-probs alone, by the same functions, and compared bit for bit. With key=value: what other
settings would have made of the same samples, without a new rollout. Keys that need one, or a
forward, are refused by name.

examples:
  python tools/audit.py recompute runs/quickstart-s1
  python tools/audit.py recompute runs/quickstart-s1 --iterations 3-5
  python tools/audit.py recompute runs/quickstart-s1 algorithm.group_std=none
  python tools/audit.py recompute runs/ppo algorithm.gae.lam=1 algorithm.whiten=none
  python tools/audit.py recompute runs/kl algorithm.kl.beta=0.01 algorithm.kl.estimator=k2
  python tools/audit.py recompute runs/quickstart-s1 algorithm.zero_variance=keep --out new.safetensors

The loss terms are those at ratio 1, where every iteration's first minibatch really is. Its loss is
held against the recorded one, within {TOLERANCE:g} of the mean |advantage|: the trainer sums in float32.

exit codes: 0 equal, or told what would change; 1 something differs, or a sealed file is damaged;
2 no such run, iteration or key, or one that cannot be recomputed
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other recipe settings")
    parser.add_argument("--iterations", metavar="A-B", help="3, 2-5, 2- or -5 (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the new columns, safetensors")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found; returns the exit code."""
    prepare_output()
    try:
        job = _job(arguments)
        results = [_iteration(job, number) for number in job.iterations]
        if arguments.out is not None:
            _write(arguments.out, job, results)
    except (NotARun, RecipeError, Refused, ValueError) as error:
        print(f"audit recompute: {error}", file=sys.stderr)
        return 1 if isinstance(error, SealError) else 2
    if arguments.json:
        print(json.dumps(_as_json(job, results), allow_nan=False))
    else:
        print("\n".join(what_if(job, results) if job.changes else as_trained(job, results)))
    return 1 if any(result.problems for result in results) else 0


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    source: RunView
    recipe: Recipe
    """The run's last one; an iteration before a resume may have had another."""
    other: Recipe
    overrides: Sequence[str]
    changes: Sequence[str]
    """`key old → new`."""
    iterations: list[int]
    keeps_columns: bool


@dataclass
class Result:
    """One iteration: what was trained on, what the other recipe makes of it, what differs."""

    iteration: int
    problems: list[str]
    compared: bool
    """False where nothing was derived, so that there is nothing to compare with."""
    old: dict[str, Any]
    new: dict[str, Any]
    first_loss: dict[str, float] | None
    """None where it is not compared; `loss_not_compared` says why."""
    loss_not_compared: str | None
    changed: int
    """Samples whose verdict, minibatch or advantage is another."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)


def _job(arguments: argparse.Namespace) -> Job:
    source = open_sealed(arguments.folder)
    recipe = source.recipe
    other = load_recipe(arguments.folder / RECIPE_FILE, arguments.overrides)
    chosen = list(source.sealed)
    if arguments.iterations is not None:
        chosen = text.iteration_range(arguments.iterations, chosen)
    roles = [source.iteration(number).manifest.header.producers for number in chosen]
    sealed_by_all = frozenset.intersection(*map(frozenset, roles)) if roles else frozenset()
    check_recomputable(recipe, other, sealed_by_all)
    if arguments.out is not None:
        _check_out(arguments.out, arguments.folder)
    changes = told(recipe, other)
    return Job(
        source, recipe, other, arguments.overrides, changes, chosen, arguments.out is not None
    )


def _check_out(path: Path, run_folder: Path) -> None:
    if path.exists():
        raise Refused(f"--out {path} exists; name another file")
    if not path.absolute().parent.is_dir():
        raise Refused(f"--out {path}: there is no folder {path.parent}")
    if path.resolve().is_relative_to((run_folder / FOLDER).resolve()):
        raise Refused(f"--out {path} lies among sealed files; name another folder")


def _iteration(job: Job, number: int) -> Result:
    sealed = job.source.iteration(number).sealed
    recipe, other = job.source.recipe_of(number), job.other
    if recipe is not job.recipe:
        other = load_recipe(job.source.recipe_file(number), job.overrides)
    again = recompute(sealed, recipe)
    problems: list[Difference] = []
    if sealed.derived is not None:
        problems = list(differences(sealed, again))
    loss, value_loss = _first_losses(job, recipe, sealed, again)
    new, scores = again, None
    if job.changes:
        facts = job.source.facts_recipe_of(number)
        if other.reward != facts.reward:
            scores = scored_under(sealed.scores, facts, other)
        new = recompute(sealed, other, scores, _beta(sealed, recipe, other))
    return Result(
        iteration=number,
        problems=[*map(str, problems), *_wrong_loss(loss), *_wrong_loss(value_loss)],
        compared=sealed.derived is not None,
        old=_numbers(sealed, again, recipe),
        new=_numbers(sealed, new, other),
        first_loss=asdict(loss) if isinstance(loss, FirstLoss) else None,
        loss_not_compared=loss if isinstance(loss, str) else None,
        changed=_changed(sealed, again, new),
        columns=_columns(sealed, new, other) if job.keeps_columns else {},
    )


def _numbers(sealed: SealedIteration, again: Recomputed, recipe: Recipe) -> dict[str, Any]:
    """What a table tells of an iteration under a recipe; None for what is not known."""
    trained = again.advantages[again.plan.trained]
    values = value_losses(sealed, again, recipe) or []
    parts = [part for part in terms(sealed, again, recipe) if part is not None]
    kl = token_kl(sealed, recipe.algorithm.kl.estimator)
    on = np.repeat(again.plan.trained, sealed.samples.response_lengths) & sealed.samples.action_mask
    known = np.zeros(0) if kl is None else kl[on & ~np.isnan(kl)]
    terms_kl, surrogates = [part.kl for part in parts], [part.surrogate for part in parts]
    return {
        "groups_trained": again.plan.selection.counts["groups_trained"],
        "samples_trained": int(again.plan.trained.sum()),
        "tokens_trained": sum(totals.tokens for totals in again.plan.totals),
        "advantage_abs_mean": _mean(np.abs(trained)),
        "advantage_abs_max": float(np.abs(trained).max()) if len(trained) else None,
        "kl_mean": _mean(known),
        "kl_tokens_unknown": None if kl is None else int(on.sum()) - len(known),
        "kl_beta": again.derived.kl_beta,
        "surrogate": None if None in surrogates else _mean(surrogates),
        "kl_term": None if None in terms_kl else _mean(terms_kl),
        "value_loss": _mean([value for value in values if value is not None]),
    }


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _beta(sealed: SealedIteration, recipe: Recipe, other: Recipe) -> float:
    """β under `other`: its own where it is another; else as it was in the iteration."""
    own = other.algorithm.kl.beta
    return sealed_beta(sealed, recipe) if own == recipe.algorithm.kl.beta else own


def _first_losses(
    job: Job, recipe: Recipe, sealed: SealedIteration, again: Recomputed
) -> tuple[FirstLoss | str, FirstLoss | None]:
    """The first steps' losses, the actor's (or why not) and the critic's, as the run recorded them
    and as they are recomputed."""
    number = sealed.manifest.header.iteration
    lines = updates_of(job.source, number)
    if not lines:
        return "no update is recorded", None
    rows = [line.told for line in job.source.metrics.of(number)[:1]]
    actor = first_loss(sealed, again, recipe, lines[0], rows[0] if rows else {})
    return actor, first_value_loss(sealed, again, recipe, lines[0])


def _wrong_loss(loss: FirstLoss | str | None) -> list[str]:
    return [str(loss)] if isinstance(loss, FirstLoss) and not loss.agrees else []


def _changed(sealed: SealedIteration, old: Recomputed, new: Recomputed) -> int:
    same = old.plan.selection.verdict == new.plan.selection.verdict
    same &= old.plan.minibatch == new.plan.minibatch
    lengths = sealed.samples.response_lengths
    moved = old.derived.advantages != new.derived.advantages
    moved &= np.repeat(old.plan.trained | new.plan.trained, lengths)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return int((~same | (np.bincount(rows, moved, minlength=len(lengths)) > 0)).sum())


def _columns(sealed: SealedIteration, new: Recomputed, recipe: Recipe) -> dict[str, np.ndarray]:
    samples = sealed.samples
    columns = {
        "draw_index": samples.draw_index,
        "candidate": samples.candidate,
        "response_lengths": samples.response_lengths,
        "verdict": new.plan.selection.verdict,
        "minibatch": new.plan.minibatch,
        "sample_advantages": new.advantages,
    }
    for name in DERIVED_COLUMNS:
        if getattr(new.derived, name) is not None:
            columns[name] = getattr(new.derived, name)
    kl = token_kl(sealed, recipe.algorithm.kl.estimator)
    return columns if kl is None else columns | {"kl": kl}


def _write(path: Path, job: Job, results: Sequence[Result]) -> None:
    """One table over all iterations: `iteration` int32 [N], per-token columns float32 [R]."""
    names = results[0].columns
    columns = {name: np.concatenate([result.columns[name] for result in results]) for name in names}
    lengths = columns.pop("response_lengths")
    columns["response_offsets"] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    rows = [len(result.columns["draw_index"]) for result in results]
    numbers = [result.iteration for result in results]
    columns["iteration"] = np.repeat(np.array(numbers, dtype=np.int32), rows)
    metadata = {
        "run_id": job.recipe.run.name,
        "recipe_hash": job.other.hash,
        "changes": list(job.changes),
    }
    write_columns(path, "recomputed", 0, columns, metadata)


def _as_json(job: Job, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "run": job.recipe.run.name,
        "recipe_hash": job.recipe.hash,
        "changes": list(job.changes),
        "equal": all(result.compared and not result.problems for result in results),
        "iterations": [
            {name: value for name, value in asdict(result).items() if name != "columns"}
            for result in results
        ],
    }
