"""The recipe's keys about prompts, scorers and evaluation: forms, defaults, refusals.

Not covered: what the files hold, and what the keys do in a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recipe import RecipeError, load_recipe, main

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
OWN = "mine:score"


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_is_a_list_of_one_source_with_the_sections_keys() -> None:
    plain = load_recipe(QUICKSTART, ["data.train=a/sums-{seed}.jsonl.gz", "seed=3"])
    listed = load_recipe(QUICKSTART, ["data.train=[{path: 'a/sums-{seed}.jsonl.gz'}]", "seed=3"])
    assert plain == listed and plain.data.train[0].name is None
    (source,) = plain.data.training
    assert (source.path, source.name, source.weight) == ("a/sums-3.jsonl.gz", "sums-3", None)
    assert (source.prompt_key, source.answer_key) == ("prompt", "answer")
    assert load_recipe(QUICKSTART, ["data.eval="]).data.held_out == ()


def test_a_sources_own_keys_win(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        f"base: {QUICKSTART}\n"
        "data:\n"
        "  system_prompt: Be brief.\n"
        "  train:\n"
        "    - {path: a.jsonl, weight: 3}\n"
        "    - {path: b.parquet, weight: 1, name: maths, prompt_key: question, reward: m,\n"
        "       system_prompt: Think.}\n"
    )
    recipe = load_recipe(tmp_path / "two.yaml")
    first, second = recipe.data.training
    assert (first.name, first.prompt_key, first.system_prompt) == ("a", "prompt", "Be brief.")
    assert (second.name, second.prompt_key, second.system_prompt) == ("maths", "question", "Think.")
    assert second.reward == "m" and [first.weight, second.weight] == [3.0, 1.0]
    (tmp_path / "again.yaml").write_text(recipe.resolved_yaml())
    assert load_recipe(tmp_path / "again.yaml").data == recipe.data


def test_resolved_recipes_name_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(QUICKSTART), "--get", "data.train"]) == 0
    assert "models/quickstart-s1/data/train.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train=5", "data.train: must be a path or a list of sources, got 5"),
        ("data.train=[]", "data.train: must have at least 1 entry"),
        ("data.train=[{name: a}]", "data.train.0.path: this key is required"),
        ("data.train=[{path: a, wieght: 1}]", "data.train.0.wieght: unknown key"),
        ("data.train=[{path: a, weight: 0}]", "data.train.0.weight: must be greater than 0"),
        ("data.train=[{path: a/x.jsonl}, {path: b/x.jsonl}]", "two sources are called x"),
        ("data.train=[{path: a, weight: 1}, {path: b}]", "give all of them one, or none"),
        ('data.train=[{path: a, name: "x\\ny"}]', "has a character that does not print"),
        ('data.eval=[{path: a, reward: "x\\ty"}]', "has a character that does not print"),
        ("data.eval=[{path: a, weight: 1}]", "held-out prompts are not drawn"),
        ("data.curriculum=easy", "there is no curriculum easy; name your function"),
        ("data.max_overlap=1.5", "must be less than or equal to 1"),
        (f"reward.scorers=[{{name: '{OWN}'}}, {{name: 'other:score'}}]", "listed twice as score"),
        ("reward.scorers=[{name: exact_match, batch: 4}]", "scores one response at a time"),
        ("reward.scorers=[{name: exact_match, component: a/b}]", "'a/b' has a slash"),
        ("reward.scorers=[{name: 'mine:mean'}]", "reward/mean is the name of another metric"),
        ("reward.scorers=[{name: exact_match, only: [a, a]}]", "a reward name is listed twice"),
        ("reward.scorers=[{name: exact_mach}]", "did you mean exact_match?"),
        ("eval.pass_at=[4]", "pass@4 needs at least 4 sampled responses"),
        ("eval.probes=[{name: exact_match}]", "exact_match is a component of the reward already"),
        ("eval.probes=[{name: nothing}]", "eval.probes.0.name: there is no scorer nothing"),
        (f"eval.probes=[{{name: '{OWN}', weight: 2}}]", "never part of a reward"),
        (
            "eval.probes=[{name: format, component: a_sampled}, {name: format, component: a}]",
            "eval/probe/a_sampled is what probe a says of sampled responses",
        ),
        ("eval.temperature=0", "must be greater than 0"),
    ],
)
def test_what_is_refused_is_told_where_it_stands(override: str, says: str) -> None:
    message = refusal(override)
    assert message.startswith("override ") and says in message


def test_a_reward_is_named_by_the_source_or_by_its_rows() -> None:
    told = refusal("data.train=[{path: a, reward: m}]", "data.reward_key=kind")
    assert "data.train.0.reward: the rows say their rewards themselves, in kind" in told


def test_what_is_sampled_needs_sampling() -> None:
    told = refusal("eval.sampled=false", "eval.samples=4")
    assert "eval.samples: with eval.sampled false nothing is sampled" in told
    assert "(eval.samples=1 where a base recipe has it)" in told
    told = refusal("eval.sampled=false", "eval.temperature=0.5")
    assert "(eval.temperature=null where a base recipe has it)" in told
    given = ["eval.samples=4", "eval.temperature=0.5", "eval.sampled=false"]
    load_recipe(QUICKSTART, [*given, "eval.samples=1", "eval.temperature=null"])


def test_one_scorer_may_be_listed_twice_under_two_names() -> None:
    scorers = "reward.scorers=[{name: exact_match, only: [a]}, {name: exact_match, component: b}]"
    first, second = load_recipe(QUICKSTART, [scorers]).reward.scorers
    assert (first.title, second.title) == ("exact_match", "b")
    assert first.scores("a") and not first.scores("x") and second.scores("x")
    assert first.options == {}
