"""`reshard`: a `torch_dist` folder or checkpoint → a `torch_dist` folder cut for another layout."""

from __future__ import annotations

import argparse

from megarl.convert import options
from megarl.convert.boxes import ConvertError
from megarl.convert.opening import CHECKPOINT, TORCH_DIST, kind_of, opened
from megarl.convert.output import refuse_existing
from megarl.convert.processes import Processes
from megarl.convert.source import target_dtypes
from megarl.convert.tell import wrote
from megarl.convert.write_megatron import write_megatron

LINE = "megatron torch_dist folder → the same weights, cut for another layout"
HELP = """Write the weights of a torch_dist folder, or of a training checkpoint's actor, cut for
another layout. What is written is read back before it gets its name, and every tensor must have
the digest of the source's.

  python tools/convert_ckpt.py reshard out/qwen out/qwen-tp4 --tp 4
  python tools/convert_ckpt.py reshard runs/mine-s1/checkpoints/iter_000030 out/mine --tp 1 --pp 2

Megatron loads a torch_dist folder at any layout as it is. Cutting it anew makes each rank's part
one file that only that rank reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_paths(parser, "torch_dist folder, or checkpoints/iter_N", "folder to write")
    options.add_hf_files(parser)
    options.add_layout(parser)


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    def check() -> None:
        refuse_existing(arguments.out)
        if kind_of(arguments.source) not in (TORCH_DIST, CHECKPOINT):
            raise ConvertError(f"{arguments.source}: not megatron's format; use hf-to-megatron")

    crew.each(check)
    mesh = options.mesh_of(arguments)
    with crew.opened(lambda: opened(arguments.source, arguments.hf_files)) as source:
        crew.each(lambda: options.refuse_misfit(source.spec, mesh))
        dtypes = crew.each(lambda: target_dtypes(source, None))
        manifest = write_megatron(source, arguments.out, mesh, dtypes, crew, proven=True)
        wrote(arguments.out, source, manifest, crew)
    return 0
