"""One iteration in plain torch on Hugging Face models: score, credit, loss, gradient, steps.

One process, one row at a time, no packs, no shards, nothing of `megarl`. Models are float32; what
is summed over tokens is float64.

    PPO clip      arXiv:1707.06347, equation 7       dual clip       arXiv:1912.09729, equation 5
    GSPO          arXiv:2507.18071, equation 5       CISPO           arXiv:2506.13585, equation 4
    k1, k2, k3    Schulman 2020, DeepSeekMath's equation 4
    value clip    Schulman's baselines; arXiv:2005.12729, section 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference.formulas import Credit, credit
from tests.reference.rules import MOST_TOKENS, TEMPERATURE, Optimizer, Row, Rules, Step


@dataclass
class Told:
    """One iteration. Lists over rows, float64; None where a row does not train."""

    credit: Credit
    old: list[np.ndarray]
    ref: list[np.ndarray] | None
    values: list[np.ndarray] | None
    last_values: list[float] | None
    actor: list[Step] = field(default_factory=list)
    critic: list[Step] = field(default_factory=list)
    moved: dict[str, float] = field(default_factory=dict)
    """How far the last minibatch was from the sealed policy and values: `tokens`, `kl` summed over
    them, and how many lost their gradient to a bound: `cut_high`, `cut_low`, `value_cut`."""


def _hidden(body: nn.Module, row: Row) -> Tensor:
    """Last hidden states from the last prompt token to the last response token, [R + 1, H]."""
    ids = torch.from_numpy(np.concatenate([row.prompt, row.response])).long()
    return body(ids[None]).last_hidden_state[0, len(row.prompt) - 1 :]


def log_probs(model: Any, row: Row) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) float32 [R] at the sampling temperature."""
    logits = model.lm_head(_hidden(model.model, row)[:-1]) / TEMPERATURE
    log_p = logits.log_softmax(-1)
    target = torch.from_numpy(row.response).long()
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def values(model: Any, row: Row) -> Tensor:
    """float32 [R + 1]: V(s_t) before each response token, then what is seen after the last."""
    return model.score(_hidden(model.model, row))[:, 0]


@torch.no_grad()
def _scored(score: Callable, model: Any, rows: Sequence[Row]) -> list[np.ndarray]:
    return [score(model, row).numpy() for row in rows]


def importance(row: Row, old: np.ndarray, rules: Rules) -> np.ndarray:
    """Constant weights of the policy term: the trainer's over the generator's probability."""
    log_ratio = (old.astype(np.float64) - row.rollout.astype(np.float64))[row.acts]
    if rules.importance == "none" or not len(log_ratio):
        return np.ones(len(old))
    ratio = {
        "token": np.exp(log_ratio),
        "sequence": np.exp(log_ratio.sum()),
        "sequence_mean": np.exp(log_ratio.mean()),
    }[rules.importance]
    if rules.importance_mode == "truncate":
        ratio = np.minimum(ratio, rules.importance_high)
    else:
        ratio = ratio * ((ratio >= rules.importance_low) & (ratio <= rules.importance_high))
    weights = np.zeros(len(old))
    weights[row.acts] = ratio
    return weights


def policy_terms(now: Tensor, old: Tensor, advantages: Tensor, rules: Rules) -> Tensor:
    """To be minimised, one per action of one row; float64."""
    log_ratio = now - old
    low, high = 1 - rules.clip_low, 1 + rules.clip_high
    if rules.objective == "cispo":
        return -log_ratio.exp().clamp(low, high).detach() * advantages * now
    if rules.objective == "gspo":
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    ratio = log_ratio.exp()
    best = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if rules.dual_clip is not None and rules.objective == "ppo_clip":
        best = torch.where(advantages < 0, torch.maximum(best, rules.dual_clip * advantages), best)
    return -best


def kl_terms(now: Tensor, ref: Tensor, kind: str) -> Tensor:
    ell = now - ref
    return {"k1": ell, "k2": ell**2 / 2, "k3": (-ell).exp() + ell - 1}[kind]


def divisor(row: Row, rows: Sequence[Row], rules: Rules) -> float:
    """What a token of `row` is divided by; `rows` are the minibatch."""
    acting = [other for other in rows if other.acts.any()]
    if rules.reduction == "token_mean":
        return float(sum(other.acts.sum() for other in acting))
    if rules.reduction == "sequence_mean":
        return float(len(acting) * row.acts.sum())
    return float(len(acting) * MOST_TOKENS)


