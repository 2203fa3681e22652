"""The digest against its definition in plain Python integers, and its independence of layout."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.contracts.mesh import Mesh
from megarl.reshard import digest as digest_module
from megarl.reshard.digest import (
    BITS,
    Digester,
    block_digest,
    drift_message,
    joined,
    row_sums,
    scratch_for,
)
from megarl.reshard.layout import hf_placement, megatron_placement, sglang_placement
from megarl.reshard.matrix import as_matrix
from megarl.reshard.placement import LayoutError, LogicalTensor, Piece, Placement
from tests.reshard.models import make_shards, make_spec, make_whole

MASK = 2**64 - 1
HALF = 2**32 - 1


def _factor(seed: str, position: int) -> int:
    z = int.from_bytes(blake3(seed.encode()).digest()[:8], "little")
    z = (z + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def _element(bits: int, column: int) -> int:
    """f_j(x) of an element of up to 32 bits, x signed."""
    factor = _factor("columns", column)
    b, c = factor & HALF, factor >> 32 | 1
    p = bits * b & HALF
    q = c * ((p - (1 << 32) if p >> 31 else p) >> 16) & HALF
    return q + (p << 32) if column % 2 else p + (q << 32)


def _plain(rows: list[list[float]], name: str, pack: str, unpack: str, row=0, col=0) -> int:
    total = 0
    for i, values in enumerate(rows, row):
        for j, value in enumerate(values, col):
            bits = struct.unpack(unpack, struct.pack(pack, value))[0]
            total += _factor(name, i) * _element(bits, j)
    return total & MASK


@pytest.mark.parametrize("row, col", [(0, 0), (3, 1), (0, 8190), (0, 8191)])
def test_digest_is_its_definition(row: int, col: int) -> None:
    """Also where the factors are made in two steps."""
    rows = [[1.0, -2.5, 0.0, 3e-39], [-0.0, float("inf"), 7.25, -1e4], [0.1, 0.2, 0.3, 0.4]]
    block = torch.tensor(rows)
    assert block_digest(block, "w", row, col) == _plain(rows, "w", "<f", "<i", row, col)
    halves = block.half()
    right = _plain(halves.tolist(), "w", "<e", "<h", row, col)
    assert block_digest(halves, "w", row, col) == right
    cut = block[:, 1:2]
    right = _plain([[row[1]] for row in rows], "w", "<f", "<i", row, col + 1)
    assert block_digest(cut, "w", row, col + 1) == right


def test_64_bit_elements_take_64_bit_products() -> None:
    rows = [[1.0, -2.5, 1e-300], [float("inf"), 7.25, -1e4]]
    total = sum(
        _factor("w", i) * struct.unpack("<q", struct.pack("<d", value))[0] * _factor("columns", j)
        for i, row in enumerate(rows)
        for j, value in enumerate(row, 5)
    )
    assert block_digest(torch.tensor(rows, dtype=torch.float64), "w", 0, 5) == total & MASK


def test_bfloat16_bits_are_signed_16_bit_integers() -> None:
    block = torch.tensor([[1.0, -3.0]]).bfloat16()
    bits = [0x3F80, 0xC040 - 0x10000]
    right = sum(_factor("w", 4) * _element(b, 9 + j) for j, b in enumerate(bits))
    assert block_digest(block, "w", 4, 9) == right & MASK


def _row_sums(block: torch.Tensor, col: int) -> torch.Tensor:
    sums = torch.empty(len(block), dtype=torch.int64)
    row_sums(block, col, block.dtype, sums, scratch_for(block.device))
    return sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("col", [0, 1, 6, 4097])
def test_no_two_16_bit_elements_count_alike(dtype, col: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    assert len(_row_sums(every, col).unique()) == 2**16


@pytest.mark.parametrize("col", [0, 1, 6, 4097])
def test_no_two_32_bit_elements_count_alike(col: int) -> None:
    """Of a million: neighbours, and values that differ in their upper half alone."""
    near = torch.arange(-(2**19), 2**19, dtype=torch.int32)
    far = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16 + 2**15
    bits = torch.cat([near, far]).unique()[:, None].view(torch.float32)
    assert len(_row_sums(bits, col).unique()) == len(bits)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    col=st.integers(0, 5),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_one_changed_element_always_changes_it(dtype, rows, cols, col, data) -> None:
    bits = BITS[dtype.itemsize]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    block = torch.randn(rows, cols, generator=generator).to(dtype)
    other = block.clone()
    at = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    info = torch.iinfo(bits)
    other.view(bits)[at] = data.draw(st.integers(info.min, info.max))
    same = bool(other.view(bits)[at] == block.view(bits)[at])
    assert (block_digest(block, "w", 2, col) == block_digest(other, "w", 2, col)) == same


def test_changes_of_high_bits_do_not_cancel_in_a_row() -> None:
    """Two signs flipped, two powers of two swapped: products modulo 2^32 alone let half pass."""
    block = torch.full((1, 64), 0.5)
    block[0, ::2] = -0.5
    digest = block_digest(block, "w", 0, 0)
    for one, two in itertools.combinations(range(64), 2):
        flipped, swapped = block.clone(), block.clone()
        flipped[0, [one, two]] *= -1
        swapped[0, one] *= 2
        swapped[0, two] *= 0.5
        assert digest != block_digest(flipped, "w", 0, 0)
        assert digest != block_digest(swapped, "w", 0, 0)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_shares_of_disjoint_parts_add_up(dtype, rows, cols, seed, data) -> None:
    block = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    row, col = data.draw(st.integers(0, rows)), data.draw(st.integers(0, cols))
    whole = block_digest(block, "w", 0, 0)
    parts = [
        block_digest(block[r : r + h, c : c + w], "w", r, c)
        for (r, h), (c, w) in itertools.product(
            ((0, row), (row, rows - row)), ((0, col), (col, cols - col))
        )
        if h and w
    ]
    assert sum(parts) % 2**64 == whole


def test_any_single_bit_changes_it() -> None:
    block = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    seen = {block_digest(block, "w", 0, 0)}
    for row, col, bit in itertools.product(range(3), range(5), range(32)):
        other = block.clone()
        other.view(torch.int32)[row, col] ^= (1 << bit) if bit < 31 else -(1 << 31)
        seen.add(block_digest(other, "w", 0, 0))
    assert len(seen) == 1 + 3 * 5 * 32


def test_swaps_names_and_positions_change_it() -> None:
    block = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    others = [block.T.contiguous(), block.flip(0), block.flip(1)]
    digests = [block_digest(b, "w", 0, 0) for b in (block, *others)]
    digests += [block_digest(block, *place) for place in (("v", 0, 0), ("w", 1, 0), ("w", 0, 1))]
    assert len(set(digests)) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cols, col", [(33, 2), (33, 3), (32, 2), (32, 3)])
def test_row_blocks_change_nothing(monkeypatch, dtype, cols: int, col: int) -> None:
    block = torch.randn(70, cols, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = block_digest(block, "w", 3, col)
    for size in (1, 35, 100, 101):
        monkeypatch.setattr(digest_module, "CPU_BLOCK", size)
        assert block_digest(block, "w", 3, col) == whole


def test_experts_in_three_dimensions_are_the_matrix_of_their_rows() -> None:
    experts = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))
    assert as_matrix(experts).data_ptr() == experts.data_ptr()
    assert torch.equal(as_matrix(experts), torch.cat(list(experts)))
    piece = Piece(0, "w", 0, 0, 12, 5, "experts", 0, 0)
    placement = Placement.of_pieces(
        "live", {"w": LogicalTensor("w", (12, 5))}, [[piece]], [{"experts": (12, 5)}], [[]]
    )
    found = Digester(placement, 0, {"experts": experts}, torch.float32).digest()
    assert int(found[0]) % 2**64 == block_digest(torch.cat(list(experts)), "w", 0, 0)


@pytest.mark.parametrize("odd", [torch.zeros(3, 5, 4).transpose(0, 1), torch.tensor(1.0)])
def test_a_parameter_that_is_no_matrix_in_place_is_refused(odd) -> None:
    with pytest.raises(LayoutError, match=r"of shape \[.*\] and strides \[.*\] is no matrix"):
        as_matrix(odd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_layouts_have_one_digest_for_each_tensor(dtype, tied) -> None:
    spec = make_spec(tied=tied)
    found = []
    for world, tp, pp, rollout_tp in ((1, 1, 1, 1), (4, 2, 1, 4), (8, 4, 2, 8), (4, 1, 1, 2)):
        mesh = Mesh(world, tp=tp, pp=pp, rollout_tp=rollout_tp)
        for placement in (make(spec, mesh) for make in (megatron_placement, sglang_placement)):
            whole = make_whole(placement)
            shares = [
                Digester(placement, rank, make_shards(placement, rank, whole), dtype).digest()
                for rank in range(world)
            ]
            digests, torn = joined(placement, [share.tolist() for share in shares])
            assert not torn
            found.append(digests)
    right = {
        name: block_digest((tensor if tensor.dim() == 2 else tensor[:, None]).to(dtype), name, 0, 0)
        for name, tensor in make_whole(hf_placement(spec, Mesh(1, tp=1))).items()
    }
    assert all(digests == right for digests in found)


def test_copies_that_differ_are_told_by_majority() -> None:
    placement = megatron_placement(make_spec(), Mesh(4, tp=1))
    shares = [[7] * len(placement.tensors) for _ in range(4)]
    name = "model.norm.weight"
    shares[3][list(placement.tensors).index(name)] = 8
    whole, torn = joined(placement, shares)
    assert name not in whole and len(whole) == len(placement.tensors) - 1
    assert drift_message("megatron", torn) == (
        "copies of the megatron's weights differ: "
        "model.norm.weight: rank 3 drifted from ranks 0, 1, 2"
    )
