"""Recipes: every refusal in one line with its place, inheritance, overrides, stability.

Not covered: what a key does once the run uses it, and checks against the model's own config
(head counts, context length), which are made where that config is read.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from megarl.recipe import (
    Recipe,
    RecipeError,
    help_text,
    load_recipe,
    main,
    recipe_reference_markdown,
)
from megarl.recipe.keys import key_table

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"

MINIMAL = """\
seed: 7
run:
  iterations: 4
model:
  path: models/tiny-s{seed}
data:
  train: train.jsonl
  max_prompt_tokens: 16
world:
  ranks: 2
actor:
  tp: 2
  lr: 2e-4
  tokens_per_micro_batch: 64
rollout:
  prompts_per_iteration: 4
  group_size: 4
  max_response_tokens: 16
  max_total_tokens: 256
  max_running_requests: 8
  chunked_prefill_tokens: 64
reward:
  scorers:
    - {name: exact_match, strip: true}
algorithm:
  minibatches: 2
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL)
    return path


def line_of(path: Path, start: str) -> str:
    """`file:line` of the first line of `path` that starts so, spaces aside."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip().startswith(start):
            return f"{path}:{number}"
    raise AssertionError(f"no line of {path} starts with {start}")


def refusal(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides or [])
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_setting(path: Path, key: str, value: str) -> str:
    """Sets a dotted key in the file; returns the `file:line` where it stands."""
    yaml = YAML()
    tree = yaml.load(path.read_text())
    node: Any = tree
    *sections, leaf = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[leaf] = YAML(typ="safe").load(value)
    with open(path, "w") as out:
        yaml.dump(tree, out)
    node = YAML().load(path.read_text())
    for section in sections:
        node = node[section]
    return f"{path}:{node.lc.key(leaf)[0] + 1}"


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
        ("data.train", "", "must be text, got nothing"),
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
        assert load_recipe(recipe_file, [f"{key}={value}"]).data.eval == value
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


def test_bases_merge_deep_and_lists_are_replaced(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text(
        "base: ../small.yaml\nactor: {lr: 1e-3}\nreward:\n  scorers: [{name: format}]\n"
    )
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text("base: sub/child.yaml\nalgorithm:\n  clip_high: 0.3\n")
    recipe = load_recipe(grandchild)
    assert recipe.run.name == "grandchild-s7"
    assert (recipe.actor.lr, recipe.actor.tp) == (1e-3, 2)
    assert [s.name for s in recipe.reward.scorers] == ["format"]
    assert (recipe.algorithm.clip_high, recipe.algorithm.minibatches) == (0.3, 2)


def test_errors_point_to_the_file_that_set_the_value(recipe_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("base: small.yaml\nrollout:\n  temperature: 0.7\n")
    in_base = with_setting(recipe_file, "rollout.group_size", "1")
    assert refusal(child).startswith(f"{in_base}: rollout.group_size: ")
    child.write_text("base: small.yaml\nrollout:\n\n  group_size: 0\n")
    assert refusal(child).startswith(f"{child}:4: rollout.group_size: ")
    child.write_text("base: small.yaml\nrollout:\n  group_size: 4\n  temprature: 0.5\n")
    assert refusal(child).startswith(f"{child}:4: rollout.temprature: unknown key; did you mean")


def test_base_chains_that_cannot_be_read_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("# comment\nbase: nowhere.yaml\n")
    assert refusal(child).startswith(f"{child}:2: base: there is no file")
    child.write_text("base: [small.yaml]\n")
    assert "must be the path of one recipe file" in refusal(child)
    recipe_file.write_text("base: child.yaml\n" + MINIMAL)
    child.write_text("base: small.yaml\n")
    assert "inherits from itself" in refusal(child)


@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        (b"actor:\n  lr: [1\n", ":3", "not valid YAML"),
        (b"actor: {lr: 1}\nactor: {tp: 2}\n", ":2", "actor: this key is set twice"),
        (b"- a\n", ":1", "a recipe is a mapping of sections"),
        (b"\xff\xfe\x00", "", "not a UTF-8 text file"),
        (b"", "", "this key is required and not set"),
        (b"a: 1\n---\nb: 1\n", "", "not valid YAML"),
        (b"a: 1\nb: !thing x\n", ":2", "not valid YAML"),
        (b"a: 2024-13-01\n", ":1", "a: month must be in 1..12"),
        (b"a: &a\n  - *a\n", ":1", "an alias to itself"),
        (b"a: *nowhere\n", ":1", "not valid YAML"),
        (b"a\tb: [\x00]\n", "", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, place: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}{place}")
    assert says in message


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from([row.key for row in key_table()]),
    value=st.one_of(
        st.sampled_from(
            ["", "~", "[]", "{}", "{a: 1}", "[[1]]", "1e999", "-1", "0", "0x1F", "! x"]
        ),
        st.integers().map(str),
        st.floats().map(str),
        st.text(max_size=8),
    ),
)
def test_any_value_at_any_key_loads_or_is_refused_in_one_line(key: str, value: str) -> None:
    try:
        load_recipe(QUICKSTART, [f"{key}={value}"])
    except RecipeError as error:
        assert "\n" not in str(error)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: there is no such recipe file"
    assert refusal(tmp_path) == f"{tmp_path}: there is no such recipe file"


def test_hash_ignores_name_folder_and_display_only(recipe_file: Path) -> None:
    hash_ = load_recipe(recipe_file).hash
    assert hash_.startswith("sha256:")
    same = ["run.name=other", "run.folder=/tmp/x", "run.overwrite=true", "observe.console=plain"]
    assert load_recipe(recipe_file, same).hash == hash_
    others = {
        load_recipe(recipe_file, [setting]).hash
        for setting in ("seed=8", "actor.lr=3e-4", "run.iterations=5", "rollout.temperature=0.9")
    }
    assert len(others | {hash_}) == 5


def test_hash_ignores_how_the_recipe_is_written(recipe_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("base: small.yaml\nactor: {lr: 0.00020, tp: 2, betas: [0.9, 0.95]}\n")
    assert load_recipe(child).hash == load_recipe(recipe_file).hash


def test_hash_is_the_recorded_one(recipe_file: Path) -> None:
    # Fails when a key or default changes: then every recorded hash changes too, on purpose.
    assert (
        load_recipe(recipe_file).hash
        == "sha256:f04260d4f25fe78512e946608df5e55c9578ba1db2f1b6b8e14490fbf8f1af0a"
    )


def test_resolved_recipe_loads_to_itself(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["run.name=kept", "data.system_prompt='a: b\\n#c é'"])
    copy = tmp_path / "recipe.yaml"
    copy.write_text(recipe.resolved_yaml(), encoding="utf-8")
    again = load_recipe(copy)
    assert again == recipe
    assert again.resolved_yaml() == recipe.resolved_yaml()


def test_environment_variables_are_not_expanded(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    recipe = load_recipe(recipe_file, ["data.system_prompt=$SECRET ${SECRET} ~"])
    assert recipe.data.system_prompt == "$SECRET ${SECRET} ~"
    assert "hunter2" not in recipe.resolved_yaml()


def test_every_key_is_documented() -> None:
    assert [row.key for row in key_table() if not row.meaning] == []
    text = help_text(width=80)
    assert max(map(len, text.splitlines())) <= 80
    for row in key_table():
        assert f"  {row.key} " in text
        assert f"`{row.key}`" in recipe_reference_markdown()


def test_docs_page_is_the_schema_s() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == recipe_reference_markdown(), "run `make docs`"


def test_quickstart_loads_and_is_short() -> None:
    recipe = load_recipe(QUICKSTART)
    assert recipe.run.name == "quickstart-s1"
    assert recipe.model.path == "models/quickstart-s1/model"
    assert (recipe.world.ranks, recipe.actor.tp, recipe.rollout.tp) == (2, 2, 1)

    def leaves(value: Any) -> int:
        children = value.values() if isinstance(value, dict) else value
        return sum(map(leaves, children)) if isinstance(value, dict | list) else 1

    assert leaves(YAML(typ="safe").load(QUICKSTART.read_text())) <= 25


def test_every_shipped_recipe_loads() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes
    assert all(isinstance(load_recipe(path), Recipe) for path in recipes)


def test_command_line(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recipe_file), "seed=2", "--get", "world.ranks"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert main([str(recipe_file)]) == 0
    assert capsys.readouterr().out.startswith("seed: 7\n")
    assert main(["--reference"]) == 0
    assert capsys.readouterr().out == recipe_reference_markdown()
    assert main([str(recipe_file), "--get", "world.rank"]) == 2
    assert capsys.readouterr().err == "--get world.rank: unknown key; see --help for the keys\n"
    assert main([str(recipe_file), "actor.lr=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, megarl.recipe as r; r.load_recipe(sys.argv[1]); "
        "bad = {'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUICKSTART)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", "."])
def test_a_run_name_is_one_folder_below_the_runs(name: str) -> None:
    with pytest.raises(RecipeError, match="run.name: .* is not a plain folder name"):
        load_recipe("recipes/quickstart.yaml", [f"run.name={name}"])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (" mine", "white space around the value"),
        ("mine\n", "white space around the value"),
        ("' mine'", "run.name: ' mine' has white space around it"),
        ('"mine\\n"', "run.name: .* has white space around it"),
        ('"a\\tb"', "run.name: .* characters that cannot be seen"),
        ("x" * 201, f"run.name: '{'x' * 39}…' is 201 bytes long"),
        ("é" * 101, "is 202 bytes long"),
        (f"../{'x' * 5000}", "is not a plain folder name"),
    ],
)
def test_a_run_name_is_refused_rather_than_trimmed(value: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe("recipes/quickstart.yaml", [f"run.name={value}"])
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
