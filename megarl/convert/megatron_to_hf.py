"""`megatron-to-hf`: a `torch_dist` folder or training checkpoint → a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.safetensors_folder import COMPANIONS, STORED_AS, FolderWriter
from megarl.contracts.version import WeightManifest
from megarl.convert import options
from megarl.convert.boxes import ConvertError
from megarl.convert.copying import Copier, ahead, one_thread, refuse_damaged
from megarl.convert.manifest import MANIFEST, manifest_text, weight_manifest
from megarl.convert.opening import CHECKPOINT, TORCH_DIST, kind_of, opened
from megarl.convert.output import only_writer, refuse_existing, refuse_full_disk
from megarl.convert.processes import Processes
from megarl.convert.progress import Progress
from megarl.convert.source import Source, target_dtypes
from megarl.convert.tell import wrote

KIND = "hf"
LINE = "megatron torch_dist folder or training checkpoint → Hugging Face folder"
HELP = """Write the weights of a torch_dist folder, or those of the actor in a training checkpoint,
as a Hugging Face folder that transformers and SGLang load. Tensors are streamed: a few MB of them
are in memory at a time. What is read must have the digests that were recorded when it was written
(manifest.json, or the checkpoint's position.json).

  python tools/convert_ckpt.py megatron-to-hf out/qwen out/qwen-hf
  python tools/convert_ckpt.py megatron-to-hf runs/mine-s1/checkpoints/iter_000030 out/mine
  python tools/convert_ckpt.py megatron-to-hf runs/mine-s1/checkpoints/iter_000030 out/mine \\
      --dtype bfloat16 --hf-files models/mine
  python tools/convert_ckpt.py megatron-to-hf runs/mine-s1/checkpoints/iter_000030/critic out/value

A checkpoint's critic becomes a sequence or token classification of one label, as a reward model is
and critic.path takes one; iter_N/reference is a policy as the actor is. config.json and tokenizer
come from the torch_dist folder, for a checkpoint from the model folder that its recipe names for
this model, or from --hf-files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_paths(parser, "torch_dist folder, or checkpoints/iter_N", "folder to write")
    options.add_hf_files(parser)
    options.add_dtype(parser)
    parser.add_argument(
        "--max-file-bytes",
        type=options.size,
        metavar="SIZE",
        help="weights beyond this go into several files with an index: bytes, or 500MB, 5GB, … "
        "in powers of 1000 (default: 5GB)",
    )


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    def check() -> None:
        if crew.size > 1:
            raise ConvertError("megatron-to-hf streams in one process; start it without torchrun")
        refuse_existing(arguments.out)
        if kind_of(arguments.source) not in (TORCH_DIST, CHECKPOINT):
            raise ConvertError(
                f"{arguments.source}: not megatron's format; hf-to-megatron converts it to that"
            )

    crew.each(check)
    with opened(arguments.source, arguments.hf_files) as source:
        dtypes = target_dtypes(source, options.DTYPES[arguments.dtype])
        manifest = write_hf(source, arguments.out, dtypes, arguments.max_file_bytes)
        wrote(arguments.out, source, manifest, crew)
    return 0


def write_hf(
    source: Source,
    out: Path,
    dtypes: dict[str, torch.dtype],
    most_file_bytes: int | None = None,
) -> WeightManifest:
    """Write `out`, with each tensor in its dtype of `dtypes`; the folder appears when it is whole.

    Raises `ConvertError`: it exists or another conversion is writing it, it could not be written,
    the source could not be read or has other weights than were recorded of it.
    """
    with only_writer(out):
        return _write_hf(source, out, dtypes, most_file_bytes)


def _write_hf(
    source: Source, out: Path, dtypes: dict[str, torch.dtype], most_file_bytes: int | None
) -> WeightManifest:
    stored_as = {name: STORED_AS[dtype] for name, dtype in dtypes.items()}
    elements = {name: stored.rows * stored.cols for name, stored in source.tensors.items()}
    refuse_full_disk(out, sum(elements[name] * dtypes[name].itemsize for name in dtypes))
    writer = FolderWriter(out, stored_as, most_file_bytes, source.config)
    if refusal := writer.refusal():
        raise ConvertError(refusal)
    try:
        with one_thread(), Progress(f"writing {out.name}", source.bytes) as progress:
            copier = Copier(source, dtypes, progress)
            writer.begin([(name, stored.shape) for name, stored in source.tensors.items()])
            for name, rows in ahead(_rows(copier)):
                writer.add(name, rows)
                if writer.error:
                    break
        if not writer.error:
            refuse_damaged(source, copier.before)
        manifest = weight_manifest(source, dtypes, copier.after)
        config = writer.config_of(source.companions)
        text = manifest_text(KIND, source, manifest, None, config)
        if error := writer.finish(source.companions, COMPANIONS, {MANIFEST: text}):
            raise ConvertError(error)
    except BaseException:
        writer.discard()
        raise
    return manifest


def _rows(copier: Copier) -> Iterator[tuple[str, Tensor]]:
    for name in copier.source.tensors:
        for rows in copier.rows(name):
            yield name, rows
