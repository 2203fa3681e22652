"""Vocabulary-parallel scores against an unsharded float64 log-softmax; memory of one chunk.

Hand numbers are in `tests/known_faults/test_models.py`. Not covered: GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, HIDDEN, ROWS, CHUNK = 50, 12, 512, 7


def _problem(vocab: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(9)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw)
    weight = torch.randn(ROWS, HIDDEN, generator=draw)  # padding rows are not zero
    target = torch.randint(0, vocab, (TOKENS,), generator=draw)
    grads = torch.randn(2, TOKENS, generator=draw)
    return hidden, weight, target, grads[0], grads[1]


def _oracle(vocab: int, temperature: float) -> tuple[torch.Tensor, ...]:
    hidden, weight, target, grad_log_prob, grad_entropy = (
        x.double() if x.is_floating_point() else x for x in _problem(vocab)
    )
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = (hidden @ weight[:vocab].t() / temperature).log_softmax(-1)
    log_prob = log_p.gather(1, target[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (log_prob * grad_log_prob + entropy * grad_entropy).sum()
    return log_prob, entropy, *torch.autograd.grad(loss, (hidden, weight))


class _Largest(TorchDispatchMode):
    """The most elements of any tensor made, but for those over the hidden size."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and HIDDEN not in leaf.shape:
                self.elements = max(self.elements, leaf.numel())
        return out


def _scores(vocab: int, temperature: float) -> tuple[torch.Tensor, ...]:
    from megarl.models.logprobs import token_scores

    group = dist.group.WORLD
    hidden, weight, target, grad_log_prob, grad_entropy = _problem(vocab)
    shard = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden.requires_grad_()
    options = {"temperature": temperature, "vocab": vocab, "chunk": CHUNK, "group": group}
    with torch.no_grad():
        quiet = token_scores(hidden, shard, target, **options)
    with _Largest() as largest:
        scores = token_scores(hidden, shard, target, **options)
        loss = (scores.log_probs_A * grad_log_prob + scores.entropy_A * grad_entropy).sum()
        loss.backward()
    statistics = 5 * TOKENS * group.size()
    assert largest.elements <= max(CHUNK * len(shard), statistics), largest.elements
    assert torch.equal(quiet.log_probs_A, scores.log_probs_A)
    assert torch.equal(quiet.entropy_A, scores.entropy_A)
    only = token_scores(hidden, shard, target, **options).log_probs_A
    (single,) = torch.autograd.grad((only * grad_log_prob).sum(), hidden)
    empty = token_scores(hidden[:0], shard, target[:0], **options)
    (nothing,) = torch.autograd.grad(empty.log_probs_A.sum() + empty.entropy_A.sum(), shard)
    assert not nothing.any()
    out = (scores.log_probs_A, scores.entropy_A, hidden.grad, shard.grad, single)
    return tuple(x.detach() for x in out)


@pytest.mark.dist
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tp, vocab", [(1, 300), (2, 300), (2, 200)])
def test_values_and_gradients_are_the_unsharded_ones(
    ranks, tp: int, vocab: int, temperature: float
) -> None:
    """With 200 the second rank of two holds nothing but padding."""
    log_prob, entropy, grad_hidden, grad_weight = _oracle(vocab, temperature)
    told = ranks.run(tp, _scores, vocab, temperature)
    for rank in told:
        torch.testing.assert_close(rank[0].double(), log_prob, atol=5e-6, rtol=1e-6)
        torch.testing.assert_close(rank[1].double(), entropy, atol=5e-6, rtol=1e-6)
        torch.testing.assert_close(rank[2].double(), grad_hidden, atol=2e-5, rtol=1e-5)
        assert torch.equal(rank[2], told[0][2]), "TP ranks must hold the same gradient"
    shards = torch.cat([rank[3] for rank in told])
    torch.testing.assert_close(shards.double(), grad_weight, atol=2e-5, rtol=1e-5)
    assert not shards[vocab:].any(), "padding rows have no gradient"


@pytest.mark.dist
def test_the_log_prob_alone_has_its_own_gradient(ranks) -> None:
    hidden, weight, target, grad_log_prob, _ = _problem(300)
    hidden.requires_grad_()
    log_p = (hidden @ weight[:300].t()).log_softmax(-1)
    wanted = torch.autograd.grad(
        (log_p.gather(1, target[:, None])[:, 0] * grad_log_prob).sum(), hidden
    )
    for rank in ranks.run(2, _scores, 300, 1.0):
        torch.testing.assert_close(rank[4], wanted[0], atol=2e-5, rtol=1e-4)
