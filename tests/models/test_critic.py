"""The critic: where it begins, its steps against torch's AdamW on transformers' model, refusals.

Its values in every layout are in `test_values.py`. Not covered: GPU, bfloat16.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.contracts.mesh import Mesh
from megarl.data.packing import plan_own_packs, plan_update
from megarl.data.prepare import prepare
from megarl.models.critic_spec import critic_spec
from megarl.reshard.families import FolderError, read_spec
from megarl.reshard.placement import LayoutError
from tests.models.support import (
    VOCAB,
    actor_section,
    as_stored,
    gather_logical,
    local_packs,
    make_actor,
    make_critic,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    squares,
    value_batch,
    write_hf_model,
)
from tests.models.test_values import values_of

# With this epsilon Adam's step is smooth in the gradient: rounding cannot turn one around.
OPTIONS = {"weight_decay": 0.1, "clip_grad": 0.7, "eps": 1e-3, "lr": 1e-2}
STEPS = 3
LAYOUTS = {  # name → (ranks, tp, pp, section)
    "one": (1, 1, 1, {"distributed_optimizer": False}),
    "dp2 sharded": (2, 1, 1, {}),
    "sp tp2": (2, 2, 1, {"sequence_parallel": True}),
    "pp2": (2, 1, 2, {"recompute": "full"}),
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def bodies(request, tmp_path_factory) -> tuple[Path, Any]:
    """A causal LM's folder, and transformers' sequence classification with its body and a head of
    zeros."""
    import transformers

    folder = tmp_path_factory.mktemp("causal")
    causal = write_hf_model(folder, "qwen2", tied=request.param)
    config = transformers.Qwen2Config.from_pretrained(folder, num_labels=1, pad_token_id=0)
    model = transformers.Qwen2ForSequenceClassification(config).float().eval()
    model.model.load_state_dict(causal.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return folder, model


def _torch_steps(model: Any) -> dict[str, torch.Tensor]:
    samples = make_samples(5, 12)
    place = torch.arange(len(samples.response_ids)).float()
    section = actor_section(**OPTIONS)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    for _ in range(STEPS):
        adam.zero_grad()
        values, _ = values_of(model, samples)
        (0.5 * (values - torch.sin(place)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(params, section.clip_grad)
        adam.step()
    return as_stored(model, model.state_dict())


def _steps(folder: Path, tp: int, pp: int, section: dict) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh

    world, samples = make_world(tp, pp), make_samples(5, 12)
    critic = make_critic(folder, world, **OPTIONS | section)
    told: dict[str, Any] = {"before": gather_logical(critic, critic.named_parameters())}
    (packs,) = critic.padded([local_packs(samples, world.mesh, world.rank, 60)])
    told["values"] = [each.values_A for each in critic.values(packs)]
    batches = [value_batch(pack, samples) for pack in packs]
    results = [critic.update(batches, squares) for _ in range(STEPS)]
    told["stepped"] = [result.stepped for result in results]
    told["steps"] = critic.optimizer_step
    told["after"] = gather_logical(critic, critic.named_parameters())
    destroy_mesh()
    return told


@pytest.mark.dist
def test_a_fresh_critic_is_the_body_under_zeros_and_steps_as_torch_does(ranks, bodies) -> None:
    folder, model = bodies
    body = as_stored(model, model.state_dict())
    wanted = _torch_steps(model)
    moved = max(float((wanted[name] - body[name]).abs().max()) for name in wanted)
    assert moved > 1e-3, "steps that move nothing prove little"
    for name, (world, *layout) in LAYOUTS.items():
        run = ranks.run(world, _steps, folder, *layout)[0]
        assert run["before"].keys() == body.keys(), name
        assert all(torch.equal(run["before"][each], body[each]) for each in body), name
        assert not torch.cat(run["values"]).any(), name
        assert run["stepped"] == [True] * STEPS and run["steps"] == STEPS
        for each, weight in wanted.items():
            assert (run["after"][each] - weight).abs().max() <= 1e-5, (name, each)


def _spoiled(folder: Path, to: Path, spoil: Any) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    spoil(weights)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, to / "model.safetensors")
    return to


def _built(folders: list[Path]) -> list[str]:
    from megarl.models.build import destroy_mesh

    world, told = make_world(1), []
    for folder in folders:
        with pytest.raises(ValueError) as error:
            make_critic(folder, world)
        told.append(str(error.value))
    destroy_mesh()
    return told


@pytest.mark.dist
def test_only_the_fresh_head_may_be_absent(ranks, tmp_path) -> None:
    causal, tied, reward = (tmp_path / name for name in ("causal", "tied", "reward"))
    write_hf_model(causal, "qwen3")
    write_hf_model(tied, "qwen3", tied=True)
    write_hf_model(reward, "qwen3", task="SequenceClassification")
    norm = "model.norm.weight"

    def other_output(weights: dict) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    cases = {
        f"no file holds {norm}": (causal, lambda weights: weights.pop(norm)),
        "no file holds lm_head.weight": (causal, lambda weights: weights.pop("lm_head.weight")),
        "holds extra.weight, which": (
            causal,
            lambda weights: weights.update({"extra.weight": torch.zeros(2)}),
        ),
        "holds score.weight, which": (
            causal,
            lambda weights: weights.update({"score.weight": torch.zeros(1, 64)}),
        ),
        "lm_head.weight is [307, 3]": (
            causal,
            lambda weights: weights.update({"lm_head.weight": torch.zeros(VOCAB, 3)}),
        ),
        "differs from model.embed_tokens.weight": (tied, other_output),
        "no file holds score.weight": (reward, lambda weights: weights.pop("score.weight")),
    }
    folders = [
        _spoiled(source, tmp_path / f"spoiled{number}", spoil)
        for number, (source, spoil) in enumerate(cases.values())
    ]
    (told,) = ranks.run(1, _built, folders)
    for words, text in zip(cases, told, strict=True):
        assert words in text and "critic.path" in text and "\n" not in text, text


def test_a_critic_of_another_size_must_read_the_actors_tokens(tmp_path) -> None:
    write_hf_model(tmp_path / "actor", "qwen2", tied=True)
    write_hf_model(tmp_path / "small", "llama", hidden_size=32, num_hidden_layers=1)
    write_hf_model(tmp_path / "reward", "qwen3", task="TokenClassification")
    write_hf_model(tmp_path / "words", "qwen2", vocab_size=VOCAB - 1)
    write_hf_model(tmp_path / "short", "qwen2", max_position_embeddings=100)
    actor = read_spec(tmp_path / "actor")
    spec, fresh = critic_spec(tmp_path / "small", actor)
    assert fresh and (spec.head, spec.tied, spec.value_bias, spec.hidden) == (
        *("value", False, False),
        32,
    )
    assert critic_spec(tmp_path / "actor", actor)[0].tied is False
    assert critic_spec(tmp_path / "reward", actor) == (read_spec(tmp_path / "reward"), False)
    assert critic_spec(tmp_path / "short", actor, longest=100)[1]

    many = json.loads((tmp_path / "reward" / "config.json").read_text())
    (tmp_path / "many").mkdir()
    many["id2label"] = {"0": "bad", "1": "good"}
    (tmp_path / "many" / "config.json").write_text(json.dumps(many))
    (tmp_path / "default").mkdir()
    two = {key: value for key, value in many.items() if key != "id2label"}
    (tmp_path / "default" / "config.json").write_text(json.dumps(two))
    for name, words in {
        "words": ["vocabulary of 306", "307"],
        "short": ["100 positions", "256"],
        "many": ["several labels (2 in id2label)"],
        "default": ["two labels (transformers' default where config.json has neither"],
        "absent": ["no such model folder"],
    }.items():
        with pytest.raises(FolderError) as error:
            critic_spec(tmp_path / name, actor, longest=256)
        text = str(error.value)
        assert "critic.path" in text and "model.path" not in text and "\n" not in text, text
        assert all(word in text for word in [*words, str(tmp_path / name)]), text


def test_a_critic_that_cannot_be_cut_is_refused_before_anything_is_built(tmp_path) -> None:
    write_hf_model(tmp_path, "qwen2", num_hidden_layers=1)
    actor = read_spec(tmp_path)
    with pytest.raises(LayoutError) as error:
        critic_spec(tmp_path, actor, mesh=Mesh(2, tp=1, pp=2))
    text = str(error.value)
    assert text.startswith(f"critic.path: {tmp_path}: ") and "pp" in text and "\n" not in text


def _side_by_side(folder: Path, small: Path, budget: int | None) -> dict[str, Any]:
    """Actor and critic of another size in one process, through `prepare` and an update each."""
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1), make_samples(5, 12)
    actor = make_actor(folder, world)
    critic = make_critic(small, world, actor=actor.spec)
    lengths = samples.prompt_lengths + samples.response_lengths
    update = plan_update(lengths, [np.arange(7), np.arange(7, 12)], world.size, 60)
    own = update if budget is None else plan_own_packs(update, lengths, budget)
    mine = np.flatnonzero(update.owner == world.dp_index)
    held = samples.select(mine)
    rows = update.local_packs(world.dp_index)
    critic_rows = None if budget is None else own.local_packs(world.dp_index)
    prepared = prepare(held, rows, actor, None, world.device, critic, critic_rows)
    assert prepared.ref_log_probs is None
    told: dict[str, Any] = {
        "rows": mine,
        "values": np.split(prepared.values, held.response_offsets[1:-1]),
        "last": prepared.last_values,
        "log_probs": prepared.old_log_probs,
        "packs": [len(part) for part in prepared.critic_packs],
        "same packs": [list(map(id, part)) for part in prepared.packs]
        == [list(map(id, part)) for part in prepared.critic_packs],
    }
    values = np.concatenate([np.zeros(0, np.float32), prepared.values])
    kept: list[float] = []
    for part in prepared.critic_packs:

        def loss(values_A: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict]:
            known = batch.pack.take(values)
            kept.append(float((values_A.detach() - known).abs().max()) if len(known) else 0.0)
            return squares(values_A, batch)

        if not critic.optimizer_step:
            critic.update([value_batch(pack, held) for pack in part], loss)
    told["gap in update"] = max(kept)
    first = [micro_batch(pack, held) for pack in prepared.packs[0]]
    actor.update(first, policy_gradient)
    told["steps"] = (actor.optimizer_step, critic.optimizer_step)
    destroy_mesh()
    return told


@pytest.mark.dist
@pytest.mark.parametrize("budget", [None, 25])
def test_values_come_back_in_the_samples_order_from_packs_of_its_own(
    ranks, tmp_path, budget
) -> None:
    write_hf_model(tmp_path / "actor", "qwen2", tied=True)
    model = write_hf_model(
        tmp_path / "small", "llama", task="TokenClassification", hidden_size=32, num_hidden_layers=1
    )
    samples = make_samples(5, 12)
    values, last = values_of(model, samples)
    values = np.split(values.detach().numpy(), samples.response_offsets[1:-1])
    seen: list[int] = []
    runs = ranks.run(2, _side_by_side, tmp_path / "actor", tmp_path / "small", budget)
    for run in runs:
        assert run["same packs"] == (budget is None)
        assert run["packs"] == runs[0]["packs"] and run["steps"] == (1, 1)
        assert run["gap in update"] == 0.0, "an update's forward has the sealed bits"
        for row, found, final in zip(run["rows"], run["values"], run["last"], strict=True):
            assert found.dtype == final.dtype == np.float32
            assert np.abs(found - values[row]).max() <= 3e-5
            assert abs(final - float(last[row])) <= 3e-5
            seen.append(int(row))
    assert sorted(seen) == list(range(12))
    if budget is not None:
        assert runs[0]["packs"][0] > 1


def _misfit(folder: Path, mesh: dict[str, int]) -> str:
    from megarl.models.build import destroy_mesh

    world = make_world(**mesh)
    with pytest.raises(ValueError) as error:
        make_critic(folder, world)
    destroy_mesh()
    return str(error.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    "mesh, key", [({"tp": 2}, "tp"), ({"tp": 1, "pp": 2}, "pp"), ({"tp": 1, "ep": 2}, "ep")]
)
def test_a_critic_that_the_mesh_does_not_cut_is_refused_by_name(ranks, tmp_path, mesh, key) -> None:
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1}
    write_hf_model(tmp_path, "qwen2", **odd)
    for text in ranks.run(2, _misfit, tmp_path, mesh):
        assert text.startswith(f"critic.path: {tmp_path}: ") and "\n" not in text, text
        assert f"actor.{key}" in text, text


def test_a_head_is_asked_for() -> None:
    from megarl.models.roles import Critic

    spec = SimpleNamespace(head="lm")
    with pytest.raises(ValueError, match=r"critic\.path: x: the critic needs a value head"):
        Critic(spec, Path("x"), None, None, None, 1.0, 1)
