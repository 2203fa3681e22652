"""What generator tests compare with: the HF model in float64, and when two draws may differ."""

from __future__ import annotations

import numpy as np
import torch

from megarl.contracts.samples import Sample

BOUND = 1e-4
"""Largest |engine − HF| log-prob in fp32, and margin under which two draws may differ."""


def hf_log_probs(
    folder: str, samples: list[Sample], temperature: float, dtype: torch.dtype = torch.float64
) -> list[np.ndarray]:
    """[len(response), V] rows of the HF model's log-softmax, per sample; float64 is the oracle."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = []
    with torch.no_grad():
        for sample in samples:
            ids = np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64)
            logits = model(torch.from_numpy(ids)[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
            rows.append(torch.log_softmax(logits.double() / temperature, dim=-1).numpy())
    return rows


def own(rows: list[np.ndarray], samples: list[Sample]) -> np.ndarray:
    """Log-probs of the samples' own ids, all samples in a row."""
    return np.concatenate(
        [row[np.arange(len(row)), s.response_ids] for row, s in zip(rows, samples, strict=True)]
    )


def gap(folder: str, samples: list[Sample], temperature: float) -> float:
    """Largest |engine − HF| log-prob over the samples' own ids."""
    told = np.concatenate([sample.rollout_log_probs for sample in samples])
    return float(np.abs(own(hf_log_probs(folder, samples, temperature), samples) - told).max())


def first_difference(ours: Sample, theirs: Sample) -> int | None:
    """Position of the first differing id, or None."""
    assert (ours.draw_index, ours.candidate) == (theirs.draw_index, theirs.candidate)
    short = min(len(ours.response_ids), len(theirs.response_ids))
    differ = np.flatnonzero(ours.response_ids[:short] != theirs.response_ids[:short])
    return int(differ[0]) if len(differ) else None


def seeded_margin(
    folder: str, sample: Sample, other_id: int, position: int, temperature: float = 1.0
) -> float:
    """How much the seeded race was won by, in nats, between a sample's id and another's."""
    from megarl.platforms.sglang_patches import seeded_scores

    row = hf_log_probs(folder, [sample], temperature)[0][position]
    where = torch.tensor([len(sample.prompt_ids) + position - 1])
    scores = seeded_scores(torch.from_numpy(row)[None], torch.tensor([sample.seed]), where)[0]
    return abs(float(torch.log(scores[sample.response_ids[position]] / scores[other_id])))


def assert_same_draws(
    folder: str, ours: list[Sample], theirs: list[Sample], temperature: float = 1.0
) -> None:
    """Same ids, or a first difference whose seeded race was undecided by rounding."""
    for a, b in zip(ours, theirs, strict=True):
        where = first_difference(a, b)
        if where is None:
            assert len(a.response_ids) == len(b.response_ids)
        else:
            margin = seeded_margin(folder, a, int(b.response_ids[where]), where, temperature)
            assert margin < BOUND, (a.draw_index, a.candidate, where, margin)
