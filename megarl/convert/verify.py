"""`verify`: two models, tensor by tensor, and what two libraries compute with them."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from megarl.checkpoint.model_fit import numbers_of
from megarl.convert import options
from megarl.convert.boxes import ConvertError
from megarl.convert.copying import one_thread, refuse_damaged
from megarl.convert.manifest import told
from megarl.convert.opening import GGUF, HF, kind_of, opened
from megarl.convert.processes import Processes
from megarl.convert.progress import Progress
from megarl.convert.source import Source, digest_of

BOUND = 3e-5
LINE = "whether two models are the same, tensor by tensor; with --logits what they compute"
HELP = f"""Compare two models: the numbers of their configs and, by digest, their tensors. Hugging
Face folders, GGUF files, torch_dist folders, training checkpoints, in any pair. Every number and
every tensor that differs is named. With --logits the side that transformers can load is also run
through transformers and the other one through megarl's own model, in float32, and the
log-probabilities of every token of some texts are compared; of a critic or reward model the values.

  python tools/convert_ckpt.py verify models/qwen out/qwen
  python tools/convert_ckpt.py verify models/qwen out/qwen --logits
  python tools/convert_ckpt.py verify models/qwen out/qwen-bf16 --dtype bfloat16

exit codes: 0 the same; 1 they differ; 2 a side that cannot be read. The largest difference that
--logits lets pass is {BOUND:g} (--bound)."""
MOST_TOLD = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=options.path)
    parser.add_argument("b", metavar="B", type=options.path)
    options.add_hf_files(parser)
    parser.add_argument(
        "--dtype",
        choices=tuple(options.DTYPES),
        default="keep",
        help="compare after a cast of both to it (default: keep, the bits as they are)",
    )
    parser.add_argument("--logits", action="store_true", help="compare what they compute as well")
    parser.add_argument("--prompts", metavar="FILE", type=options.path, help="a text in each line")
    parser.add_argument(
        "--bound",
        type=options.positive_real,
        default=BOUND,
        metavar="X",
        help=f"largest difference of a log-probability or value (default: {BOUND:g})",
    )


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    if crew.size > 1:
        raise ConvertError("verify runs in one process; start it without torchrun")
    if arguments.prompts is not None and not arguments.logits:
        raise ConvertError("--prompts is of --logits")
    kinds = [kind_of(path) for path in (arguments.a, arguments.b)]
    if arguments.logits and not {HF, GGUF} & set(kinds):
        raise ConvertError("--logits needs a Hugging Face folder or GGUF file on one side")
    lines = None
    if arguments.prompts is not None:
        from megarl.convert.logits import lines_of

        lines = lines_of(arguments.prompts)
    files = arguments.hf_files
    with opened(arguments.a, files) as a, opened(arguments.b, files) as b:
        numbers = other_numbers(a, b, rounded=GGUF in kinds)
        differ = differences(a, b, options.DTYPES[arguments.dtype])
        for line in [*numbers, *differ[:MOST_TOLD]]:
            print(line)
        if differ:
            print(f"{len(differ)} of {len(a.tensors.keys() | b.tensors.keys())} tensors differ")
        else:
            print(f"{len(a.tensors)} tensors, {a.parameters:,} parameters: the same")
        if numbers:
            also = "; what they compute is not compared" if arguments.logits else ""
            print(f"{len(numbers)} numbers of the config differ: two models{also}")
            return 1
        if not arguments.logits:
            return 1 if differ else 0
        from megarl.convert.logits import largest_difference, texts_of

        theirs, ours = (a, b) if kinds[0] in (HF, GGUF) else (b, a)
        texts = texts_of(lines, theirs)
        found, tokens, place = largest_difference(theirs, ours, texts)
    fine = found <= arguments.bound
    what = "values" if theirs.spec.head == "value" else "log-probabilities"
    print(
        f"{what} of {tokens} tokens, transformers on {theirs.path} against megarl on "
        f"{ours.path}: largest difference {found:.3g} ({place}), bound {arguments.bound:g}: "
        f"{'fine' if fine else 'too large'}"
    )
    return 0 if fine and not differ else 1


def other_numbers(a: Source, b: Source, rounded: bool = False) -> list[str]:
    """One line for each number of the configs, of those that megarl computes with, that the two do
    not have alike. `rounded`: as float32, which is what a GGUF file has for a fraction."""

    def told(value: Any) -> Any:
        return float(np.float32(value)) if rounded and isinstance(value, float) else value

    mine, theirs = numbers_of(a.spec), numbers_of(b.spec)
    return [
        f"config.json: {name} {value} against {theirs[name]}"
        for name, value in mine.items()
        if told(value) != told(theirs[name])
    ]


def differences(a: Source, b: Source, dtype: torch.dtype | None = None) -> list[str]:
    """One line for each tensor that the two do not have alike. Raises `ConvertError` where one of
    them is not what was recorded when it was written."""
    lines = []
    digests: tuple[dict[str, int], dict[str, int]] = ({}, {})
    with one_thread(), Progress("comparing", a.bytes + b.bytes) as progress:
        for name in [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]:
            missing = [side.path for side in (a, b) if name not in side.tensors]
            if missing:
                lines.append(f"{name}: not in {missing[0]}")
                continue
            kinds = [side.tensors[name] for side in (a, b)]
            for side, found in zip((a, b), digests, strict=True):
                found[name] = digest_of(side, name, dtype)
                progress.advance(side.tensors[name].bytes)
            if kinds[0].shape != kinds[1].shape or (dtype is None and kinds[0] != kinds[1]):
                both = " against ".join(f"{told(one.dtype)}{list(one.shape)}" for one in kinds)
                lines.append(f"{name}: {both}")
            elif digests[0][name] != digests[1][name]:
                lines.append(f"{name}: {digests[0][name]:#x} against {digests[1][name]:#x}")
    if dtype is None:
        for side, found in zip((a, b), digests, strict=True):
            refuse_damaged(side, found)
    return lines
