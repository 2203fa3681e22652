r"""The scorer `math` against verdicts that follow from mathematics, and answers made to cost time.

Not covered here: whether latex2sympy reads every command; worker processes and their deadlines.
"""

from __future__ import annotations

import time

import pytest

from megarl.rewards import math_answer, math_value
from megarl.rewards.scorer import Response, RewardParts

SCORE = math_answer.make(take="whole")
STATED = math_answer.make()


def response(text: str, answer: str = "5", finished: bool = True) -> Response:
    return Response(text, answer, "What is it?", finished, "eos" if finished else "max_tokens")


EQUAL = [
    # numbers
    ("1/2", r"\frac12"), ("1/2", r"\dfrac{1}{2}"), ("1/2", "0.5"), ("1/2", "½"), ("0.5", ".50"),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}"), ("1000", "1,000"), ("1000", "1{,}000"),
    ("1000000", r"1\,000\,000"), ("1000000", "1 000 000"), ("1000", "10^{3}"), ("1000", "10^3"),
    ("1.5", r"1\frac{1}{2}"), ("1.5", "1 1/2"), ("1.5", "1½"), ("-1.5", r"-1\frac12"),
    ("5000", r"5 \times 10^3"), ("0.00012", r"1.2\cdot10^{-4}"), ("5000", "5×10³"),
    ("-3", "−3"), ("12", "１２"), ("12", "١٢"), ("7", "+7"), ("72", "72.0"), ("5", "5."),
    ("1/3", r"0.\overline{3}"), ("1/6", r"0.1\overline{6}"), ("1/3", "0.(3)"),
    ("5", "five"), ("101_2", "101_{2}"), (r"101_{\text{two}}", "101_2"),
    ("10001", r"\text{10001}"), ("6", "(2)(3)"), ("6", "2(3)"), ("120", "5!"),
    (r"\frac{1}{2004!}", r"\dfrac{1}{2004!}"), ("2^{-98}", r"2\cdot 2^{-99}"),
    ("2^{2^{2020}}", "4^{2^{2019}}"), ("10", r"\binom{5}{2}"), ("-2", r"\sqrt[3]{-8}"),
    (r"2\sqrt2", "√8"), ("2", r"\log_2 4"), (r"\ln 8", r"3\ln 2"), ("1", r"\sin 90^\circ"),
    (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"), (r"\pi", "π"), ("3", "|-3|"), ("1/2", r"\cos(\pi/3)"),
    # percent, money, units
    (r"28\%", "0.28"), (r"28\%", "28 percent"), ("0.5", r"50\%"), ("18", r"\$18"), ("18", "$18"),
    ("18", "18 dollars"), (r"\$18.50", "18.5"), ("$18", "18 dollars"), ("1234", r"\$1,234"),
    ("5", r"5\text{ cm}"), ("5", r"5\,\mathrm{cm}"), ("5", "5 cm"), (r"5\text{ cm}", "5"),
    (r"5\text{ m}", r"500\text{ cm}"), (r"5\text{ cm}^2", "5 square centimeters"),
    ("5 m", r"5\text{ m}"), ("60 km/h", r"60\text{ km per hour}"), ("90", r"90^\circ"),
    ("90", "90°"), ("90 degrees", r"90^{\circ}"), ("12", "12 apples"), ("12", r"12\text{ ways}"),
    # names
    ("5", "x=5"), ("x=5", "5"), ("5", "x = 2+3 = 5"), ("5", "5 = x"), ("x^2", "f(x) = x^2"),
    ("5", r"\text{Area} = 5"), ("2x+1", "y=2x+1"), ("5", "AB = 5"), ("5", "2+3=5"),
    # expressions
    ("(x+1)^2", "x^2+2x+1"), ("x^2-1", "(x-1)(x+1)"), ("x/2", "0.5x"), ("1", r"\sin^2 x+\cos^2 x"),
    ("2i", "(1+i)^2"), ("3+4i", "4i+3"), ("e^{i\\pi}", "-1"), (r"|x|", r"\sqrt{x^2}"),
    (r"2x\sqrt x", r"2\sqrt{x^3}"), ("x_1+x_2", "x_2+x_1"), (r"\frac{x^2-1}{x-1}", "x+1"),
    ("n!", r"n\cdot(n-1)!"), ("x²", "x^2"), ("2*x**2", "2x^2"), ("sqrt(2)/2", r"\frac{\sqrt2}{2}"),
    # rows, lists, sets, intervals
    ("(1,2)", "(1, 2)"), ("(1,2)", r"\left( 1, \frac42 \right)"), ("(1,2)", "1, 2"),
    (r"\{1,2\}", r"\{2,1\}"), ("1,2", "2, 1"), ("1,2", r"2\text{ and }1"),
    (r"\{1,1,2\}", r"\{1,2\}"),
    ("1, -1", r"\pm 1"), (r"1\pm\sqrt2", r"1-\sqrt2, 1+\sqrt2"), ("x=1 or x=2", "1, 2"),
    ("1, 2", r"x=2 \text{ or } x=1"), ("x=2, x=-2", r"x=\pm2"), ("(x,y)=(1,2)", "(1,2)"),
    ("(1,2)", "x=1, y=2"), ("x=1,y=2", "y=2, x=1"), ("1,000, 2,000", "1000, 2000"),
    ("(1,2)", "1<x<2"), ("(1,2]", r"1 < x \le 2"), (r"x \in [2,\infty)", r"x\ge2"),
    ("x>2", "2x>4"), ("x>2", "2<x"), ("x<-2", "-x>2"), ("(-∞,1)∪(2,∞)", "x<1 or x>2"),
    (r"(2,\infty)\cup(-\infty,1)", r"(-\infty,1)\cup(2,\infty)"), ("x^2<4", "-2<x<2"),
    (r"[-1,1]", r"x^2\le1"), (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"x\ne1", r"\mathbb{R}\setminus\{1\}"),
    (r"\emptyset", "no solution"), ("∅", r"\{\}"), ("all real numbers", "ℝ"), (r"\infty", "∞"),
    # equations, matrices, ratios, times, words
    ("3x+4y+14=0", "6x+8y=-28"), ("y=x/2", "2y=x"), ("xy=1", r"y=\frac1x"), ("x+y<2", "2x+2y<4"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&\frac42\\3&4\end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), ("3:4", "6:8"), ("3:4", r"\frac34"),
    ("10:30", "10:30 AM"), ("10:30", "10:30"), ("Monday", "monday"), (r"\text{Monday}", "Monday"),
    ("A", r"\text{(A)}"), ("(A)", "A"), ("Alice and Bob", "Bob and Alice"),
    ("yes", r"\textbf{Yes}"),
    ("undefined", "does not exist"), ("no", "No"), ("2500000", r"\$2.5 million"), ("36", "3 dozen"),
    (r"\frac13", r"x=0.333=\frac13"), (r"60^\circ", r"t=\frac{\pi}{3}=60^\circ"),
    ("25%", r"P=\frac14=25\%"), ("10", r"n=\binom52=10"), ("A", r"\text{(A)}\ -x"),
    ("f(x)=2x", "y=2x"), (r"\langle 1,2,3\rangle", "(1,2,3)"), ("1000", "1e3"),
    ("2:15 pm", "2:15 p.m."),
    ("-2<x<2", "|x|<2"), (r"77^\circ F", "77"), ("(1,2),(3,4)", "(3,4) and (1,2)"),
    ("25", "25 square meters"),
]  # fmt: skip

