"""Moves the bytes of a plan: local copies, and one all-to-all for each bounded bucket.

Views into parameters and buffers are made once and remade only when a parameter's storage moves,
for with small models the Python around a transfer would cost more than the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.reshard.plan import Copy, Plan


def as_matrix(param: Tensor) -> Tensor:
    """The parameter as rows × columns, 1-D ones as n × 1; a view without gradient."""
    detached = param.detach()
    return detached.unsqueeze(1) if detached.dim() == 1 else detached


def window(param: Tensor, row: int, col: int, rows: int, cols: int) -> Tensor:
    """A rectangle of a parameter, as a 2-D view without gradient."""
    return as_matrix(param)[row : row + rows, col : col + cols]


@dataclass
class _Side:
    """What a rank sends, or receives, in one bucket: peers in rank order, copies in plan order."""

    splits: list[int]
    copies: list[Copy] = field(default_factory=list)
    in_params: list[Tensor] = field(default_factory=list)
    in_buffer: list[Tensor] = field(default_factory=list)


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

        `bucket_bytes` bounds what a rank sends, and what it receives, at a time.
        """
        self.rank = rank
        self.source_params, self.target_params = source_params, target_params
        self.local = [c for c in plan.copies if c.source == c.target == rank]
        buckets = plan.buckets(max(1, bucket_bytes // dtype.itemsize))
        self.sends = [self._side(bucket, plan.world, sends=True) for bucket in buckets]
        self.receives = [self._side(bucket, plan.world, sends=False) for bucket in buckets]
        self.send_buffer, self.receive_buffer = (
            torch.empty(
                max((sum(side.splits) for side in sides), default=0), dtype=dtype, device=device
            )
            for sides in (self.sends, self.receives)
        )
        self._places: list[int] = []

    def _side(self, bucket: list[Copy], world: int, *, sends: bool) -> _Side:
        mine = [c for c in bucket if (c.source if sends else c.target) == self.rank]
        by_peer: list[list[Copy]] = [[] for _ in range(world)]
        for copy in mine:
            by_peer[copy.target if sends else copy.source].append(copy)
        splits = [sum(copy.elements for copy in copies) for copies in by_peer]
        return _Side(splits, [copy for copies in by_peer for copy in copies])

    def _from(self, c: Copy) -> Tensor:
        return window(
            self.source_params[c.source_param], c.source_row, c.source_col, c.rows, c.cols
        )

    def _into(self, c: Copy) -> Tensor:
        return window(
            self.target_params[c.target_param], c.target_row, c.target_col, c.rows, c.cols
        )

    def _look(self) -> None:
        """Make the views again when a parameter lies elsewhere than at the last run."""
        live = (self.source_params, self.target_params)
        places = [param.data_ptr() for params in live for param in params.values()]
        if places == self._places:
            return
        self._local_from = [self._from(copy) for copy in self.local]
        self._local_into = [self._into(copy) for copy in self.local]
        for sides, buffer, view in (
            (self.sends, self.send_buffer, self._from),
            (self.receives, self.receive_buffer, self._into),
        ):
            for side in sides:
                side.in_params = [view(copy) for copy in side.copies]
                side.in_buffer, at = [], 0
                for copy in side.copies:
                    flat = buffer[at : at + copy.elements]
                    side.in_buffer.append(flat.view(copy.rows, copy.cols))
                    at += copy.elements
        self._places = places

    @torch.no_grad()
    def run(self) -> None:
        """Write every target element of this rank; collective over the default group.

        Every rank takes part in every bucket, also with nothing to send or receive.
        """
        self._look()
        if self.local:
            torch._foreach_copy_(self._local_into, self._local_from)
        for send, receive in zip(self.sends, self.receives, strict=True):
            if send.copies:
                torch._foreach_copy_(send.in_buffer, send.in_params)
            dist.all_to_all_single(
                self.receive_buffer[: sum(receive.splits)],
                self.send_buffer[: sum(send.splits)],
                output_split_sizes=receive.splits,
                input_split_sizes=send.splits,
            )
            if receive.copies:
                torch._foreach_copy_(receive.in_params, receive.in_buffer)
