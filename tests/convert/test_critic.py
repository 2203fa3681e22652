"""The critic and the reference of a training checkpoint as Hugging Face folders: what transformers
computes with a critic, and that a run takes it back as its `critic.path`.

On real gloo ranks; the oracle of values is transformers. Not covered: a whole run that starts from
such a folder; GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.convert.manifest import read_manifest
from megarl.models.critic_spec import critic_spec
from megarl.reshard.families import read_spec
from tests.convert.models import convert, make, same_bytes, tensors_in

pytestmark = pytest.mark.dist


def saved_with_a_critic(actor_folder: Path, critic_folder: Path, run: Path, tp: int) -> Any:
    """A critic after two steps, saved beside an actor; its values of some samples."""
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.layouts import packs_of, train
    from tests.checkpoint.saving import checkpointer, critic_of, save
    from tests.models.runs import merged
    from tests.models.support import make_actor, make_samples, make_world

    actor = make_actor(actor_folder, make_world(tp))
    critic = critic_of(critic_folder, actor)
    saver = checkpointer(run, actor, critic=critic)
    train(critic, 2)
    recipe = {"model": {"path": str(actor_folder)}, "critic": {"path": str(critic_folder)}}
    save(saver, 1, recipe=recipe)
    saver.settle(wait=True)
    saver.close()
    samples = make_samples(99, 12, below=300)
    packs = packs_of(critic, samples)
    found = merged(critic, packs, [told.values_A for told in critic.values(packs)], samples)
    destroy_mesh()
    return found


def values_by_transformers(folder: Path, task: str) -> torch.Tensor:
    """Of every response token: the head on the hidden state that the token was drawn from."""
    import transformers

    from tests.models.support import make_samples

    model = getattr(transformers, f"AutoModelFor{task}").from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for sample in make_samples(99, 12, below=300):
            ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])[None].long()
            hidden = model.base_model(ids).last_hidden_state[0]
            found.append(model.score(hidden)[len(sample.prompt_ids) - 1 : -1, 0])
    return torch.cat(found)


CRITICS = {
    "fresh": ({"tied": True}, "SequenceClassification"),
    "reward model": ({"task": "TokenClassification"}, "TokenClassification"),
}


def verified(a: Path, b: Path) -> int:
    """`verify --logits`, in a world of one that leaves no environment behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "0")
            patch.delenv(name)
        return convert("verify", a, b, "--logits")


def shifted(folder: Path, copy: Path) -> Path:
    """The model with another weight in its head."""
    shutil.copytree(folder, copy)
    tensors = tensors_in(copy)
    tensors["score.weight"][0, 3] += 0.5
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_verify_compares_values_of_reward_models(tmp_path, capsys, task: str) -> None:
    reward = make(tmp_path / "a", "qwen2", task=task)
    (reward / "tokenizer.json").unlink()  # its few words make no text: ids are random
    other = shifted(reward, tmp_path / "b")
    assert verified(reward, reward) == 0
    assert "values of " in capsys.readouterr().out
    assert verified(reward, other) == 1
    said = capsys.readouterr().out
    assert "score.weight: " in said and said.endswith("too large\n"), said


