"""Folders that do not hold what is asked for, and disks that take no more: every rank is told.

Not covered: a byte that flipped inside a tensor (`test_state_digest.py`: digests tell), a file
system that loses what it had confirmed.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.layouts import Layout, load, save, train
from tests.models.support import write_hf_model

pytestmark = pytest.mark.dist
TP2 = Layout(2, tp=2)


def _save_one(source: Path, folder: Path, layout: Layout) -> int:
    from megarl.models.build import destroy_mesh

    actor = layout.actor(source)
    train(actor, 1)
    written = save(actor, folder)
    destroy_mesh()
    return written


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("damage")
    write_hf_model(place / "model")
    return place


@pytest.fixture(scope="module")
def whole(ranks, place) -> Path:
    written = ranks.run(2, _save_one, place / "model", place / "whole", TP2)
    for rank, size in enumerate(written):
        on_disk = (place / "whole" / f"__{rank}_0.distcp").stat().st_size
        assert 0 < size <= on_disk
    return place / "whole"


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * keep))

    return damage


def _cut_last_byte(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _garble(folder: Path) -> None:
    """The whole file is there, and is no file of torch's any more."""
    path = folder / "__0_0.distcp"
    path.write_bytes(b"\7" * path.stat().st_size)


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "cut in half": (_cut("__1_0.distcp", 0.5), ("__1_0.distcp ends at", "a part of ")),
    "a byte short": (_cut_last_byte, ("__1_0.distcp ends at", "a part of ")),
    "empty": (_cut("__0_0.distcp", 0.0), ("__0_0.distcp ends at 0 of", "a part of ")),
    "missing": (_remove("__0_0.distcp"), ("__0_0.distcp is missing", "a part of ")),
    "no index": (_remove(".metadata"), ("index", ".metadata")),
    "half an index": (_cut(".metadata", 0.5), ("index cannot be read",)),
    "no config": (_remove("metadata.json"), ("metadata.json",)),
    "half a config": (_cut("metadata.json", 0.5), ("index cannot be read",)),
    "no common file": (_remove("common.pt"), ("common.pt",)),
    "garbled": (_garble, ("__0_0.distcp is damaged: it has no ",)),
    "no folder": (shutil.rmtree, ("no such checkpoint",)),
}


def _loads(source: Path, folders: list[Path], layout: Layout, steps: int = 1) -> list[str]:
    """What each load told, "loaded" if nothing."""
    from megarl.checkpoint.torch_dist import TensorsError
    from megarl.models.build import destroy_mesh

    actor = layout.actor(source)
    told = []
    for folder in folders:
        try:
            load(actor, folder, steps)
            told.append("loaded")
        except TensorsError as error:
            told.append(str(error))
    destroy_mesh()
    return told


def _is_one_line_of(text: str, folder: Path, parts: tuple[str, ...]) -> None:
    assert text != "loaded", folder
    assert "\n" not in text and len(text) < 600, text
    for part in (str(folder), *parts):
        assert part in text, (part, text)


def test_a_damaged_folder_is_refused_by_every_rank(ranks, place, whole) -> None:
    folders = []
    for name, (damage, _) in DAMAGES.items():
        folder = place / name.replace(" ", "_")
        shutil.copytree(whole, folder)
        damage(folder)
        folders.append(folder)
    # One data-parallel rank reads what the other does not; the whole one comes last.
    for layout in (TP2, Layout(2)):
        told = ranks.run(2, _loads, place / "model", [*folders, whole], layout)
        assert told[0] == told[1], "every rank tells the same"
        assert told[0].pop() == "loaded"
        for text, folder, (_, parts) in zip(told[0], folders, DAMAGES.values(), strict=True):
            print(text)
            _is_one_line_of(text, folder, parts)


