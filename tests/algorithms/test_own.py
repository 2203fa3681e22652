"""Own functions by import path, and an own objective tried at start and used in the loss.

Not covered here: own estimators of advantages (test_own_estimator.py), recipes that name one
(tests/recipe).
"""

from __future__ import annotations

import sys

import pytest
import torch

from megarl.algorithms.objectives import merge_sums
from megarl.algorithms.own import code_hash, is_own, load_own
from megarl.algorithms.own_objective import check_objective
from megarl.contracts.errors import InputError
from megarl.data.packing import build_pack
from tests.algorithms import own_functions
from tests.algorithms.toy import Settings, loss_of, micro_batch, parameters, scores
from tests.data.make_samples import make_samples

HERE = "tests.algorithms.own_functions"
KEY = "algorithm.objective"


@pytest.mark.parametrize("path", [f"{HERE}:reinforce", f"{HERE}.reinforce"])
def test_a_function_is_found_by_its_import_path(path) -> None:
    assert is_own(path) and load_own(KEY, path) is own_functions.reinforce


def test_names_of_built_ins_are_no_paths() -> None:
    assert not any(map(is_own, ("ppo_clip", "gspo", "grpo", "reinforce_baseline")))


@pytest.mark.parametrize(
    "path, told",
    [
        ("reinforce", "'reinforce' is no import path; give your function as import.path:function"),
        (":reinforce", "':reinforce' is no import path"),
        ("no_such_module:f", "cannot import no_such_module:f: ModuleNotFoundError: No module"),
        (f"{HERE}:mine", "AttributeError: module 'tests.algorithms.own_functions' has no"),
        (f"{HERE}:not_a_function", "own_functions:not_a_function is a int, not a function"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(path, told) -> None:
    with pytest.raises(InputError) as raised:
        load_own("algorithm.advantage", path)
    assert str(raised.value).startswith("algorithm.advantage: ") and told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_hash_is_of_the_code(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "own_code_one.py"
    source.write_text("def f(x):\n    return x\n")
    (tmp_path / "own_code_two.py").write_text("from own_code_one import f\n")
    first = code_hash(KEY, "own_code_one:f")
    assert first.startswith("sha256:") and code_hash(KEY, "own_code_one.f") == first
    through = code_hash(KEY, "own_code_two:f")
    source.write_text("def f(x):\n    return 2 * x\n")
    assert code_hash(KEY, "own_code_one:f") != first
    assert code_hash(KEY, "own_code_two:f") != through  # where it is defined counts as well
    for name in ("own_code_one", "own_code_two"):
        sys.modules.pop(name)


def test_code_that_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(InputError, match="math:exp has no source file"):
        code_hash(KEY, "math:exp")


@pytest.mark.parametrize("name", ["reinforce", "soft_gate", "sequence_ratio", "divides_by_none"])
def test_sound_objectives_pass(name) -> None:
    check_objective(Settings(f"{HERE}:{name}"))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_built_ins_pass_the_same_trial(name, monkeypatch) -> None:
    monkeypatch.setattr("megarl.algorithms.own_objective.is_own", lambda name: True)
    monkeypatch.setattr("megarl.algorithms.own_objective.load_own", lambda key, name: None)
    check_objective(Settings(name))


@pytest.mark.parametrize(
    "name, told",
    [
        ("detached", "has no gradient: the sum .* on log_probs_A; do not detach them"),
        ("no_gradient", "has no gradient"),
        ("less_its_mean", "has no gradient: .* do not subtract the losses' mean over tokens"),
        ("less_a_fixed_mean", "not active .* one sequence of tokens.sequence_A only"),
        ("drops_at_random", "gives other numbers when called again with the same tokens"),
        ("counts_calls", "gives other numbers when called again with the same tokens"),
        ("reduced", r"returned torch.float32\[\], not one loss per token, torch.float32\[10\]"),
        ("in_double", r"returned torch.float64\[10\], not one loss per token"),
        ("a_number", "returned a float, not one loss per token"),
        ("infinite", "returned a loss that is not finite"),
        ("steep", "has a gradient that is not finite"),
        ("counts_holes", "lets tokens that are not active change others' loss"),
        ("sees_neighbours", "gives a token another loss when other samples are in its pack"),
        ("needs_an_action", "raised IndexError: max"),
        ("reports_tokens", r"reports own_ratio of shape \[10\]; sums are scalars"),
        ("raises", "raised KeyError: 'no such"),
    ],
)
def test_a_faulty_objective_is_told_in_one_line(name, told) -> None:
    with pytest.raises(InputError, match=told) as raised:
        check_objective(Settings(f"{HERE}:{name}"))
    assert str(raised.value).startswith(f"{KEY}: {HERE}:{name} ")
    assert "\n" not in str(raised.value)


def test_a_misspelt_built_in_is_refused_at_start() -> None:
    with pytest.raises(InputError, match="algorithm.objective is 'gpso'; use ppo_clip, gspo"):
        check_objective(Settings("gpso"))


def _run(settings: Settings, cuts: list[list[int]]):
    samples = make_samples([(0, i, 2, 3 + i) for i in range(3)], holes=True)
    tokens = len(samples.response_ids)
    table, losses, sums = parameters(2), [], []
    old = samples.rollout_log_probs - 1
    for rows in cuts:
        pack = build_pack(samples, rows)
        weights_A = pack.action_mask_A.float() / tokens
        batch = micro_batch(pack, old, None, old * 0 + 1, weights_A)
        loss, told = loss_of(scores(table.float(), pack), batch, settings)
        loss.backward()
        losses.append(loss.item())
        sums.append(told)
    return sum(losses), table.grad, merge_sums(sums)


def test_an_own_objective_is_the_policy_term() -> None:
    """Its loss is reduced by the house, its sums are reported under their own names."""
    ours, gradient, sums = _run(Settings(f"{HERE}:soft_gate"), [[0, 1, 2]])
    again, other, cut = _run(Settings(f"{HERE}.soft_gate"), [[2], [], [1, 0]])
    assert again == pytest.approx(ours, rel=1e-6)
    torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-7)
    assert cut["own_far"] == sums["own_far"] > 0 and sums["tokens"] == cut["tokens"]
    assert "clip_low" not in sums


def test_an_own_gspo_is_the_houses_within_its_bounds() -> None:
    own = _run(Settings(f"{HERE}:sequence_ratio"), [[0, 1, 2]])
    built_in = _run(Settings("gspo", clip_low=0.99, clip_high=1e9), [[0, 1, 2]])
    assert own[0] == pytest.approx(built_in[0], rel=1e-5)
    torch.testing.assert_close(own[1], built_in[1], rtol=1e-4, atol=1e-6)
