"""Forwards that score are in eval mode, those that learn in training mode, and none drops anything.

Not covered: GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megarl.models.pipeline import check_mode
from tests.models.support import (
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)


def _modes(folder: Path) -> dict[str, Any]:
    from megarl.models.build import destroy_mesh

    world, samples = make_world(1), make_samples(5, 12)
    actor = make_actor(folder, world)
    packs = local_packs(samples, world.mesh, world.rank, 60)
    batches = [micro_batch(pack, samples) for pack in packs]
    seen: list[bool] = []
    layer = actor.model.decoder.layers[1].mlp
    layer.register_forward_hook(lambda module, *_: seen.append(module.training))
    told: dict[str, Any] = {}

    def failing(do: Any) -> str:
        with pytest.raises(RuntimeError) as error:
            do()
        return str(error.value)

    actor.log_probs(packs)
    told["scored"], seen[:] = set(seen), []
    actor.update(batches, policy_gradient)
    told["learned"], seen[:] = set(seen), []
    layer.train()
    told["one module"] = failing(lambda: actor.log_probs(packs))
    assert not seen, "nothing was computed"
    layer.eval()

    def broken(scores: Any, batch: Any) -> Any:
        raise RuntimeError("the loss fails")

    told["loss"] = failing(lambda: actor.update(batches, broken))
    seen[:] = []
    actor.log_probs(packs)
    told["after a failed update"] = set(seen)
    layer.add_module("drop", nn.Dropout(0.1).eval())
    told["dropout"] = failing(lambda: actor.log_probs(packs))
    told["dropout in an update"] = failing(lambda: actor.update(batches, policy_gradient))
    layer.drop.p = 0.0
    actor.model.config.attention_dropout = 0.1
    told["config"] = failing(lambda: actor.log_probs(packs))
    destroy_mesh()
    return told


@pytest.mark.dist
def test_scoring_and_learning_have_their_modes(ranks, tmp_path) -> None:
    write_hf_model(tmp_path)
    (told,) = ranks.run(1, _modes, tmp_path)
    assert told["scored"] == told["after a failed update"] == {False}
    assert told["learned"] == {True}
    assert "decoder.layers.1.mlp (MLP) is in training mode" in told["one module"]
    assert told["loss"] == "the loss fails"
    for key in ("dropout", "dropout in an update"):
        assert "decoder.layers.1.mlp.drop (Dropout) has dropout 0.1" in told[key]
    assert "attention_dropout 0.1" in told["config"]


def test_a_module_that_does_not_learn_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).train()
    model[1].eval()
    with pytest.raises(RuntimeError, match=r"1 \(Linear\) is in eval mode .* training mode"):
        check_mode(model, learn=True)