DIFFERENT = [
    ("-3", "3"), ("50", "0.5"), ("50", r"50\%"), (r"28\%", "28"), ("4", r"4\sqrt{2}"),
    (r"1/2004!", r"1/2006!"), ("2^{-99}", "2^{-98}"), ("1/3", "0.333333"), ("1/3", "0.333"),
    (r"\pi", "3.14159"), (r"\pi", "3.14159265358979323846264338327950288"), ("0", "10^{-300}"),
    ("2^{2^{2020}}", "4^{2^{2018}}"), ("0", r"e^{-2000}"), ("1", "1+10^{-60}"),
    ("1", "1.0000000000000000001"),
    ("1/2", "1/3"), ("12", "1 2"), ("23", "2 3"), ("1000", "1,00"), ("5", ""),
    ("5", "5x"), ("5x", "5"), ("5", "5m"), ("x", "X"), ("A", "B"), ("ab", "aB"), ("x", "y"),
    ("x'", "x"),
    (r"5\text{ m}", r"5\text{ cm}"), ("$5", "5 euros"), (r"5\text{ cm}^2", r"5\text{ cm}"),
    ("x", "|x|"), ("(x+1)^2", "x^2+1"), ("2i", "2"), ("1+i", "1-i"), ("x=5", "y=5"),
    ("(1,2)", "(2,1)"), ("(1,2)", "2, 1"), (r"\{1,2\}", "(1,2)"), ("(1,2)", "[1,2]"),
    ("(1,2]", "[1,2)"),
    ("[1,2]", r"\{1,2\}"), ("1,2", "1"), ("1", "1,2"), ("2", "1 or 2 or 3"), ("2", r"\pm2"),
    ("2", "2 or 3"), ("2", "2, 3"), ("2", "2; 3"), ("2", r"2\text{ or }3"), ("2", r"2\quad 3"),
    ("x=2", "x=2 or x=3"), (r"\{1,2\}", r"\{1,2,3\}"), ("1,2,3", "1,2,2"), ("2", "not 2"),
    ("2", "1 and 2"),
    ("1<x<2", r"1\le x<2"), ("x>2", "y>2"), ("x>2", "x<2"), ("x>2", "2x>2"), ("x+y<2", "-x-y<-2"),
    (r"(-\infty,1)\cup(2,\infty)", "(1,2)"), (r"\mathbb{R}", r"\mathbb{Z}"),
    (r"\infty", r"-\infty"),
    ("3*x-1*y+13=0", "3x+4y+14=0"), ("y=2x+1", "y=2x"), ("x^2=4", "x=2"), ("14", "3x+4y=14"),
    ("3", "1+1=3"), ("x=5", "x=4=5"), ("(5,6)", "x=4=5, y=6"), ("5", "x = 1.2 = 5"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    ("3:4", "4:3"), ("10:30", "10:20"), ("10:30 AM", "10:30 PM"), ("10:30", "1:3"),
    ("101_2", "101_3"), ("101_2", "101"), ("east", "seat"), ("Monday", "Tuesday"), ("yes", "no"),
    (r"\emptyset", "0"), (r"\emptyset", r"\{0\}"), ("none", "all real numbers"), ("undefined", "0"),
    ("5", "5 thirds"), ("5", "5 million"), ("5", "5 squared"), ("x>2", "x>2 or x>3"),
    ("5", "at least 5"),
    (r"\Delta", r"\delta"), ("2", "2=3"), ("(1,2)", "(1,2) or (2,1)"), ("5", "5'"), ("no", "on"),
    ("5", r"\frac{5}{0}"), ("5", "5 - "), ("5", "="), ("5", "5=?"), ("5", "I think it is 5 or 6"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "text"), EQUAL)
def test_says_the_same(gold, text):
    assert SCORE(response(text, gold)).total == 1.0


@pytest.mark.parametrize(("gold", "text"), DIFFERENT)
def test_says_something_else(gold, text):
    assert SCORE(response(text, gold)).total == 0.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so $\boxed{5}$", True),
        (r"\boxed{4} and then \boxed{5}", True),
        (r"\boxed{5} and then \boxed{4}", False),
        (r"\boxed{5} and then \boxed{4", True),  # the last one whose braces balance
        (r"\boxed{\frac{10}{2}}", True),
        (r"\boxed {\text{5 cm}}", True),
        ("The answer is 5. I hope it is correct.", True),
        ("**Answer:** $x=5$\nDone 6.", True),
        ("the answer is\n\n$$5$$", True),
        ("The answer is: 5.0 cm.", True),
        ("work 4\n#### 5", True),
        ("The answer is 4. No: the answer is 5.", True),
        ("The answer is 5. No: the answer is 4.", False),
        ("The answer is 4 or 5.", False),
        ("The answer is $4$ or $5$.", False),
        (r"The answer is 5, so \boxed{4}", False),
        (r"<think>\boxed{4}</think> The answer is 5", True),
        (r"\boxed{5} and \boxed{5.00}", True),
        (r"\boxed{\frac{10}{2}}, $\boxed{x=5}$", True),
        (r"\boxed{5} and \boxed{5.01}", False),
        (r"\boxed{5\text{ cm}}, \boxed{5} or \boxed{5\text{ m}}", False),
    ],
)
def test_the_answer_stands_where_the_rule_says(text, found):
    assert STATED(response(text)).total == float(found)


