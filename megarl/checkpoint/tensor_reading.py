"""Reads a `torch_dist` folder from front to back, each tensor straight to where it belongs.

The library reads a file in the order in which the model names its tensors, unpickles each into
memory of its own and copies it. Items of one shape and dtype begin alike, byte for byte, up to
their elements: `torch.save` writes a zip whose first record says all that there is to say of the
tensor. So `torch.load` is asked about the first of a kind, and where an item begins like it, its
elements are read into the tensor that wants them. Any other item goes the library's way.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

MOST_AT_ONCE = 2**30
"""Bytes of one read; the kernel stops below 2^31."""
ELEMENTS = "data/0"
"""The zip record that holds a saved tensor's elements."""

Kind = tuple[int, torch.dtype, torch.Size]
"""Stored bytes, dtype and shape of an item."""


class FrontToBackReader(CachedMetadataFileSystemReader):
    """What `dist_checkpointing.load` reads from (`reading_by`)."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self._heads: dict[Kind, bytes] = {}
        """What comes before the elements of every item of a kind."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what `plan` asks for. Raises `OSError`, and what `torch.load` raises."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            path = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(path, []).append(item)
        for path, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with open(self.fs.concat_path(self.path, path), "rb", buffering=0) as file:
                for item in items:
                    self._read(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        stored = self.storage_data[item.storage_index]
        if stored.transform_descriptors:
            raise ValueError(f"{item.storage_index.fqn} was stored by a transform: not read here")
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(_bytes(file, stored.offset, stored.length)))
            return
        target = planner.resolve_tensor(item).detach()
        if not self._read_into(file, item, target):
            packed = io.BytesIO(_bytes(file, stored.offset, stored.length))
            tensor = torch.load(packed, map_location="cpu", weights_only=True)
            target.copy_(_part(tensor, item))
        planner.commit_tensor(item, target)

    def _read_into(self, file: BinaryIO, item: ReadItem, target: Tensor) -> bool:
        """Whether `target` is all of what is stored, as it lies there; it is filled then."""
        if not (target.is_cpu and target.is_contiguous() and target.numel()):
            return False
        stored = self.storage_data[item.storage_index]
        kind = (stored.length, target.dtype, target.shape)
        if kind not in self._heads:
            head = _head(_create_file_view(file, stored.offset, stored.length), target)
            if head is None:
                return False
            self._heads[kind] = head
        found = bytearray(len(self._heads[kind]))
        _fill(file, stored.offset, [memoryview(found), _memory(target)])
        return found == self._heads[kind]


def _part(tensor: Tensor, item: ReadItem) -> Tensor:
    part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
    if part.shape != torch.Size(item.lengths):
        fqn = item.storage_index.fqn
        raise ValueError(f"{fqn} holds {list(part.shape)} where {list(item.lengths)} was asked for")
    return part


def _head(item: BinaryIO, target: Tensor) -> bytes | None:
    """What comes before the elements of a stored tensor that is of the shape and dtype of `target`,
    and lies as it does; None for any other."""
    tensor = torch.load(item, map_location="meta", weights_only=True)  # without its elements
    size = target.numel() * target.element_size()
    as_target = tensor.shape == target.shape and tensor.dtype == target.dtype
    if not (as_target and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size):
        return None
    item.seek(0)
    start = torch._C.PyTorchFileReader(item).get_record_offset(ELEMENTS)
    item.seek(0)
    return item.read(start)


def _bytes(file: BinaryIO, offset: int, length: int) -> bytearray:
    found = bytearray(length)
    _fill(file, offset, [memoryview(found)])
    return found


def _fill(file: BinaryIO, offset: int, parts: list[memoryview]) -> None:
    """Read `parts` one after the other. Raises `OSError` where the file ends before."""
    while parts:
        most = MOST_AT_ONCE
        asked = []
        for part in parts:
            asked.append(part[:most])
            most -= len(asked[-1])
        got = os.preadv(file.fileno(), asked, offset)
        if got == 0:
            raise OSError(f"the file ends at {offset}")
        offset += got
        while parts and got >= len(parts[0]):
            got -= len(parts.pop(0))
        if got:
            parts[0] = parts[0][got:]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    # Not by numpy(): a storage that numpy has seen cannot be resized, as offloading does.
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_uint8 * size).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def reading_by(reader: FrontToBackReader) -> Iterator[None]:
    """The library loads the reader's folder by it, and its index is read once."""
    made = strategies._get_filesystem_reader
    strategies._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        strategies._get_filesystem_reader = made
