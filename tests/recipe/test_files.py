"""Recipe files: inheritance, what is none, the hash, names of runs, docs, the command line.

Not covered: values of keys and their checks (`tests/test_recipe.py`).
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
from tests.recipe.files import MINIMAL, QUICKSTART, ROOT, refusal, with_setting


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL)
    return path


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
        == "sha256:1914fde723e1b776da6c890056ddb95917d4a0c470c3c4864ac9d794903be7c1"
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
