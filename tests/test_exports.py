"""Exports beside checkpoints: when, whole or not there, and which one is the best.

Real exports of a small model by gloo ranks. Not covered: crashes (`test_exports_crash.py`), a model
of more than one weights file.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.exports import Exports
from megarl.reshard.digest import DriftError
from megarl.reshard.families import FolderError
from tests.exporting import BEST, Run, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def _regular(model: str) -> None:
    run = Run(model, "checkpoint.export_every=3")
    assert [n for n in range(8) if run.write(n, 0.1 * n)] == [3, 6]
    assert run.seen() == (["iter_000003", "iter_000006"], None)
    assert run.exports.state is None
    for finished in (3, 6):
        assert run.holds(run.folder / "exports" / f"iter_{finished:06d}", finished)
    assert not Run(model).exports.due(10, 1.0)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_every_so_many_iterations(ranks, model: Path, size: int) -> None:
    ranks.run(size, _regular, str(model))


def _best(model: str) -> None:
    run = Run(model, BEST, "checkpoint.export_every=4")
    best = run.folder / "exports" / "best"
    story = {0: 0.1, 2: 0.1, 4: 0.5, 6: None, 8: 0.5, 10: 0.6, 12: float("nan"), 14: 0.7}
    wrote = [n for n, accuracy in story.items() if run.write(n, accuracy)]
    assert wrote == [0, 4, 8, 10, 12, 14]
    assert run.exports.state == {"accuracy": 0.7, "iteration": 14, "only_best": [0, 10, 14]}
    assert json.loads(json.dumps(run.exports.state)) == run.exports.state
    assert run.holds(best, 14)
    run.exports.settle({"accuracy": 0.6, "iteration": 10, "only_best": [0, 10]})
    names = [f"iter_{n:06d}" for n in (4, 8, 10, 12, 14)]
    assert run.seen() == (["best", *names], "iter_000014")
    run.exports.settle(run.exports.state)
    names.remove("iter_000010")
    assert run.seen() == (["best", *names], "iter_000014")
    assert run.exports.state["only_best"] == [14]
    run.exports.settle(run.exports.state)
    assert run.seen() == (["best", *names], "iter_000014")


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_best_is_strictly_better_and_former_ones_go_after_a_checkpoint(
    ranks, model: Path, size: int
) -> None:
    ranks.run(size, _best, str(model))


def _without_checkpoints(model: str) -> None:
    run = Run(model, BEST, "checkpoint.every=0")
    for finished, accuracy in ((0, 0.1), (2, 0.2), (4, 0.15)):
        run.write(finished, accuracy)
    assert run.seen() == (["best", "iter_000002"], "iter_000002")


@pytest.mark.dist
def test_without_checkpoints_on_the_way_a_former_best_goes_at_once(ranks, model: Path) -> None:
    ranks.run(1, _without_checkpoints, str(model))


def _there_already(model: str) -> None:
    run = Run(model, BEST, "checkpoint.export_every=2")
    run.write(2)  # at the end of an iteration; evaluated when the next begins
    assert run.write(2, 0.5)
    assert run.exports.state == {"accuracy": 0.5, "iteration": 2, "only_best": []}
    # A process that goes on from position 2 evaluates once more.
    run.exports = run.again()
    run.exports.restore(None)
    assert run.seen() == (["iter_000002"], None)
    assert run.write(2, 0.5) and run.seen()[1] == "iter_000002"
    # A folder that the run did not make only for its best is never removed.
    fresh = Run(model, BEST)
    fresh.exports.write(2, run.weights(2), 0.5)
    fresh.exports.write(3, run.weights(3), 0.6)
    fresh.exports.settle(fresh.exports.state)
    assert fresh.seen()[0] == ["best", "iter_000002", "iter_000003"]
    for shards in (run.weights(9), _one_bit_off(run.weights(2))):
        with pytest.raises(FolderError, match="iter_000002: exists and holds other weights; move"):
            run.again().write(2, shards)
    narrow = Run(model, "model.dtype=bfloat16")
    with pytest.raises(FolderError, match="exists and holds other weights"):
        narrow.exports.write(2, run.weights(2))


def _one_bit_off(shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    bits = shards["decoder.final_layernorm.weight"].view(torch.int32)
    bits[3] ^= 1
    return shards


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_an_export_that_is_there_is_taken_only_with_the_same_weights(
    ranks, model: Path, size: int
) -> None:
    ranks.run(size, _there_already, str(model))


def _refused(model: str) -> list[str]:
    run = Run(model, BEST)
    exports = run.folder / "exports"
    told = []
    run.on_main(lambda: (exports / "best").mkdir(parents=True))
    try:
        run.write(2, 0.5)
    except FolderError as error:
        told.append(str(error))
    assert run.exports.state is None
    left = run.world.gather(sorted(path.name for path in exports.iterdir()))[0]
    assert left == [".best.partial", "best", "iter_000002"]
    run.on_main(
        lambda: shutil.rmtree(exports),
        lambda: exports.write_text(""),
    )
    try:
        run.write(4, 0.5)
    except FolderError as error:
        told.append(str(error))
    shards = run.weights(5)
    if run.world.rank == 1:
        _one_bit_off(shards)
    try:
        Exports(run.folder / "other", run.recipe, run.spec, run.world).write(5, shards)
    except DriftError as error:
        told.append(str(error))
    return told


@pytest.mark.dist
def test_what_cannot_be_written_is_refused_on_every_rank_and_best_stays(ranks, model: Path) -> None:
    one, other = ranks.run(2, _refused, str(model))
    assert one == other and len(one) == 3
    assert "directory" in one[0] and "exports/best" in one[0]
    assert "exports" in one[1]
    assert "model.norm.weight" in one[2]
    assert not any("\n" in line for line in one)


def _resumed(model: str) -> list[str | None]:
    run = Run(model, BEST)
    run.write(2, 0.5)
    position = run.exports.state
    run.write(4, 0.7)
    exports = run.folder / "exports"

    def resume(state: dict[str, Any] | None, own: bool = True) -> str | None:
        run.exports = run.again()
        return run.exports.restore(state, own=own)

    told = [resume(position)]
    assert run.seen()[1] == "iter_000002"
    assert run.exports.state == position
    assert not run.exports.due(4, 0.5) and run.exports.due(4, 0.51)
    told.append(resume(position, own=False))
    assert run.seen() == (["iter_000002", "iter_000004"], None)
    assert run.exports.state == position | {"only_best": []}
    assert not run.exports.due(4, 0.5)
    told.append(resume(None))
    assert run.exports.state is None and run.exports.due(0, 0.0)
    removed = exports / ".iter_000000.removed"
    run.on_main(
        lambda: shutil.rmtree(exports / "iter_000002"),
        lambda: os.symlink("iter_000002", exports / "best"),
        (exports / ".iter_000006.partial").mkdir,
        removed.mkdir,
        (removed / "config.json").touch,
        lambda: os.symlink("iter_000004", exports / ".best.partial"),
    )
    told.append(resume(position))
    assert run.seen() == (["iter_000004"], None)
    assert not run.exports.due(4, 0.5)
    return told


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2])
def test_a_resume_takes_the_position_s_best(ranks, model: Path, size: int) -> None:
    for told in ranks.run(size, _resumed, str(model)):
        assert (told[0], told[2]) == (None, None)
        assert told[1] == told[3]
        assert told[1].endswith(
            "exports/best: not there, for the best so far, iter_000002, is not; "
            "the next one has more than its accuracy of 0.5"
        )
