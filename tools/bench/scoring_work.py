"""What the bench of scoring gives to scorers: rows with answers, and a pool that times them."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from megarl.contracts.records import Prompt, RewardRecord
from megarl.contracts.samples import End, EndReason, Sample
from megarl.recipe.learning import RewardSection
from megarl.rewards.score import ScoringPool

OWN = "tools.bench.scoring_graders"
GROUP = 8
"""Responses to a prompt."""
WARM_UP = 16
REASONING = (
    "First we write down what is given, call the unknown x, and set up an equation from the second "
    "sentence. Moving terms to one side gives a quadratic, whose discriminant is positive. "
)
PROGRAM = "def total(numbers):\n    return sum(numbers)\n"

Row = tuple[str, str, dict[str, Any]]
"""Response, answer, the row's other keys."""


class Characters:
    """The one method of `Tokens` that scoring needs: a token is a character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@dataclass(frozen=True)
class Measured:
    """One collection."""

    seconds: float
    """From the first submission to the last record."""
    records: list[RewardRecord]


@contextmanager
def pool_of(*scorers: dict[str, Any], **keys: Any) -> Iterator[ScoringPool]:
    """A pool of real workers, all of them started."""
    section = RewardSection(scorers=list(scorers), **{"max_error_share": 1.0} | keys)
    pool = ScoringPool(section, Characters())
    try:
        yield pool
    finally:
        pool.close()


def measure(pool: ScoringPool, rows: Sequence[Row]) -> Measured:
    """Score the rows, a group of responses to each prompt."""
    made = [_sample(number, *row) for number, row in enumerate(rows)]
    began = time.perf_counter()
    for sample, prompt in made:
        pool.submit(sample, prompt)
    records = pool.collect([(sample.draw_index, sample.candidate) for sample, _ in made])
    return Measured(time.perf_counter() - began, records)


def _sample(number: int, text: str, answer: str, more: dict[str, Any]) -> tuple[Sample, Prompt]:
    ids = np.array([ord(character) for character in text], dtype=np.int32)
    draw, candidate = divmod(number, GROUP)
    sample = Sample(
        draw_index=draw,
        candidate=candidate,
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=ids,
        action_mask=np.ones(len(ids), dtype=bool),
        rollout_log_probs=np.zeros(len(ids), dtype=np.float32),
        end=End.TERMINATED,
        end_reason=EndReason.EOS,
        seed=0,
        started=0.0,
        finished=0.0,
    )
    prompt = Prompt(f"p{number}", "bench", "What is x?", (1,), answer, more, reward="bench")
    return sample, prompt


def rows_of(kind: str, count: int, seed: int) -> list[Row]:
    """`count` rows for the scorer `kind`, three quarters of them right; by seed other answers."""
    draw = random.Random(f"{kind} {seed}")
    rows: list[Row] = []
    while len(rows) < count:
        row = _MAKERS.get(kind, _word)
        gold, told, wrong = row(draw)
        for candidate in range(min(GROUP, count - len(rows))):
            said = wrong if candidate % 4 == 3 else told
            rows.append((REASONING * draw.randint(2, 6) + said, gold, {}))
    return rows


def _math(draw: random.Random) -> tuple[str, str, str]:
    a, b, c = (draw.randint(2, 99) for _ in range(3))
    return draw.choice(
        [
            (rf"\frac{{{a}}}{{{b}}}", rf"So \boxed{{{a}/{b}}}.", rf"So \boxed{{{a}/{b + 1}}}."),
            (
                rf"{a}\sqrt{{{b}}}",
                rf"\boxed{{\sqrt{{{a * a * b}}}}}",
                rf"\boxed{{{a}\sqrt{{{c}0}}}}",
            ),
            (f"({a}, {a + b}]", rf"\boxed{{({a},\,{a + b}]}}", rf"\boxed{{[{a}, {a + b}]}}"),
            (f"{a * 1000 + c}", rf"\boxed{{{a},{c:03d}}}", rf"\boxed{{{a},{c + 1:03d}}}"),
            (f"{a}x^2+{b}x", rf"\boxed{{x({a}x+{b})}}", rf"\boxed{{x({a}x-{b})}}"),
        ]
    )


def _gsm8k(draw: random.Random) -> tuple[str, str, str]:
    a, b = draw.randint(2, 99), draw.randint(2, 99)
    return f"{a}*{b} = <<{a}*{b}={a * b}>>{a * b}\n#### {a * b}", f"#### {a * b}", f"#### {a + b}"


def _choice(draw: random.Random) -> tuple[str, str, str]:
    right, other = draw.sample("ABCD", 2)
    return right, f"The answer is ({right}).", f"The answer is ({other})."


def _word(draw: random.Random) -> tuple[str, str, str]:
    number = draw.randint(10, 9999)
    return str(number), f"so {number}", f"so {number + 1}"


def _code(draw: random.Random) -> tuple[str, str, str]:
    numbers = [draw.randint(0, 99) for _ in range(8)]
    cases = [{"args": [numbers[:size]], "output": sum(numbers[:size])} for size in (0, 3, 8)]
    tests = {"style": "call", "function": "total", "cases": cases}
    wrong = PROGRAM.replace("sum", "max")
    return json.dumps(tests), f"\n```python\n{PROGRAM}```", f"\n```python\n{wrong}```"


_MAKERS = {"math": _math, "gsm8k": _gsm8k, "multiple_choice": _choice, "code": _code}


def storm_rows(count: int, share: float, seed: int) -> list[Row]:
    """Rows that are right, but for `share` of each that gets stuck and that crashes its grader."""
    draw = random.Random(seed)
    bad = round(count * share)
    kinds = ["stuck"] * bad + ["crash"] * bad + ["fine"] * (count - 2 * bad)
    draw.shuffle(kinds)
    rows = []
    for kind in kinds:
        gold, told, _ = _math(draw)
        rows.append((REASONING * 3 + told, gold, {"kind": kind}))
    return rows


STATUS_OF = {"stuck": "timeout", "crash": "error", "fine": "ok"}


def account(rows: Sequence[Row], records: Sequence[RewardRecord]) -> dict[str, int]:
    """What went wrong with the records: every fine row is right, so a 0 is never one's score."""
    told = Counter(record.status.value for record in records)
    pairs = list(zip(rows, records, strict=False))
    return {
        "records_without_status": len(rows) - sum(told[name] for name in STATUS_OF.values()),
        "zeros_that_should_not_be": sum(record.total == 0.0 for record in records),
        "wrong_statuses": sum(
            STATUS_OF[more["kind"]] != record.status.value for (_, _, more), record in pairs
        ),
    }


def descendants() -> set[int]:
    """Every process below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def left_since(before: set[int], seconds: float = 5.0) -> int:
    """Processes started since `before` that do not end within so many seconds."""
    until = time.monotonic() + seconds
    while (left := descendants() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return len(left)
