"""The experts that a CPU rank computes, against the sum over experts in float64.

Not covered: whether SGLang calls them rightly; `tests/rollout/test_families` asks the whole model.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl import platforms

TOKENS, CHOICES, HIDDEN, WIDTH, EXPERTS = 23, 3, 10, 6, 4


def _config(**changes) -> SimpleNamespace:
    plain = {"activation": "silu", "apply_router_weight_on_input": False, "gemm1_alpha": None}
    return SimpleNamespace(**(plain | changes))


def _computed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and the same in float64 token by token; some choices are experts of other ranks."""
    platforms.prepare_sglang()
    from megarl.platforms.sglang_experts import local_experts

    torch.manual_seed(5)
    layer = SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * WIDTH, HIDDEN).to(dtype),
        w2_weight=torch.randn(EXPERTS, HIDDEN, WIDTH).to(dtype),
    )
    x = torch.randn(TOKENS, HIDDEN).to(dtype)
    weights = torch.rand(TOKENS, CHOICES)
    # Of eight experts, 4 to 7 are elsewhere; token 0 has none here, and nobody chose expert 2.
    ids = torch.stack([torch.randperm(8)[:CHOICES] for _ in range(TOKENS)])
    ids[0] = torch.tensor([4, 5, 6])
    ids[ids == 2] = 7
    ids[ids >= EXPERTS] = -1
    ours = local_experts(layer, x, (weights, ids.to(torch.int32), None), _config())
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for choice in range(CHOICES):
            expert = int(ids[token, choice])
            if expert >= 0:
                both = layer.w13_weight[expert].double() @ x[token].double()
                gate, up = both[:WIDTH], both[WIDTH:]
                down = layer.w2_weight[expert].double() @ (gate * torch.sigmoid(gate) * up)
                exact[token] += weights[token, choice].double() * down
    return ours, exact


@pytest.mark.dist
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_rank_sums_its_own_experts_only(ranks, dtype, bound) -> None:
    ours, exact = ranks.run(1, _computed, dtype)[0]
    assert ours.dtype == dtype
    assert ours[0].abs().max() == 0
    scale = exact.abs().max()
    assert scale > 1 and (ours.double() - exact).abs().max() <= bound * scale


def _refused() -> list[str]:
    platforms.prepare_sglang()
    from megarl.platforms.sglang_experts import local_experts

    told = []
    layer = SimpleNamespace(w13_weight_bias=None)
    biased = SimpleNamespace(w13_weight_bias=torch.zeros(1))
    for given, config in (
        (layer, _config(activation="gelu")),
        (layer, _config(apply_router_weight_on_input=True)),
        (layer, _config(gemm1_alpha=1.7)),
        (biased, _config()),
    ):
        try:
            local_experts(given, torch.zeros(1, 1), None, config)
            told.append("nothing was raised")
        except NotImplementedError as error:
            told.append(str(error))
    return told


@pytest.mark.dist
def test_other_kinds_of_experts_are_refused(ranks) -> None:
    assert (
        ranks.run(1, _refused)[0] == ["experts other than plain SwiGLU are not computed here"] * 4
    )
