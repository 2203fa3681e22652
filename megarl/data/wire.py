"""Samples between ranks as bytes: one all-to-all of sizes, one of everything else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from megarl.contracts.samples import Samples
from megarl.world import World

# One rank's rows as bytes: these columns one after the other, in this order.
_PER_ROW = {
    "draw_index": np.int32,
    "candidate": np.int32,
    "end_reason": np.int8,
    "seed": np.int64,
    "started": np.float64,
    "finished": np.float64,
}
_LENGTHS = {"prompt_lengths": np.int64, "response_lengths": np.int64, "experts_lengths": np.int64}
_PER_PROMPT_TOKEN = {"prompt_ids": np.int32}
_PER_RESPONSE_TOKEN = {
    "response_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
}

_PER_EXPERT = {"experts": np.int16}

Sizes = tuple[int, int, int, int]
"""Rows, prompt tokens, response tokens, experts of tokens."""


def send_to_owners(world: World, samples: Samples, owner: np.ndarray) -> list[Samples]:
    """What every rank sent here, by rank. Collective.

    `owner` int [n] is the data-parallel part that each row goes to, −1 for none; all ranks of a
    part get the row. To a rank it goes from its replica's rank with the same remainder modulo
    rollout.tp: from itself when it holds the row, else work spread over the replica.
    """
    order = np.argsort(owner, kind="stable")
    order = order[np.searchsorted(owner[order], 0) :]
    grouped = samples.select(order)
    bounds = np.searchsorted(owner[order], np.arange(world.mesh.dp + 1)).tolist()
    tp = world.mesh.rollout_tp
    spans = []
    for rank in range(world.size):
        part = world.mesh.dp_index(rank)
        mine = rank % tp == world.rank % tp
        spans.append((bounds[part], bounds[part + 1]) if mine else (0, 0))
    out_sizes = [_sizes(grouped, *span) for span in spans]
    sent = np.empty(sum(map(_bytes_of, out_sizes)), dtype=np.uint8)
    at = 0
    for span in spans:
        for column in _pieces(grouped, *span):
            sent[at : at + len(column)] = column
            at += len(column)
    return _exchange_bytes(world, sent, out_sizes, samples.version_id)


def _exchange_bytes(
    world: World, sent: np.ndarray, out_sizes: list[Sizes], version_id: str
) -> list[Samples]:
    out = torch.tensor(out_sizes, dtype=torch.int64)
    into = torch.empty_like(out)
    dist.all_to_all_single(into, out, group=world.control)
    in_sizes = [tuple(row) for row in into.tolist()]
    in_splits = [_bytes_of(sizes) for sizes in in_sizes]
    received = np.empty(sum(in_splits), dtype=np.uint8)
    dist.all_to_all_single(
        torch.from_numpy(received),
        torch.from_numpy(sent),
        in_splits,
        [_bytes_of(sizes) for sizes in out_sizes],
        group=world.control,
    )
    starts = np.concatenate([[0], np.cumsum(in_splits)]).tolist()
    return [
        _from_bytes(received[starts[rank] : starts[rank + 1]], sizes, version_id)
        for rank, sizes in enumerate(in_sizes)
    ]


def _sizes(samples: Samples, start: int, stop: int) -> Sizes:
    prompts, responses = samples.prompt_offsets, samples.response_offsets
    experts = samples.experts_offsets
    return (
        stop - start,
        int(prompts[stop] - prompts[start]),
        int(responses[stop] - responses[start]),
        int(experts[stop] - experts[start]),
    )


def _columns(sizes: Sizes) -> Iterator[tuple[str, type, int]]:
    """(name, dtype, elements) of each column in the byte form of so many rows and tokens."""
    kinds = (_PER_ROW | _LENGTHS, _PER_PROMPT_TOKEN, _PER_RESPONSE_TOKEN, _PER_EXPERT)
    for kind, elements in zip(kinds, sizes, strict=True):
        for name, dtype in kind.items():
            yield name, dtype, elements


def _bytes_of(sizes: Sizes) -> int:
    return sum(elements * np.dtype(dtype).itemsize for _, dtype, elements in _columns(sizes))


def _pieces(samples: Samples, start: int, stop: int) -> Iterator[np.ndarray]:
    """The columns of rows [start, stop) as bytes, uint8 each, without copying."""
    rows = {
        **dict.fromkeys(_PER_ROW | _LENGTHS, slice(start, stop)),
        **dict.fromkeys(_PER_PROMPT_TOKEN, slice(*samples.prompt_offsets[[start, stop]])),
        **dict.fromkeys(_PER_RESPONSE_TOKEN, slice(*samples.response_offsets[[start, stop]])),
        **dict.fromkeys(_PER_EXPERT, slice(*samples.experts_offsets[[start, stop]])),
    }
    for name, dtype, _ in _columns((0, 0, 0, 0)):
        yield getattr(samples, name)[rows[name]].astype(dtype, copy=False).view(np.uint8)


def _from_bytes(data: np.ndarray, sizes: Sizes, version_id: str) -> Samples:
    columns, start = {}, 0
    for name, dtype, elements in _columns(sizes):
        # A copy of its own: columns lie at odd addresses in the bytes.
        column = np.empty(elements, dtype=dtype)
        column.view(np.uint8)[:] = data[start : start + column.nbytes]
        start += column.nbytes
        column.setflags(write=False)
        columns[name] = column
    for kind in ("prompt", "response", "experts"):
        lengths = columns.pop(f"{kind}_lengths")
        columns[f"{kind}_offsets"] = np.concatenate([[0], np.cumsum(lengths)])
    return Samples(**columns, version_id=version_id)
