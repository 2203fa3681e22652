"""Whether a `torch_dist` folder holds what is asked for; every rank is told what one of them found.

The index and the lengths of files tell nearly everything before the first tensor is filled.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, apply_factories
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader

MOST_TOLD = 3


class TensorsError(RuntimeError):
    """Tensors that could not be written, or a folder that does not hold what is asked for."""


def agree(folder: Path, error: str | None) -> None:
    """Raises `TensorsError` on every rank, in the same words, if any has an error. Collective."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    told: dict[str, list[str]] = {}
    for rank, text in enumerate(errors):
        if text is not None:
            told.setdefault(text, []).append(str(rank))
    if told:
        lines = [f"{text} (rank {', '.join(ranks)})" for text, ranks in told.items()]
        more = f"; and {len(lines) - MOST_TOLD} more" if len(lines) > MOST_TOLD else ""
        raise TensorsError(f"{folder}: " + "; ".join(lines[:MOST_TOLD]) + more)


def refusal(
    shards: Mapping[str, ShardedBase], folder: Path, reader: FileSystemReader
) -> str | None:
    """Why `folder` cannot fill this rank's `shards`, or None: read from the index, by its `reader`,
    and file lengths."""
    try:
        if maybe_load_config(str(folder)) is None:
            return "no such checkpoint: it has no metadata.json"
        TorchCommonLoadStrategy().load_common(folder)
        index = reader.read_metadata()
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    except Exception as error:  # a damaged pickle may raise anything
        return f"its index cannot be read: {type(error).__name__}: {first_line(error)}"
    wanted = _wanted(shards)
    for shard in wanted.values():
        if fault := _mismatch(shard, index.state_dict_metadata):
            return fault
    for place, stored in index.storage_data.items():
        end = stored.offset + stored.length
        if place.fqn in wanted and sizes.get(stored.relative_path, 0) < end:
            held = sizes.get(stored.relative_path)
            how = "is missing" if held is None else f"ends at {held} of at least {end} bytes"
            return f"{stored.relative_path} {how}: it holds a part of {place.fqn}"
    return None


def unreadable(shards: Mapping[str, ShardedBase], folder: Path) -> str | None:
    """The first stored part of this rank's tensors that is no tensor any more, or None. Slow: it
    reads them all."""
    wanted = {key for key, shard in _wanted(shards).items() if not isinstance(shard, ShardedObject)}
    for place, stored in FileSystemReader(folder).read_metadata().storage_data.items():
        if place.fqn not in wanted:
            continue
        try:
            with (folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu")
        except Exception as error:  # a damaged pickle may raise anything
            kind = type(error).__name__
            return f"{stored.relative_path} is damaged: it has no {place.fqn} where it was ({kind})"
    return None


def first_line(error: BaseException) -> str:
    """Of the first rank's own error, where the library wrapped those of all ranks; of the
    operating system's, where one is behind it."""
    failures = getattr(error, "failures", None)
    if failures:
        rank = min(failures)
        return f"rank {rank}: {first_line(failures[rank][0])}"
    own = next((cause for cause in _causes(error) if isinstance(cause, OSError)), error)
    told = [line.strip() for line in str(own).splitlines() if line.strip()]
    return told[0] if told else type(own).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _wanted(shards: Mapping[str, ShardedBase]) -> dict[str, Any]:
    state: dict[str, Any] = dict(shards)
    apply_factories(state)
    return {
        shard.unique_key if isinstance(shard, ShardedObject) else shard.key: shard
        for shard in nested_values(state)
    }


def _mismatch(shard: Any, stored: Mapping[str, Any]) -> str | None:
    if isinstance(shard, ShardedObject):
        return None if shard.unique_key in stored else f"it has no {shard.unique_key}"
    if shard.key not in stored:
        return f"it has no tensor {shard.key}"
    shape, dtype = tuple(stored[shard.key].size), stored[shard.key].properties.dtype
    # Rows of the vocabulary are padded by the layout; what lies in the padding is no matter.
    first = 1 if shard.allow_shape_mismatch else 0
    if shape[first:] != tuple(shard.global_shape)[first:]:
        return f"its {shard.key} is {list(shape)}, the model's is {list(shard.global_shape)}"
    if dtype != shard.dtype:
        return f"its {shard.key} is {dtype}, the model's is {shard.dtype}"
    return None