@pytest.mark.parametrize("text", ["5", "It is 5", "", r"\boxed{}", r"\boxed{5} </think> hm", "$ $"])
def test_without_a_stated_answer_there_is_none(text):
    assert STATED(response(text)) == RewardParts(0.0, "no_answer")


def test_other_places_to_take_the_answer_from():
    def total(text: str, **options) -> float:
        return math_answer.make(**options)(response(text)).total

    assert total("The answer is 5", take="boxed") == 0.0
    assert total(r"The answer is 5, not \boxed{4}", take="said") == 0.0
    assert total("The answer is 5", take="said") == 1.0
    assert total("first 4\n5\n", take="last_line") == 1.0
    assert total("<a>4</a><a>5</a>", pattern="<a>(.*?)</a>") == 1.0
    assert total("5", pattern="<a>(.*?)</a>") == 0.0


def test_options_on_values():
    def total(text: str, gold: str, **options) -> float:
        return math_answer.make(take="whole", **options)(response(text, gold)).total

    assert total("28", r"28\%", percent="number") == total(r"28\%", "28", percent="number") == 1.0
    assert total("0.28", r"28\%", percent="number") == 1.0
    assert total("29", r"28\%", percent="number") == total("50", "0.5", percent="number") == 0.0
    assert total("5 cm", "5 m", units="ignore") == 1.0
    assert total("0.333", "1/3", tolerance=2e-3) == total("3.1416", r"\pi", tolerance=1e-5) == 1.0
    assert total("0.333", "1/3", tolerance=1e-4) == total("-3.1416", r"\pi", tolerance=1e-5) == 0.0
    assert total("0.001", "0", tolerance=0.1) == 0.0  # the tolerance is relative


