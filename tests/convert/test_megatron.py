"""What is written is read by megatron at other layouts, and what megatron writes is read here.

On real gloo ranks, through megarl's own models and `torch_dist` code. The oracle is a model that
was loaded from the HF folder, and the manifest that megarl computes of it. Not covered: resuming
a run from a converted folder; GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.convert.manifest import read_manifest
from megarl.convert.opening import open_source
from megarl.convert.source import digest_of
from megarl.convert.stored import read_index
from tests.convert.models import FAMILIES, MOE, convert, make, same_bytes, tensors_in

pytestmark = pytest.mark.dist


def _world(sizes: dict):
    from megarl.contracts.mesh import Mesh
    from megarl.models.build import initialize_mesh
    from megarl.world import World

    size = torch.distributed.get_world_size()
    world = World(Mesh(size, **({"tp": 1} | sizes)), torch.device("cpu"), 60)
    initialize_mesh(world.mesh, 60)
    return world


def read_by_megatron(model: str, folder: str, sizes: dict, dtype: torch.dtype) -> tuple:
    """(whether every parameter is the HF folder's, megarl's manifest hash of what was loaded)."""
    from megarl.checkpoint.torch_dist import load_tensors, model_tensors
    from megarl.models.build import build_model, destroy_mesh
    from megarl.reshard.digest import Digester
    from megarl.reshard.families import read_spec
    from megarl.reshard.layout import megatron_placement
    from megarl.reshard.transfer import weight_manifest

    world = _world(sizes)
    spec = read_spec(Path(model))
    place = (world.mesh, world.rank, dtype, world.device)
    live = build_model(spec, Path(model), *place, sequence_parallel=world.mesh.tp > 1)
    right = {name: param.detach().clone() for name, param in live.named_parameters()}
    with torch.no_grad():
        for param in live.parameters():
            param.fill_(float("nan"))
    load_tensors(model_tensors(live), Path(folder))
    found = {name: param.detach() for name, param in live.named_parameters()}
    placement = megatron_placement(spec, world.mesh)
    digester = Digester(placement, world.rank, dict(live.named_parameters()), dtype)
    manifest = weight_manifest(placement, digester, dtype, world)
    destroy_mesh()
    return same_bytes(found, right), manifest.hash


def written_by_megatron(model: str, folder: str, sizes: dict) -> None:
    from megarl.checkpoint.torch_dist import begin_save, model_tensors
    from megarl.models.build import build_model, destroy_mesh
    from megarl.reshard.families import read_spec

    world = _world(sizes)
    spec = read_spec(Path(model))
    live = build_model(
        spec,
        Path(model),
        world.mesh,
        world.rank,
        torch.float32,
        world.device,
        sequence_parallel=spec.moe is not None,
    )
    if world.is_main:
        Path(folder).mkdir()
    world.barrier("folder")
    save = begin_save(model_tensors(live), Path(folder), None)
    save.write()
    save.finish()
    destroy_mesh()


READ = [
    ("llama", 2, {"tp": 2}, ["--pp", 2]),
    ("qwen2", 2, {"pp": 2}, ["--tp", 2, "--pp", 2]),
    ("qwen3", 2, {"pp": 2, "virtual": 2}, []),
    ("mistral", 2, {"pp": 2, "stages": (1, 3)}, ["--tp", 2]),
    ("mixtral", 2, {"ep": 2}, ["--tp", 2]),
    ("qwen3_moe", 2, {"tp": 2, "ep": 2, "expert_tp": 1}, ["--ep", 4, "--expert-tp", 1]),
]


@pytest.mark.parametrize("family, ranks_, sizes, layout", READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatron_reads_it_at_another_layout(
    ranks, tmp_path, family: str, ranks_: int, sizes: dict, layout: list, dtype: torch.dtype
) -> None:
    model = make(tmp_path / "hf", family, dtype, num_hidden_layers=4)
    out = tmp_path / "m"
    assert convert("hf-to-megatron", model, out, *layout) == 0
    manifest = read_manifest(out)[1].hash
    told = ranks.run(ranks_, read_by_megatron, str(model), str(out), sizes, dtype)
    assert told == [(True, manifest)] * ranks_


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}])
def test_what_megatron_writes_is_read(ranks, tmp_path, tied: bool, sizes: dict) -> None:
    model = make(tmp_path / "hf", "qwen2", tied=tied, num_hidden_layers=4)
    out = tmp_path / "m"
    ranks.run(2, written_by_megatron, str(model), str(out), sizes)
    assert convert("verify", model, out, "--hf-files", model) == 0
    assert convert("megatron-to-hf", out, tmp_path / "b", "--hf-files", model) == 0
    assert same_bytes(tensors_in(model), tensors_in(tmp_path / "b"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_index_is_megatrons_own(ranks, tmp_path, family: str) -> None:
    """Keys, shapes, dtypes and chunks, as a model on the same layout writes them."""
    model = make(tmp_path / "hf", family, num_hidden_layers=4)
    sizes, layout = {"tp": 2}, ["--tp", 2]
    if family in MOE:
        sizes, layout = {"ep": 2}, ["--ep", 2]
    ranks.run(2, written_by_megatron, str(model), str(tmp_path / "theirs"), sizes)
    assert convert("hf-to-megatron", model, tmp_path / "mine", *layout) == 0
    theirs, mine = (
        {
            key: (
                tuple(entry.size),
                entry.properties.dtype,
                sorted((tuple(part.offsets), tuple(part.sizes)) for part in entry.chunks),
            )
            for key, entry in read_index(tmp_path / name).state_dict_metadata.items()
        }
        for name in ("theirs", "mine")
    )
    assert theirs == mine
    same = [(tmp_path / name / "metadata.json").read_text() for name in ("theirs", "mine")]
    assert json.loads(same[0]) == json.loads(same[1])


def saved_by_a_run(model: str, run: str, tp: int) -> None:
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, save, step
    from tests.models.support import make_actor, make_world

    saver = checkpointer(Path(run), make_actor(Path(model), make_world(tp)), background=False)
    step(saver.actor)
    save(saver, 1)
    saver.close()
    destroy_mesh()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_training_checkpoint_gives_the_actors_weights(ranks, tmp_path, capsys, tp: int) -> None:
    model = make(tmp_path / "hf", "qwen2")
    ranks.run(2, saved_by_a_run, str(model), str(tmp_path / "run"), tp)
    checkpoint = tmp_path / "run" / "checkpoints" / "iter_000001"
    files = ("--hf-files", model)
    assert convert("megatron-to-hf", checkpoint, tmp_path / "b", *files) == 0
    position = json.loads((checkpoint / "position.json").read_text())
    found = read_manifest(tmp_path / "b")[1]
    assert found.hash == position["actor"]["weight_manifest_hash"]
    # A step was taken: the weights are the run's and not the model folder's.
    assert convert("verify", model, checkpoint, *files) == 1
    assert convert("reshard", checkpoint, tmp_path / "m", "--tp", 2, *files) == 0
    source = open_source(tmp_path / "m")
    assert {entry.name: entry.digest for entry in found.tensors} == {
        name: digest_of(source, name) for name in source.tensors
    }
    capsys.readouterr()
    assert convert("megatron-to-hf", checkpoint, tmp_path / "c") == 2
    assert "--hf-files" in capsys.readouterr().err
    assert convert("megatron-to-hf", tmp_path / "run", tmp_path / "c") == 2
    assert "name one of its checkpoints/iter_N" in capsys.readouterr().err
    (checkpoint / "COMMIT.json").unlink()
    assert convert("megatron-to-hf", checkpoint, tmp_path / "c", *files) == 2
    assert "half-written" in capsys.readouterr().err
