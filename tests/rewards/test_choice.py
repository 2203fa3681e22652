"""The scorer `multiple_choice` against verdicts by hand.

Not covered here: worker processes; options other than A to J.
"""

from __future__ import annotations

import pytest

from megarl.rewards import choice
from megarl.rewards.scorer import Response, RewardParts

SCORE = choice.make()
CITIES = ["Paris", "London", "a cat", r"$\frac{1}{2}$"]


def response(text: str, answer: str = "B", finished: bool = True, **metadata) -> Response:
    end = "eos" if finished else "max_tokens"
    return Response(text, answer, "Which?", finished, end, metadata=metadata)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{B}", r"so $\boxed{\text{(B)}}$.", r"\boxed{\textbf{(B)}\ 5}", "Answer: B",
        "**Answer:** B", "**Answer: (B)**", "Answer:\nB", "The answer is B.", "the answer is b",
        "The answer is (B) because", "The correct answer is option B", "The correct option is B.",
        "I choose B", "Option B is correct.", "#### B", "B", "(B)", "**B**", "B.", "thus (B)",
        "The answer is A. No, the answer is B.", "The best choice is B, since it works",
        "The answer is B, not A.", "<think>(A) or (C)</think>(B)", r"\boxed{A}, no, \boxed{B}",
        "So the answer is\n\n**B**", "the answer is $B$", "(B) it is. Yes, (B).",
        "The answer is not A, it is B.", "The answer is not (A); it's (B).",
        "The answer is not A, but B.", "The answer is (B) because A and C are wrong.",
        "(B) because A and C are wrong", "The answer is B, since A, C and D are all incorrect",
        "Option B is correct because options (A) and (C) are wrong.",
    ],
)  # fmt: skip
def test_the_option_stated_last(text):
    assert SCORE(response(text)) == RewardParts(1.0)


@pytest.mark.parametrize(
    ("text", "gold", "detail"),
    [
        ("The answer is B. No, the answer is A.", "B", ""), (r"\boxed{B}, no, \boxed{A}", "B", ""),
        ("A or B", "B", "no_answer"), ("Answer: A or B", "A", "unreadable"),
        ("Answer: A, B", "A", "unreadable"), ("Answer: A and B", "A", "unreadable"),
        ("Answer: AB", "A", "unreadable"), ("The answer is A/B", "A", "unreadable"),
        (r"\boxed{A, B}", "A", "unreadable"), (r"\boxed{A B}", "A", "unreadable"),
        ("The answer is either A or B", "A", "unreadable"), ("(A) (B) (C)", "B", "unreadable"),
        ("Answer: B (A)", "B", "unreadable"),
        ("I think a cat is here", "A", "no_answer"), ("I think so", "I", "no_answer"),
        ("The answer is a cat", "A", "unreadable"), ("The answer is A cat", "A", "unreadable"),
        ("The answer is I think B", "I", "unreadable"), ("The answer is not B", "B", "unreadable"),
        ("Answer: none", "B", "unreadable"),
        ("The answer is B is wrong", "B", "unreadable"),
        ("The answer is not A, it is B or C", "B", "unreadable"),
        ("The answer is not A, it is B", "A", ""), ("The answer is not A, B", "B", "unreadable"),
        ("The answer is (B) because A and B are wrong", "B", "unreadable"),
        ("The answer is (B) because A is wrong, or C", "B", "unreadable"),
        ("The answer is (B) or (A) because C is wrong", "B", "unreadable"),
        ("The answer is (B) because A and C are right", "B", "unreadable"),
        ("The answer is (B) because A and C are wrong", "A", ""),
        (r"\boxed{" + r"B\frac" * 100_000 + "}", "B", "unreadable"),
        (r"\boxed{}", "B", "no_answer"), ("", "B", "no_answer"),
    ],
)  # fmt: skip
def test_another_option_several_or_none(text, gold, detail):
    assert SCORE(response(text, gold)) == RewardParts(0.0, detail)


@pytest.mark.parametrize(
    ("text", "gold", "total"),
    [
        ("The answer is London", "B", 1.0), ("The answer is B", "London", 1.0),
        ("The answer is B", "1", 1.0), ("The answer is (B) London.", "B", 1.0),
        ("The answer is B. London", "B", 1.0), (r"\boxed{a cat}", "C", 1.0),
        (r"\boxed{\dfrac12}", "D", 1.0), (r"\boxed{\frac{1}{2}}", "3", 1.0),
        ("The answer is a cat", "A", 0.0), ("The answer is Paris", "B", 0.0),
        ("The answer is (B) Paris", "B", 0.0), ("The answer is E", "B", 0.0),
        ("The answer is Rome", "B", 0.0),
    ],
)  # fmt: skip
def test_with_choices_a_text_or_number_may_stand_for_a_letter(text, gold, total):
    assert SCORE(response(text, gold, choices=CITIES)).total == total


NUMBERS = ["2", "3", "4", "12"]


