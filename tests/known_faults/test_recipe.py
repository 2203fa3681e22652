"""Faults that a recipe alone can hold, refused before anything starts.

Not covered: the same settings reached through code, which `SamplingContract.check_trainable` and
the algorithms refuse; singletons that arise while running.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megarl.recipe import RecipeError, load_recipe

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    return str(caught.value)


def test_a_group_of_one_is_refused_at_start() -> None:
    message = refusal("rollout.group_size=1")
    assert message.startswith("override rollout.group_size=1: rollout.group_size: ")
    assert "set rollout.group_size to 2 or more" in message
    assert load_recipe(QUICKSTART, ["rollout.group_size=2"]).rollout.group_size == 2


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("algorithm.clip_hi=0.28", "algorithm.clip_high"),
        ("algorithm.dualclip=1.5", "algorithm.dual_clip"),
        ("algorithm.clip_lo=0.2", "algorithm.clip_low"),
        ("algorithm.clip.high=0.28", None),
        ("algorithm.kl_beta=0.1", None),
    ],
)
def test_a_misspelt_key_is_an_error_and_not_the_default(misspelt: str, meant: str | None) -> None:
    message = refusal(misspelt)
    assert message.startswith(f"override {misspelt}: algorithm.")
    assert "unknown key" in message
    if meant:
        assert f"did you mean {meant}?" in message


def test_a_misspelt_choice_is_an_error_and_not_the_default() -> None:
    assert "must be 'k1', 'k2' or 'k3'" in refusal("algorithm.kl.estimator=low_var_kl")


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.top_p=0.9",
        "rollout.top_k=1",
        "rollout.min_p=0.05",
        "rollout.frequency_penalty=0.1",
        "rollout.presence_penalty=-0.1",
        "rollout.repetition_penalty=1.1",
    ],
)
def test_samplers_whose_log_probs_are_not_the_trainer_s_are_refused(setting: str) -> None:
    message = refusal(setting)
    assert message.startswith(f"override {setting}: {setting.partition('=')[0]}: ")
    assert "the trainer scores the full distribution" in message


def test_the_refused_sampler_would_have_put_the_kept_mass_into_every_ratio() -> None:
    # p = [.6, .3, .1] under top_p .9 keeps .9 of the mass: why the refusal is not pedantry.
    full, kept = [math.log(p) for p in (0.6, 0.3)], [math.log(p / 0.9) for p in (0.6, 0.3)]
    assert [round(x, 4) for x in full] == [-0.5108, -1.2040]
    assert [round(x, 4) for x in kept] == [-0.4055, -1.0986]
    assert all(math.isclose(math.exp(f - k), 0.9) for f, k in zip(full, kept, strict=True))
    assert "top_p" in refusal("rollout.top_p=0.9")
