"""A digest of each logical tensor that does not depend on how it is laid out.

    digest = Σ_i a_i · (Σ_j x_ij · b_j)   modulo 2^64

over logical rows i and columns j. x_ij are the element's raw bits as a signed integer of its own
width; a_i is odd, mixed from the tensor's name and i; b_j is odd, mixed from j. An odd factor is
invertible modulo 2^64, so a change of one element always changes the digest; and sums over
disjoint parts add up, whoever holds them. It guards against faults, not against an adversary.
A 1-D tensor of n elements is n × 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from megarl.reshard.placement import Piece, Placement

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64 (Steele, Lea, Flood 2014)."""
COLUMNS = "columns"
"""Seeds b, as a tensor's name seeds its a."""
CPU_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 22
"""Elements worked at once: int64 products that stay in a CPU's cache, few kernels elsewhere."""
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


@lru_cache(maxsize=64)
def _column_factors(first: int, count: int, device: torch.device) -> Tensor:
    return coefficients(COLUMNS, first, count).to(device)


def scratch_for(device: torch.device) -> Tensor:
    """Room for the products of one row block; kept over a pass, for allocating it costs more."""
    most = CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    return torch.empty(most, dtype=torch.int64, device=device)


def row_sums(block: Tensor, col: int, dtype: torch.dtype, out: Tensor, scratch: Tensor) -> None:
    """Σ_j x_ij · b_j of each row, after the cast to `dtype`, into `out` int64 [rows].

    `block`: 2-D, any float dtype; `col`: the logical column of its first; `scratch`: int64, flat.
    """
    rows, cols = block.shape
    if scratch.numel() < cols:
        scratch = torch.empty(cols, dtype=torch.int64, device=block.device)
    factors = _column_factors(col, cols, block.device)
    step = scratch.numel() // cols
    for row in range(0, rows, step):
        bits = block[row : row + step].to(dtype).view(BITS[dtype.itemsize])
        products = scratch[: bits.numel()].view(bits.shape)
        torch.sum(products.copy_(bits).mul_(factors), dim=1, out=out[row : row + step])


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
        """`dtype`: the digest is of the elements cast to it."""
        self.dtype = dtype
        self.params = params
        self.tensors = len(placement.tensors)
        numbers = {name: number for number, name in enumerate(placement.tensors)}
        pieces = sorted(
            placement.pieces[rank], key=lambda p: (p.param, p.param_col, p.cols, p.col, p.param_row)
        )
        self.runs = _runs(pieces)
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
            tensor = self.params[param].detach()
            matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
            block = matrix[param_row : param_row + rows, param_col : param_col + cols]
            row_sums(block, col, self.dtype, sums[at : at + rows], scratch)
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
