"""A digest of each logical tensor that does not depend on how it is laid out.

    digest = Σ_i a_i · Σ_j f_j(x_ij)   modulo 2^64

over logical rows i and columns j. x_ij are the element's raw bits as a signed integer of its own
width; a_i is odd, mixed from the tensor's name and i. For elements of up to 32 bits

    p = b_j · x                 modulo 2^32, signed
    q = c_j · ⌊p / 2^16⌋        modulo 2^32
    f_j(x) = p + 2^32 · q  for even j,  q + 2^32 · p  for odd j    (p and q unsigned)

with b_j and c_j odd, mixed from j; for 64-bit elements f_j(x) = b_j · x with an odd 64-bit b_j.
All of it is 32-bit arithmetic on blocks that stay in cache: the products of two neighbouring
columns, read as one 64-bit number, are p + 2^32 · p' and add up as they lie.

A change of one element always changes the digest. An odd factor is invertible modulo 2^32, so p
changes. For even j, f changes modulo 2^32. For odd j it does so too where q changes; where q stays,
f changes by 2^32 times the change of p, and that is no multiple of 2^64. a_i is invertible modulo
2^64. q is there for several changes at once: b_j · x moves a change of x only upwards, so that
signs flipped in one row would cancel in p alone every second time.

Sums over disjoint parts add up, whoever holds them. The digest guards against faults, not against
an adversary. A 1-D tensor of n elements is n × 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from megarl.reshard.matrix import held_as, window
from megarl.reshard.placement import Piece, Placement

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64 (Steele, Lea, Flood 2014)."""
COLUMNS = "columns"
"""Seeds the columns' factors, as a tensor's name seeds its a."""
CPU_BLOCK, DEVICE_BLOCK = 1 << 19, 1 << 22
"""Elements worked at once. On a CPU their products (4 bytes, twice) stay in its last cache, and a
call of torch costs little beside them."""
COLUMN_STEP = 1 << 13
"""Columns whose factors are made at a time."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DriftError(RuntimeError):
    """Ranks that must hold the same elements do not."""


class DigestError(RuntimeError):
    """Weights differ from the manifest that they should be."""


def coefficients(seed: str, first: int, count: int) -> Tensor:
    """Odd int64 factors [count] of positions `first …`: splitmix64 of (seed's hash, position)."""
    start = int.from_bytes(blake3(seed.encode()).digest(8), "little")
    with np.errstate(over="ignore"):
        z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z += np.uint64(start)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


@lru_cache(maxsize=16)
def _factors_up_to(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    wide = coefficients(COLUMNS, 0, count)
    low, high = wide.view(torch.int32).view(-1, 2).unbind(1)
    return low.contiguous().to(device), (high | 1).to(device), wide.to(device)


def _column_factors(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """b and c, int32, and the 64-bit b, each [count], of logical columns `first …`."""
    ready = _factors_up_to(-(-(first + count) // COLUMN_STEP) * COLUMN_STEP, device)
    b, c, wide = (factors[first : first + count] for factors in ready)
    return b, c, wide


def scratch_for(device: torch.device) -> Tensor:
    """Room for the products of one row block; kept over a pass, for allocating it costs more."""
    most = CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    return torch.empty(most, dtype=torch.int64, device=device)


def row_sums(block: Tensor, col: int, dtype: torch.dtype, out: Tensor, scratch: Tensor) -> None:
    """Σ_j f_j(x_ij) of each row, after the cast to `dtype`, into `out` int64 [rows].

    `block`: 2-D, any float dtype; `col`: the logical column of its first; `scratch`: int64, flat.
    """
    rows, cols = block.shape
    b, c, wide = _column_factors(col, cols, block.device)
    if scratch.numel() < cols + 4:
        scratch = torch.empty(cols + 4, dtype=torch.int64, device=block.device)
    step = min(rows, scratch.numel() // (cols + 4))
    half = scratch.numel() // 2
    if dtype.itemsize < 8:
        ps, p_pairs = _paired(scratch[:half], step, cols, col % 2)
        qs, q_pairs = _paired(scratch[half:], step, cols, 1 - col % 2)
    for row in range(0, rows, step):
        bits = block[row : row + step].to(dtype).view(BITS[dtype.itemsize])
        count = len(bits)
        sums = out[row : row + count]
        if dtype.itemsize == 8:
            products = scratch[: count * cols].view(count, cols)
            torch.sum(torch.mul(bits, wide, out=products), dim=1, out=sums)
            continue
        p = ps[:count]
        if bits.dtype == torch.int32:
            torch.mul(bits, b, out=p)
        else:
            p.copy_(bits).mul_(b)
        torch.sum(p_pairs[:count], dim=1, out=sums)
        torch.mul(p.bitwise_right_shift_(16), c, out=qs[:count])
        sums.add_(torch.sum(q_pairs[:count], dim=1))


def _paired(room: Tensor, rows: int, cols: int, shift: int) -> tuple[Tensor, Tensor]:
    """int32 [rows, cols] in `room` (int64, flat), and the int64 pairs of columns that it fills.

    With `shift` 1 its first column is the second of a pair. Halves beside it are zero.
    """
    width = (shift + cols + 1) // 2
    pairs = room[: rows * width].view(rows, width)
    halves = pairs.view(torch.int32)
    if shift:
        halves[:, 0] = 0
    if (shift + cols) % 2:
        halves[:, -1] = 0
    return halves[:, shift : shift + cols], pairs


def block_digest(block: Tensor, name: str, row: int, col: int) -> int:
    """The share of logical tensor `name` that `block` holds, in 0 … 2^64 − 1.

    `block`: 2-D, at logical (row, col); its dtype is the one digested.
    """
    sums = torch.empty(block.shape[0], dtype=torch.int64, device=block.device)
    row_sums(block, col, block.dtype, sums, scratch_for(block.device))
    factors = coefficients(name, row, block.shape[0]).to(block.device)
    return int(torch.sum(sums * factors)) % 2**64


class Digester:
    """Digests what one rank holds, where it lies, one number for each logical tensor.

    Everything that depends on the layout is worked out once.
    """

    def __init__(
        self, placement: Placement, rank: int, params: Mapping[str, Tensor], dtype: torch.dtype
    ) -> None:
        """`dtype`: the model's; the digest is of the elements cast to what it holds them in."""
        self.params = params
        self.tensors = len(placement.tensors)
        numbers = {name: number for number, name in enumerate(placement.tensors)}
        pieces = sorted(
            placement.pieces[rank], key=lambda p: (p.param, p.param_col, p.cols, p.col, p.param_row)
        )
        self.runs = _runs(pieces)
        self.dtypes = {p.param: held_as(placement.tensors[p.tensor], dtype) for p in pieces}
        self.rows = sum(piece.rows for piece in pieces)
        device = next(iter(params.values())).device if params else torch.device("cpu")
        factors = [coefficients(piece.tensor, piece.row, piece.rows) for piece in pieces]
        owners = [torch.full((piece.rows,), numbers[piece.tensor]) for piece in pieces]
        empty = [torch.empty(0, dtype=torch.int64)]
        self.factors = torch.cat(factors or empty).to(device)
        self.owners = torch.cat(owners or empty).to(device)

    @torch.no_grad()
    def digest(self) -> Tensor:
        """int64 [logical tensors], in the placement's order, on the CPU; 0 where none is held."""
        sums = torch.empty(self.rows, dtype=torch.int64, device=self.factors.device)
        scratch = scratch_for(sums.device)
        at = 0
        for param, param_row, param_col, rows, cols, col in self.runs:
            block = window(self.params[param], param_row, param_col, rows, cols)
            row_sums(block, col, self.dtypes[param], sums[at : at + rows], scratch)
            at += rows
        total = torch.zeros(self.tensors, dtype=torch.int64, device=sums.device)
        return total.index_add_(0, self.owners, sums.mul_(self.factors)).cpu()


def _runs(pieces: Sequence[Piece]) -> list[tuple[str, int, int, int, int, int]]:
    """Pieces stacked in one parameter over the same columns, as one block.

    (parameter, row, column, rows, columns, logical column); the rows' order is the pieces'.
    """
    runs: list[tuple[str, int, int, int, int, int]] = []
    for piece in pieces:
        if runs:
            param, row, param_col, rows, cols, col = runs[-1]
            same = (param, param_col, cols, col) == (
                piece.param,
                piece.param_col,
                piece.cols,
                piece.col,
            )
            if same and row + rows == piece.param_row:
                runs[-1] = (param, row, param_col, rows + piece.rows, cols, col)
                continue
        runs.append(
            (piece.param, piece.param_row, piece.param_col, piece.rows, piece.cols, piece.col)
        )
    return runs


def joined(placement: Placement, by_rank: Sequence[Sequence[int]]) -> tuple[dict[str, int], dict]:
    """Whole-tensor digests from each rank's shares.

    `by_rank`: for each rank, its shares in the placement's order of tensors. Returns the digest of
    each tensor whose copies agree, and for each other one {share: ranks} of the parts that do not.
    """
    whole: dict[str, int] = {}
    torn: dict[str, list[dict[int, list[int]]]] = {}
    for number, (name, parts) in enumerate(placement.copies.items()):
        total = 0
        for ranks in parts:
            said: dict[int, list[int]] = {}
            for rank in ranks:
                said.setdefault(by_rank[rank][number], []).append(rank)
            if len(said) > 1:
                torn.setdefault(name, []).append(said)
            total += by_rank[ranks[0]][number]
        if name not in torn:
            whole[name] = total % 2**64
    return whole, torn


def drift_message(kind: str, torn: Mapping[str, Sequence[Mapping[int, Sequence[int]]]]) -> str:
    """One line naming the tensors whose copies differ and, where a majority tells, the ranks."""
    return f"copies of the {kind}'s weights differ: {drifted(torn)}"


def drifted(torn: Mapping[str, Sequence[Mapping[int, Sequence[int]]]]) -> str:
    """The tensors that `joined` found torn, each with its ranks."""
    told = []
    for name, parts in list(torn.items())[:4]:
        for said in parts:
            groups = sorted(said.values(), key=len, reverse=True)
            if 2 * len(groups[0]) > sum(len(ranks) for ranks in groups):
                odd = sorted(rank for ranks in groups[1:] for rank in ranks)
                told.append(f"{name}: {named(odd)} drifted from {named(groups[0])}")
            else:
                parties = " against ".join(named(ranks) for ranks in sorted(groups))
                told.append(f"{name}: {parties}, no majority tells which drifted")
    more = f"; and {len(torn) - 4} more tensors" if len(torn) > 4 else ""
    return "; ".join(told) + more


def named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
