"""`verify`: two models, tensor by tensor, and what two libraries compute with them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

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
HELP = f"""Compare the tensors of two models by digest: Hugging Face folders, GGUF files, torch_dist
folders, training checkpoints, in any pair. Every tensor that differs is named. With --logits the
side that transformers can load is also run through transformers and the other one through megarl's
own model, in float32, and the log-probabilities of every token of some texts are compared.

  python tools/convert_ckpt.py verify models/qwen out/qwen
  python tools/convert_ckpt.py verify models/qwen out/qwen --logits
  python tools/convert_ckpt.py verify models/qwen out/qwen-bf16 --dtype bfloat16

exit codes: 0 the same; 1 they differ; 2 a side that cannot be read. The largest difference that
--logits lets pass is {BOUND:g} (--bound)."""
MOST_TOLD = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path)
    parser.add_argument("b", metavar="B", type=Path)
    options.add_hf_files(parser)
    parser.add_argument(
        "--dtype",
        choices=tuple(options.DTYPES),
        default="keep",
        help="compare after a cast of both to it (default: keep, the bits as they are)",
    )
    parser.add_argument("--logits", action="store_true", help="compare log-probabilities as well")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="a text in each line")
    parser.add_argument(
        "--bound",
        type=float,
        default=BOUND,
        metavar="X",
        help=f"largest difference of a log-probability (default: {BOUND:g})",
    )


def run(arguments: argparse.Namespace, crew: Processes) -> int:
    if crew.size > 1:
        raise ConvertError("verify runs in one process; start it without torchrun")
    if arguments.prompts is not None and not arguments.logits:
        raise ConvertError("--prompts is of --logits")
    kinds = [kind_of(path) for path in (arguments.a, arguments.b)]
    if arguments.logits and not {HF, GGUF} & set(kinds):
        raise ConvertError("--logits needs a Hugging Face folder or GGUF file on one side")
    files = arguments.hf_files
    with opened(arguments.a, files) as a, opened(arguments.b, files) as b:
        differ = differences(a, b, options.DTYPES[arguments.dtype])
        for line in differ[:MOST_TOLD]:
            print(line)
        if differ:
            print(f"{len(differ)} of {len(a.tensors.keys() | b.tensors.keys())} tensors differ")
        else:
            print(f"{len(a.tensors)} tensors, {a.parameters:,} parameters: the same")
        if not arguments.logits:
            return 1 if differ else 0
        if a.spec != b.spec and _numbers(a) != _numbers(b):
            raise ConvertError(f"{a.path} and {b.path} are models of other numbers")
        from megarl.convert.logits import largest_difference, texts_of

        theirs, ours = (a, b) if kinds[0] in (HF, GGUF) else (b, a)
        texts = texts_of(arguments.prompts, theirs)
        found, tokens, place = largest_difference(theirs, ours, texts)
    fine = found <= arguments.bound
    print(
        f"log-probabilities of {tokens} tokens, transformers on {theirs.path} against megarl on "
        f"{ours.path}: largest difference {found:.3g} ({place}), bound {arguments.bound:g}: "
        f"{'fine' if fine else 'too large'}"
    )
    return 0 if fine and not differ else 1


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


def _numbers(source: Source) -> tuple:
    """What fixes the arithmetic: of a config, all but its hash."""
    fields = source.spec.__dataclass_fields__
    return tuple(getattr(source.spec, name) for name in fields if name != "config_hash")
