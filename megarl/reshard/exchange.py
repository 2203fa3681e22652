"""Moves the bytes of a plan: local copies, and one all-to-all for each bounded bucket.

Two send and two receive buffers take turns. While one bucket is under way the next is packed and
sent after it, and a share of the local copies is made; then the first is waited for and unpacked.

Views into parameters and buffers are made once and remade only when a parameter's storage moves,
for with small models the Python around a transfer would cost more than the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.matrix import window
from megarl.reshard.plan import Copy, Plan

BUFFERS = 2
"""Of each kind: the buckets that may be under way at once."""


class Window(NamedTuple):
    """A rectangle of a parameter."""

    param: str
    row: int
    col: int
    rows: int
    cols: int

    def is_above(self, other: Window) -> bool:
        """Whether both make one rectangle, this one first."""
        return (self.param, self.col, self.cols) == (other.param, other.col, other.cols) and (
            self.row + self.rows == other.row
        )

    def with_below(self, other: Window) -> Window:
        return self._replace(rows=self.rows + other.rows)


def _from(copy: Copy) -> Window:
    return Window(copy.source_param, copy.source_row, copy.source_col, copy.rows, copy.cols)


def _into(copy: Copy) -> Window:
    return Window(copy.target_param, copy.target_row, copy.target_col, copy.rows, copy.cols)


def _joined(steps: Sequence[tuple[Window, ...]]) -> list[tuple[Window, ...]]:
    """`steps` with those taken together that lie one below the other in every column of it."""
    found: list[tuple[Window, ...]] = []
    for step in steps:
        if found and all(a.is_above(b) for a, b in zip(found[-1], step, strict=True)):
            found[-1] = tuple(a.with_below(b) for a, b in zip(found[-1], step, strict=True))
        else:
            found.append(step)
    return found


@dataclass
class _Side:
    """What a rank sends, or receives, in one bucket: peers in rank order, copies in plan order."""

    splits: list[int]
    """Elements for, or from, each rank."""
    windows: list[Window]
    in_params: list[Tensor] = field(default_factory=list)
    in_buffer: list[Tensor] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(self.splits)


@dataclass
class _Local:
    """Copies within the rank that are made while one bucket is under way."""

    windows: list[tuple[Window, Window]] = field(default_factory=list)
    source: list[Tensor] = field(default_factory=list)
    target: list[Tensor] = field(default_factory=list)


class Exchange:
    """One plan between one rank's live source and target parameters, repeatable."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source_params: Mapping[str, Tensor],
        target_params: Mapping[str, Tensor],
        dtype: torch.dtype,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """`dtype`: what travels and is written; source elements are cast to it before they leave.

        Each of the four buffers has at most half of `bucket_bytes`, so all that is held beside the
        parameters is at most twice `bucket_bytes`, but never less than one element in each.
        """
        self.rank = rank
        self.source_params, self.target_params = source_params, target_params
        buckets = plan.buckets(max(1, bucket_bytes // BUFFERS // dtype.itemsize), rank)
        self.sends = [self._side(bucket, plan.world, sends=True) for bucket in buckets]
        self.receives = [self._side(bucket, plan.world, sends=False) for bucket in buckets]
        self.local = _dealt(plan.of(rank), rank, max(1, len(buckets)))
        self.send_buffers, self.receive_buffers = (
            [
                torch.empty(
                    max((side.elements for side in sides[turn::BUFFERS]), default=0),
                    dtype=dtype,
                    device=device,
                )
                for turn in range(BUFFERS)
            ]
            for sides in (self.sends, self.receives)
        )
        self._places: list[int] = []

    def _side(self, bucket: list[Copy], world: int, *, sends: bool) -> _Side:
        by_peer: list[list[tuple[Window]]] = [[] for _ in range(world)]
        splits = [0] * world
        for copy in bucket:
            if (copy.source if sends else copy.target) == self.rank:
                peer = copy.target if sends else copy.source
                by_peer[peer].append((_from(copy) if sends else _into(copy),))
                splits[peer] += copy.elements
        windows = [step for steps in by_peer for step in steps]
        return _Side(splits, [step for (step,) in _joined(windows)])

    @property
    def held_bytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.nbytes for buffer in (*self.send_buffers, *self.receive_buffers))

    def _look(self) -> None:
        """Make the views again when a parameter lies elsewhere than at the last run."""
        live = (self.source_params, self.target_params)
        places = [param.data_ptr() for params in live for param in params.values()]
        if places == self._places:
            return
        for part in self.local:
            part.source = [_view(self.source_params, one) for one, _ in part.windows]
            part.target = [_view(self.target_params, one) for _, one in part.windows]
        for sides, buffers, params in (
            (self.sends, self.send_buffers, self.source_params),
            (self.receives, self.receive_buffers, self.target_params),
        ):
            for number, side in enumerate(sides):
                side.in_params = [_view(params, one) for one in side.windows]
                side.in_buffer, at = [], 0
                for one in side.windows:
                    flat = buffers[number % BUFFERS][at : at + one.rows * one.cols]
                    side.in_buffer.append(flat.view(one.rows, one.cols))
                    at += one.rows * one.cols
        self._places = places

    @torch.no_grad()
    def run(self) -> None:
        """Write every target element of this rank; collective over the default group.

        Every rank takes part in every bucket, also with nothing to send or receive.
        """
        self._look()
        under_way: list[dist.Work] = []
        for number in range(len(self.sends)):
            under_way.append(self._start(number))
            self._copy_local(number)
            if len(under_way) == BUFFERS:
                self._finish(number - BUFFERS + 1, under_way.pop(0))
        for left, work in enumerate(under_way, len(self.sends) - len(under_way)):
            self._finish(left, work)
        if not self.sends:
            self._copy_local(0)

    def _start(self, number: int) -> dist.Work:
        """Pack a bucket and begin its all-to-all."""
        send, receive = self.sends[number], self.receives[number]
        if send.windows:
            torch._foreach_copy_(send.in_buffer, send.in_params)
        return dist.all_to_all_single(
            self.receive_buffers[number % BUFFERS][: receive.elements],
            self.send_buffers[number % BUFFERS][: send.elements],
            output_split_sizes=receive.splits,
            input_split_sizes=send.splits,
            async_op=True,
        )

    def _copy_local(self, number: int) -> None:
        part = self.local[number]
        if part.windows:
            torch._foreach_copy_(part.target, part.source)

    def _finish(self, number: int, work: dist.Work) -> None:
        """Wait for a bucket and unpack it; its two buffers are free again."""
        work.wait()
        receive = self.receives[number]
        if receive.windows:
            torch._foreach_copy_(receive.in_params, receive.in_buffer)


def _view(params: Mapping[str, Tensor], one: Window) -> Tensor:
    return window(params[one.param], one.row, one.col, one.rows, one.cols)


def _dealt(copies: Sequence[Copy], rank: int, parts: int) -> list[_Local]:
    """The copies within `rank`, in `parts` of about as many elements, cut between whole rows."""
    joined = _joined([(_from(c), _into(c)) for c in copies if c.source == c.target == rank])
    total = sum(source.rows * source.cols for source, _ in joined)
    dealt = [_Local() for _ in range(parts)]
    done = 0
    for source, target in joined:
        row = 0
        while row < source.rows:
            # The part that the next element falls into takes what fits, but a row at least.
            part = done * parts // total
            room = -(-(part + 1) * total // parts) - done
            rows = min(source.rows - row, max(1, room // source.cols))
            step = (w._replace(row=w.row + row, rows=rows) for w in (source, target))
            dealt[part].windows.append(tuple(step))
            row += rows
            done += rows * source.cols
    return dealt
