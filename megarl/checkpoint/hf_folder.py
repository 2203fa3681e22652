"""HF checkpoint folders: safetensors → this rank's shards, and every rank's shards → a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.checkpoint.safetensors_folder import (
    COMPANIONS,
    DERIVED_SUFFIX,
    DTYPES,
    EMBEDDING,
    OUTPUT,
    STORED_AS,
    FolderWriter,
    StoredTensor,
    stored_tensors,
)
from megarl.reshard.digest import Digester, block_digest
from megarl.reshard.exchange import Exchange
from megarl.reshard.families import FolderError, ModelSpec, family_rules
from megarl.reshard.layout import hf_placement
from megarl.reshard.matrix import as_matrix, held_as, window
from megarl.reshard.placement import LogicalTensor, Piece, Placement
from megarl.reshard.plan import make_plan
from megarl.reshard.transfer import param_faults, source_digests
from megarl.world import World

STREAM_BYTES = 64 << 20
"""What rank 0 holds of an export at a time, unless one tensor is larger."""


def load_shards(
    folder: Path,
    placement: Placement,
    rank: int,
    params: Mapping[str, Tensor],
    dtype: torch.dtype,
    body: ModelSpec | None = None,
) -> None:
    """Fill this rank's parameters from the HF folder, reading only the slices it holds.

    `params`: every parameter of `placement.params[rank]`, of `dtype`, written in place; a stored
    tensor of another float dtype is cast. Padding becomes zero. `body`: the model that the folder
    holds, where it has another head than the placement's: what only that one has is checked and
    left out, what only the placement has, its head, becomes zero. Not collective.
    Raises `FolderError` before anything is written, naming file and tensor: missing, unexpected,
    of another shape or not a float; a shard that is missing or truncated; parameters that differ
    from the placement's.
    """
    faults = param_faults(placement, rank, params, dtype)
    if faults:
        raise FolderError("; ".join(faults[:3]))
    shapes = {name: tuple(tensor.shape) for name, tensor in placement.tensors.items()}
    if body is not None:
        shapes = {rule.hf: rule.shape for rule in family_rules(body)}
    stored = _checked(Path(folder), shapes)
    with torch.no_grad(), ExitStack() as stack:
        opened = {
            path: stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for path in sorted({tensor.path for tensor in stored.values()})
        }
        if OUTPUT in stored and OUTPUT not in shapes:
            _refuse_other_output(stored, opened, placement.pieces[rank])
        for piece in placement.pieces[rank]:
            box = (piece.param_row, piece.param_col, piece.rows, piece.cols)
            target = window(params[piece.param], *box)
            if piece.tensor in shapes:
                block = _read(stored[piece.tensor], opened, piece)
                target.copy_(block.view(piece.rows, piece.cols))
            else:
                target.zero_()
        for pad in placement.padding[rank]:
            window(params[pad.param], *pad[1:]).zero_()


def export_folder(
    folder_out: Path,
    source_folder: Path,
    placement: Placement,
    params: Mapping[str, Tensor],
    spec: ModelSpec,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Write the model whose shards are `params` as an HF folder. Collective.

    Tensors stream to rank 0 in bounded groups, each checked against the shards' digest. Weights
    are of `dtype`, and config.json says so; config, tokenizer and generation files are those of
    `source_folder`. The folder appears under its name only when it is whole, on every rank's
    return. Raises `FolderError` on every rank when it exists or could not be written,
    `DriftError` when copies of the shards differ.
    """
    whole = hf_placement(spec, world.mesh)
    dtypes = {name: held_as(tensor, dtype) for name, tensor in whole.tensors.items()}
    stored_as = {name: STORED_AS[each] for name, each in dtypes.items()}
    writer = FolderWriter(Path(folder_out), stored_as) if world.rank == 0 else None
    faults = param_faults(placement, world.rank, params)
    if writer is not None and (refusal := writer.refusal()):
        faults.append(refusal)
    _agree(world, "; ".join(faults[:3]))
    digests = source_digests(placement, Digester(placement, world.rank, params, dtype), world)
    plan = make_plan(placement, whole)
    tensors = list(whole.tensors.values())
    if writer is not None:
        writer.begin([(tensor.name, tensor.shape) for tensor in tensors])
    for group in _groups(tensors, STREAM_BYTES // dtype.itemsize):
        received = {
            tensor.name: torch.empty(tensor.shape, dtype=dtypes[tensor.name], device=world.device)
            for tensor in group
            if writer is not None
        }
        names: dict[torch.dtype, set[str]] = {}
        for tensor in group:
            names.setdefault(dtypes[tensor.name], set()).add(tensor.name)
        for kind, held in names.items():
            exchange = Exchange(
                plan.only(held),
                world.rank,
                params,
                received,
                kind,
                STREAM_BYTES,
                device=world.device,
            )
            exchange.run()
        if writer is not None:
            for name, tensor in received.items():
                if block_digest(as_matrix(tensor), name, 0, 0) != digests[name]:
                    writer.fail(f"{name} arrived with another digest than the shards have")
                writer.add(name, tensor)
    error = ""
    if writer is not None:
        error = writer.finish(Path(source_folder), COMPANIONS)
    _agree(world, error)


def _agree(world: World, error: str) -> None:
    told = [line for line in world.gather(error) if line]
    if told:
        raise FolderError("; ".join(told[:3]))


def _groups(tensors: list[LogicalTensor], most: int) -> Iterator[list[LogicalTensor]]:
    """Consecutive tensors of at most `most` elements together, or one larger tensor."""
    group: list[LogicalTensor] = []
    held = 0
    for tensor in tensors:
        size = tensor.rows * tensor.cols
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += size
    if group:
        yield group


def _checked(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """What the folder holds, which must be tensors of these names and `shapes`."""
    stored = stored_tensors(folder)
    tied = OUTPUT not in shapes
    for name, tensor in stored.items():
        if name not in shapes and not (name.endswith(DERIVED_SUFFIX) or (tied and name == OUTPUT)):
            raise FolderError(f"{tensor.path}: holds {name}, which the model does not have")
    for name, shape in shapes.items():
        if name not in stored:
            raise FolderError(f"{folder}: no file holds {name}")
        tensor = stored[name]
        if tensor.shape != shape:
            raise FolderError(
                f"{tensor.path}: {name} is {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise FolderError(
                f"{tensor.path}: {name} is {tensor.dtype}; handled: {', '.join(DTYPES)}"
            )
    return stored


def _read(tensor: StoredTensor, opened: Mapping[Path, safe_open], piece: Piece) -> Tensor:
    cut = opened[tensor.path].get_slice(tensor.name)
    rows = slice(piece.row, piece.row + piece.rows)
    return cut[rows] if len(tensor.shape) == 1 else cut[rows, piece.col : piece.col + piece.cols]


def _refuse_other_output(
    stored: Mapping[str, StoredTensor],
    opened: Mapping[Path, safe_open],
    pieces: tuple[Piece, ...],
) -> None:
    """A tied model's folder may repeat the embedding as `lm_head.weight`, but not change it."""
    for piece in pieces:
        if piece.tensor == EMBEDDING and not torch.equal(
            _read(stored[OUTPUT], opened, piece), _read(stored[EMBEDDING], opened, piece)
        ):
            raise FolderError(
                f"{stored[OUTPUT].path}: {OUTPUT} differs from {EMBEDDING} "
                "though config.json says tie_word_embeddings"
            )
