"""Which sizes divide by a layout of the rollout, and the line about those that do not."""

from __future__ import annotations

import pytest

from megarl.rollout.sizes import check_divides

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 80}
MOE = DENSE | {"num_experts": 6, "moe_intermediate_size": 20, "intermediate_size": 81}
MIXTRAL = DENSE | {"num_local_experts": 4}
LATENT = MOE | {
    "num_experts": None,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 80,
}


@pytest.mark.parametrize(
    "config, tp, ep",
    [
        (DENSE, 1, 1),
        (DENSE, 8, 1),  # four ranks share a key/value head
        (MOE, 4, 2),  # the dense width is no layer's
        (MOE, 2, 2),
        (MIXTRAL, 4, 4),
        (DENSE | {"num_key_value_heads": None}, 8, 1),
        (LATENT, 4, 2),  # latent attention has no key/value heads
    ],
)
def test_what_divides_passes(config, tp, ep) -> None:
    check_divides(config, tp, ep, "folder")


@pytest.mark.parametrize(
    "config, tp, ep, told",
    [
        (DENSE, 16, 1, "num_attention_heads 8 does not divide by 16"),
        (DENSE | {"num_key_value_heads": 4}, 6, 1, "num_key_value_heads 4 and rollout.tp=6"),
        (DENSE | {"intermediate_size": 81}, 2, 1, "intermediate_size 81 does not divide by 2"),
        (MOE, 4, 4, "num_experts 6 does not divide by 4"),
        (
            MOE | {"moe_intermediate_size": 21},
            4,
            2,
            "moe_intermediate_size 21 does not divide by 2",
        ),
        (MIXTRAL | {"intermediate_size": 81}, 2, 1, "intermediate_size 81 does not divide by 2"),
        (DENSE, 2, 2, "no experts for rollout.ep=2"),
        (MOE, 4, 3, "rollout.ep=3 does not divide rollout.tp=4"),
        (LATENT | {"intermediate_size": 81}, 2, 1, "intermediate_size 81 does not divide by 2"),
        (LATENT, 8, 2, "n_shared_experts · moe_intermediate_size 20 does not divide by 8"),
    ],
)
def test_what_does_not_is_refused_in_one_line(config, tp, ep, told) -> None:
    with pytest.raises(ValueError) as caught:
        check_divides(config, tp, ep, "folder")
    assert told in str(caught.value) and "\n" not in str(caught.value)
