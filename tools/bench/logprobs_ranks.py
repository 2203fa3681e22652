"""What every rank of `bench.py logprobs` does: scores and gradients, megarl's way and plainly.

    torchrun … -m tools.bench.logprobs_ranks JOB.json

Every measurement begins and ends at a barrier; rank 0 writes what was measured to the job's
`result`. T tokens, V vocabulary, H hidden size; a rank of n holds V/n rows of the output layer.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.logprobs import token_scores
from megarl.world import process_group
from tools.bench.harness import interleaved, say
from tools.bench.memory import cost_of, largest

LOGIT_STD = 3.0
"""Spread of the logits: entropies of a few nats, as a model's."""
TEMPERATURE = 0.9


class Problem:
    """One rank's part: the same hidden states and targets on all ranks, its rows of the weight."""

    def __init__(self, tokens: int, vocab: int, hidden: int, chunk: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        draw = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(tokens, hidden, generator=draw)
        self.target = torch.randint(0, vocab, (tokens,), generator=draw)
        self.grads = torch.randn(2, tokens, generator=draw) / tokens
        whole = torch.randn(vocab, hidden, generator=draw) * (LOGIT_STD / hidden**0.5)
        self.weight = whole.chunk(ranks)[rank].clone()
        self.whole = whole if ranks > 1 else self.weight
        self.first = rank * len(self.weight)
        self.vocab, self.chunk = vocab, chunk

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.requires_grad_(), self.weight.requires_grad_()

    def megarl(self) -> list[Tensor]:
        """(log-probs, entropies, gradients of hidden and of the own rows)."""
        hidden, weight = self.leaves
        scores = token_scores(
            hidden,
            weight,
            self.target,
            temperature=TEMPERATURE,
            vocab=self.vocab,
            chunk=self.chunk,
            group=dist.group.WORLD,
        )
        return self._differentiated(scores.log_probs_A, scores.entropy_A, (hidden, weight))

    def naive(self) -> list[Tensor]:
        """The same of the own rows, as if there were no others: nothing is exchanged."""
        hidden, weight = self.leaves
        return self._naive(hidden @ weight.t() / TEMPERATURE, (hidden, weight))

    def given(self) -> Callable[[], list[Tensor]]:
        """As `naive`, but from logits that are there to the gradient of the logits."""
        with torch.no_grad():
            logits = (self.hidden @ self.weight.t()).div_(TEMPERATURE)
        logits.requires_grad_()
        return lambda: self._naive(logits, (logits,))

    def _naive(self, logits: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor]:
        log_p = logits.log_softmax(-1)
        own = (self.target - self.first).clamp(0, logits.shape[1] - 1)
        log_probs = log_p.gather(1, own[:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        del logits, log_p
        return self._differentiated(log_probs, entropy, wanted)

    def _differentiated(
        self, log_probs: Tensor, entropy: Tensor, wanted: tuple[Tensor, ...]
    ) -> list[Tensor]:
        loss = (log_probs * self.grads[0]).sum() + (entropy * self.grads[1]).sum()
        return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, wanted)]

    def exact(self, rows: int = 64) -> list[Tensor]:
        """In float64 by the formulas of softmax, `rows` tokens at a time, over all of V."""
        weight = self.whole.detach().double()
        grad_weight = torch.zeros_like(weight)
        told: list[tuple[Tensor, ...]] = []
        for start in range(0, len(self.hidden), rows):
            part = slice(start, start + rows)
            hidden = self.hidden.detach()[part].double()
            log_p = (hidden @ weight.t() / TEMPERATURE).log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)
            g, k = self.grads[:, part].double()[..., None]
            grad = p.mul_(log_p.add(entropy[:, None]).mul_(k).add_(g)).neg_()
            target = self.target[part, None]
            grad.scatter_add_(1, target, g).div_(TEMPERATURE)
            told.append((log_p.gather(1, target).squeeze(1), entropy, grad @ weight))
            grad_weight.addmm_(grad.t(), hidden)
        own = slice(self.first, self.first + len(self.weight))
        return [torch.cat(column) for column in zip(*told, strict=True)] + [grad_weight[own]]


def errors(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """(largest difference of a log-prob or entropy in nats, largest ‖Δg‖/‖g‖ of a gradient)."""
    scores = max(float((a - b).abs().max()) for a, b in zip(found[:2], exact[:2], strict=True))
    gradients = max(
        float((a - b).norm() / b.norm()) for a, b in zip(found[2:], exact[2:], strict=True)
    )
    return scores, gradients


def sides_of(
    run: Callable[[], list[Tensor]], plain: Callable[[], list[Tensor]], repeats: int, note: Any
) -> dict[str, list[dict[str, float]]]:
    """What each side cost, by turn. The first call of each tells how much memory it takes."""
    sides = {"megarl": run, "naive": plain}
    room = 2**26 + max(cost_of(one, 0).extra_bytes for one in sides.values())
    measured = {name: lambda one=one: asdict(cost_of(one, room)) for name, one in sides.items()}
    turns = interleaved(measured, repeats, note)
    return {name: [turn[name] for turn in turns] for name in sides}


def measure(job: Mapping[str, Any], note: Callable[[str], None] | None) -> dict[str, Any]:
    """Both comparisons of one shape."""
    sizes = job["tokens"], job["vocab"]
    problem = Problem(*sizes, job["hidden"], job["chunk"])
    exact = problem.exact()
    told: dict[str, Any] = {"errors": [largest(error) for error in errors(problem.megarl(), exact)]}
    if dist.get_world_size() == 1:
        told["naive_errors"] = list(errors(problem.naive(), exact))
    del exact
    gc.collect()
    gc.freeze()
    told["product"] = sides_of(problem.megarl, problem.naive, job["repeats"], note)
    del problem
    thin = Problem(*sizes, job["thin"], job["chunk"])
    told["given"] = sides_of(thin.megarl, thin.given(), job["repeats"], note)
    return told


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with process_group("gloo", 600):
        told = measure(job, say if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            Path(job["result"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
