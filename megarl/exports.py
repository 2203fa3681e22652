"""HF exports beside checkpoints: `exports/iter_N/`, and `exports/best`, a link to one of them.

    due()       every `checkpoint.export_every` iterations, or when held-out accuracy is a new best
    write()     the folder, whole under its name at once; then the link, turned in one step
    settle()    after a checkpoint: removes former bests that no position leads back to
    restore()   on a resume: the best as the position has it, and the link to it

N counts the finished iterations, as in `checkpoints/iter_N/`. An export of a position is written
before its checkpoint begins: a run resumed from there does not write it any more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.checkpoint.hf_folder import export_folder
from megarl.checkpoint.records import EXPORTS_FOLDER
from megarl.checkpoint.safetensors_folder import STORED_AS, stored_tensors
from megarl.experience.columns import sync_folder
from megarl.recipe import Recipe
from megarl.reshard.digest import Digester, block_digest
from megarl.reshard.families import FolderError, ModelSpec
from megarl.reshard.layout import megatron_placement
from megarl.reshard.matrix import as_matrix
from megarl.reshard.transfer import source_digests
from megarl.world import World

BEST = "best"
TURNING = f".{BEST}.partial"
"""The new link until it takes the old one's place."""
REMOVED = ".removed"
"""Ends the hidden name of an export on its way out, so that half of one never has a real name."""
UNFINISHED = (TURNING, ".iter_*.partial", f".iter_*{REMOVED}")
"""What a killed process may have left."""

T = TypeVar("T")


def export_name(finished: int) -> str:
    """`iter_000010`: the weights after ten iterations."""
    return f"iter_{finished:06d}"


