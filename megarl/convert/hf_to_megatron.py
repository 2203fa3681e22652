"""`hf-to-megatron`: a Hugging Face folder or GGUF file → a megatron `torch_dist` folder."""

from __future__ import annotations

import argparse

from megarl.convert import options
from megarl.convert.boxes import ConvertError
from megarl.convert.opening import GGUF, HF, kind_of, opened
from megarl.convert.output import refuse_existing
from megarl.convert.processes import Processes
from megarl.convert.source import target_dtypes
from megarl.convert.tell import wrote
from megarl.convert.write_megatron import write_megatron

LINE = "Hugging Face folder or GGUF file → megatron torch_dist folder"
HELP = """Write the weights of a Hugging Face folder (one safetensors file, or several with an
index) or of a GGUF file as a megatron torch_dist checkpoint. Any layout can load it; the layout
options only say how its files are cut. config.json, tokenizer and generation files come along, and
manifest.json has a digest of every tensor.

  python tools/convert_ckpt.py hf-to-megatron models/qwen out/qwen
  python tools/convert_ckpt.py hf-to-megatron models/qwen out/qwen --tp 2 --pp 2 --dtype bfloat16
  python tools/convert_ckpt.py hf-to-megatron SmolLM2.Q4_1.gguf out/smol
  torchrun --nproc_per_node 4 tools/convert_ckpt.py hf-to-megatron models/big out/big --tp 4

One process can write every layout: it holds two chunks at a time, never the model (a GGUF file is
decoded as a whole, to float32). Under torchrun the processes share the ranks' files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_paths(parser, "Hugging Face folder, or file.gguf", "folder to write")
    options.add_dtype(parser)
    options.add_layout(parser)


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    def check() -> None:
        refuse_existing(arguments.out)
        kind = kind_of(arguments.source)
        if kind not in (HF, GGUF):
            raise ConvertError(
                f"{arguments.source}: a {kind} folder is in megatron's format; reshard cuts it anew"
            )

    crew.each(check)
    mesh = options.mesh_of(arguments)
    with crew.opened(lambda: opened(arguments.source)) as source:
        crew.each(lambda: options.refuse_misfit(source.spec, mesh))
        dtypes = crew.each(lambda: target_dtypes(source, options.DTYPES[arguments.dtype]))
        manifest = write_megatron(source, arguments.out, mesh, dtypes, crew)
        wrote(arguments.out, source, manifest, crew)
    return 0
