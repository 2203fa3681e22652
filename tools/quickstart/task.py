"""The quickstart's task: two-digit sums, and two strategies to answer them.

A worked answer (" 8 + 8 = 16, 2 + 1 + 1 = 4, so 46") is right when every step is; an estimate
(" about 50") is short and never right. Warmed up on both, a model knows how to work a sum out but
mostly does not bother; that is what the reward has to reinforce.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOWEST, HIGHEST = 10, 49
HELD_OUT_OF_1000 = 100
ANSWER_PATTERN = r"(?:^|so )(\d+)$"
QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question; `question` is the user's message, before the chat template."""

    a: int
    b: int
    phrasing: int

    @property
    def question(self) -> str:
        return QUESTIONS[self.phrasing].format(a=self.a, b=self.b)

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def id(self) -> str:
        return f"sum-{self.a}-{self.b}-{self.phrasing}"

    def worked(self) -> str:
        """Ones, then tens with the carry, then the sum."""
        ones = self.a % 10 + self.b % 10
        tens = self.a // 10 + self.b // 10 + ones // 10
        return (
            f" {self.a % 10} + {self.b % 10} = {ones}, "
            f"{self.a // 10} + {self.b // 10} + {ones // 10} = {tens}, so {self.a + self.b}"
        )

    def estimate(self) -> str:
        """The sum to the nearest ten."""
        return f" about {(self.a + self.b + 5) // 10 * 10}"


def is_held_out(a: int, b: int) -> bool:
    """One pair in ten, by a mixing hash: a linear rule would hold out whole digit pairs."""
    mixed = ((a << 8 | b) * 0x9E3779B97F4A7C15) % 2**64
    mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed >> 32) % 1000 < HELD_OUT_OF_1000


def all_problems(held_out: bool) -> list[Problem]:
    """Every problem of one side, in order; both phrasings of a pair are on the same side."""
    numbers = range(LOWEST, HIGHEST + 1)
    return [
        Problem(a, b, phrasing)
        for a in numbers
        for b in numbers
        if is_held_out(a, b) == held_out
        for phrasing in range(len(QUESTIONS))
    ]


def shuffled(problems: list[Problem], seed: int) -> list[Problem]:
    """A copy in an order of `seed`'s own."""
    problems = list(problems)
    random.Random(seed).shuffle(problems)
    return problems