class Exports:
    """The exports of one run. Every rank holds the same; rank 0 writes."""

    def __init__(self, run_folder: Path, recipe: Recipe, spec: ModelSpec, world: World) -> None:
        self.folder = Path(run_folder) / EXPORTS_FOLDER
        self.recipe, self.spec, self.world = recipe, spec, world
        self._best: tuple[float, int] | None = None
        self._only_best: tuple[int, ...] = ()
        self._written: int | None = None

    @property
    def state(self) -> dict[str, Any] | None:
        """Plain JSON for the position: `accuracy` and `iteration` of the best so far, and
        `only_best`, the iterations exported for nothing but having been the best. None: no best.
        """
        if self._best is None:
            return None
        accuracy, iteration = self._best
        return {
            "accuracy": accuracy,
            "iteration": iteration,
            "only_best": list(self._only_best),
        }

    def due(self, finished: int, accuracy: float | None = None) -> bool:
        """Whether the weights after `finished` iterations are to be exported.

        `accuracy`: theirs on the held-out prompts, where they were evaluated. An export that this
        process has written is not due again, unless to become the best.
        """
        regular = self._is_regular(finished) and finished != self._written
        return regular or self._is_better(accuracy)

    def write(
        self, finished: int, params: Mapping[str, Tensor], accuracy: float | None = None
    ) -> Path:
        """Export the actor's shards `params` as `exports/iter_N`; with a new best accuracy make
        `exports/best` point to it. Collective.

        A folder that is there already, and holds these very weights, is taken as it is. Raises
        `FolderError` on every rank where it holds others or something could not be written,
        `DriftError` when copies of the shards differ.
        """
        path = self.folder / export_name(finished)
        there = self._on_main(path.exists)
        if there and finished != self._written:
            self._refuse_others(path, params)
        if not there:
            export_folder(
                path,
                Path(self.recipe.model.path),
                megatron_placement(self.spec, self.world.mesh),
                params,
                self.spec,
                self.world,
                self._dtype,
            )
            self._on_main(lambda: _sync(path))
        self._written = finished
        if self._is_regular(finished):
            self._only_best = tuple(n for n in self._only_best if n != finished)
        elif not there:
            self._only_best += (finished,)
        if self._is_better(accuracy):
            self._on_main(lambda: self._point_best_to(path.name))
            self._best = (accuracy, finished)
            if not self.recipe.checkpoint.every:  # no position on the way that leads back to one
                self.settle(None)
        return path

    def settle(self, committed: Mapping[str, Any] | None) -> None:
        """Remove exports that were only ever the best, and are not now, neither by this run nor by
        `committed`, the `state` in the newest checkpoint that is whole. Collective.

        Raises `FolderError` on every rank where one cannot be removed.
        """
        needed = {None if self._best is None else self._best[1]}
        needed.add(None if committed is None else committed["iteration"])
        gone = [n for n in self._only_best if n not in needed]
        if not gone:
            return
        self._on_main(lambda: [self._remove(export_name(n)) for n in gone])
        self._only_best = tuple(n for n in self._only_best if n in needed)

    def restore(self, state: Mapping[str, Any] | None, *, own: bool = True) -> str | None:
        """Take over the position's `state`, after what is newer was set aside. Collective.

        Removes what a killed process left half-written and turns the link, or removes it where its
        export is gone: a later best may have replaced it, or (not `own`) the position is another
        run's. The accuracy to beat stays; returns a line that says so. Raises `FolderError`.
        """
        self._best = None if state is None else (state["accuracy"], state["iteration"])
        self._only_best = tuple(state["only_best"]) if state is not None and own else ()
        self._written = None
        if not self._on_main(lambda: self._clear(own)) or self._best is None:
            return None
        accuracy, iteration = self._best
        return (
            f"{self.folder / BEST}: not there, for the best so far, {export_name(iteration)}, is "
            f"not; the next one has more than its accuracy of {accuracy:g}"
        )

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.recipe.model.dtype)

    def _is_regular(self, finished: int) -> bool:
        every = self.recipe.checkpoint.export_every
        return bool(every and finished and finished % every == 0)

    def _is_better(self, accuracy: float | None) -> bool:
        if accuracy is None or not self.recipe.checkpoint.export_best:
            return False
        return self._best is None or accuracy > self._best[0]

    def _point_best_to(self, name: str) -> None:
        """At any moment the link is the old one or the new one, never none."""
        turning = self.folder / TURNING
        turning.unlink(missing_ok=True)
        turning.symlink_to(name, target_is_directory=True)
        os.replace(turning, self.folder / BEST)
        sync_folder(self.folder)

    def _remove(self, name: str) -> None:
        path, out = self.folder / name, self.folder / f".{name}{REMOVED}"
        if path.exists():
            path.rename(out)
            shutil.rmtree(out)

    def _clear(self, own: bool) -> bool:
        """Tidy up and turn the link; whether it is missing for want of the best's folder."""
        for pattern in UNFINISHED:
            for path in self.folder.glob(pattern):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        name = None if self._best is None else export_name(self._best[1])
        if name is not None and own and (self.folder / name).is_dir():
            self._point_best_to(name)
            return False
        if (self.folder / BEST).is_symlink():
            (self.folder / BEST).unlink()
        return True

    def _refuse_others(self, path: Path, params: Mapping[str, Tensor]) -> None:
        placement = megatron_placement(self.spec, self.world.mesh)
        digester = Digester(placement, self.world.rank, params, self._dtype)
        digests = source_digests(placement, digester, self.world)
        if self._on_main(lambda: _digests(path, self._dtype)) != digests:
            raise FolderError(f"{path}: exists and holds other weights; move it away")

    def _on_main(self, act: Callable[[], T]) -> T:
        """Rank 0's result on every rank; what fails there fails on every rank."""
        error, result = "", None
        if self.world.is_main:
            try:
                result = act()
            except (OSError, FolderError) as problem:
                error = str(problem)
        error, result = self.world.gather((error, result))[0]
        if error:
            raise FolderError(f"{self.folder}: {error}")
        return result


def _sync(path: Path) -> None:
    """The folder, its files and its name are on the disk."""
    for file in path.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    sync_folder(path)
    sync_folder(path.parent)


def _digests(folder: Path, dtype: torch.dtype) -> dict[str, int]:
    """Digest of every stored tensor by name; of none where one has another dtype."""
    stored = stored_tensors(folder)
    if any(tensor.dtype != STORED_AS[dtype] for tensor in stored.values()):
        return {}
    digests = {}
    for path in sorted({tensor.path for tensor in stored.values()}):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                digests[name] = block_digest(as_matrix(file.get_tensor(name)), name, 0, 0)
    return digests
