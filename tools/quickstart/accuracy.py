"""Held-out accuracy of the quickstart model, by plain batched decoding with transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from megarl.contracts.tokens import Tokens
from megarl.rewards import exact
from megarl.rewards.scorer import Response
from tools.quickstart.task import ANSWER_PATTERN, Problem

MAX_RESPONSE_TOKENS = 32


@torch.inference_mode()
def responses(
    model: PreTrainedModel, tokens: Tokens, problems: Sequence[Problem], greedy: bool, seed: int = 0
) -> list[tuple[str, bool]]:
    """(text, finished) of a response to each problem, greedy or sampled at temperature 1."""
    by_length: dict[int, list[int]] = defaultdict(list)
    prompts = [tokens.render(problem.question) for problem in problems]
    for index, ids in enumerate(prompts):
        by_length[len(ids)].append(index)
    generator = torch.Generator().manual_seed(seed)
    (eos,) = tokens.eos_ids
    result: list[tuple[str, bool]] = [("", False)] * len(problems)
    # Prompts of one length make one batch: nothing is padded.
    for indices in by_length.values():
        next_B1 = torch.tensor([prompts[index] for index in indices])
        cache, drawn = None, []
        for _ in range(MAX_RESPONSE_TOKENS):
            output = model(input_ids=next_B1, past_key_values=cache, use_cache=True)
            cache, logits_BV = output.past_key_values, output.logits[:, -1]
            if greedy:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
            drawn.append(next_B1)
        for index, row in zip(indices, torch.cat(drawn, 1).tolist(), strict=True):
            length = row.index(eos) if eos in row else len(row)
            result[index] = (tokens.decode(row[:length]), eos in row)
    return result


def accuracy(
    model: PreTrainedModel, tokens: Tokens, problems: Sequence[Problem], greedy: bool
) -> float:
    """Share of problems answered right, by the quickstart's own `exact_match` settings."""
    scorer = exact.make(pattern=ANSWER_PATTERN)
    right = 0.0
    answers = responses(model, tokens, problems, greedy)
    for problem, (text, finished) in zip(problems, answers, strict=True):
        response = Response(text, problem.answer, problem.question, finished, end_reason="")
        right += scorer(response).total
    return right / len(problems)
