"""Moves elements from a source to where they are written, some rows at a time, digested on the way.

Every element of a logical tensor passes once. Its digest in the dtype that is written goes into the
manifest; that in the dtype it had is held against what was recorded when the source was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from megarl.convert.boxes import ConvertError
from megarl.convert.progress import Progress
from megarl.convert.source import Source, blocks, refuse_overflow
from megarl.reshard.digest import block_digest

T = TypeVar("T")
MOST_TOLD = 3


class Copier:
    """Reads boxes of a source in the dtypes that are written."""

    def __init__(
        self, source: Source, dtypes: Mapping[str, torch.dtype], progress: Progress
    ) -> None:
        self.source, self.dtypes, self.progress = source, dtypes, progress
        self.before = dict.fromkeys(source.tensors, 0)
        """Digests in the stored dtype, of what has passed."""
        self.after = dict.fromkeys(source.tensors, 0)
        """Digests in the dtype that is written."""

    def fill(self, name: str, row: int, col: int, out: Tensor) -> None:
        """`out` [rows, cols], of the written dtype, from that place of tensor `name` on. Raises as
        `refuse_overflow`."""
        stored = self.source.tensors[name]
        for rows in blocks(out.shape[0], max(1, out.shape[1] * stored.dtype.itemsize)):
            window = out[rows]
            at = row + rows.start
            if out.dtype == stored.dtype:
                self.source.read(name, at, col, window)
                digest = block_digest(window, name, at, col)
                self.before[name] += digest
                self.after[name] += digest
            else:
                block = torch.empty(window.shape, dtype=stored.dtype)
                self.source.read(name, at, col, block)
                window.copy_(block)
                refuse_overflow(self.source, name, block, window)
                self.before[name] += block_digest(block, name, at, col)
                self.after[name] += block_digest(window, name, at, col)
            self.progress.advance(window.numel() * stored.dtype.itemsize)

    def rows(self, name: str) -> Iterator[Tensor]:
        """The tensor's rows, some MB at a time, in the written dtype."""
        stored = self.source.tensors[name]
        for rows in blocks(stored.rows, stored.cols * stored.dtype.itemsize):
            out = torch.empty(rows.stop - rows.start, stored.cols, dtype=self.dtypes[name])
            self.fill(name, rows.start, 0, out)
            yield out


@contextmanager
def one_thread() -> Iterator[None]:
    """Some MB are cast and digested faster by one thread than shared out among many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items, each made in a thread while the one before is used."""
    iterator = iter(items)
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        coming = reader.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, iterator, end)
            yield item
            del item


def refuse_damaged(source: Source, digests: Mapping[str, int]) -> None:
    """Hold what was read against what was recorded when the source was written.

    Raises `ConvertError` naming the tensors that changed since.
    """
    wrong = [
        name
        for name, digest in source.recorded.items()
        if name in digests and digests[name] % 2**64 != digest
    ]
    if wrong:
        more = f" (and {len(wrong) - MOST_TOLD} more)" if len(wrong) > MOST_TOLD else ""
        raise ConvertError(
            f"{source.path}: {', '.join(wrong[:MOST_TOLD])}{more}: not the weights that "
            f"{source.recorded_in} records; the files are damaged, or were changed by hand: then "
            f"remove {source.recorded_in.name}"
        )
