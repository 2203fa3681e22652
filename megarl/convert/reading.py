"""Rectangles of matrices that lie in files row after row, read without mapping the files.

A mapped file counts as memory of the process, as far as it was touched.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

MOST_AT_ONCE = 2**30
"""Bytes of one read; the kernel stops below 2^31."""
ROWS_BYTES = 4 * 2**20
"""Read, cast and digested at a time: what stays in a CPU's cache."""


class Files:
    """Files that are read from, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def fill(self, path: Path, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the file's bytes from `offset` on. Raises `OSError`."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
        while memory:
            got = os.preadv(self._open[path], [memory[:MOST_AT_ONCE]], offset)
            if got == 0:
                raise OSError(f"{path}: ends at byte {offset}, before what it should hold")
            memory = memory[got:]
            offset += got

    def read(self, path: Path, offset: int, length: int) -> bytes:
        found = bytearray(length)
        self.fill(path, offset, memoryview(found))
        return bytes(found)

    def fill_box(
        self, path: Path, offset: int, width: int, row: int, col: int, out: Tensor
    ) -> None:
        """Fill `out` [rows, cols] from row `row`, column `col` on of the matrix of its dtype, with
        `width` columns, that begins at `offset`. `out` may be a window. Raises `OSError`."""
        rows, cols = out.shape
        size = out.element_size()
        if cols == width and out.is_contiguous():
            self.fill(path, offset + row * width * size, memory_of(out))
            return
        step = max(1, ROWS_BYTES // (width * size))
        scratch = torch.empty(min(step, rows), width, dtype=out.dtype)
        for at in range(0, rows, step):
            block = scratch[: min(step, rows - at)]
            self.fill(path, offset + (row + at) * width * size, memory_of(block))
            out[at : at + len(block)].copy_(block[:, col : col + cols])

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
