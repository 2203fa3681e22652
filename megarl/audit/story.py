"""The whole story of one sample as plain data: what it is, how it came about, what it led to.

Every number is sealed or follows from sealed ones; where something is not on the disk the story
says None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from megarl.algorithms.kl import kl_estimate
from megarl.audit import group
from megarl.audit.again import Recomputed
from megarl.audit.earlier import EarlierView, rolled_back
from megarl.audit.group import tokens_of, verdict_of
from megarl.audit.source import Words, flatten, updates_of, version_lines
from megarl.audit.text import none_if_nan
from megarl.audit.view import RunView
from megarl.checkpoint.segments import segment_of
from megarl.experience.load import SealedIteration
from megarl.experience.source import SOURCE_FILE
from megarl.recipe import Recipe
from megarl.rollout.requests import request_seed
from megarl.rollout.selection import Verdict

VERDICT_WORDS: Mapping[str, str] = {
    Verdict.TRAINED: "trained",
    Verdict.ABORTED: "refused: its generation was aborted",
    Verdict.INVALID_TOKENS: "refused: it has an id that the tokenizer does not know",
    Verdict.REWARD_TIMEOUT: "refused: it was not scored within the deadline",
    Verdict.REWARD_ERROR: "refused: its scorer failed",
    Verdict.INCOMPLETE_GROUP: "dropped: its group lacks a scored candidate "
    "(algorithm.partial_groups drop)",
    Verdict.GROUP_OF_ONE: "dropped: it is the only scored sample of its group, nothing compares",
    Verdict.ZERO_VARIANCE: "dropped: all rewards of its group are equal "
    "(algorithm.zero_variance drop)",
    Verdict.SURPLUS: "dropped: enough groups before its own were fit to train",
    Verdict.NO_STEPS: "refused: it has no step score (algorithm.rewards process)",
    Verdict.TRUNCATED: "compared with its group and not trained on: it was cut off "
    "(algorithm.overlong.mask_truncated)",
}
MATTERED = (
    "seed",
    "model",
    "data.template",
    "data.system_prompt",
    "rollout.prompts_per_iteration",
    "rollout.group_size",
    "rollout.retries",
    "rollout.dtype",
    "reward.scorers",
    "reward.on_status",
    "reward.penalty",
    "reward.violated",
    "algorithm",
    "actor.lr",
    "actor.lr_schedule",
    "critic",
    "reference.path",
    "reference.refresh_every",
)
"""Recipe keys and sections that decided the sample and what it taught; sampling is told apart."""


def verdict_words(verdict: Verdict | None) -> str:
    if verdict is None:
        return "sealed, but the run ended before anything was derived from it"
    return VERDICT_WORDS.get(verdict, f"left out: {str(verdict).replace('_', ' ')}")


def story(run: RunView, sealed: SealedIteration, row: int, words: Words) -> dict[str, Any]:
    """Everything known of the sample in canonical row `row`; JSON-able."""
    sample, header = sealed.samples[row], sealed.manifest.header
    prompt = sealed.prompts[sample.draw_index]
    recipe = run.recipe_of(header.iteration)
    return {
        "sample_id": sealed.sample_id(row),
        "iteration": header.iteration,
        "draw_index": sample.draw_index,
        "candidate": sample.candidate,
        "words": words.told,
        "prompt": dict(prompt)
        | {
            "tokens": len(sample.prompt_ids),
            "token_ids": sample.prompt_ids.tolist(),
            "executed": _joined(words.pieces(sample.prompt_ids)),
        },
        "response": {
            "text": words.text(sample.response_ids),
            "tokens": len(sample.response_ids),
            "actions": int(sample.action_mask.sum()),
            "end": sample.end.name.lower(),
            "end_reason": sample.end_reason.name.lower(),
        },
        "origin": _origin(sealed),
        "generation": _generation(sealed, row),
        "token_table": _tokens(recipe, sealed, row, words),
        "reward": _reward(run.facts_recipe_of(header.iteration), sealed, row),
        "group": group.siblings(recipe, sealed, row),
        "advantage": group.advantage(recipe, sealed, row, _again(run, header.iteration)),
        "training": _training(run, sealed, row),
        "versions": _versions(run, sealed),
        "attempts": _attempts(run, header.iteration),
        "recipe_hash": header.recipe_hash,
        "recipe_is_sealed_one": run.facts_recipe_of(header.iteration).hash == header.recipe_hash,
        "recipe": _mattered(recipe),
        "experience": {
            "folder": str(sealed.folder),
            "experience_hash": sealed.manifest.experience_hash,
            "sealed_at": _clock(sealed.manifest.sealed_at),
            "tokenizer_hash": header.tokenizer_hash,
        },
    }


def _again(run: RunView, iteration: int) -> Recomputed | None:
    """None where the recipe cannot be applied to the facts, which `verify` tells."""
    try:
        return run.iteration(iteration).again
    except ValueError:
        return None


def _joined(pieces: list[str] | None) -> str | None:
    return None if pieces is None else "".join(pieces)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _origin(sealed: SealedIteration) -> dict[str, Any] | None:
    """Whose samples these are, where the run scored another one's again."""
    path = sealed.folder / SOURCE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _generation(sealed: SealedIteration, row: int) -> dict[str, Any]:
    sample, header = sealed.samples[row], sealed.manifest.header
    sampling = header.sampling
    prompt_id = sealed.prompts[sample.draw_index]["prompt_id"]
    origin = _origin(sealed)
    iteration = header.iteration if origin is None else origin["iteration"]
    expected = request_seed(sampling.seed, iteration, prompt_id, sample.candidate)
    return {
        "version": sealed.samples.version_id,
        "replica": int(sealed.replica[row]),
        "seed": sample.seed,
        "seed_of": {
            "run_seed": sampling.seed,
            "iteration": iteration,
            "prompt_id": prompt_id,
            "candidate": sample.candidate,
        },
        "seed_recomputed": expected,
        "started": _clock(sample.started),
        "finished": _clock(sample.finished),
        "seconds": sample.finished - sample.started,
        "sampling": {name: getattr(sampling, name) for name in type(sampling).__slots__},
    }


