"""What log-probs are compared with, the Hugging Face model in float32, and on which texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.contracts.samples import EndReason, Sample, Samples
from megarl.rollout.requests import Request, request_seed

PROMPTS = (3, 17, 30, 41)
"""Their lengths: the third needs more than one cache page, none is a multiple of another."""
RESPONSE = 5
Ids = tuple[int, ...]


def requests(vocab: int) -> list[Request]:
    """Fixed random prompts, and the seeds of their responses."""
    draw = np.random.default_rng(3)
    return [
        Request(
            row, 0, tuple(draw.integers(6, vocab, length).tolist()), request_seed(7, 0, "p", row)
        )
        for row, length in enumerate(PROMPTS)
    ]


class Oracle:
    """Log-probs of every token but the first, float32 [n - 1], each sequence computed once."""

    def __init__(self, folder: Path) -> None:
        import transformers

        auto = transformers.AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[Ids, np.ndarray] = {}

    @torch.no_grad()
    def of(self, ids: Ids) -> np.ndarray:
        if ids not in self._known:
            tokens = torch.tensor(ids)
            rows = self._model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
            self._known[ids] = rows.gather(1, tokens[1:, None]).squeeze(1).numpy()
        return self._known[ids]


def as_samples(sequences: list[Ids]) -> Samples:
    """Each sequence with its first token for a prompt, so that the trainer scores all others."""
    return Samples.from_rows(
        [
            Sample(
                draw_index=row,
                candidate=0,
                prompt_ids=np.array(ids[:1]),
                response_ids=np.array(ids[1:]),
                action_mask=np.ones(len(ids) - 1, bool),
                rollout_log_probs=np.zeros(len(ids) - 1, np.float32),
                end=0,
                end_reason=EndReason.EOS,
                seed=row,
                started=0.0,
                finished=1.0,
            )
            for row, ids in enumerate(sequences)
        ],
        "layouts",
    )
