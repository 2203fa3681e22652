"""Recipes: values and overrides; every refusal in one line with its place.

Not covered: what a key does once the run uses it, and checks against the model's own config
(head counts, context length), which are made where that config is read; files that inherit, what
is stored and documented (`tests/recipe/`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recipe import load_recipe
from tests.recipe.files import MINIMAL, line_of, refusal, with_setting


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_names_and_seed_are_filled(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.run.name == "small-s7"
    assert recipe.run_folder == Path("runs/small-s7")
    assert recipe.model.path == "models/tiny-s7"
    assert recipe.actor.lr == 2e-4
    assert recipe.actor.betas == (0.9, 0.95)
    assert recipe.reward.scorers[0].options == {"strip": True}
    assert (recipe.parity.max, recipe.parity.mean) == (1e-4, 1e-5)
    assert recipe.algorithm.kl.beta == 0.0


def test_parity_bounds_follow_the_coarser_dtype(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["rollout.dtype=bfloat16"])
    assert (recipe.parity.max, recipe.parity.mean) == (0.5, 5e-3)
    recipe = load_recipe(recipe_file, ["rollout.dtype=bfloat16", "parity.max=0.02"])
    assert (recipe.parity.max, recipe.parity.mean) == (0.02, 5e-3)


def test_seed_override_reaches_names_and_paths(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["seed=3"])
    assert recipe.run.name == "small-s3"
    assert recipe.model.path == "models/tiny-s3"
    recipe = load_recipe(recipe_file, ["seed=3", "run.name=mine-{seed}"])
    assert recipe.run.name == "mine-3"


def test_recipe_is_frozen(recipe_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(recipe_file).actor.lr = 1.0


# key, refused value, what the message must say besides place and key
CROSS_CHECKS = [
    ("actor.pp", "2", "make world.ranks a multiple of 4 or change actor.tp or actor.pp"),
    ("world.ranks", "3", "make world.ranks a multiple of 2"),
    ("rollout.tp", "4", "make world.ranks a multiple of 4 or change rollout.tp"),
    ("rollout.group_size", "1", "set rollout.group_size to 2 or more"),
    ("algorithm.minibatches", "5", "set algorithm.minibatches to 4 or less"),
    ("actor.tokens_per_micro_batch", "31", "raise it to 32 or more"),
    ("rollout.max_total_tokens", "39", "raise it to 40 or more"),
    ("rollout.chunked_prefill_tokens", "257", "does not fit into rollout.max_total_tokens 256"),
    ("rollout.release", "true", "a CPU cannot give the generator's memory back"),
    ("rollout.top_p", "0.9", "the trainer scores the full distribution"),
    ("actor.min_lr", "1.0", "is above lr 0.0002"),
    ("actor.min_lr", "1e-5", "set actor.lr_schedule to linear or cosine"),
    ("actor.lr_warmup_steps", "8", "the run has 8"),
    ("reward.on_status.error", "penalty", "set reward.penalty"),
    ("reward.on_status.timeout", "penalty", "set reward.penalty"),
    ("reward.scorers", "[{name: format, weight: 0}]", "give one a weight"),
    ("reward.violated", "-1", "give one at_least or leave reward.violated out"),
    ("experience.keep_every", "10", "set experience.keep, or leave keep_every out"),
    ("parity.mean", "0.5", "lower parity.mean or raise parity.max"),
]


@pytest.mark.parametrize(("key", "value", "says"), CROSS_CHECKS)
def test_cross_checks_name_line_key_and_remedy(
    recipe_file: Path, key: str, value: str, says: str
) -> None:
    place = with_setting(recipe_file, key, value)
    message = refusal(recipe_file)
    assert message.startswith(f"{place}: {key}: ")
    assert says in message


@pytest.mark.parametrize(("key", "value", "says"), CROSS_CHECKS)
def test_cross_checks_name_the_override(recipe_file: Path, key: str, value: str, says: str) -> None:
    message = refusal(recipe_file, [f"{key}={value}"])
    assert message.startswith(f"override {key}={value}: {key}: ")
    assert says in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.tokens_per_micro_batch=32"],
        ["rollout.max_total_tokens=40", "rollout.chunked_prefill_tokens=40"],
        ["algorithm.minibatches=4"],
        ["actor.lr_warmup_steps=7"],
        ["actor.lr_schedule=cosine", "actor.min_lr=2e-4"],
        ["reward.on_status.error=penalty", "reward.penalty=-1"],
        ["rollout.tp=2"],
        ["rollout.max_lost_share=0.99", "algorithm.dynamic_sampling.max_rounds=9"],
        ["reward.scorers=[{name: format, at_least: 1}]", "reward.violated=-1"],
        ["reward.quarantine_after=0"],
        ["experience.keep=2", "experience.keep_every=10"],
        [f"run.name={'x' * 200}"],
        ["run.name=two words"],
        ["rollout.group_size=2"],
        ["rollout.top_p=1", "rollout.top_k=-1", "rollout.repetition_penalty=1.0"],
    ],
)
def test_values_on_the_edge_pass(recipe_file: Path, overrides: list[str]) -> None:
    load_recipe(recipe_file, overrides)


def test_a_scorer_listed_twice_is_refused(recipe_file: Path) -> None:
    with_setting(recipe_file, "reward.scorers", "[{name: format}, {name: format}]")
    message = refusal(recipe_file)
    assert "reward.scorers.1.name: scorer format is listed twice" in message
    assert message.startswith(f"{recipe_file}:")


def test_a_scorer_that_is_not_there_is_refused(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL.replace("name: exact_match", "name: exact_macth"))
    place = line_of(recipe_file, "- {name: exact_macth")
    message = refusal(recipe_file)
    assert message.startswith(f"{place}: reward.scorers.0.name: there is no scorer exact_macth; ")
    own = "reward.scorers=[{name: 'my_package.rewards:score'}]"
    assert load_recipe(recipe_file, [own]).reward.scorers[0].name == "my_package.rewards:score"


def test_a_constraint_without_the_total_it_leads_to_is_refused(recipe_file: Path) -> None:
    with_setting(recipe_file, "reward.scorers", "[{name: format, at_least: 1.0}]")
    message = refusal(recipe_file)
    assert message.startswith(f"{recipe_file}:") and "set reward.violated" in message
    assert "reward.scorers.0.at_least: " in message


@pytest.mark.parametrize("dtype_key", ["rollout.dtype", "model.dtype"])
@pytest.mark.parametrize(("bound", "value"), [("max", "1e-4"), ("mean", "1e-4")])
def test_fp32_parity_bounds_are_refused_with_bfloat16(
    recipe_file: Path, dtype_key: str, bound: str, value: str
) -> None:
    overrides = [f"{dtype_key}=bfloat16", f"parity.{bound}={value}"]
    message = refusal(recipe_file, overrides)
    assert message.startswith(f"override parity.{bound}={value}: parity.{bound}: ")
    assert f"{dtype_key} bfloat16" in message
    assert load_recipe(recipe_file, [*overrides, "parity.action=warn"]).parity.action == "warn"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", "1.5", "must be an integer, got 1.5"),
        ("actor.lr", "fast", 'must be a number, got "fast"'),
        ("actor.lr", "0", "must be greater than 0, got 0"),
        ("actor.lr", ".inf", "must be a finite number, got Infinity"),
        ("actor.distributed_optimizer", "1", "must be true or false, got 1"),
        ("rollout.group_size", "'8'", 'must be an integer, got "8"'),
        ("rollout.stop", "x", 'must be a list, got "x"'),
        ("reward.scorers", "[]", "must have at least 1 entry, got []"),
        ("algorithm.reduction", "mean", "must be 'token_mean', 'sequence_mean' or"),
        ("algorithm.dual_clip", "1.0", "must be greater than 1, got 1.0"),
        ("data.train", "", "must be a path or a list of sources, got nothing"),
        ("eval.every", "0", "must be greater than 0"),
        ("rollout.max_lost_share", "1", "must be less than 1"),
        ("algorithm.dynamic_sampling.max_rounds", "0", "must be greater than 0"),
        ("reward.quarantine_after", "-1", "must be greater than or equal to 0"),
        ("algorithm", "3", "must be a section of keys, got 3"),
        ("data.eval", "2024-01-01", None),
    ],
)
def test_wrong_types_and_ranges_are_refused(
    recipe_file: Path, key: str, value: str, says: str | None
) -> None:
    if says is None:  # an unquoted date is text that looks like one
        (source,) = load_recipe(recipe_file, [f"{key}={value}"]).data.eval
        assert source.path == value
        return
    assert refusal(recipe_file, [f"{key}={value}"]).startswith(f"override {key}={value}: {key}: ")
    assert says in refusal(recipe_file, [f"{key}={value}"])


def test_a_wrong_type_in_a_list_points_to_its_line(recipe_file: Path) -> None:
    text = MINIMAL.replace("{name: exact_match, strip: true}", "name: 3")
    recipe_file.write_text(text)
    place = line_of(recipe_file, "- name: 3")
    assert refusal(recipe_file) == f"{place}: reward.scorers.0.name: must be text, got 3"


def test_a_missing_key_points_to_its_section(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL.replace("  lr: 2e-4\n", ""))
    place = line_of(recipe_file, "actor:")
    assert refusal(recipe_file) == f"{place}: actor.lr: this key is required and not set"


def test_a_missing_section_points_to_the_file(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL.replace("algorithm:\n  minibatches: 2\n", ""))
    message = refusal(recipe_file)
    assert message == f"{recipe_file}: algorithm: this key is required and not set"


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("rollout.grup_size=4", "rollout.group_size"),
        ("group_size=4", "rollout.group_size"),
        ("actor.group_size=4", "rollout.group_size"),
        ("algorithm.kl.betta=1", "algorithm.kl.beta"),
        ("algoritm.minibatches=1", "algorithm"),
        ("lr=1", "actor.lr"),
    ],
)
def test_unknown_keys_name_the_nearest(recipe_file: Path, override: str, near: str) -> None:
    message = refusal(recipe_file, [override])
    assert message.startswith(f"override {override}: ")
    assert message.endswith(f"unknown key; did you mean {near}?")


def test_every_problem_is_told_with_its_place(recipe_file: Path) -> None:
    one = with_setting(recipe_file, "run.iterations", "many")
    message = refusal(recipe_file, ["actor.lr=fast", "rollout.tp=0"])
    assert message.count("; ") == 2
    assert f"{one}: run.iterations: " in message
    assert "override actor.lr=fast: actor.lr: " in message
    assert "override rollout.tp=0: rollout.tp: " in message


def test_an_unknown_key_like_nothing_says_where_keys_are(recipe_file: Path) -> None:
    message = refusal(recipe_file, ["zzz.yyy=1"])
    assert message == "override zzz.yyy=1: zzz: unknown key; see --help for the keys"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "write overrides as key=value"),
        ("=3", "write overrides as key=value"),
        ("a..b=3", "write overrides as key=value"),
        ("actor.lr=[1", "not valid YAML"),
        ("reward.scorers.0.weight=2", "reward.scorers is a list, which is replaced whole"),
    ],
)
def test_malformed_overrides_are_refused(recipe_file: Path, override: str, says: str) -> None:
    message = refusal(recipe_file, [override])
    assert message.startswith(f"override {override}: ")
    assert says in message


def test_overrides_are_yaml_and_the_last_one_wins(recipe_file: Path) -> None:
    overrides = [
        "actor.lr=1",
        "actor.lr=3e-4",
        "algorithm.kl={beta: 0.5}",
        "algorithm.kl.estimator=k2",
        "reward.scorers=[{name: format, weight: 2}]",
        "rollout.stop=['.']",
        "run.name=",
    ]
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.actor.lr == 3e-4
    assert (recipe.algorithm.kl.beta, recipe.algorithm.kl.estimator) == (0.5, "k2")
    assert [(s.name, s.weight) for s in recipe.reward.scorers] == [("format", 2.0)]
    assert recipe.rollout.stop == (".",)
    assert recipe.run.name == "small-s7"