def _tokens(
    recipe: Recipe, sealed: SealedIteration, row: int, words: Words
) -> list[dict[str, Any]]:
    """One entry per response token; log-probs None where they were not computed."""
    sample, span = sealed.samples[row], tokens_of(sealed, row)
    pieces = words.pieces(sample.response_ids)
    old = sealed.old_log_probs[span]
    columns: dict[str, np.ndarray] = {
        "rollout_log_prob": sample.rollout_log_probs,
        "old_log_prob": old,
        "gap": old.astype(np.float64) - sample.rollout_log_probs,
    }
    if sealed.ref_log_probs is not None:
        ref = sealed.ref_log_probs[span]
        columns["ref_log_prob"] = ref
        kind = recipe.algorithm.kl.estimator
        columns["kl"] = kl_estimate(kind, torch.tensor(old), torch.tensor(ref)).numpy()
    if sealed.values is not None:
        columns["value"] = sealed.values[span]
    steps = sealed.scores.steps.select([row])
    if len(steps.token):
        columns["step_reward"] = np.full(len(sample.response_ids), np.nan)
        columns["step_reward"][steps.token] = steps.value
    if sealed.derived is not None:
        columns |= {name: values[span] for name, values in sealed.derived.columns.items()}
    return [
        {
            "token": at,
            "id": int(id_),
            "piece": None if pieces is None else pieces[at],
            "action": bool(sample.action_mask[at]),
        }
        | {name: none_if_nan(values[at]) for name, values in columns.items()}
        for at, id_ in enumerate(sample.response_ids)
    ]


def _reward(recipe: Recipe, sealed: SealedIteration, row: int) -> dict[str, Any]:
    record = sealed.records[row]
    weights = {item.title: item.weight for item in recipe.reward.scorers}
    components = {
        name: {
            "score": value,
            "weight": weights.get(name),
            "applies_to": list(record.applies_to.get(name, ())) or None,
        }
        for name, value in record.components.items()
    }
    counted = [
        part["score"] * part["weight"] for part in components.values() if part["weight"] is not None
    ]
    return {
        "total": record.total,
        "weighted_sum": sum(counted) if components and len(counted) == len(components) else None,
        "status": str(record.status),
        "detail": record.detail,
        "kind": str(record.kind),
        "components": components,
        "step_rewards": [list(step) for step in record.step_rewards],
        "seconds": record.seconds,
        "scorer_version": record.scorer_version,
    }


