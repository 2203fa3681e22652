"""Held-out evaluation through the generator: greedy and sampled accuracy.

It touches no training state: no cursor moves, seeds are its own, and its samples are never
trained on. A sample that was lost or could not be scored is left out of the accuracy and counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.contracts.records import Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import Samples, SamplingContract
from megarl.contracts.tokens import Tokens
from megarl.contracts.version import PolicyVersion
from megarl.rewards.score import ScoringPool
from megarl.rollout.collect import (
    Grading,
    check_failures,
    count_losses,
    make_requests,
    rollout,
)
from megarl.rollout.generator import Generator
from megarl.world import World

EVALUATION = -1
"""Takes the place of the iteration in seeds: every evaluation draws with the same ones."""


def evaluate(
    world: World,
    generator: Generator,
    version: PolicyVersion,
    prompts: Sequence[Prompt],
    sampling: SamplingContract,
    *,
    pool: ScoringPool | None,
    tokens: Tokens,
    metric: str,
    sampled: bool,
    max_error_share: float,
    max_lost_share: float,
    file: Path,
) -> dict[str, float]:
    """Collective. `eval/accuracy` (greedy), `eval/accuracy_sampled` (one draw at the run's
    temperature), both the mean of component `metric` over scored prompts, and counts.

    Rank 0 writes every generation to `file`, one JSON object a line.
    """
    result: dict[str, float] = {"eval/prompts": float(len(prompts))}
    modes = [("greedy", replace(sampling, n=1, temperature=0.0))]
    if sampled:
        modes.append(("sampled", replace(sampling, n=1)))
    lines: list[dict] = []
    for mode, contract in modes:
        grading = Grading(pool, prompts, tokens.known_ids)
        requests = make_requests(prompts, contract, EVALUATION)
        samples, losses = rollout(world, generator, requests, contract, version, grading)
        lost = count_losses(world, losses, len(requests), max_lost_share)
        records = grading.collect()
        check_failures(world, grading.failures, max_error_share)
        # A declared penalty is a total without components: not scored, as far as accuracy goes.
        scored = [r for r in records if r.status is RewardStatus.OK and metric in r.components]
        values = [record.components[metric] for record in scored]
        counts = world.totals(
            {
                "sum": float(np.sum(values)),
                "scored": float(len(values)),
                "failed": float(len(records) - len(scored)),
                "tokens": float(len(samples.response_ids)) if pool is not None else 0.0,
            },
            counted=pool is not None,
        )
        suffix = "" if mode == "greedy" else f"_{mode}"
        if counts["scored"]:
            result[f"eval/accuracy{suffix}"] = counts["sum"] / counts["scored"]
        result[f"eval/unscored{suffix}"] = counts["failed"]
        if lost:
            result[f"eval/lost{suffix}"] = float(sum(lost.values()))
        total = counts["scored"] + counts["failed"]
        result[f"eval/response_length{suffix}"] = counts["tokens"] / total
        lines += _lines(mode, prompts, samples, records, tokens)
    gathered = world.gather(lines)
    if world.is_main:
        _write(file, version, [line for part in gathered for line in part])
    return result


def _lines(
    mode: str,
    prompts: Sequence[Prompt],
    samples: Samples,
    records: Sequence[RewardRecord],
    tokens: Tokens,
) -> list[dict]:
    rows = {(sample.draw_index, sample.candidate): sample for sample in samples}
    return [
        {
            "mode": mode,
            "prompt_id": prompts[record.draw_index].prompt_id,
            "prompt": prompts[record.draw_index].text,
            "answer": prompts[record.draw_index].answer,
            "response": tokens.decode(rows[record.draw_index, record.candidate].response_ids),
            "end_reason": rows[record.draw_index, record.candidate].end_reason.name.lower(),
            "status": str(record.status),
            "components": record.components,
            "detail": record.detail,
        }
        for record in records
    ]


def _write(file: Path, version: PolicyVersion, lines: list[dict]) -> None:
    lines.sort(key=lambda line: (line["mode"], line["prompt_id"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(".tmp")
    head = {"version": version.id, "optimizer_step": version.optimizer_step}
    with open(whole, "w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(head | line, ensure_ascii=False) + "\n")
    whole.replace(file)
