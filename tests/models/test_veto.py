"""A veto on a step: asked of all ranks' sums, and whatever it refuses has left no trace.

Not covered: GPU, what a run's veto looks at (`tests/algorithms`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import (
    gather_logical,
    local_packs,
    make_actor,
    make_samples,
    make_world,
    micro_batch,
    policy_gradient,
    write_hf_model,
)

pytestmark = pytest.mark.dist
LAYOUTS = {"dp2": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}  # name → (tp, pp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_hf_model(path, "qwen2", tied=True)
    return path


def _state(actor: Any) -> list[torch.Tensor]:
    """Everything a step moves on this rank: weights, masters, moments."""
    held = [tensor.detach().clone() for tensor in actor.named_parameters().values()]
    for chained in actor.trainer.optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            held += [master.detach().clone() for master in group["params"]]
        for state in chained.optimizer.state.values():
            held += [value.clone() for value in state.values() if torch.is_tensor(value)]
    return held


def _vetoed(folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """A step, a vetoed one, one that a veto lets pass; and the same without the vetoed one."""
    from megarl.models.build import destroy_mesh

    world, samples = make_world(tp, pp), make_samples(5, 12)
    told: dict[str, Any] = {"sums": []}

    def refuse(sums: dict[str, float]) -> str:
        told["sums"].append(dict(sums))
        return f"too far: {sums['pg']}"

    def agree(sums: dict[str, float]) -> None:
        told["sums"].append(dict(sums))

    actor = make_actor(folder, world, lr_schedule="linear", lr_warmup_steps=2)
    (packs,) = actor.padded([local_packs(samples, world.mesh, world.rank, 60)])
    batches = [micro_batch(pack, samples) for pack in packs]
    other = make_actor(folder, world, lr_schedule="linear", lr_warmup_steps=2)
    told["first"] = actor.update(batches, policy_gradient)
    other.update(batches, policy_gradient)
    # A step that was refused before must stay counted, too.
    spoiled = [dataclasses.replace(batch, advantages_A=batch.advantages_A / 0) for batch in batches]
    for each in (actor, other):
        assert "not finite" in each.update(spoiled, policy_gradient, refuse).skipped_reason
    assert not told["sums"], "what is not finite is not asked about"
    before, counts = _state(actor), actor.trainer.state
    told["vetoed"] = actor.update(batches, policy_gradient, refuse)
    after = _state(actor)
    told["untouched"] = len(before) == len(after) and all(
        torch.equal(one, another) for one, another in zip(before, after, strict=True)
    )
    told["counts"] = (counts, actor.trainer.state)
    told["passed"] = actor.update(batches, policy_gradient, agree)

    gathered: list[Any] = []
    gather = world.gather
    world.gather = lambda value: gathered.append(value) or gather(value)
    told["without"] = other.update(batches, policy_gradient)
    world.gather = gather
    told["gathers"] = len(gathered)
    mine, theirs = (gather_logical(each, each.named_parameters()) for each in (actor, other))
    told["same"] = all(torch.equal(mine[name], theirs[name]) for name in mine)
    told["state"] = (actor.trainer.state, other.trainer.state)
    told["speaks"] = world.leads_owners
    destroy_mesh()
    return told


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_veto_of_all_ranks_sums_leaves_no_trace(ranks, folder, name: str) -> None:
    runs = ranks.run(2, _vetoed, folder, *LAYOUTS[name])
    for run in runs:
        first, vetoed, passed = run["first"], run["vetoed"], run["passed"]
        assert (vetoed.stepped, vetoed.stopped) == (False, True)
        assert vetoed.skipped_reason == f"too far: {run['sums'][0]['pg']}"
        assert run["untouched"]
        assert run["counts"][0] == run["counts"][1]
        assert run["counts"][0] == {
            "steps": 1,
            "skipped_steps": 1,
            "skipped_in_a_row": 1,
            "empty_minibatches": 0,
        }
        assert (passed.stepped, passed.stopped, passed.skipped_reason) == (True, False, None)
        assert not first.stopped and passed.lr == vetoed.lr == 2 * first.lr
        # Without a veto: the gather of who is finite, and nothing else.
        assert run["gathers"] == 1
        assert run["same"] and run["state"][0] == run["state"][1]
        assert run["sums"] == runs[0]["sums"], "every rank is asked about the same"
    own = [run["vetoed"].sums for run in runs if run["speaks"]]
    for key in ("pg", "entropy"):
        assert runs[0]["sums"][0][key] == pytest.approx(sum(each[key] for each in own), abs=1e-12)
    largest = max(each["log_prob_max"] for each in own)
    assert runs[0]["sums"][0]["log_prob_max"] == largest
    assert len(own) == (2 if name == "dp2" else 1)