@pytest.mark.parametrize(
    ("answer_is", "gold", "choices", "letter"),
    [
        ("index", "2", NUMBERS, "C"), ("text", "2", NUMBERS, "A"), ("any", "12", NUMBERS, "D"),
        ("any", "C", NUMBERS, "C"), ("any", "1", ["0", "1"], "B"), ("any", "1", ["1", "1"], "B"),
        ("letter", "A", ["B", "A"], "A"), ("text", "A", ["B", "A"], "B"),
        ("letter", "(c)", CITIES, "C"), ("letter", "c", None, "C"), ("text", "a cat", CITIES, "C"),
    ],
)  # fmt: skip
def test_the_prompts_answer_is_what_the_option_says(answer_is, gold, choices, letter):
    one = choice.make(answer_is=answer_is)
    scores = {
        said: one(response(f"The answer is {said}", gold, choices=choices)).total for said in "ABCD"
    }
    assert scores == {said: float(said == letter) for said in "ABCD"}


@pytest.mark.parametrize(
    ("answer_is", "gold", "choices", "why"),
    [
        ("any", "2", NUMBERS, "'2' is the index of choice C and the text of choice A: set the"),
        ("any", "A", ["B", "A"], "'A' is the letter of choice A and the text of choice B: set the"),
        ("index", "4", NUMBERS, "no index of a choice"), ("index", "A", NUMBERS, "no index of a"),
        ("index", "0", None, "no index of a choice"), ("text", "5", NUMBERS, "no choice's text"),
        ("text", "A", CITIES, "no choice's text"), ("letter", "2", NUMBERS, "no letter from A"),
        ("text", "1", ["1", "1"], "several of its choices"),
    ],
)  # fmt: skip
def test_an_answer_that_may_mean_two_choices_or_none_is_an_error(answer_is, gold, choices, why):
    with pytest.raises(ValueError, match=why):
        choice.make(answer_is=answer_is)(response("Answer: A", gold, choices=choices))


def test_choices_may_be_a_mapping_and_have_another_key():
    by_letter = {"A": "Paris", "B": "London"}
    labelled = {"label": ["A", "B"], "text": ["Paris", "London"]}
    for choices in (by_letter, labelled):
        assert SCORE(response("Answer: London", choices=choices)).total == 1.0
    other = choice.make(choices="options")
    assert other(response("Answer: London", options=["Paris", "London"])).total == 1.0
    assert other(response("Answer: London", choices=["Paris", "London"])).total == 0.0


@pytest.mark.parametrize(
    ("gold", "metadata"),
    [
        ("", {}), (" ", {}), ("K", {}), ("London", {}), ("1", {}), ("A or B", {}),
        ("E", {"choices": CITIES}), ("4", {"choices": CITIES}), ("Rome", {"choices": CITIES}),
        ("same", {"choices": ["same", "same"]}), ("A", {"choices": "Paris"}),
        ("A", {"choices": {"first": "Paris"}}), ("A", {"choices": ["x"] * 11}),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_an_error(gold, metadata):
    with pytest.raises(ValueError, match="the (prompt|row)'s|the prompt has no answer"):
        SCORE(response("Answer: A", gold, **metadata))


def test_a_response_that_was_cut_off_is_wrong_unless_told():
    cut = response("Answer: B", finished=False)
    assert SCORE(cut) == RewardParts(0.0, "not_finished")
    assert choice.make(finished=False)(cut) == RewardParts(1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is on the Thames.\n\nLondon", RewardParts(1.0)),
        ("It is on the Thames.\n**London.**", RewardParts(1.0)),
        ("It is on the Thames.\n\nParis", RewardParts(0.0)),
        ("It is on the Thames.\n\nParis or London", RewardParts(0.0, "no_answer")),
        ("One of these:\nParis\nLondon", RewardParts(0.0, "no_answer")),
        ("It is on the Thames.\n\nB) London", RewardParts(1.0)),
        ("It is on the Thames.\n\nB) Paris", RewardParts(0.0, "unreadable")),
        ("It is on the Thames.\n\nB) London, since it is there", RewardParts(1.0)),
        ("It is on the Thames.\n\nB) London is in Ontario too", RewardParts(0.0, "no_answer")),
        ("A) Paris\nB) London", RewardParts(0.0, "no_answer")),
        ("A) Paris\nB) London\n\nIt must be\nB) London", RewardParts(1.0)),
        ("A) Paris\nB) London\n\nA) Paris\nIt is old.\nB) London", RewardParts(0.0, "no_answer")),
        ("(A) is in France.\n\nB) London, so the answer is A", RewardParts(0.0)),
    ],
)
def test_a_last_line_states_an_option_by_its_text(text, expected):
    assert SCORE(response(text, choices=CITIES)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The answer is C.\n\nWhy not the others:\nA) too small\nB) too old\nD) too large", "C"),
        ("\\boxed{B}\n\n(A) Paris is in France.", "B"),
        ("Answer: B\n\n(A) Paris is in France, so it is out.", "B"),
        ("**Answer: B**\n\nA) Paris – capital of France", "B"),
        ("The answer is B) London.\n\nParis", "B"),
        ("The answer is A or B.\n\nB) London", ""),
        ("Why not these:\nA) too small\nD) too large", ""),
        ("The answer is the following:\nB) London", "B"),
        ("Which option is right?\n\nB) London", "B"),
    ],
)
def test_a_last_line_of_letter_and_text_gives_way_to_a_statement(text, said):
    for choices in (None, ["Paris", "London", "Rome", "Oslo"]):
        scores = {one: SCORE(response(text, one, choices=choices)).total for one in "ABCD"}
        assert scores == {one: float(one == said) for one in "ABCD"}


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="choices must be a text, not"):
        choice.make(choices="")
    with pytest.raises(ValueError, match="answer_is must be any, letter, index or text, not 'no'"):
        choice.make(answer_is="no")