@pytest.mark.parametrize("name, tp", [("fresh", 1), ("reward model", 2)])
def test_a_checkpoints_critic_is_a_reward_model(
    ranks, tmp_path, capsys, name: str, tp: int
) -> None:
    numbers, task = CRITICS[name]
    actor = make(tmp_path / "actor", "qwen2")
    critic = make(tmp_path / "critic", "qwen2", num_hidden_layers=3, **numbers)
    run, out = tmp_path / "run", tmp_path / "out"
    values = ranks.run(2, saved_with_a_critic, actor, critic, run, tp)[0]
    folder = run / "checkpoints/iter_000001"
    assert convert("megatron-to-hf", folder / "critic", out) == 0
    spec = read_spec(out)
    assert (spec.head, spec.value_bias, spec.layers) == ("value", task[0] == "T", 3)
    assert critic_spec(out, read_spec(actor)) == (spec, False)
    apart = (values_by_transformers(out, task) - values).abs().max()
    assert float(values.abs().max()) > 1e-2 and float(apart) < 1e-4
    position = json.loads((folder / "position.json").read_text())
    assert read_manifest(out)[1].hash == position["critic"]["weight_manifest_hash"]
    assert (out / "tokenizer.json").is_file()
    # Cut for megatron and back again it is the same folder.
    assert convert("reshard", folder / "critic", tmp_path / "m", "--tp", 2) == 0
    assert convert("megatron-to-hf", tmp_path / "m", tmp_path / "b") == 0
    assert same_bytes(tensors_in(out), tensors_in(tmp_path / "b"))
    assert read_spec(tmp_path / "b") == spec
    capsys.readouterr()
    assert convert("inspect", folder / "critic") == 0
    assert "critic of a training checkpoint" in capsys.readouterr().out
    (out / "tokenizer.json").unlink()  # its few words make no text: ids are random
    assert verified(folder / "critic", out) == 0
    said = capsys.readouterr().out
    assert "values of " in said and str(out) in said and said.endswith("fine\n"), said
    # Another model's config is refused.
    assert convert("megatron-to-hf", folder / "critic", tmp_path / "c", "--hf-files", actor) == 2
    assert "[3, 64], config.json makes it [2, 64]" in capsys.readouterr().err


def saved_with_a_reference(actor_folder: Path, reference_folder: Path, run: Path) -> None:
    from megarl.models.build import destroy_mesh
    from tests.checkpoint.saving import checkpointer, reference_of, save
    from tests.models.support import make_actor, make_world

    actor = make_actor(actor_folder, make_world(1))
    saver = checkpointer(run, actor, reference=reference_of(reference_folder, actor))
    recipe = {"model": {"path": str(actor_folder)}, "reference": {"path": str(reference_folder)}}
    save(saver, 1, recipe=recipe)
    saver.settle(wait=True)
    saver.close()
    destroy_mesh()


def test_a_checkpoints_reference_is_a_model_folder(ranks, tmp_path, capsys) -> None:
    actor = make(tmp_path / "actor", "qwen2")
    reference = make(tmp_path / "reference", "qwen2", num_hidden_layers=3)
    ranks.run(1, saved_with_a_reference, actor, reference, tmp_path / "run")
    source, out = tmp_path / "run/checkpoints/iter_000001/reference", tmp_path / "out"
    capsys.readouterr()
    assert convert("megatron-to-hf", source, out) == 0
    assert "no record" not in capsys.readouterr().out
    assert same_bytes(tensors_in(out), tensors_in(reference))
    assert read_spec(out) == read_spec(reference)
    assert convert("inspect", source) == 0
    assert "reference of a training checkpoint" in capsys.readouterr().out
    # The digests that the position has are held against what is read.
    (weights,) = source.glob("*.distcp")
    spoiled = bytearray(weights.read_bytes())
    needle = tensors_in(reference)["model.norm.weight"].numpy().tobytes()
    spoiled[spoiled.index(needle)] ^= 1
    weights.write_bytes(spoiled)
    assert convert("megatron-to-hf", source, tmp_path / "again") == 2
    assert "model.norm.weight: not the weights that" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_checkpoint_without_a_role_has_none_to_give(
    tmp_path, monkeypatch, capsys, role: str
) -> None:
    from megarl.convert import opening

    folder = tmp_path / "iter_000001"
    (folder / role).mkdir(parents=True)
    (folder / "position.json").write_text(json.dumps({"recipe": {}}))
    monkeypatch.setattr(opening, "read_commit", lambda _: None)
    assert convert("megatron-to-hf", folder / role, tmp_path / "out") == 2
    assert f": {folder / 'position.json'}: tells of no {role}\n" in capsys.readouterr().err
