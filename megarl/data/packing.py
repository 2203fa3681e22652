"""Token-budget micro-batches: which samples share a forward, and the packed tensors of one.

The plan is a pure function of the lengths in canonical order, so every rank draws the same plan
and only takes its own part. A response token is *predicted* at the position before it: the first
one at the last prompt token; a packed neighbour's first token is never a target.

T packed tokens, A response tokens of a pack (the scored positions), n samples of a pack,
N samples and R response tokens of a `Samples`.

Example: prompts of 3 and 2, responses of 3 and 1 tokens, in one pack::

    token_ids_T  P0 P1 P2 R0 R1 R2 | Q0 Q1 S0      cu_seqlens  [0, 6, 9]
    positions_T   0  1  2  3  4  5 |  0  1  2
    predictor_A  [2, 3, 4, 7]  target_A [R0, R1, R2, S0]  sequence_A [0, 0, 0, 1]
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megarl.contracts.samples import Samples


class _OnDevice:
    """Moves every tensor field, also of nested records; a field that is no tensor is kept."""

    def to(self, device: torch.device | str) -> Self:
        moved = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            moved[item.name] = value.to(device) if hasattr(value, "to") else value
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class Pack(_OnDevice):
    """Packed sequences of one forward.

    A pack without samples holds one dummy token (id 0, `cu_seqlens` [0, 1]) and A = 0: its rank
    runs the same forward as its peers and adds nothing. A padded pack (`pad_pack`) ends with dummy
    sequences, which have no row and no response token; `cu_seqlens` tells them too.
    """

    rows: Tensor  # int64 [n], rows of this rank's Samples, ascending
    token_ids_T: Tensor  # int64 [T]
    positions_T: Tensor  # int64 [T], restarting at 0 in every sequence
    cu_seqlens: Tensor  # int32 [n+1], sequence s is [cu_seqlens[s], cu_seqlens[s+1])
    predictor_A: Tensor  # int64 [A], index in T whose logits predict response token a
    target_A: Tensor  # int64 [A], the response token's id
    action_mask_A: Tensor  # bool [A]
    sequence_A: Tensor  # int64 [A], which of the n sequences
    response_A: Tensor  # int64 [A], index in the Samples' flat response arrays
    max_length: int
    """Tokens of the longest sequence."""

    @property
    def is_empty(self) -> bool:
        return len(self.rows) == 0

    def take(self, values_R: np.ndarray) -> Tensor:
        """This pack's part [A] of an array over the Samples' response tokens [R]."""
        return torch.from_numpy(np.ascontiguousarray(values_R[self.response_A.cpu().numpy()])).to(
            self.response_A.device
        )


@dataclass(frozen=True)
class MicroBatch(_OnDevice):
    """One forward and backward: a pack and what the loss needs of each response token.

    Raises `ValueError` when a column is not float32 [A].
    """

    pack: Pack
    old_log_probs_A: Tensor  # float32, the actor's before any update of the iteration
    ref_log_probs_A: Tensor | None  # float32, the reference's, when a KL term needs them
    rollout_log_probs_A: Tensor  # float32, the generator's
    advantages_A: Tensor  # float32
    weights_A: Tensor  # float32, Σ weights · loss over all packs of all ranks is the loss

    def __post_init__(self) -> None:
        shape = self.pack.target_A.shape
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "pack" or value is None:
                continue
            if value.dtype != torch.float32 or value.shape != shape:
                raise ValueError(
                    f"{item.name} is {value.dtype}{list(value.shape)}, "
                    f"the pack needs torch.float32{list(shape)}"
                )


def plan_packs(
    lengths: np.ndarray | Sequence[int],
    dp: int,
    budget: int,
    name: Callable[[int], str] = "sample {}".format,
    even_length: int | None = None,
) -> list[list[np.ndarray]]:
    """Rows of every pack, `plan[dp_index][pack]`, int64 ascending.

    `lengths` are prompt + response tokens in canonical order. Each row is in one pack, no pack is
    above `budget` tokens, every dp index has the same number of packs (at least one, perhaps
    empty). Tokens are balanced over packs, and work over dp indices: n · (1 + n / even_length)
    for a sample of n tokens, where at `even_length` attention costs as much as all else (None:
    tokens alone). Longest sample first into the lightest pack, with as few packs as that allows,
    never more than best-fit decreasing needs.

    A group's samples may lie apart, for what needs siblings (means, deviations) comes from the
    global table. Work of the busiest dp index over the mean, 64 groups of 16 at lognormal lengths
    (median 6000, at most 32768), even_length 16000: 1.00 on 8 and on 32 indices; by tokens alone
    1.05 and 1.13; with whole groups on one index 1.01 and 2.39.

    Raises `ValueError` for a sample longer than the budget; `name` turns a row into its name.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    long = np.flatnonzero(lengths > budget)
    if len(long):
        told = ", ".join(f"{name(int(row))} ({lengths[row]} tokens)" for row in long[:5])
        more = f" and {len(long) - 5} more" if len(long) > 5 else ""
        raise ValueError(
            f"longer than the budget of {budget} tokens per micro-batch: {told}{more}; "
            "raise actor.tokens_per_micro_batch or lower the response limit"
        )
    if dp < 1 or (lengths <= 0).any():
        raise ValueError(f"packing needs dp ≥ 1 and lengths ≥ 1, got dp={dp}, {lengths.tolist()}")
    order = np.lexsort((np.arange(len(lengths)), -lengths)).tolist()
    tokens = lengths.tolist()
    fallback = _best_fit(tokens, order, budget)
    most = max(1, -(-len(fallback) // dp))
    fewest = max(1, -(-int(lengths.sum()) // (dp * budget)))
    packs = fallback + [[] for _ in range(most * dp - len(fallback))]
    for per_index in range(fewest, most + 1):
        balanced = _spread(tokens, order, per_index * dp)
        if max(sum(tokens[row] for row in rows) for rows in balanced) <= budget:
            packs = balanced
            break
    work = tokens if even_length is None else (lengths * (even_length + lengths)).tolist()
    return _deal([sorted(rows) for rows in packs], work, dp)


def _spread(tokens: list[int], order: list[int], bins: int) -> list[list[int]]:
    """Longest first into the lightest bin; the lower bin wins a tie."""
    packs: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, index) for index in range(bins)]
    for row in order:
        load, index = loads[0]
        packs[index].append(row)
        heapq.heapreplace(loads, (load + tokens[row], index))
    return packs


def _best_fit(tokens: list[int], order: list[int], budget: int) -> list[list[int]]:
    """Longest first into the fullest bin with room."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for row in order:
        at = bisect_left(rooms, (tokens[row], -1))
        if at == len(rooms):
            packs.append([])
            room, index = budget, len(packs) - 1
        else:
            room, index = rooms.pop(at)
        packs[index].append(row)
        insort(rooms, (room - tokens[row], index))
    return packs


def _deal(packs: list[list[int]], work: list[int], dp: int) -> list[list[np.ndarray]]:
    """Packs over dp indices, an equal number each, heaviest first to the lightest index."""
    per_index = len(packs) // dp
    loads = {pack: sum(work[row] for row in rows) for pack, rows in enumerate(packs)}
    dealt: list[list[int]] = [[] for _ in range(dp)]
    lightest = [(0, index) for index in range(dp)]
    for pack in sorted(loads, key=lambda pack: (-loads[pack], pack)):
        total, index = heapq.heappop(lightest)
        dealt[index].append(pack)
        if len(dealt[index]) < per_index:
            heapq.heappush(lightest, (total + loads[pack], index))
    return [
        [np.array(packs[pack], dtype=np.int64) for pack in sorted(own, key=lambda p: -loads[p])]
        for own in dealt
    ]


@dataclass(frozen=True)
class UpdatePlan:
    """Which rows train in which minibatch, pack and data-parallel part; fixed once, globally."""

    packs: tuple[tuple[tuple[np.ndarray, ...], ...], ...]
    """`packs[minibatch][dp_index][pack]`: global canonical rows, int64 ascending."""
    owner: np.ndarray
    """int64 [N], the dp index that packs each global row; −1 where no pack has the row."""

    @property
    def packed(self) -> np.ndarray:
        """bool [N]."""
        return self.owner >= 0

    def local_packs(self, dp_index: int) -> list[list[np.ndarray]]:
        """`[minibatch][pack]` rows of a dp index's own Samples (its rows in canonical order)."""
        local = np.full(len(self.owner), -1, dtype=np.int64)
        own = np.flatnonzero(self.owner == dp_index)
        local[own] = np.arange(len(own))
        return [[local[rows] for rows in parts[dp_index]] for parts in self.packs]


def plan_update(
    lengths: np.ndarray | Sequence[int],
    minibatches: Sequence[np.ndarray],
    dp: int,
    budget: int,
    name: Callable[[int], str] = "sample {}".format,
    even_length: int | None = None,
) -> UpdatePlan:
    """Packs of every minibatch (arrays of global rows, disjoint); pure, the same on every rank.

    An empty minibatch has one empty pack on every dp index. Raises `ValueError` when a row is in
    two minibatches, and as `plan_packs`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    owner = np.full(len(lengths), -1, dtype=np.int64)
    plan = []
    for rows in minibatches:
        rows = np.sort(np.asarray(rows, dtype=np.int64))
        if (owner[rows] >= 0).any() or len(np.unique(rows)) != len(rows):
            raise ValueError(f"a row is in two minibatches or twice in one: {rows.tolist()}")
        parts = plan_packs(
            lengths[rows], dp, budget, lambda row, rows=rows: name(int(rows[row])), even_length
        )
        plan.append(tuple(tuple(rows[pack] for pack in own) for own in parts))
        for dp_index, own in enumerate(plan[-1]):
            for pack in own:
                owner[pack] = dp_index
    return UpdatePlan(packs=tuple(plan), owner=owner)


def ragged_index(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 indices of the flat elements of `rows`, row by row, without a loop."""
    lengths = offsets[rows + 1] - offsets[rows]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(starts[-1]) - np.repeat(starts[:-1] - offsets[rows], lengths)


def build_pack(samples: Samples, rows: np.ndarray | Sequence[int]) -> Pack:
    """The packed tensors of `rows`, in that order; no rows give the dummy pack."""
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) == 0:
        return empty_pack()
    prompts, responses = samples.prompt_lengths[rows], samples.response_lengths[rows]
    lengths = prompts + responses
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    sequence_T = np.repeat(np.arange(len(rows)), lengths)
    positions_T = np.arange(cu_seqlens[-1]) - cu_seqlens[:-1][sequence_T]
    is_response_T = positions_T >= prompts[sequence_T]
    response_A = ragged_index(samples.response_offsets, rows)
    token_ids_T = np.empty(cu_seqlens[-1], dtype=np.int64)
    token_ids_T[~is_response_T] = samples.prompt_ids[ragged_index(samples.prompt_offsets, rows)]
    token_ids_T[is_response_T] = samples.response_ids[response_A]
    # No prompt is empty (a contract of Samples), so the position before is in the same sequence.
    predictor_A = np.flatnonzero(is_response_T) - 1
    return Pack(
        rows=_tensor(rows),
        token_ids_T=_tensor(token_ids_T),
        positions_T=_tensor(positions_T),
        cu_seqlens=_tensor(cu_seqlens, np.int32),
        predictor_A=_tensor(predictor_A),
        target_A=_tensor(token_ids_T[is_response_T]),
        action_mask_A=_tensor(samples.action_mask[response_A], np.bool_),
        sequence_A=_tensor(sequence_T[is_response_T]),
        response_A=_tensor(response_A),
        max_length=int(lengths.max()),
    )


def empty_pack() -> Pack:
    """The pack without samples: one dummy token."""
    none = np.zeros(0)
    return Pack(
        rows=_tensor(none),
        token_ids_T=_tensor([0]),
        positions_T=_tensor([0]),
        cu_seqlens=_tensor([0, 1], np.int32),
        predictor_A=_tensor(none),
        target_A=_tensor(none),
        action_mask_A=_tensor(none, np.bool_),
        sequence_A=_tensor(none),
        response_A=_tensor(none),
        max_length=1,
    )


def _tensor(values: Any, dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))


