"""A source's weights as a megatron `torch_dist` folder, cut as a layout's ranks would have them.

No rank is needed for a rank's file: a chunk of a global tensor is read, written and let go. So one
process writes any layout, and several share the ranks' files among them.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.checkpoint.safetensors_folder import COMPANIONS, config_text
from megarl.checkpoint.tensor_files import (
    WRITE_BACK_BYTES,
    begin_write_back,
    without_checksums,
)
from megarl.contracts.mesh import Mesh
from megarl.contracts.version import WeightManifest
from megarl.convert.boxes import (
    Chunk,
    ConvertError,
    global_shape,
    own_address,
    rank_chunks,
    whole_placement,
)
from megarl.convert.copying import Copier, ahead, one_thread, refuse_damaged
from megarl.convert.manifest import MANIFEST, manifest_text, told, weight_manifest
from megarl.convert.output import copy_companions, folder_when_whole, refuse_other_sizes
from megarl.convert.processes import Processes, one_line
from megarl.convert.progress import Progress
from megarl.convert.source import FLOAT32_ALWAYS, Source, digest_of
from megarl.convert.stored import INDEX_FILE, TorchDistSource
from megarl.reshard.families import ModelSpec

T = TypeVar("T")
KIND = "torch_dist"
COMMON = "common.pt"
CONFIG = {
    "sharded_backend": KIND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""megatron's `metadata.json` (`CheckpointingConfig`)."""
Written = list[tuple[MetadataIndex, tuple[int, ...], _StorageInfo, torch.dtype]]
"""(place, sizes, where in which file, dtype) of each chunk."""


def write_megatron(
    source: Source,
    out: Path,
    mesh: Mesh,
    dtypes: Mapping[str, torch.dtype],
    crew: Processes,
    proven: bool = False,
) -> WeightManifest:
    """Write `out`, cut for `mesh`, with each tensor in its dtype of `dtypes`. Collective.

    `proven`: read it back before it gets its name, and hold it against what was to be written.

    Raises `ConvertError` on every process: `out` exists, could not be written, the source could
    not be read or has other weights than were recorded of it.
    """
    spec = source.spec
    jobs = crew.each(lambda: _jobs(source, mesh))
    need = sum(_bytes(source, dtypes, chunk) for chunks in jobs.values() for chunk in chunks)
    mine = {rank: chunks for rank, chunks in jobs.items() if rank % crew.size == crew.rank}
    with (
        one_thread(),
        folder_when_whole(out, need, crew) as folder,
        Progress(f"writing {out.name}", _read(source, mine), crew.is_main) as progress,
    ):
        copier = Copier(source, dtypes, progress)

        def write() -> Written:
            written: Written = []
            for rank, chunks in mine.items():
                written += _write_file(folder / f"__{rank}_0.distcp", copier, chunks, mesh.tp)
            return written

        written = crew.each(lambda: _naming(out, write))
        shares = crew.gather((written, copier.before, copier.after))
        before, after = (
            {name: sum(share[at][name] for share in shares) for name in source.tensors}
            for at in (1, 2)
        )
        crew.each(lambda: refuse_damaged(source, before))
        manifest = weight_manifest(source, dtypes, after)
        everything = [chunk for share in shares for chunk in share[0]]

        def finish() -> None:
            _write_index(folder, out, spec, mesh.tp, everything)
            kept = next(
                dtype for name, dtype in dtypes.items() if not name.endswith(FLOAT32_ALWAYS)
            )
            config = config_text(source.companions, told(kept), source.config)
            (folder / "config.json").write_text(config)
            copy_companions(source.companions, folder, COMPANIONS)
            text = manifest_text(KIND, source, manifest, layout_of(mesh), config)
            (folder / MANIFEST).write_text(text)

        crew.on_main(lambda: _naming(out, finish))
        if proven:
            crew.each(lambda: _prove(folder, source, manifest, crew))
        crew.on_main(lambda: refuse_other_sizes(folder, _sizes(jobs, everything)))
    return manifest


def _sizes(jobs: Mapping[int, list[Chunk]], written: Written) -> dict[str, int]:
    """File → bytes, of every rank's file; of a rank that writes nothing it is empty."""
    sizes = {f"__{rank}_0.distcp": 0 for rank in jobs}
    for _, _, info, _ in written:
        name = info.relative_path
        sizes[name] = max(sizes[name], info.offset + info.length)
    return sizes


def _read(source: Source, chunks: Mapping[int, Iterable[Chunk]]) -> int:
    """Bytes of `source` that `chunks`, by rank, are made of."""
    return sum(
        part.rows * part.cols * source.tensors[part.tensor].dtype.itemsize
        for of_rank in chunks.values()
        for chunk in of_rank
        for part in chunk.parts
    )


def _naming(out: Path, write: Callable[[], T]) -> T:
    """A failing write, or the close after it, does not say which file it was."""
    try:
        return write()
    except OSError as error:
        raise ConvertError(f"{out}: not written: {one_line(error)}") from error


