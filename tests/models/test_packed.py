"""Packed attention, rotary embedding and norm, against dense masks and formulas, without ranks.

Not covered: SDPA's GPU kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megarl.models.packed import PackedAttention, PackedSequences, RMSNorm, pack_sequences
from megarl.models.rotary import inverse_frequencies

HEADS, GROUPS, DIM = 6, 2, 8
LENGTHS = [5, 1, 40, 7, 3, 22, 20]


def _pack(lengths: list[int]) -> PackedSequences:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return pack_sequences(bounds, positions, inverse_frequencies(DIM, 77_000.0), torch.float32)


def _inputs(tokens: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = [(tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, DIM)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def _dense(query, key, value, lengths: list[int]) -> torch.Tensor:
    """Block-diagonal causal mask over the whole pack, rotation by complex numbers, float64."""
    query, key, value = (x.double() for x in (query, key, value))
    position = torch.cat([torch.arange(length) for length in lengths]).double()
    frequency = 77_000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    turn = torch.polar(torch.ones(()).double(), position[:, None] * frequency)[:, None]

    def rotate(x):
        pair = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
        return torch.cat([pair.real, pair.imag], dim=-1)

    query, key = rotate(query), rotate(key)
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = len(sequence)
    visible = (sequence[:, None] == sequence) & torch.ones(tokens, tokens).tril().bool()
    scores = torch.einsum("thd,shd->hts", query, key) / DIM**0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value)


def test_packed_attention_is_the_dense_block_diagonal_one() -> None:
    pack = _pack(LENGTHS)
    assert len(pack.blocks) > 2, "several blocks must be at work"
    inputs = _inputs(sum(LENGTHS))
    out = PackedAttention()(*inputs, packed_seq_params=pack)
    expected = _dense(*inputs, LENGTHS)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, atol=1e-5, rtol=1e-5)


def test_tables_cover_each_token_once_and_waste_less_than_half() -> None:
    pack = _pack(LENGTHS)
    tokens = sum(LENGTHS)
    assert torch.equal(pack.token_S[pack.slot_T], torch.arange(tokens))
    assert len(pack.slot_T.unique()) == tokens
    assert len(pack.token_S) == sum(rows * width for rows, width in pack.blocks) < 2 * tokens
    assert pack.max_seqlen_q == 40


def test_not_a_number_stays_in_its_sequence() -> None:
    pack = _pack(LENGTHS)
    query, key, value = (x.detach() for x in _inputs(sum(LENGTHS)))
    clean = PackedAttention()(query, key, value, packed_seq_params=pack)
    for tensor in (query, key, value):
        tensor[:5] = float("nan")
    out = PackedAttention()(query, key, value, packed_seq_params=pack)
    assert out[:5].isnan().all() and torch.equal(out[5:], clean[5:])


def test_rms_norm_is_its_formula_also_in_bfloat16() -> None:
    config = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=torch.bfloat16, sequence_parallel=False
    )
    norm = RMSNorm(config, hidden_size=16, eps=1e-3)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16, generator=draw) + 0.5)
    x = (torch.randn(5, 1, 16, generator=draw) * 0.1).to(torch.bfloat16)
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    out = norm(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=1e-6)