def test_a_response_that_was_cut_off_is_wrong_unless_told():
    cut = response(r"\boxed{5}", finished=False)
    assert STATED(cut) == RewardParts(0.0, "not_finished")
    assert math_answer.make(finished=False)(cut) == RewardParts(1.0)


@pytest.mark.parametrize(
    "gold", ["", "  ", r"\boxed{}", r"\frac{1}{", "1+", "(1,2", "x=?", r"\frac{1}{0}", "x" * 5000]
)
def test_a_gold_answer_that_says_nothing_cannot_be_scored(gold):
    for text in ("5", gold, ""):
        with pytest.raises(ValueError, match="the prompt"):
            SCORE(response(text, gold))


@pytest.mark.parametrize("gold", [r"so \boxed{\frac{1}{2}}", "$0.5$", r"$$\frac12$$", "1/2", "0.5"])
def test_a_gold_answer_is_boxed_marked_as_mathematics_or_plain(gold):
    assert SCORE(response(r"\frac{1}{2}", gold)).total == 1.0


def test_an_unreadable_answer_is_wrong_and_says_so():
    for text in ("5 -", "5 (or 6)", r"\frac{5}{", "see above: =", r"5 \implies 6"):
        assert SCORE(response(text)) == RewardParts(0.0, "unreadable")
    assert SCORE(response("6")) == RewardParts(0.0)


