"""The whole loss once more, written from the papers as loops over float64 numbers.

Nothing of `megarl.algorithms` is used: this is the oracle of the tests of losses and gradients.
"""

from __future__ import annotations

import math

import numpy as np

from megarl.contracts.samples import Samples
from tests.algorithms.toy import VOCABULARY, Settings


def plain_loss(
    table_VV: np.ndarray,
    samples: Samples,
    columns: dict[str, np.ndarray],
    settings: Settings,
    max_response_tokens: int,
    constant_VV: np.ndarray | None = None,
) -> float:
    """Loss of one minibatch that holds `samples`, under bigram logits `table_VV`.

    `columns` are [R]: old, ref, rollout, advantages. `constant_VV` are the logits that constants
    of an objective (CISPO's ratios) are computed with, where these are not to vary.
    """
    log_VV = _log_softmax(table_VV)
    constant_VV = log_VV if constant_VV is None else _log_softmax(constant_VV)
    sequences = []
    for row in range(len(samples)):
        tokens = _tokens(samples, row, columns, log_VV, constant_VV)
        if tokens:
            sequences.append([_loss_of(token, tokens, settings) for token in tokens])
    total = sum(len(losses) for losses in sequences)
    if settings.reduction == "token_mean":
        return sum(sum(losses) for losses in sequences) / total
    if settings.reduction == "sequence_mean":
        return sum(sum(losses) / len(losses) for losses in sequences) / len(sequences)
    return sum(sum(losses) for losses in sequences) / (len(sequences) * max_response_tokens)


def _log_softmax(table_VV: np.ndarray) -> np.ndarray:
    return table_VV - np.log(np.exp(table_VV).sum(1, keepdims=True))


def _tokens(samples, row, columns, log_VV, constant_VV) -> list[dict[str, float]]:
    """The action tokens of one sample: log π, old, ref, rollout, A, entropy."""
    first = samples.response_offsets[row]
    prompt = samples.prompt_ids[samples.prompt_offsets[row] : samples.prompt_offsets[row + 1]]
    ids = [*prompt, *samples.response_ids[first : samples.response_offsets[row + 1]]]
    tokens = []
    for at in range(len(ids) - len(prompt)):
        if samples.action_mask[first + at]:
            before, this = (
                ids[len(prompt) + at - 1] % VOCABULARY,
                ids[len(prompt) + at] % VOCABULARY,
            )
            token = {name: float(values[first + at]) for name, values in columns.items()}
            token["new"], token["constant"] = log_VV[before, this], constant_VV[before, this]
            token["entropy"] = -float((np.exp(log_VV[before]) * log_VV[before]).sum())
            tokens.append(token)
    return tokens


def _loss_of(token: dict[str, float], sequence: list[dict], settings: Settings) -> float:
    gap = token["new"] - token["ref"]
    kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) + gap - 1}[settings.kl.estimator]
    policy = _importance(token, sequence, settings) * _objective(token, sequence, settings)
    return policy + settings.kl.beta * kl - settings.entropy_coefficient * token["entropy"]


def _objective(token: dict[str, float], sequence: list[dict], settings: Settings) -> float:
    advantage, low, high = token["advantages"], 1 - settings.clip_low, 1 + settings.clip_high
    if settings.objective == "cispo":
        ratio = math.exp(token["constant"] - token["old"])
        return -min(max(ratio, low), high) * advantage * token["new"]
    if settings.objective == "gspo":
        ratio = math.exp(sum(t["new"] - t["old"] for t in sequence) / len(sequence))
    else:
        ratio = math.exp(token["new"] - token["old"])
    gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if settings.objective == "ppo_clip" and settings.dual_clip is not None and advantage < 0:
        gain = max(gain, settings.dual_clip * advantage)
    return -gain


def _importance(token: dict[str, float], sequence: list[dict], settings: Settings) -> float:
    rule, gaps = settings.importance, [t["old"] - t["rollout"] for t in sequence]
    if rule.level == "none":
        return 1.0
    ratio = {
        "token": math.exp(token["old"] - token["rollout"]),
        "sequence": math.prod(math.exp(gap) for gap in gaps),
        "sequence_mean": math.prod(math.exp(gap) for gap in gaps) ** (1 / len(gaps)),
    }[rule.level]
    if rule.mode == "truncate":
        return min(ratio, rule.high)
    return ratio if rule.low <= ratio <= rule.high else 0.0
