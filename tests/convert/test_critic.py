"""The critic of a training checkpoint as a Hugging Face folder: what transformers computes with it,
and that a run takes it back as its `critic.path`.

On real gloo ranks; the oracle of values is transformers. Not covered: a whole run that starts from
such a folder; GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert convert("verify", folder / "critic", out) == 0
    # Another model's config is refused.
    assert convert("megatron-to-hf", folder / "critic", tmp_path / "c", "--hf-files", actor) == 2
    assert "[3, 64], config.json makes it [2, 64]" in capsys.readouterr().err


def test_a_checkpoint_without_a_critic_has_none_to_give(tmp_path, monkeypatch, capsys) -> None:
    from megarl.convert import opening

    folder = tmp_path / "iter_000001"
    (folder / "critic").mkdir(parents=True)
    (folder / "position.json").write_text(json.dumps({"recipe": {}}))
    monkeypatch.setattr(opening, "read_commit", lambda _: None)
    assert convert("megatron-to-hf", folder / "critic", tmp_path / "out") == 2
    assert f"{folder / 'position.json'}: tells of no critic" in capsys.readouterr().err
