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
from megarl.reshard.digest import Digester, block_digest, drift_message, joined
from megarl.reshard.layout import hf_placement, megatron_placement, sglang_placement
from tests.reshard.models import make_shards, make_spec, make_whole

MASK = 2**64 - 1


def _factor(seed: str, position: int) -> int:
    z = int.from_bytes(blake3(seed.encode()).digest()[:8], "little")
    z = (z + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def _plain(rows: list[list[float]], name: str, pack: str, unpack: str) -> int:
    total = 0
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            bits = struct.unpack(unpack, struct.pack(pack, value))[0]
            total += _factor(name, i) * bits * _factor("columns", j)
    return total & MASK


def test_digest_is_its_definition() -> None:
    rows = [[1.0, -2.5, 0.0, 3e-39], [-0.0, float("inf"), 7.25, -1e4], [0.1, 0.2, 0.3, 0.4]]
    block = torch.tensor(rows)
    assert block_digest(block, "a.weight", 0, 0) == _plain(rows, "a.weight", "<f", "<i")
    halves = block.half()
    assert block_digest(halves, "a.weight", 0, 0) == _plain(halves.tolist(), "a.weight", "<e", "<h")
    assert block_digest(torch.tensor([[1.0]]), "x", 0, 0) == (
        0x3F800000 * _factor("x", 0) * _factor("columns", 0) & MASK
    )


def test_bfloat16_bits_are_signed_16_bit_integers() -> None:
    block = torch.tensor([[1.0, -3.0]]).bfloat16()
    bits = [0x3F80, 0xC040 - 0x10000]
    right = sum(b * _factor("w", 4) * _factor("columns", 9 + j) for j, b in enumerate(bits))
    assert block_digest(block, "w", 4, 9) == right & MASK


@given(rows=st.integers(1, 9), cols=st.integers(1, 9), seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=40, deadline=None)
def test_shares_of_disjoint_parts_add_up(rows, cols, seed, data) -> None:
    block = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
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


def test_row_blocks_change_nothing(monkeypatch) -> None:
    block = torch.randn(70, 33, generator=torch.Generator().manual_seed(2))
    whole = block_digest(block, "w", 3, 2)
    monkeypatch.setattr(digest_module, "CPU_BLOCK", 100)
    assert block_digest(block, "w", 3, 2) == whole


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