def actor_part(model: Any, at: int, rows: list[Row], batch: list[Row], told: Told, rules: Rules):
    """One row's part of the loss of its minibatch `batch`; float64. The row has an action."""
    row, acts = rows[at], torch.from_numpy(rows[at].acts)
    now, entropy = (column.double()[acts] for column in log_probs(model, row))
    old = torch.from_numpy(told.old[at]).double()[acts]
    # The one cast of the house: what the loss gets is float32.
    advantages = torch.from_numpy(told.credit.advantages[at].astype(np.float32)).double()[acts]
    weights = torch.from_numpy(importance(row, told.old[at], rules))[acts]
    terms = weights * policy_terms(now, old, advantages, rules) - rules.entropy * entropy
    if rules.kl_in_loss:
        ref = torch.from_numpy(told.ref[at]).double()[acts]
        terms = terms + rules.beta * kl_terms(now, ref, rules.estimator)
    ratio = (now - old).detach().exp()
    told.moved["kl"] = told.moved.get("kl", 0.0) + float((ratio - 1 - ratio.log()).sum())
    told.moved["tokens"] = told.moved.get("tokens", 0.0) + len(now)
    for name, cut in {
        "cut_high": (advantages > 0) & (ratio > 1 + rules.clip_high),
        "cut_low": (advantages < 0) & (ratio < 1 - rules.clip_low),
    }.items():
        told.moved[name] = told.moved.get(name, 0.0) + float(cut.sum())
    return terms.sum() / divisor(row, batch, rules)


def critic_part(model: Any, at: int, rows: list[Row], batch: list[Row], told: Told, rules: Rules):
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²), one row's part; float64."""
    row, acts = rows[at], torch.from_numpy(rows[at].acts)
    now = values(model, row)[:-1].double()[acts]
    old = torch.from_numpy(told.values[at]).double()[acts]
    returns = torch.from_numpy(told.credit.returns[at].astype(np.float32)).double()[acts]
    terms = (now - returns) ** 2
    if rules.value_clip is not None:
        near = old + (now - old).clamp(-rules.value_clip, rules.value_clip)
        terms = torch.maximum(terms, (near - returns) ** 2)
        cut = terms > (now - returns) ** 2
        told.moved["value_cut"] = told.moved.get("value_cut", 0.0) + float(cut.sum())
    return 0.5 * terms.sum() / divisor(row, batch, rules)


def _matrices(model: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {
        name: of(param).detach().double().reshape(len(param), -1).clone()
        for name, param in model.named_parameters()
    }


def _minibatches(rows: list[Row], trained: list[bool], rules: Rules) -> list[list[int]]:
    places = [at for at, fit in enumerate(trained) if fit]
    number = len(rules.minibatches)
    if rules.split:
        return [places[first::number] for first in range(number)]
    return [[at for at in places if rows[at].group in groups] for groups in rules.minibatches]


def _learn(
    model: nn.Module, part: Callable, rows: list[Row], told: Told, rules: Rules, how: Optimizer
) -> list[Step]:
    """One optimizer step per minibatch and epoch, in order."""
    params = list(model.parameters())
    torch_kind = {
        "sgd": lambda: torch.optim.SGD(params, lr=how.lr),
        "adam": lambda: torch.optim.Adam(params, lr=how.lr, betas=how.betas, eps=how.eps),
    }
    optimizer = torch_kind[how.kind]()
    steps: list[Step] = []
    for places in _minibatches(rows, told.credit.trained, rules) * rules.epochs:
        batch = [rows[at] for at in places]
        if not batch:
            continue
        optimizer.zero_grad()
        told.moved.clear()
        loss = sum(
            part(model, at, rows, batch, told, rules) for at in places if rows[at].acts.any()
        )
        loss.backward()
        gradient = _matrices(model, lambda param: param.grad)
        kl = told.moved.get("kl", 0.0) / told.moved.get("tokens", 1.0)
        if rules.target_kl is not None and kl > rules.target_kl:
            break
        nn.utils.clip_grad_norm_(params, how.clip_grad)
        optimizer.step()
        steps.append(Step(loss.item(), gradient, _matrices(model, lambda param: param)))
    return steps


def iterate(
    actor: Any,
    rows: list[Row],
    rules: Rules,
    how: Optimizer,
    reference: Any = None,
    critic: Any = None,
) -> Told:
    """The whole iteration. The models given are trained in place."""
    old = _scored(lambda model, row: log_probs(model, row)[0], actor, rows)
    ref = None
    if reference is not None:
        ref = _scored(lambda model, row: log_probs(model, row)[0], reference, rows)
    seen = None if critic is None else _scored(values, critic, rows)
    before = None if seen is None else [column[:-1] for column in seen]
    after = None if seen is None else [float(column[-1]) for column in seen]
    told = Told(credit(rows, rules, old, ref, before, after), old, ref, before, after)
    if critic is not None:
        told.critic = _learn(critic, critic_part, rows, told, rules, how)
        value_cut = told.moved.get("value_cut", 0.0)
    told.actor = _learn(actor, actor_part, rows, told, rules, how)
    if critic is not None:
        told.moved["value_cut"] = value_cut
    return told
