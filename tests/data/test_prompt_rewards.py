"""Every row's reward name against the scorers of a recipe.

Not covered: that the scorers exist (`tests/rewards`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptError
from megarl.data.reward_names import check_only, check_probes, check_rewards
from megarl.recipe.learning import ScorerSection
from tests.contracts.tokenizer_folders import character_folder
from tests.data.prompt_files import TEMPLATE, load, two_files, write


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def rewards(*scorers: dict) -> Any:
    return SimpleNamespace(scorers=[ScorerSection(**{"name": "math"} | keys) for keys in scorers])


@pytest.mark.parametrize(
    ("scorers", "says", "held_out_says"),
    [
        ([{}], None, None),
        ([{"only": ["a"]}, {"only": ["maths"]}], None, None),
        ([{"only": ["maths"]}], r"a\.jsonl:1: .*'a' is scored by no scorer", "'a' is scored by no"),
        ([{"weight": 0.0}], r"a\.jsonl:1: .*'a' is scored by scorers of weight 0 only", None),
        ([{}, {"only": ["math"]}], r"b\.jsonl:1: .*'maths' is in no scorer's `only`", "'maths' is"),
        ([{}, {"only": ["maths"], "weight": 0.0}], None, None),
    ],
)
def test_every_row_is_scored_by_a_scorer_that_means_it(
    tokens, tmp_path, scorers, says, held_out_says
):
    """Rows of `a` have the source's name as their reward's, `b` is given one by the recipe."""
    loaded = load(two_files(tmp_path), tokens)
    for held_out, expected in ((False, says), (True, held_out_says)):
        if expected is None:
            check_rewards(loaded, rewards(*scorers), held_out=held_out)
            continue
        with pytest.raises(PromptError, match=expected) as caught:
            check_rewards(loaded, rewards(*scorers), held_out=held_out)
        assert "\n" not in str(caught.value)


def test_a_reward_name_of_a_row_is_checked_too(tokens, tmp_path):
    row = {"prompt": "x", "answer": "1"}
    path = write(tmp_path / "rows.jsonl", row | {"kind": "maths"}, row | {"kind": "mahts"})
    loaded = load(path, tokens, reward_key="kind")
    assert [row.reward for row in loaded.rows] == ["maths", "mahts"]
    with pytest.raises(PromptError, match=r"rows\.jsonl:2: .*'mahts'.*`only` are maths"):
        check_rewards(loaded, rewards({}, {"only": ["maths"]}))


def test_a_name_in_only_that_no_row_has_is_refused(tokens, tmp_path):
    train = load(two_files(tmp_path), tokens)  # `a`, `maths`
    write(tmp_path / "held.jsonl", {"prompt": "x", "answer": "1"})
    held_out = load(tmp_path / "held.jsonl", tokens)
    scorers = [ScorerSection(name="math", only=names) for names in (["a", "held"], ["maths"])]
    check_only(train, held_out, scorers)
    check_probes(held_out, [ScorerSection(name="math", only=["held"]), ScorerSection(name="math")])
    with pytest.raises(PromptError) as caught:
        check_only(train, None, scorers)
    assert str(caught.value) == (
        "reward.scorers.0.only: no usable row of data.train has the reward name 'held'; rows have "
        "'a', 'maths'; correct the name or leave it out"
    )
    mistyped = [*scorers, ScorerSection(name="math", only=["a", "mahts"])]
    says = r"^reward\.scorers\.2\.only: .* data\.train or data\.eval .*'mahts'; .* 'a', 'held'"
    with pytest.raises(PromptError, match=says):
        check_only(train, held_out, mistyped)
    # A probe scores held-out rows alone.
    with pytest.raises(PromptError, match=r"^eval\.probes\.1\.only: .*data\.eval .*'maths'; rows"):
        check_probes(held_out, [ScorerSection(name="math"), scorers[1]])
