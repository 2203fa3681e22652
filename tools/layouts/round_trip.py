"""From HF files into the trainer's layout and back: the same bytes, in float32 and bfloat16."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.hf_folder import export_folder
from megarl.models.build import build_model, weights_of
from megarl.models.roles import Actor
from megarl.reshard.digest import DriftError
from megarl.reshard.families import FolderError
from megarl.reshard.families.spec import ModelSpec
from megarl.reshard.layout import megatron_placement
from megarl.world import World


def check(world: World, spec: ModelSpec, actor: Actor, source: Path, dtype: str) -> dict[str, Any]:
    """The row of the table, the same on every rank. Collective.

    The trainer's model of `source`, whose weights are of `dtype`, is written as a folder again.
    """
    kind = getattr(torch, dtype)
    model = actor.model
    if kind is not model.dtype:
        parallel = actor.model.config.sequence_parallel
        model = build_model(
            spec, source, world.mesh, world.rank, kind, world.device, "none", parallel
        )
    placement = megatron_placement(spec, world.mesh)
    place = tempfile.mkdtemp(prefix="megarl-layouts-") if world.rank == 0 else None
    out = Path(world.gather(place)[0]) / "model"
    try:
        export_folder(out, source, placement, weights_of(model), spec, world, kind)
        verdict = _compared(source, out) if world.rank == 0 else None
    except (FolderError, DriftError) as error:  # raised on every rank alike
        verdict = {"ok": False, "why": str(error)}
    finally:
        if place is not None:
            shutil.rmtree(place)
    return world.gather(verdict)[0]


def _compared(source: Path, out: Path) -> dict[str, Any]:
    theirs, ours = _tensors(source), _tensors(out)
    odd = sorted(theirs.keys() ^ ours.keys())
    odd += [name for name in theirs.keys() & ours.keys() if not _same(theirs[name], ours[name])]
    row: dict[str, Any] = {"ok": not odd, "tensors": len(theirs)}
    return row | ({"why": f"{len(odd)} tensors differ, first {odd[0]}"} if odd else {})


def _same(a: Tensor, b: Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