def _training(run: RunView, sealed: SealedIteration, row: int) -> dict[str, Any]:
    verdict = verdict_of(sealed, row)
    told: dict[str, Any] = {
        "verdict": None if verdict is None else str(verdict),
        "words": verdict_words(verdict),
        "minibatch": None,
        "update": None,
        "times_trained": len(updates_of(run, sealed.manifest.header.iteration)),
    }
    if verdict is Verdict.TRAINED:
        recipe = run.recipe_of(sealed.manifest.header.iteration)
        minibatch = int(sealed.derived.minibatch[row])
        algorithm = recipe.algorithm
        told |= {"minibatch": minibatch, "minibatches": algorithm.minibatches}
        told |= {"epochs": algorithm.epochs}
        told |= _weight(recipe, sealed, row, minibatch)
        lines = updates_of(run, sealed.manifest.header.iteration)
        if lines:
            told["update"] = {name: lines[0].get(name) for name in ("from", "to", "kl_beta")}
            for name, role in (("steps", "steps"), ("critic", "critic_steps")):
                found = [s for s in lines[0].get(name, ()) if s["minibatch"] == minibatch]
                told["update"][role] = found
            told["update"]["step"] = next(iter(told["update"]["steps"]), None)
            told["update"]["experience_hash"] = lines[0].get("experience_hash")
    return told


def _weight(recipe: Recipe, sealed: SealedIteration, row: int, minibatch: int) -> dict[str, Any]:
    """What one action token counts in its minibatch's loss (`algorithms/reduction.py`)."""
    offsets = sealed.samples.response_offsets
    sums = np.concatenate([[0], np.cumsum(sealed.samples.action_mask, dtype=np.int64)])
    actions = np.diff(sums[offsets])
    chosen = actions[sealed.derived.minibatch == minibatch]
    tokens, sequences = int(chosen.sum()), int((chosen > 0).sum())
    kind = recipe.algorithm.reduction
    divisor = {
        "token_mean": tokens,
        "sequence_mean": sequences * int(actions[row]),
        "sequence_sum_constant": sequences * recipe.rollout.max_response_tokens,
    }.get(kind)
    return {
        "reduction": kind,
        "minibatch_tokens": tokens,
        "minibatch_sequences": sequences,
        "token_weight_is_one_over": divisor,
    }


def _versions(run: RunView, sealed: SealedIteration) -> dict[str, Any]:
    """Who made what, resolved: `roles` names ids, `known` what `versions.jsonl` says of them."""
    ids = dict(sealed.manifest.header.producers)
    for line in updates_of(run, sealed.manifest.header.iteration)[:1]:
        ids |= {"updated to": line.get("to", "")}
    committed, held = version_lines(run, "version"), version_lines(run, "loaded")
    known = {}
    for version_id in sorted(set(ids.values())):
        line, loaded = committed.get(version_id), held.get(version_id)
        if line is None:
            known[version_id] = None
            continue
        known[version_id] = {name: value for name, value in line.items() if name != "tensors"}
        known[version_id]["tensors"] = len(line.get("tensors", ())) or None
        known[version_id]["generator_held"] = loaded and loaded.get("weight_manifest_hash")
    return {"roles": ids, "known": known}


def _attempts(run: RunView, iteration: int) -> dict[str, Any]:
    """Of which start of the run the iteration is, and where it lies as others made it."""
    start = segment_of(run.segments, iteration).start
    views = [] if isinstance(run, EarlierView) else rolled_back(run, iteration)
    return {
        "resume": None if start is None else start.number,
        "update_attempt": 0 if start is None else start.attempt,
        "from_facts_sealed_before": iteration in run.reused,
        "rolled_back": {view.resumed.number: view.file("") for view in views},
    }


def _mattered(recipe: Recipe) -> dict[str, Any]:
    flat = flatten(recipe.model_dump(mode="json"))
    return {
        key: value
        for key, value in flat.items()
        if any(key == name or key.startswith(name + ".") for name in MATTERED)
    }
