"""Updates: the same over layouts, micro-batches and optimizers, and equal to torch's AdamW.

The model is tied: a pipeline holds its embedding twice (untied ones: `test_pipeline.py`).

Not covered: GPU, resuming the optimizer from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.runs import several
from tests.models.support import (
    actor_section,
    relative,
    torch_step,
    write_hf_model,
)

OPTIONS = {"distributed_optimizer": False, "weight_decay": 0.1, "clip_grad": 0.7}
LAYOUTS = {  # name → (ranks, tp, tokens per micro-batch, section)
    "one": (1, 1, 1000, OPTIONS),
    "small packs": (1, 1, 25, OPTIONS),
    "dp2": (2, 1, 1000, OPTIONS),
    "dp2 sharded": (2, 1, 30, OPTIONS | {"distributed_optimizer": True}),
    "tp2": (2, 2, 1000, OPTIONS),
    "tp2 sharded": (2, 2, 60, OPTIONS | {"distributed_optimizer": True}),
    "pp2": (2, 1, 40, OPTIONS | {"pp": 2}),
    "tp2 pp2": (4, 2, 40, OPTIONS | {"pp": 2}),
    "pp2 dp2": (4, 1, 30, OPTIONS | {"pp": 2}),
    "pp2 dp2 sharded": (4, 1, 30, OPTIONS | {"pp": 2, "distributed_optimizer": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder) -> Any:
    return write_hf_model(folder, "qwen2", tied=True)


@pytest.fixture(scope="module")
def runs(ranks, folder, model) -> dict[str, dict]:
    told: dict[str, dict] = {}
    for world in (1, 2, 4):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == world]
        answers = ranks.run(world, several, [(folder, *LAYOUTS[name][1:]) for name in names])
        for name, run in zip(names, answers[0], strict=True):
            told[name] = run
    return told


@pytest.fixture(scope="module")
def by_torch(model) -> dict[str, Any]:
    return torch_step(model, actor_section(**OPTIONS))


@pytest.mark.dist
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_step_is_torch_adamw_on_the_hf_model(runs, by_torch, name: str) -> None:
    run = runs[name]
    assert run["result"].stepped and run["result"].lr == 1e-3
    assert run["result"].grad_norm == pytest.approx(by_torch["norm"], rel=1e-5)
    assert by_torch["norm"] > OPTIONS["clip_grad"], "clipping must be at work"
    assert run["loss"] == pytest.approx(by_torch["loss"], abs=1e-6)
    assert run["loss_after"] == pytest.approx(by_torch["loss_after"], abs=1e-4)
    if "gradients" in run:
        assert relative(run["gradients"], by_torch["gradients"]) <= 1e-5
    # Adam's first step is lr · sign(gradient): one of rounding size may turn, few are.
    names = sorted(by_torch["weights"])
    apart = [(run["weights"][n] - by_torch["weights"][n]).abs().flatten() for n in names]
    assert torch.cat(apart).max() <= 2.1e-3
    assert (torch.cat(apart) > 2e-6).double().mean() <= 1e-3


@pytest.mark.dist
def test_layouts_and_micro_batches_change_nothing(runs) -> None:
    assert runs["small packs"]["packs"] > 4 and runs["dp2 sharded"]["packs"] > 2
    reference = runs["dp2"]
    for name, run in runs.items():
        assert (run["log_probs"] - reference["log_probs"]).abs().max() <= 5e-5, name
        assert torch.equal(run["log_probs"], run["in_update"]), (name, "the first ratio is not 1")
        assert run["loss_after"] == pytest.approx(reference["loss_after"], abs=1e-4), name
        if "gradients" in run:
            assert relative(run["gradients"], reference["gradients"]) <= 1e-5, name


@pytest.mark.dist
def test_sums_and_largest_values_are_over_this_ranks_micro_batches(runs) -> None:
    one, small = runs["one"]["result"], runs["small packs"]["result"]
    assert one.sums.keys() == {"pg", "entropy", "log_prob_max"}
    assert one.sums["log_prob_max"] == pytest.approx(
        float(runs["one"]["log_probs"].max()), abs=1e-6
    )
    assert one.loss == pytest.approx(one.sums["pg"] - 0.01 * one.sums["entropy"], abs=1e-6)
    for name, value in one.sums.items():
        assert small.sums[name] == pytest.approx(value, abs=1e-6)


@pytest.mark.dist
def test_bfloat16_learns_with_wide_masters(ranks, folder, model, runs) -> None:
    options = {"dtype": "bfloat16", "lr": 1e-4}
    calls = [
        (folder, tp, 60, options | {"distributed_optimizer": do})
        for tp in (1, 2)
        for do in (True, False)
    ]
    for run in ranks.run(2, several, calls)[0]:
        gap = (run["log_probs"] - runs["one"]["log_probs"]).abs()
        assert gap.mean() < 0.05, "as far from fp32 as rounding to 8 bits brings it"
        assert torch.equal(run["log_probs"], run["in_update"])
        assert run["result"].stepped and np.isfinite(run["loss_after"])
        assert run["loss_after"] < run["loss"]
