"""One role's tensors as a megatron `torch_dist` checkpoint: written by every rank, whole on load.

    pending = begin_save(role_tensors(model, state), folder)   # collective; a copy is made here
    pending.write()                                            # this rank's file; any thread
    pending.finish()                                           # collective; the index, last

    load_tensors(role_tensors(model, state), folder)           # collective; in any layout

The format is the library's own: logical tensors under megatron's names, cut in any way. Weights and
optimizer state are balanced over the ranks that hold copies of a parameter (the data-parallel ones,
for an expert the expert-data-parallel ones): it is written, and read, by the one that owns its
state.

Layers lie in one tensor, with their number as its first index; layers of a model with experts each
lie in tensors of their own, for megatron can stack only layers that are all alike. The experts of a
layer lie in one tensor, by global number.

The library writes in forked processes that a manager process collects for. In a process that also
holds SGLang, gloo and CUDA threads a fork is not safe, so the file is written here, by the caller's
own thread, from a copy.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException

from megarl.checkpoint.folder_check import TensorsError, agree, first_line, refusal, unreadable
from megarl.checkpoint.tensor_files import write_bucket
from megarl.checkpoint.tensor_reading import FrontToBackReader, reading_by
from megarl.models.build import weights_of
from megarl.models.optimizer_state import OptimizerState, holders_of, is_expert
from megarl.platforms import platform_of
from megarl.platforms.megatron_patches import cpu_mode

FORMAT = "torch_dist"
STATE_PREFIX = "optimizer.state"


Shards = dict[str, ShardedBase]
"""This rank's part of a role: megatron's description of each tensor, with its data."""


def model_tensors(model: nn.Module, owners: Mapping[str, int] | None = None) -> Shards:
    """The live weights of a `PackedGPT` or `ModelChunks`, by name in it. `owners`: which rank among
    those that hold a parameter writes and reads it (default, and of what is not trained: the first
    one)."""
    weights = weights_of(model)
    return {
        name: _owned_by(shard, (owners or {}).get(name, 0), weights[name])
        for name, shard in _described(model).items()
    }


def state_tensors(model: nn.Module, whole: Mapping[str, Mapping[str, Tensor]]) -> Shards:
    """The optimizer's state of the parameters that this rank owns (`OptimizerState.whole`)."""
    described = _described(model)
    params = dict(model.named_parameters())
    shards = {}
    for name, tensors in whole.items():
        shard = described[name]
        for key, flat in tensors.items():
            values: dict[str, Any] = {
                "key": f"{STATE_PREFIX}.{key}.{shard.key}",
                "data": flat.view(params[name].shape),
                "replica_id": (*shard.replica_id[:-1], 0),
            }
            if isinstance(shard, ShardedTensor):
                values["dtype"] = flat.dtype
            shards[f"{STATE_PREFIX}.{key}.{name}"] = replace(shard, **values)
    return shards


def _described(model: nn.Module) -> Shards:
    """Megatron's description of every weight, by its name in `model`; the stored tensors' own names
    tell nothing of chunks."""
    several = len(model.chunks) > 1
    shards = {}
    for number, chunk in enumerate(model.chunks):
        metadata = {"non_homogeneous_layers": True} if chunk.spec.moe is not None else None
        # Megatron's language model expects an output layer on the last stage.
        described = chunk if chunk.spec.head == "lm" else super(LanguageModule, chunk)
        for name, shard in described.sharded_state_dict(metadata=metadata).items():
            if isinstance(shard, ShardedObject):  # Transformer Engine's extra state; nothing here
                continue
            shards[f"chunk{number}.{name}" if several else name] = shard
    return shards


def rank_object(name: str, value: Any) -> ShardedObject:
    """A plain value that every rank has its own of; only a world of as many ranks can load it."""
    return ShardedObject(name, value, (dist.get_world_size(),), (dist.get_rank(),))


def _owned_by(shard: Any, owner: int, weight: Tensor) -> Any:
    holders = holders_of(weight)
    number = (dist.get_rank(holders) - owner) % dist.get_world_size(holders)
    return replace(shard, replica_id=(*shard.replica_id[:-1], number))


class Staging:
    """Host memory that a save is written from: taken once, used again by every later save."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the host, in storage of its own. Not to be used again before the
        save that it is for is over."""
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._held[name] = held
        return held.copy_(tensor, non_blocking=True)


def _live(tensor: Tensor) -> Tensor:
    """The same memory, of the host, as a storage of its own: the library copies what is a part of
    a larger one. `tensor` must outlive it."""
    # Not by numpy(): a storage that numpy has seen cannot be resized, as offloading does.
    size = tensor.numel() * tensor.element_size()
    raw = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@dataclass
