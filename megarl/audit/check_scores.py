"""Checks of rewards and log-probs: what a sealed iteration says of its samples' worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from megarl.audit.check_contracts import Value, parted
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RawPart, RunView
from megarl.contracts.records import RewardRecord, RewardStatus
from megarl.experience.columns import SealError
from megarl.experience.manifest import MANIFEST_FILE
from megarl.recipe import RewardSection
from megarl.rewards.score import is_penalised

LARGEST_LOG_PROB = 1e-6
"""A log-prob above 0 by more is no rounding."""


def scores(view: IterationView) -> Iterator[Found]:
    """Every total is what the recipe makes of the components: their weighted sum, the total of a
    violated constraint, or the declared penalty. The component of every scorer that scores the row
    is there, and no other."""
    section, prompts = view.facts_recipe.reward, view.sealed.prompts
    for row, record in enumerate(view.sealed.records):
        reward = prompts[record.draw_index].get("reward", "")
        found = _wrong_total(record, section, reward)
        if found is not None:
            what, field = found
            part = view.file("rollout_*.safetensors")
            yield Found(part, what, view.sealed.sample_id(row), f"reward.{field}")


def _wrong_total(
    record: RewardRecord, section: RewardSection, reward: str
) -> tuple[str, str] | None:
    """(what, field), None where the total is right."""
    if record.status is not RewardStatus.OK:
        return None
    if is_penalised(record.status, record.detail):
        if record.total == section.penalty:
            return None
        return f"penalty {record.total}, the recipe's is {section.penalty}", "total"
    scorers = {item.title: item for item in section.scorers if item.scores(reward)}
    if record.components.keys() != scorers.keys():
        odd = sorted(record.components.keys() ^ scorers.keys())
        return f"components {odd} are not those of the recipe's scorers", "components"
    said = record.components
    for name, item in scorers.items():
        if item.at_least is not None and said[name] < item.at_least:
            total = section.violated
            break
    else:
        total = sum(said[name] * item.weight for name, item in scorers.items() if item.weight)
    if record.total != total:
        return f"total {record.total}, its components give {total}", "total"
    return None


def scorer(run: RunView) -> Iterator[Found]:
    """One scorer version scored the whole run, but for a resume that was allowed another one."""
    told: list[Value] = []
    for number in run.sealed:
        view = run.iteration(number)
        # Another run's facts may be of both sides of a resume; scored anew, all are by one.
        if number in run.sources and not run.only_scores:
            continue
        with suppress(SealError):  # `manifest` tells it
            told.append((view.file(MANIFEST_FILE), number, view.manifest.header.scorer_version))
    for (file, _, version), wanted in parted(run, "scorer", told):
        what = f"scored by {version}, by what was scored before it should be {wanted}"
        yield Found(file, what, field="scorer_version")


def log_probs(view: IterationView) -> Iterator[Found]:
    """Log-probs are finite and not above 0: the generator's of every token, the trainer's of every
    token of the rows it scored. The critic's values of these are finite."""
    for raw in view.rollouts + view.scored:
        held = raw.columns
        for name in (name for name in held if name.endswith("_log_probs")):
            wrong = ~(np.isfinite(held[name]) & (held[name] <= LARGEST_LOG_PROB))
            for token in np.flatnonzero(wrong).tolist():
                row = int(np.searchsorted(held["response_offsets"], token, side="right")) - 1
                sample = view.sample_id(int(held["draw_index"][row]), int(held["candidate"][row]))
                at = token - int(held["response_offsets"][row])
                what = f"token {at} has log-prob {held[name][token]}"
                yield Found(view.file(raw.part.file), what, sample, name)
        yield from _values(view, raw)


def _values(view: IterationView, raw: RawPart) -> Iterator[Found]:
    held = raw.columns
    for name in (name for name in ("values", "last_values") if name in held):
        for at in np.flatnonzero(~np.isfinite(held[name])).tolist():
            row, where = at, "the value after its last token"
            if name == "values":
                row = int(np.searchsorted(held["response_offsets"], at, side="right")) - 1
                where = f"the value of token {at - int(held['response_offsets'][row])}"
            sample = view.sample_id(int(held["draw_index"][row]), int(held["candidate"][row]))
            yield Found(view.file(raw.part.file), f"{where} is {held[name][at]}", sample, name)


def parity(view: IterationView) -> Iterator[Found]:
    """Trainer and generator agree on every action token within the recipe's bounds."""
    bounds, samples = view.facts_recipe.parity, view.sealed.samples
    if bounds.action != "stop":
        return
    gap = np.abs(view.sealed.old_log_probs.astype(np.float64) - samples.rollout_log_probs)
    measured = samples.action_mask & np.isfinite(gap)
    if not measured.any():
        return
    gap = np.where(measured, gap, 0.0)
    token = int(np.argmax(gap))
    row = int(np.searchsorted(samples.response_offsets, token, side="right") - 1)
    mean = float(gap.sum() / measured.sum())
    where = f"token {token - int(samples.response_offsets[row])}"
    for name, value, bound in (("max", gap[token], bounds.max), ("mean", mean, bounds.mean)):
        if value > bound:
            what = f"|old − rollout| {name} {value:.3e} over the bound {bound:.0e}, most at {where}"
            sample = view.sealed.sample_id(row)
            yield Found(view.file("scored_*.safetensors"), what, sample, "old_log_probs")
