"""Checks of what a run wrote for people and for other programs: metrics, facts of its machine and
data, and the exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from megarl.audit.check_versions import MOST_TENSORS
from megarl.audit.findings import Found
from megarl.audit.logs import tensors_of
from megarl.audit.view import IterationView, RunView
from megarl.contracts.version import TensorEntry, WeightManifest
from megarl.data.prepare import Parity
from megarl.experience.versions import VERSION
from megarl.modes.sealed_updates import table_of
from megarl.observe.environment import ENVIRONMENT_FILE
from megarl.observe.row import reward_row, rollout_row
from megarl.recipe import RecipeError
from megarl.reshard.digest import block_digest

DATA_FILE = "data.json"
EXPORT_FOLDER = "hf"
FROM_FACTS = ("reward/", "response/", "prompt/")
"""Numbers of a row that follow from samples and rewards alone."""
FROM_SELECTION = ("groups/", "parity/")
_HOW_DRAWN = {"rounds": 0, "prompts": 0, "lost_reasons": {}, "by_source": {}, "by_length": {}}
"""Of the account, what is told by the ledger alone; no number that is compared has it."""
RELATIVE, ABSOLUTE = 1e-9, 1e-9
"""How far a number of a row may be off: means over the same numbers, in another order."""


def metrics(view: IterationView) -> Iterator[Found]:
    """The iteration's row has the numbers that follow from the sealed facts and from its update."""
    run = view.run
    if run.only_scores:
        return
    for line in run.metrics.of(view.number)[:1]:
        for key, value in _expected(view).items():
            told = line.told.get(key)
            known = isinstance(told, int | float) and not isinstance(told, bool)
            if not known or not math.isclose(told, value, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                what = f"{told}, the facts give {value:.12g}"
                yield Found(line.where, what, field=key)


def _expected(view: IterationView) -> dict[str, float]:
    run, sealed, plan = view.run, view.sealed, view.again.plan
    table = table_of(sealed)
    action = sealed.samples.action_mask & ~np.isnan(sealed.old_log_probs)
    gaps = np.abs(sealed.old_log_probs.astype(np.float64) - sealed.samples.rollout_log_probs)
    gaps = gaps[action]
    parity = Parity(
        max=float(gaps.max()) if len(gaps) else 0.0,
        mean=float(gaps.mean()) if len(gaps) else 0.0,
        tokens=len(gaps),
        where="",
    )
    sources = tuple(prompt["source"] for prompt in sealed.prompts)
    plan = replace(plan, account=plan.account | _HOW_DRAWN, sources=sources)
    wanted = FROM_FACTS if run.only_collects else FROM_FACTS + FROM_SELECTION
    row = reward_row(table.scores) | rollout_row(table, plan, parity)
    row = {key: value for key, value in row.items() if key.startswith(wanted)}
    return row if run.only_collects else row | _of_update(view)


def _of_update(view: IterationView) -> dict[str, float]:
    """What the row repeats of advantages and of updates.jsonl."""
    row = dict(view.again.credit.numbers)
    if view.again.derived.kl_beta:
        row["kl/beta"] = view.again.derived.kl_beta
    for line in view.run.updates.of(view.number)[:1]:
        for field, group in (("steps", "update"), ("critic", "critic")):
            steps = [step for step in line.told.get(field, []) if isinstance(step, dict)]
            if steps or group == "update":
                row |= {f"{group}/{key}": value for key, value in _of_steps(steps).items()}
    return row


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a row repeats of one role's steps."""
    stepped = [step for step in steps if step.get("stepped")]
    stopped = sum(bool(step.get("stopped")) for step in steps)
    row = {"steps": float(len(stepped)), "skipped": float(len(steps) - len(stepped) - stopped)}
    if not sum(step.get("tokens") or 0 for step in stepped):
        return row
    for field in ("loss", "grad_norm"):
        values = [step.get(field) for step in stepped]
        if all(isinstance(value, int | float) for value in values):
            row[field] = float(np.mean(values))
    return row


def rows(run: RunView) -> Iterator[Found]:
    """metrics.jsonl has one row of each iteration that was trained on, or collected, in order."""
    if run.is_replay or run.only_scores:
        return
    done = set(run.trained)
    if run.only_collects:
        done = {line["iteration"] for line in run.journal if line["state"] == "EXPERIENCE_SEALED"}
    there = [line["iteration"] for line in run.metrics]
    for before, line in zip(run.metrics.lines, run.metrics.lines[1:], strict=False):
        if line["iteration"] <= before["iteration"]:
            what = f"iteration {line['iteration']} after {before['iteration']} of {before.where}"
            yield Found(line.where, what, field="iteration")
    for number in sorted(done - set(there)):
        # The row comes last: a run may end between the commit and its row.
        if run.is_finished or number != max(done):
            yield Found(run.metrics.file, f"no row of iteration {number}")
    # Of the last iteration a failed run may have neither: only a row without a commit is odd.
    for number in sorted(set(there) - done):
        yield Found(run.metrics.file, f"a row of iteration {number}, which the journal never ended")


def setting(run: RunView) -> Iterator[Found]:
    """What the run ran on, and with which data, is told."""
    generated = any(line["state"] == "GENERATING" for line in run.journal)
    if run.cut is not None:
        return  # set aside, and not written anew yet
    for file, needed in ((ENVIRONMENT_FILE, len(run.journal) > 0), (DATA_FILE, generated)):
        path = run.folder / file
        if not path.exists():
            if needed:
                yield Found(file, "is missing")
            continue
        try:
            told = json.loads(path.read_bytes())
        except OSError as error:
            yield Found(file, f"cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:
            yield Found(file, f"is not JSON: {error}")
        else:
            if not isinstance(told, dict):
                yield Found(file, "is no JSON object")


def export(run: RunView) -> Iterator[Found]:
    """The exported model is the version that was committed last, tensor by tensor."""
    folder = run.folder / EXPORT_FOLDER
    if not (run.is_finished and run.trained):
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield Found(EXPORT_FOLDER, "holds no weights, though the run finished")
        return
    last = [line["version"] for line in run.journal if line["state"] == "ACTOR_COMMITTED"][-1]
    lines = [line for line in run.versions if line["kind"] == VERSION and line["id"] == last]
    if not lines or export_note(run) is not None:
        return  # `versions` tells the first, a note the second
    try:
        wanted = tensors_of(lines[-1].told)
    except (TypeError, ValueError):
        return  # `digests` tells it
    kinds = {entry.name: entry.dtype for entry in wanted.tensors}
    entries: list[TensorEntry] = []
    for path in files:
        try:
            entries += _digested(path, kinds)
        except (SafetensorError, OSError) as error:
            yield Found(f"{EXPORT_FOLDER}/{path.name}", f"cannot be read: {error}")
            return
    for difference in wanted.differences(WeightManifest(tuple(entries)))[:MOST_TENSORS]:
        what = f"is not what {lines[-1].where} committed: {difference}"
        yield Found(EXPORT_FOLDER, what, field="weights")


def _digested(path: Path, kinds: dict[str, str]) -> Iterator[TensorEntry]:
    """A file's tensors in the dtypes that were digested: those that the generator gets."""
    with safe_open(path, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open is no dict
            tensor = tensors.get_tensor(name)
            kind = getattr(torch, kinds.get(name, ""), tensor.dtype)
            shape = tuple(tensor.shape)
            digest = block_digest(tensor.reshape(len(tensor), -1).to(kind), name, 0, 0)
            yield TensorEntry(name, shape, str(kind).removeprefix("torch."), digest)


def export_note(run: RunView) -> str | None:
    """Why the exported weights cannot be held against digests, or None where they can: those of a
    wider dtype than the exported files have."""
    if not (run.is_finished and run.trained):
        return None
    try:
        held, written = run.recipe.rollout.dtype, run.recipe.model.dtype
    except RecipeError:  # `recipe` tells it
        return None
    if getattr(torch, held).itemsize <= getattr(torch, written).itemsize:
        return None
    return f"{EXPORT_FOLDER}/ is {written}, digests are of {held}: its weights are not compared"
