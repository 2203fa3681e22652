"""The reader of `torch_dist` folders against torch's own, on folders that torch wrote.

Not here: tensors cut for other layouts, and megatron's planner (`test_torch_dist.py`); speed
(`tools/bench.py checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megarl.checkpoint import tensor_reading
from megarl.checkpoint.tensor_reading import FrontToBackReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = [(), (1,), (7,), (3, 5), (64, 33), (2, 3, 4), (0, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors(seed: int) -> dict[str, Tensor]:
    """Two of each shape and dtype, some that do not lie in the order of their elements."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for number in range(2):
        for shape in SHAPES:
            for dtype in DTYPES:
                values = torch.randint(0, 200, shape, generator=draw).to(dtype)
                found[f"{number}.{list(shape)}.{dtype}"] = values
        found[f"{number}.turned"] = torch.rand(6, 4, generator=draw).T
        found[f"{number}.part"] = torch.rand(9, 4, generator=draw)[2:5]
    return found


def written(folder: Path, state: dict[str, Tensor]) -> Path:
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)
    return folder


def read(folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    checkpoint.load(state, storage_reader=FrontToBackReader(folder), no_dist=True)
    return state


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """Where `torch.load` was asked to bring what it read, from now on."""
    asked: list[str] = []
    load = torch.load

    def noted(*args: object, **options: object) -> object:
        asked.append(str(options["map_location"]))
        return load(*args, **options)

    patch.setattr(tensor_reading.torch, "load", noted)
    return asked


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    state = tensors(1)
    folder = written(tmp_path, state)
    mine = read(folder, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    theirs = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(theirs, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(mine[name], tensor), name
        assert torch.equal(theirs[name], tensor), name


def test_it_lies_in_the_memory_that_was_there(tmp_path: Path) -> None:
    state = tensors(2)
    folder = written(tmp_path, state)
    targets = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()
    }
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    read(folder, targets)
    for name, tensor in targets.items():
        assert torch.equal(tensor, state[name]), name
        assert tensor.data_ptr() == places[name], name


def test_targets_that_do_not_lie_in_order_are_filled(tmp_path: Path) -> None:
    folder = written(tmp_path, {"weight": torch.arange(24.0).view(4, 6)})
    around = torch.zeros(6, 8)
    read(folder, {"weight": around[:, 2:6].T})
    assert torch.equal(around[:, 2:6], torch.arange(24.0).view(4, 6).T)
    assert not around[:, :2].any() and not around[:, 6:].any()


def test_one_of_a_kind_is_asked_about_and_none_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layer {number}": torch.rand(16, 8) for number in range(20)}
    folder = written(tmp_path, state)
    asked = counted(monkeypatch)
    found = read(folder, {name: torch.zeros(16, 8) for name in state})
    assert asked == ["meta"]
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_item_of_the_same_length_that_lies_otherwise_goes_the_librarys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square and a turned square of as many bytes: only what comes before the elements tells."""
    state = {"1 plain": torch.rand(5, 5), "2 turned": torch.rand(5, 5).T}
    folder = written(tmp_path, state)
    asked = counted(monkeypatch)
    found = read(folder, {name: torch.zeros(5, 5) for name in state})
    assert "cpu" in asked
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    state = {f"layer {number}": torch.rand(64, 64) for number in range(4)}
    folder = written(tmp_path, state)
    (file,) = folder.glob("*.distcp")
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 20_000)
    with pytest.raises(CheckpointException):
        read(folder, {name: torch.zeros(64, 64) for name in state})


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    state = {f"layer {number}": torch.rand(64, 64) for number in range(4)}
    folder = written(tmp_path, state)
    (file,) = folder.glob("*.distcp")
    index = checkpoint.FileSystemReader(folder).read_metadata()
    last = max(index.storage_data.values(), key=lambda stored: stored.offset)
    with open(file, "r+b") as opened:
        opened.seek(last.offset + 60)
        opened.write(bytes(600))
    with pytest.raises(CheckpointException):
        read(folder, {name: torch.zeros(64, 64) for name in state})


def test_large_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads less than it is asked for beyond 2 GiB; here it is asked for little."""
    monkeypatch.setattr(tensor_reading, "MOST_AT_ONCE", 1000)
    state = {f"layer {number}": torch.rand(33, 65) for number in range(3)}
    folder = written(tmp_path, state)
    found = read(folder, {name: torch.zeros(33, 65) for name in state})
    assert all(torch.equal(found[name], state[name]) for name in state)
