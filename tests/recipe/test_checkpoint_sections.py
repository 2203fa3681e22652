"""The recipe's sections `checkpoint` and `resume`: defaults, refusals, the key named `from`.

Not covered: what the keys do in a run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.recipe import RecipeError, ResumeSection, load_recipe, main

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def test_defaults() -> None:
    recipe = load_recipe(QUICKSTART)
    assert recipe.model_dump(mode="json")["checkpoint"] == {
        "every": 10,
        "keep": 2,
        "keep_every": 0,
        "background": True,
        "export_every": 0,
        "export_best": False,
    }
    expected = {"from": "auto", "use": "regenerate", "allow": []}
    assert recipe.model_dump(mode="json")["resume"] == expected
    assert json.loads(recipe.resume.model_dump_json()) == expected
    assert recipe.resume == ResumeSection()


def test_from_is_a_key_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["resume.from=runs/x-s{seed}", "resume.allow=[actor.lr, tokenizer]", "seed=3"]
    recipe = load_recipe(QUICKSTART, overrides)
    assert recipe.resume.from_ == "runs/x-s3"
    assert recipe.resume.allow == ("actor.lr", "tokenizer")
    text = recipe.resolved_yaml()
    assert "\n  from: runs/x-s3\n" in text and "from_" not in text
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == recipe and again.resolved_yaml() == text
    assert main([str(QUICKSTART), "resume.from=never", "--get", "resume.from"]) == 0
    assert capsys.readouterr().out == "never\n"
    assert main([str(QUICKSTART), "--get", "resume.from_"]) == 2


def test_what_is_kept_and_resumed_is_no_part_of_the_hash() -> None:
    hash_ = load_recipe(QUICKSTART).hash
    overrides = [
        "checkpoint.every=3",
        "checkpoint.export_best=true",
        "resume.from=never",
        "resume.use=reuse_sealed",
        "resume.allow=[actor.lr]",
    ]
    assert load_recipe(QUICKSTART, overrides).hash == hash_


CONTENTS = (
    "tokenizer, model, critic, data, eval_data, sampling, scorer, algorithm, curriculum, records"
)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("checkpoint.every=-1", "must be greater than or equal to 0, got -1"),
        ("checkpoint.every=2.0", "must be an integer, got 2.0"),
        ("checkpoint.keep=0", "must be greater than 0, got 0"),
        ("checkpoint.background=1", "must be true or false, got 1"),
        ("checkpoint.keep_every=14", "14 is no multiple of checkpoint.every 10, so .* set 10$"),
        ("checkpoint.keep_every=26", "26 is no multiple of checkpoint.every 10, so .* set 30$"),
        ("checkpoint.keep_every=4", "4 is no multiple of checkpoint.every 10, so .* set 10$"),
        ("resume.from=", "must be text, got nothing"),
        ("resume.from=''", 'should have at least 1 character, got ""'),
        ("resume.from=3", "must be text, got 3"),
        ("resume.use=again", "must be 'regenerate' or 'reuse_sealed'"),
        ("resume.allow=actor.lr", 'must be a list, got "actor.lr"'),
        ("resume.from_=never", "unknown key; did you mean resume.from\\?"),
        ("resume.form=never", "unknown key; did you mean resume.from\\?"),
        ("checkpoint.interval=3", "unknown key; see --help"),
    ],
)
def test_wrong_values_are_refused(override: str, says: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(QUICKSTART, [override])
    assert str(caught.value).startswith(f"override {override}: {key}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("allow", "index", "says"),
    [
        ("[tokeniser]", 0, f"one of {CONTENTS}; did you mean tokenizer?"),
        (
            "[data, lr]",
            1,
            f"'lr' is neither a recipe key nor one of {CONTENTS}; did you mean actor.lr?",
        ),
        ("[actor.lrr]", 0, "did you mean actor.lr?"),
        ("[actor]", 0, "'actor' is neither a recipe key nor"),
        ("[zzz]", 0, "; see --help for the keys"),
        ("[seed, model, seed]", 2, "seed is listed twice; keep one"),
    ],
)
def test_what_may_be_allowed_is_named(allow: str, index: int, says: str) -> None:
    override = f"resume.allow={allow}"
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, [override])
    assert str(caught.value).startswith(f"override {override}: resume.allow.{index}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["checkpoint.keep_every=10", "checkpoint.every=0"], "one checkpoint, at the end"),
        (["checkpoint.export_best=true", "data.eval="], "set data.eval, or leave export_best out"),
    ],
)
def test_keys_that_need_each_other(overrides: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        load_recipe(QUICKSTART, overrides)
    key = overrides[0].partition("=")[0]
    assert str(caught.value).startswith(f"override {overrides[0]}: {key}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.every=0"],
        ["checkpoint.keep_every=30", "checkpoint.keep=1"],
        ["checkpoint.export_every=7", "checkpoint.every=0"],
        ["checkpoint.export_best=true"],
        [f"resume.allow=[{CONTENTS}, resume.from, reward.scorers, algorithm.kl.beta]"],
        ["resume.from=never", "resume.use=reuse_sealed"],
    ],
)
def test_values_on_the_edge_pass(overrides: list[str]) -> None:
    load_recipe(QUICKSTART, overrides)