OTHERS = {
    "more layers": ({"num_hidden_layers": 4}, "float32", ("decoder.layers.", "4", "2")),
    "fewer layers": ({"num_hidden_layers": 1}, "float32", ("decoder.layers.", "1", "2")),
    "wider": ({"hidden_size": 96}, "float32", ("96", "64")),
    "wider ffn": ({"intermediate_size": 128}, "float32", ("mlp.linear_fc",)),
    "bfloat16": ({}, "bfloat16", ("torch.float32, the model's is torch.bfloat16",)),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_model_is_refused_by_every_rank(ranks, place, whole, tmp_path, name: str) -> None:
    numbers, dtype, parts = OTHERS[name]
    write_hf_model(tmp_path, **numbers)
    for layout in (Layout(2, tp=2, dtype=dtype), Layout(2, dtype=dtype)):
        first, second = ranks.run(2, _loads, tmp_path, [whole], layout)
        assert first == second
        print(first[0])
        _is_one_line_of(first[0], whole, parts)


def test_an_untied_model_does_not_load_a_tied_one(ranks, place, tmp_path) -> None:
    """The missing output layer is asked for by the last stage only."""
    write_hf_model(tmp_path / "tied", tied=True)
    ranks.run(2, _save_one, tmp_path / "tied", tmp_path / "saved", TP2)
    folder = tmp_path / "saved"
    told = ranks.run(2, _loads, place / "model", [folder], Layout(2, pp=2))
    assert told[0] == told[1]
    _is_one_line_of(told[0][0], folder, ("it has no tensor output_layer.weight", "rank 1"))


def _random_of_two(folder: Path) -> str:
    from megarl.checkpoint.torch_dist import TensorsError, load_tensors, rank_object

    try:
        return str(load_tensors({"random": rank_object("random", None)}, folder))
    except TensorsError as error:
        return str(error)


def test_values_of_a_rank_are_for_as_many_ranks(ranks, whole) -> None:
    own = ranks.run(2, _random_of_two, whole)
    assert own == [str({"random": {"rank": rank}}) for rank in range(2)]
    (alone,) = ranks.run(1, _random_of_two, whole)
    _is_one_line_of(alone, whole, ("it has no random/shard_0_1",))


def _failing_saves(source: Path, place: Path) -> dict[str, tuple[str, list[str]]]:
    """Case → what this rank was told, and what lies in the folder then."""
    from megarl.checkpoint.torch_dist import Staging, TensorsError, begin_save, model_tensors
    from megarl.models.build import destroy_mesh

    actor = TP2.actor(source)
    world, staging = actor.world, Staging()
    told: dict[str, tuple[str, list[str]]] = {}

    def attempt(name: str, begin: Callable[[Path], Any], write: Callable, index: Callable) -> None:
        folder = place / name.replace(" ", "_")
        if world.is_main:
            folder.mkdir()
            begin(folder)
        world.barrier(name)
        text = "saved"
        try:
            pending = begin_save(model_tensors(actor.model), folder, staging)
            world.barrier(name)
            write(folder, pending)
            world.barrier(name)
            index(folder)
            pending.finish()
        except TensorsError as error:
            text = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        world.barrier(name)
        held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
        told[name] = (text, held)

    def nothing(*_: Any) -> None: ...

    def plainly(folder: Path, pending: Any) -> None:
        pending.write()

    def removed(folder: Path, pending: Any) -> None:
        if world.is_main:
            shutil.rmtree(folder)
        world.barrier("removed")
        pending.write()

    def limited(*rest: Any) -> None:
        """On rank 1: no file longer than 4 KiB."""
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        if rest:
            rest[1].write()

    def by_rank_0_only(folder: Path, pending: Any) -> None:
        if world.is_main:
            pending.write()

    def full(name: str) -> Callable[[Path], None]:
        return lambda folder: (folder / name).symlink_to("/dev/full")

    def no_index(folder: Path) -> None:
        if world.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    attempt("no folder", shutil.rmtree, plainly, nothing)
    attempt("removed", nothing, removed, nothing)
    attempt("limit", nothing, limited, nothing)
    attempt("disk full", full("__1_0.distcp"), plainly, nothing)
    attempt("not written", nothing, by_rank_0_only, nothing)
    attempt("index", nothing, plainly, no_index)
    attempt("disk full at the index", full(".metadata.tmp"), plainly, nothing)
    attempt("whole", nothing, plainly, nothing)
    destroy_mesh()
    return told


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank(ranks, place, tmp_path) -> None:
    mine, other = ranks.run(2, _failing_saves, place / "model", tmp_path)
    assert mine == other, "every rank tells the same"
    for name, (text, _) in mine.items():
        print(text)
        if name != "whole":
            _is_one_line_of(text, tmp_path / name.replace(" ", "_"), ("rank ",))
    assert "no such folder" in mine["no folder"][0]
    assert "No such file or directory" in mine["removed"][0]
    assert "__1_0.distcp could not be written: [Errno 27] File too large" in mine["limit"][0]
    assert "__1_0.distcp could not be written: [Errno 28] No space" in mine["disk full"][0]
    assert "its file was not written (rank 1)" in mine["not written"][0]
    for name in ("index", "disk full at the index"):
        assert "the index could not be written" in mine[name][0]
    assert "No space left on device" in mine["disk full at the index"][0]
    for name, (_, files) in mine.items():
        assert ("metadata.json" in files) == (name == "whole"), "half a folder passes for a whole"