def pad_pack(pack: Pack, length: int) -> Pack:
    """`pack` with dummy sequences (id 0) behind its own, so that T is `length`.

    Nothing scored is theirs, so they add exactly 0 to every loss and gradient. None is longer than
    the pack's longest sequence: attention pays for padding as it does for tokens. Raises
    `ValueError` when the pack is longer than `length`.
    """
    missing = length - len(pack.token_ids_T)
    if missing < 0:
        raise ValueError(f"a pack of {len(pack.token_ids_T)} tokens does not fit into {length}")
    if missing == 0:
        return pack
    offset = torch.arange(missing, device=pack.token_ids_T.device)
    starts = torch.arange(0, missing, pack.max_length, device=pack.cu_seqlens.device)
    first = pack.cu_seqlens[-1]
    ends = torch.cat([first + starts[1:], first[None] + missing])
    return replace(
        pack,
        token_ids_T=torch.cat([pack.token_ids_T, torch.zeros_like(offset)]),
        positions_T=torch.cat([pack.positions_T, offset % pack.max_length]),
        cu_seqlens=torch.cat([pack.cu_seqlens, ends.to(torch.int32)]),
    )


def restore(packs: Sequence[Pack], values: Sequence[Tensor]) -> np.ndarray:
    """Per-pack arrays [A] back in the order of the Samples' response tokens: float32 [R].

    Raises `ValueError` unless the packs cover every response token exactly once.
    """
    if len(packs) != len(values):
        raise ValueError(f"{len(values)} arrays for {len(packs)} packs")
    where = np.concatenate([np.zeros(0, np.int64), *(p.response_A.cpu().numpy() for p in packs)])
    columns = [value.detach().float().cpu().numpy() for value in values]
    flat = np.concatenate([np.zeros(0, np.float32), *columns])
    if len(where) != len(flat):
        raise ValueError(f"{len(flat)} values for {len(where)} response tokens")
    if not np.array_equal(np.sort(where), np.arange(len(where))):
        raise ValueError("the packs do not cover every response token exactly once")
    restored = np.empty(len(flat), dtype=np.float32)
    restored[where] = flat
    return restored