class PendingSave:
    """A save whose content is fixed, and whose files are not whole yet."""

    _folder: Path
    _writer: FileSystemWriterAsync
    _index: Metadata | None
    """On rank 0: which tensors the folder holds."""
    _kept: list[Tensor]
    """What is written from where it lies."""
    _written: list[Any] | None = None
    _error: str | None = None

    def write(self) -> int:
        """Write this rank's file and wait for the disk; returns its bytes. In any thread.

        An error is raised by `finish`, on every rank.
        """
        written: list[Any] = []
        total = 0
        for bucket in self._writer.write_buckets:
            try:
                result = write_bucket(bucket, self._writer.transforms)
            except (OSError, RuntimeError) as error:  # torch.save raises both for a full disk
                self._error = f"{bucket[1]} could not be written: {first_line(error)}"
                return total
            written += result
            total += sum(item.size_in_bytes for item in result)
        self._written = written
        return total

    def finish(self) -> None:
        """The folder's index, written when every rank has written. Collective, main thread.

        Raises `TensorsError` on every rank, naming the folder and the ranks that could not write.
        """
        # The library's own finalizing leaves the other ranks waiting where rank 0 cannot write.
        error = self._error
        if self._written is None and error is None:
            error = "its file was not written"
        agree(self._folder, error)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._written, everyone if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            error = self._write_index(everyone)
        agree(self._folder, error)

    def _write_index(self, written: list[Any]) -> str | None:
        try:
            with (self._folder / COMMON_STATE_FNAME).open("wb") as file:
                torch.save({}, file)
            self._writer.finish(self._index, written)
            save_config(CheckpointingConfig(FORMAT, 1), str(self._folder))
        except (OSError, RuntimeError) as error:
            return f"the index could not be written: {first_line(error)}"
        return None


class _Planned(TorchDistSaveShardedStrategy):
    """Plans a save and leaves writing to the caller."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> tuple[Any, Any]:
        return writer, planned[1]


def begin_save(shards: Shards, folder: Path, staging: Staging | None) -> PendingSave:
    """Fix what is saved: a copy of this rank's `shards`, and the plan of who writes what.

    Without `staging` nothing on the host is copied: it stays as it is until `write` has returned.
    Collective. `folder` exists and is empty; raises `TensorsError` on every rank where it does not.
    """
    agree(folder, None if folder.is_dir() else "no such folder")
    state: dict[str, Any] = dict(shards)
    kept: list[Tensor] = []
    devices: set[torch.device] = set()
    with _quiet(), cpu_mode():
        apply_factories(state)
        for tensor in nested_values(state):
            if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id):
                data = tensor.data.detach()
                devices.add(data.device)
                if staging is not None:
                    name = f"{folder.name}/{tensor.key}{tensor.global_offset}"
                    tensor.data = staging.copy(name, data)
                elif data.is_cpu and data.is_contiguous() and data.numel():
                    kept.append(data)
                    tensor.data = _live(data)
                else:
                    tensor.data = data.cpu().contiguous()
        for device in devices:  # copies to pinned memory are on their way
            platform_of(device.type).synchronize(device)
        state, _ = save_preprocess(state)
        writer, index = _Planned(FORMAT, 1, thread_count=1).async_save(state, folder)
    return PendingSave(folder, writer, index, kept)


def load_tensors(shards: Shards, folder: Path) -> dict[str, Any]:
    """Fill the tensors of `shards` in place from `folder`, whatever layout wrote it; returns the
    plain values. Collective.

    Raises `TensorsError` on every rank, naming the folder and the first tensor that it lacks, or
    has in another shape or dtype, or only half of; nothing was filled then, but for a file that is
    whole and cannot be read.
    """
    reader = FrontToBackReader(folder)
    agree(folder, refusal(shards, folder, reader))
    state: dict[str, Any] = dict(shards)
    try:
        with _quiet(), cpu_mode(), reading_by(reader):
            # Here, or the library would join again what was filled where it lies.
            apply_factories(state)
            loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    except CheckpointException as error:  # raised on every rank
        agree(folder, unreadable(shards, folder))
        raise TensorsError(f"{folder}: {first_line(error)}") from error
    return {
        name: loaded[name]
        for name, shard in shards.items()
        if not isinstance(shard, (ShardedTensor, ShardedTensorFactory))
    }


def share_weights(model: nn.Module, owners: Mapping[str, int]) -> None:
    """Bring every weight from the rank that loaded it to the others that hold it. Collective over
    the data-parallel and the expert-data-parallel group."""
    weights = weights_of(model)
    # Of one dtype each, on one group; a kind that a rank has none of, none of its group has.
    kinds: dict[tuple[bool, str], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        kinds.setdefault((is_expert(weight), str(weight.dtype)), {})[name] = weight
    for _, held in sorted(kinds.items()):
        _share(held, owners, holders_of(next(iter(held.values()))))


@torch.no_grad()
def _share(weights: Mapping[str, Tensor], owners: Mapping[str, int], group: ProcessGroup) -> None:
    if dist.get_world_size(group) == 1:
        return
    for owner in range(dist.get_world_size(group)):
        owned = [weights[name] for name in sorted(weights) if owners.get(name, 0) == owner]
        if not owned:
            continue
        flat = torch.cat([weight.detach().view(-1) for weight in owned])
        dist.broadcast(flat, dist.get_global_rank(group, owner), group=group)
        at = 0
        for weight in owned:
            weight.view(-1).copy_(flat[at : at + weight.numel()])
            at += weight.numel()


def owned_tensors(model: nn.Module, state: OptimizerState) -> Shards:
    """The live weights that this rank reads for itself and the others that hold them."""
    weights = weights_of(model)
    return {
        name: shard
        for name, shard in model_tensors(model, state.owners).items()
        if state.carries(name, weights[name])
    }


def read_whole(state: OptimizerState, model: nn.Module, folder: Path, extra: Shards) -> dict:
    """Weights and optimizer state from `folder`, then to every rank that holds a part. Collective;
    returns the plain values of `extra`."""
    whole = state.whole(fill=0.0)
    mine = owned_tensors(model, state)
    plain = load_tensors(mine | state_tensors(model, whole) | extra, folder)
    share_weights(model, state.owners)
    state.scatter(whole)
    return plain


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
