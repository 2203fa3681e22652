"""Options that several commands share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from megarl.contracts.mesh import Mesh
from megarl.convert.boxes import ConvertError, smallest_world
from megarl.reshard.families import ModelSpec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.placement import LayoutError

DTYPES = {
    "keep": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)b?", re.IGNORECASE)
_KEY = re.compile(r"(?:actor|rollout)\.(\w+)")


def add_paths(parser: argparse.ArgumentParser, source: str, out: str) -> None:
    parser.add_argument("source", metavar="SOURCE", type=path, help=source)
    parser.add_argument("out", metavar="OUT", type=path, help=out)


def path(text: str) -> Path:
    """An empty one would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def size(text: str) -> int:
    """Bytes: `5000000`, `500MB`, `1.5 GB`."""
    found = _SIZE.fullmatch(text.strip())
    bytes_ = int(float(found[1]) * 1000 ** _UNITS.index((found[2] or "").lower())) if found else 0
    if bytes_ < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give bytes, or 500MB, 5GB, …")
    return bytes_


def positive_real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def add_hf_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf-files",
        metavar="FOLDER",
        type=path,
        help="where config.json and tokenizer are, when they are not beside the weights",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="keep",
        help="of the weights that are written (default: keep the bits as they are)",
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout: how the files are cut (any layout can load them)")
    for name, text in (
        ("--tp", "tensor parallel size (default: 1)"),
        ("--pp", "pipeline stages (default: 1)"),
        ("--ep", "expert parallel size (default: 1)"),
    ):
        group.add_argument(name, type=_positive, default=1, metavar="N", help=text)
    group.add_argument(
        "--expert-tp", type=_positive, metavar="N", help="of the experts (default: --tp)"
    )
    group.add_argument(
        "--virtual-stages",
        type=_positive,
        default=1,
        metavar="N",
        help="model chunks of a pipeline stage (default: 1)",
    )
    group.add_argument(
        "--stage-layers",
        type=_positive,
        nargs="+",
        default=(),
        metavar="N",
        help="layers of each chunk, in depth order (default: as many in all)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def mesh_of(arguments: argparse.Namespace) -> Mesh:
    """The smallest mesh of these sizes. Raises `ConvertError` naming the option."""
    tp, pp, ep, expert_tp = arguments.tp, arguments.pp, arguments.ep, arguments.expert_tp
    try:
        return Mesh(
            smallest_world(tp, pp, ep, expert_tp),
            tp=tp,
            pp=pp,
            ep=ep,
            expert_tp=expert_tp,
            virtual=arguments.virtual_stages,
            stages=tuple(arguments.stage_layers),
        )
    except ValueError as error:
        raise ConvertError(as_options(error)) from error


def refuse_misfit(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises `ConvertError` where the model does not divide."""
    try:
        megatron_placement(spec, mesh)
    except (LayoutError, ValueError) as error:
        raise ConvertError(as_options(error)) from error


def as_options(error: Exception) -> str:
    """What was said of recipe keys, said of options: `actor.tp` is `--tp`."""
    return _KEY.sub(lambda key: "--" + key[1].replace("_", "-"), str(error))
