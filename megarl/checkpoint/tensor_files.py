"""One rank's file of a `torch_dist` folder, written so that the disk works from the first byte on.

Items are the library's own: a `torch.save` each, one behind the other.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult

WRITE_BACK_BYTES = 32 * 2**20
"""The disk is told to begin after so many bytes; left to itself the kernel begins at the fsync."""
_SYNC_FILE_RANGE_WRITE = 2


def write_bucket(bucket: Any, transforms: Any) -> list[WriteResult]:
    """Write and fsync what megatron's writer planned for one file (`write_buckets`).

    Raises `OSError` and what `torch.save` raises.
    """
    path, key, (objects, tensors) = bucket
    results = []
    with open(path, "wb") as stream, without_checksums():
        begun = 0
        for item, data in [*objects, *tensors]:
            results.append(
                _write_item(transforms, stream, data, item, key, SerializationFormat.TORCH_SAVE)
            )
            if stream.tell() - begun >= WRITE_BACK_BYTES:
                stream.flush()
                begin_write_back(stream, begun)
                begun = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
    return results


def begin_write_back(stream: BinaryIO, start: int) -> None:
    """Only a hint: what fails here, `fsync` tells."""
    sync = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if sync is not None:
        count = ctypes.c_int64(stream.tell() - start)
        sync(stream.fileno(), ctypes.c_int64(start), count, _SYNC_FILE_RANGE_WRITE)


@contextmanager
def without_checksums() -> Iterator[None]:
    """torch.load never reads the zip's CRC32; the digests in the position are what is checked."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
