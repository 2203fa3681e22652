"""The scorer `gsm8k` against verdicts by hand.

Not covered here: worker processes.
"""

from __future__ import annotations

import pytest

from megarl.rewards import gsm8k
from megarl.rewards.scorer import Response, RewardParts

STRICT = gsm8k.make()
LAST = gsm8k.make(take="last_number")


def response(text: str, answer: str = "18", finished: bool = True) -> Response:
    return Response(text, answer, "How many?", finished, "eos" if finished else "max_tokens")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("9 * 2 = 18\n#### 18", "She has 9 * 2 = <<9*2=18>>18.\n#### 18"),
        ("#### 1,234", "#### 1234"), ("#### 1,234.", "1,234"), ("#### 12,345,678", "12345678"),
        ("#### $18", "18"), ("#### $18.00", "18"), (r"\boxed{\$18}", "18"), ("#### -$5", "-5"),
        ("#### +7", "7"), ("#### ７２", "72"), ("#### −5", "-5"), ("#### 72.0", "72"),
        ("#### 1/2", "0.5"), (r"\boxed{\frac{1}{2}}", "0.5"), ("#### 18 dollars a day", "18"),
        ("#### **18**", "18"), ("####18", "18"), ("#### 50%", "50"), (r"\boxed{18}", "18"),
        ("#### 17\n#### 18", "18"), (r"#### 17, no: \boxed{18}", "18"),
        (r"\boxed{17} #### 18", "18"),
        ("<think>#### 17</think>#### 18", "18"), ("#### 0.50", ".5"),
        ("#### 3 m^2", "3"), ("#### 3 ft^2", "3"), ("#### 3yd^3", "3"), ("#### 3 inches^2", "3"),
        (r"\boxed{3\text{ cm}^3}", "3"), ("#### 9.8 m/s^2", "9.8"), ("#### 3 people/km^2", "3"),
        (r"\boxed{18} and \boxed{18.00}", "18"), (r"#### \boxed{18}, \boxed{\$18}", "18"),
    ],
)  # fmt: skip
def test_the_same_number(text, gold):
    assert STRICT(response(text, gold)) == RewardParts(1.0)


@pytest.mark.parametrize(
    ("text", "gold", "detail"),
    [
        ("#### 17", "18", ""), ("#### 5", "-5", ""), ("#### 18\n#### 17", "18", ""),
        ("#### 0.333", "1/3", ""), ("#### 18.0000001", "18", ""), ("#### 1.8", "18", ""),
        ("#### 17 or 18", "18", "unreadable"), ("#### 1 234", "1234", "unreadable"),
        ("#### x18", "18", "unreadable"), ("#### eighteen", "18", "unreadable"),
        ("#### 1,23", "123", "unreadable"), ("#### 10 / 0", "10", "unreadable"),
        (r"\boxed{5x^2}", "5", "unreadable"), ("#### 5 x^2", "5", "unreadable"),
        ("#### 5 t^2", "5", "unreadable"), (r"\boxed{5\text{M}^2}", "5", "unreadable"),
        ("#### 5 x/y^2", "5", "unreadable"), (r"\boxed{9 + 9}, \boxed{18}", "18", "unreadable"),
        (r"\boxed{18} and \boxed{18.01}", "18", "unreadable"),
        ("#### 17 18 19 " + "x" * 300, "18", "unreadable"),
        ("It is 18", "18", "no_answer"), ("The answer is 18", "18", "no_answer"),
        ("####", "18", "no_answer"), (r"\boxed{}", "18", "no_answer"), ("", "18", "no_answer"),
    ],
)  # fmt: skip
def test_another_number_or_none(text, gold, detail):
    assert STRICT(response(text, gold)) == RewardParts(0.0, detail)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("The answer is 18", 1.0), ("3 and then 18.", 1.0), ("That makes $18.00!", 1.0),
        ("the answer is 18 because 9 + 9 = 18. It took 7 steps", 1.0), ("18 of 20", 0.0),
        ("#### 17, so 18", 0.0), (r"\boxed{17} 18", 0.0), ("none", 0.0), ("x18", 0.0),
    ],
)  # fmt: skip
def test_the_last_number_counts_where_told_and_nothing_is_marked(text, total):
    assert LAST(response(text)).total == total


def test_a_response_that_was_cut_off_is_wrong_unless_told():
    cut = response("#### 18", finished=False)
    assert STRICT(cut) == RewardParts(0.0, "not_finished")
    assert gsm8k.make(finished=False)(cut) == RewardParts(1.0)


@pytest.mark.parametrize("gold", ["", " ", "####", "eighteen", "#### 17 or 18", "17 18"])
def test_a_gold_answer_that_is_not_one_number_cannot_be_scored(gold):
    with pytest.raises(ValueError, match="the prompt"):
        STRICT(response("#### 18", gold))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="take must be stated or last_number"):
        gsm8k.make(take="strict")