def _prove(folder: Path, source: Source, manifest: WeightManifest, crew: Processes) -> None:
    """This process's share of the tensors has the manifest's digests, as read from `folder`.

    Raises `ConvertError` naming the first that does not."""
    written = TorchDistSource(folder, source.spec, folder)
    mine = manifest.tensors[crew.rank :: crew.size]
    try:
        total = sum(written.tensors[entry.name].bytes for entry in mine)
        with Progress("reading it back", total, crew.is_main) as progress:
            for entry in mine:
                if digest_of(written, entry.name) != entry.digest:
                    raise ConvertError(f"{folder}: {entry.name} is not what was written")
                progress.advance(written.tensors[entry.name].bytes)
    finally:
        written.close()


def layout_of(mesh: Mesh) -> dict[str, int | list[int]]:
    """For the manifest."""
    return {
        "ranks": mesh.world,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "ep": mesh.ep,
        "expert_tp": mesh.etp,
        "virtual_stages": mesh.virtual,
        "stage_layers": list(mesh.stages),
    }


def _jobs(source: Source, mesh: Mesh) -> dict[int, list[Chunk]]:
    """Rank → what it writes: of copies, the lowest rank's."""
    seen = set()
    jobs: dict[int, list[Chunk]] = {}
    for rank in range(mesh.world):
        jobs[rank] = []
        for chunk in rank_chunks(source.spec, mesh, rank):
            place = (chunk.param, chunk.row, chunk.col)
            if place not in seen:
                seen.add(place)
                jobs[rank].append(chunk)
    return jobs


def _dtype_of(source: Source, dtypes: Mapping[str, torch.dtype], chunk: Chunk) -> torch.dtype:
    if chunk.parts:
        return dtypes[chunk.parts[0].tensor]
    return _main_dtype(dtypes)


def _main_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    return next(dtype for name, dtype in dtypes.items() if not name.endswith(FLOAT32_ALWAYS))


def _bytes(source: Source, dtypes: Mapping[str, torch.dtype], chunk: Chunk) -> int:
    return chunk.elements * _dtype_of(source, dtypes, chunk).itemsize


def _write_file(path: Path, copier: Copier, chunks: list[Chunk], tp: int) -> Written:
    written: Written = []
    spec = copier.source.spec

    def filled() -> Iterator[tuple[Chunk, Tensor]]:
        for chunk in chunks:
            yield chunk, _filled(copier, chunk)

    with without_checksums(), path.open("wb") as stream:
        begun = 0
        for chunk, tensor in ahead(filled()):
            place = own_address(spec, chunk.param)
            flat = len(global_shape(spec, chunk.param, tp)) == 1
            own, at = (
                ((chunk.rows,), (chunk.row,))
                if flat
                else ((chunk.rows, chunk.cols), (chunk.row, chunk.col))
            )
            sizes, offsets = (*[1] * len(place.lead), *own), (*place.lead, *at)
            begin = stream.tell()
            try:
                torch.save(tensor.view(sizes), stream)
                stream.flush()
            except (OSError, RuntimeError) as error:
                raise ConvertError(f"{path}: {one_line(error)}, at {place.key}") from error
            info = _StorageInfo(path.name, begin, stream.tell() - begin)
            written.append((MetadataIndex(place.key, offsets), sizes, info, tensor.dtype))
            if stream.tell() - begun >= WRITE_BACK_BYTES:
                begin_write_back(stream, begun)
                begun = stream.tell()
        os.fsync(stream.fileno())
    return written


def _filled(copier: Copier, chunk: Chunk) -> Tensor:
    """The chunk's elements; padding is zero."""
    dtype = _dtype_of(copier.source, copier.dtypes, chunk)
    tensor = torch.empty(chunk.rows, chunk.cols, dtype=dtype)
    below = 0
    for part in chunk.parts:
        window = tensor[part.at_row : part.at_row + part.rows]
        copier.fill(part.tensor, part.row, part.col, window)
        below = max(below, part.at_row + part.rows)
    tensor[below:].zero_()
    return tensor


def _write_index(folder: Path, out: Path, spec: ModelSpec, tp: int, written: Written) -> None:
    """Raises `OSError`."""
    by_key: dict[str, list] = {}
    for place, sizes, info, dtype in written:
        by_key.setdefault(place.fqn, []).append((place, sizes, info, dtype))
    described, stored = {}, {}
    for param in whole_placement(spec).params[0]:
        place = own_address(spec, param)
        if place.key in described:
            continue
        chunks = sorted(by_key[place.key], key=lambda chunk: tuple(chunk[0].offset))
        described[place.key] = TensorStorageMetadata(
            TensorProperties(dtype=chunks[0][3]),
            torch.Size((*place.lengths, *global_shape(spec, param, tp))),
            [ChunkStorageMetadata(at.offset, torch.Size(sizes)) for at, sizes, _, _ in chunks],
        )
        stored |= {at: info for at, _, info, _ in chunks}
    index = Metadata(described, None, stored, StorageMeta(str(out), None, None, []), "1.0.0")
    with (folder / INDEX_FILE).open("wb") as file:
        pickle.dump(index, file)
    with (folder / COMMON).open("wb") as file:
        torch.save({}, file)
    (folder / "metadata.json").write_text(json.dumps(CONFIG))
