"""Ranks whose machines have other copies of a file, or none: told by all of them in one line.

Two ranks of this machine, each with a folder of its own. Not covered: other tokenizers' models.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.contracts.tokenizer_folders import character_folder
from tests.data.prompt_files import TEMPLATE, write

pytestmark = pytest.mark.dist

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def _loads(folders: list[str], alone: bool) -> str:
    """What rank r says of loading from the r-th folder; empty where it loaded."""
    import torch
    import torch.distributed as dist

    from megarl.assemble_data import load_inputs
    from megarl.contracts.errors import InputError
    from megarl.contracts.mesh import Mesh
    from megarl.modes.evaluate_alone import load_held_out
    from megarl.recipe import load_recipe
    from megarl.world import World

    world = World(Mesh(dist.get_world_size(), tp=1), torch.device("cpu"), 30.0)
    folder = Path(folders[world.rank])
    values = {
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
        "data.template": folder / "own.jinja",
        "rollout.prompts_per_iteration": 2,
        "data.overlap_words": 0,
    }
    recipe = load_recipe(QUICKSTART, [f"{key}={value}" for key, value in values.items()])
    try:
        load_held_out(recipe, world) if alone else load_inputs(recipe, None, world)
    except InputError as error:
        return f"{type(error).__name__} {error.told_by_all}: {error}"
    return ""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    first = tmp_path / "node0"
    first.mkdir()
    character_folder(first / "model", TEMPLATE)
    write(first / "train.jsonl", *({"prompt": f"{n}", "answer": str(n)} for n in range(4)))
    write(first / "eval.jsonl", {"prompt": "9", "answer": "9"})
    (first / "own.jinja").write_text(TEMPLATE)
    others = [shutil.copytree(first, tmp_path / f"node{n}") for n in (1, 2)]
    return [str(first), *map(str, others)]


def _said(ranks, folders: list[str], *, alone: bool = False) -> str:
    lines = ranks.run(3, _loads, folders, alone)
    assert len(set(lines)) == 1 and "\n" not in lines[0], lines
    return lines[0]


def test_copies_that_are_the_same_are_fine(ranks, folders: list[str]) -> None:
    assert _said(ranks, folders) == "" and _said(ranks, folders, alone=True) == ""


def test_another_copy_is_told_by_all_ranks(ranks, folders: list[str]) -> None:
    write(Path(folders[0]) / "train.jsonl", *({"prompt": f"{n}", "answer": "7"} for n in range(4)))
    write(Path(folders[2]) / "eval.jsonl", {"prompt": "8", "answer": "8"})
    assert _said(ranks, folders) == (
        "InputsDiffer True: ranks have loaded other inputs than the others; rank 0: another "
        "data.train; rank 2: another data.eval; every machine needs the same files and code"
    )
    assert "; rank 2: another data.eval; every" in _said(ranks, folders, alone=True)


def test_another_template_is_told_with_what_follows_from_it(ranks, folders: list[str]) -> None:
    (Path(folders[1]) / "own.jinja").write_text(TEMPLATE + "!")
    said = _said(ranks, folders)
    assert "rank 1: another data.train, data.template, data.eval; every" in said


@pytest.mark.parametrize("alone", [False, True])
def test_a_file_that_one_machine_lacks_is_told_by_all(ranks, folders: list[str], alone) -> None:
    (Path(folders[1]) / "eval.jsonl").unlink()
    said = _said(ranks, folders, alone=alone)
    assert said.startswith(
        "InputsDiffer True: inputs that cannot be loaded on every rank (ranks 0, 2 could); rank 1: "
        f"{folders[1]}/eval.jsonl does not exist"
    )


def test_what_no_rank_can_load_is_told_in_its_own_words(ranks, folders: list[str]) -> None:
    (Path(folders[0]) / "train.jsonl").unlink()
    said = _said(ranks, [folders[0]] * 3)
    assert said.startswith(f"PromptError False: {folders[0]}/train.jsonl does not exist")