HOSTILE = {
    "tower": "9^{9^{9^9}}",
    "million digits": r"10^{10^{10}}",
    "factorial": "(10^{10})!",
    "factorials": "9!!!!!",
    "binomial": r"\binom{1000000000}{500000000}",
    "binomial of a power": r"\binom{9^{9^{9^9}}}{2}",
    "divisor of a power": r"\gcd(9^{9^{9^9}},7)",
    "a power times i": "9^{9^{9^9}}i",
    "a power in percent": r"9^{9^{9^9}}\%",
    "below a power": "x<9^{9^{9^9}}",
    "sum": r"\sum_{k=1}^{1000000000} k",
    "digits": "1" * 10_000,
    "decimals": "1." + "3" * 19_000,
    "digits in an expression": "1" * 3_000 + "x",
    "braces": "{" * 5_000 + "1" + "}" * 5_000,
    "fractions": r"\frac{1}{" * 300 + "2" + "}" * 300,
    "bars": "|x|" * 200,
    "parentheses": "(" * 2_000,
    "terms": "x+" * 50_000 + "1",
    "list": ",".join("1" * 150),
    "plus minus": r"1\pm 1" * 100,
    "signs": "-" * 5_000 + "1",
    "power": "(x+1)^{1000000}>0",
    "exponentials": "e^{e^{e^{e^e}}}",
    "roots": r"\sqrt{" + "1234567891" * 30 + "}",
    "subscripts": "x_{" * 8 + "1" + "}" * 8,
    "functions": r"\sin " * 60 + "x",
    "words": "word " * 20_000,
    "units": "5 " + "m " * 1_500,
    "dollars": "$" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_answer_costs_long(name):
    for text in (HOSTILE[name], r"\boxed{" * 5_000 + HOSTILE[name], "answer is " + HOSTILE[name]):
        for score in (SCORE, STATED):
            began = time.process_time()
            assert score(response(text, r"\frac{7}{2}")).total == 0.0
            assert time.process_time() - began < 2.0  # about 0.05 on an idle machine


@pytest.mark.parametrize(
    ("gold", "text", "total"),
    [
        (r"5 \text{ m}", r"\begin{pmatrix}1\\2\end{pmatrix}\text{ km}", 0.0),
        ("5", r"\begin{pmatrix}1\\2\end{pmatrix}:3", 0.0),
        ("3:4", r"3:\begin{pmatrix}1\\2\end{pmatrix}", 0.0),
        (r"5\%", r"\begin{pmatrix}1\\2\end{pmatrix}\%", 0.0),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}\text{ km}",
            r"\begin{pmatrix}1000\\2000\end{pmatrix}\text{ m}",
            1.0,
        ),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}\text{ km}",
            r"\begin{pmatrix}1\\2\end{pmatrix}\text{ m}",
            0.0,
        ),
    ],
)
def test_a_matrix_with_a_unit_or_in_a_ratio_is_compared_or_wrong(gold, text, total):
    assert SCORE(response(text, gold)).total == total
    assert math_answer.make(take="whole", percent="number")(response(text, gold)).total == total


def test_what_a_comparison_raises_is_the_responses_0_unless_the_prompts_answer_does(monkeypatch):
    real = math_answer.same

    def same(gold, answer, policy):
        if six in (gold, answer):
            raise AttributeError("a fault of sympy's")
        return real(gold, answer, policy)

    six = math_answer.readings("6")[0]
    monkeypatch.setattr(math_answer, "same", same)
    assert SCORE(response("6", "5")) == RewardParts(0.0, "unreadable")
    with pytest.raises(ValueError, match="answer '6' cannot be compared: AttributeError: a fault"):
        SCORE(response("8", "6"))


@pytest.mark.parametrize("error", [MemoryError, OSError, ImportError])
@pytest.mark.parametrize("module", [math_value, math_answer], ids=["read", "compare"])
def test_a_failing_machine_is_never_a_0(monkeypatch, module, error):
    def fail(*_, **__):
        raise error("no more")

    given = response(r"\frac{x+7919}{3}", "5")  # not read before, so not remembered
    monkeypatch.setattr(module, "latex2sympy" if module is math_value else "same", fail)
    with pytest.raises(error, match="no more"):
        SCORE(given)


def test_big_powers_are_compared_by_their_logarithms_and_other_big_values_as_written():
    assert SCORE(response("9^{9^{9^9}}", "9^{9^{9^9}}")).total == 1.0
    assert SCORE(response("(10^{10})!", "(10^{10})!")).total == 1.0
    assert SCORE(response("4^{2^{2019}}", "2^{2^{2020}}")).total == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"take": "first"}, "take must be"),
        ({"percent": "both"}, "percent must be"),
        ({"units": "yes"}, "units must be"),
        ({"tolerance": -0.1}, "tolerance must be"),
        ({"tolerance": float("nan")}, "tolerance must be"),
        ({"tolerance": "a"}, "tolerance must be"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a"}, "0 groups"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        math_answer.make(**options)
