"""Rotary embedding out of config.json, against transformers' own functions.

Not covered: the trainer's frequencies (tests/models) and SGLang's (tests/rollout).
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.reshard.families import FAMILIES, FolderError, read_spec
from megarl.reshard.families.rope import OF_KIND
from megarl.reshard.families.spec import RopeScaling

BASE = dict(
    model_type="llama",
    vocab_size=300,
    hidden_size=256,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DEFAULT_YARN = 0.1 * math.log(4.0) + 1.0


def _read(folder, **config):
    (folder / "config.json").write_text(json.dumps(BASE | config))
    return read_spec(folder)


def _frequencies(config: LlamaConfig) -> tuple[torch.Tensor, float]:
    return ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)


def _restated(scaling: RopeScaling, theta: float) -> dict[str, object]:
    """What was read, with nothing left to a default."""
    told = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind != "linear":
        told["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind == "llama3":
        told |= {"low_freq_factor": scaling.low_freq_factor}
        told |= {"high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        told |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        told |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
    return told


@pytest.mark.parametrize(
    "block",
    [
        LINEAR,
        LLAMA3,
        {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
        LLAMA3 | {"factor": 32, "low_freq_factor": 2, "high_freq_factor": 3},
        YARN,
        {"rope_type": "yarn", "factor": 4},
        YARN | {"factor": 1.0},
        YARN | {"factor": 7.0},
        YARN | {"beta_fast": 16, "beta_slow": 2.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"mscale": 0.7},
        YARN | {"mscale_all_dim": 0.7},
        YARN | {"truncate": False},
        YARN | {"attention_factor": DEFAULT_YARN},
    ],
)
def test_what_is_read_gives_transformers_frequencies(tmp_path, block) -> None:
    spec = _read(tmp_path, rope_theta=5e4, rope_scaling=block)
    assert spec.rope_theta == 5e4
    theirs = LlamaConfig.from_pretrained(tmp_path)
    numbers = BASE | {"rope_parameters": _restated(spec.rope_scaling, spec.rope_theta)}
    ours = LlamaConfig(**numbers)
    (inverse, attention), (told, factor) = _frequencies(theirs), _frequencies(ours)
    assert torch.equal(inverse, told)
    assert factor == pytest.approx(attention, rel=1e-12)
    assert spec.rope_scaling.attention_factor == pytest.approx(attention, rel=1e-12)


def test_every_kind_that_a_family_names_is_read() -> None:
    named = {kind for family in FAMILIES.values() for kind in family.rope_kinds}
    assert named | {"default"} == OF_KIND.keys()


def test_the_numbers_by_hand(tmp_path) -> None:
    assert _read(tmp_path, rope_scaling=LINEAR).rope_scaling == RopeScaling("linear", 2.5)
    llama3 = _read(tmp_path, rope_scaling=LLAMA3).rope_scaling
    assert llama3 == RopeScaling("llama3", 8.0, 512, 1.0, 4.0)
    yarn = _read(tmp_path, rope_scaling=YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}).rope_scaling
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    # (0.2 · ln 4 + 1) / (0.1 · ln 4 + 1)
    assert yarn.attention_factor == pytest.approx(1.12175114, abs=1e-8)


@pytest.mark.parametrize(
    "rope, theta",
    [
        ({}, 10000.0),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
        ({"rope_scaling": {}, "rope_theta": 2e4}, 2e4),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 2e4}, 2e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4}, 3e4),
        ({"partial_rotary_factor": 1.0, "rope_theta": 3e4}, 3e4),
    ],
)
def test_rope_theta_is_found_where_any_transformers_writes_it(tmp_path, rope, theta) -> None:
    spec = _read(tmp_path, **rope)
    assert (spec.rope_theta, spec.rope_scaling) == (theta, None)
    assert LlamaConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == theta


def test_either_transformers_writes_one_stretching(tmp_path) -> None:
    older = _read(tmp_path, rope_theta=5e4, rope_scaling=LLAMA3)
    typed = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    oldest = _read(tmp_path, rope_theta=5e4, rope_scaling=typed | {"type": "llama3"})
    newer = _read(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 5e4})
    both = _read(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 5e4}, rope_scaling=LLAMA3)
    assert older.rope_scaling == oldest.rope_scaling == newer.rope_scaling == both.rope_scaling
    assert older.rope_theta == oldest.rope_theta == newer.rope_theta == both.rope_theta == 5e4


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    "rope, named",
    [
        ({"rope_scaling": DYNAMIC}, "type 'dynamic' is not handled, only default, linear, llama3"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "['yarn']"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_type 'yarn' and type 'linear'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
        ({"rope_scaling": YARN, "rope_parameters": LINEAR}, "tell rotary embedding differently"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e4}, "told twice and differs"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"mrope_section": [2, 2]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor is 0.5, below 1"),
        ({"rope_scaling": LINEAR | {"factor": 2}}, "write 2.0"),
        ({"rope_scaling": LINEAR | {"beta_fast": 32}}, "beta_fast, not handled"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor is null"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "is not below high_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 1.0}}, "attention_factor, not handled"),
        ({"rope_scaling": YARN | {"factor": None}}, "factor is null"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor = 1.0: SGLang"),
        ({"rope_scaling": YARN | {"attn_factor": 1.0}}, "attn_factor, not handled"),
        ({"rope_scaling": YARN | {"extrapolation_factor": 1.0}}, "extrapolation_factor"),
        ({"rope_scaling": YARN | {"beta_fast": None}}, "beta_fast is null"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 1}}, "is not above beta_slow"),
        ({"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 1}}, "mscale is 0"),
        ({"rope_scaling": YARN | {"truncate": None}}, "truncate is None"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1.5}}, "is 1.5"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, rope, named) -> None:
    with pytest.raises(FolderError) as refused:
        _read(tmp_path, **rope)
    assert named in str(refused.value) and str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)
