#!/usr/bin/env python3
"""Makes word problems in the style of GSM8K: `question`, and an `answer` that ends in `#### 42`.

    python tools/make_word_problems.py                       # models/word-problems-s1
    python tools/make_word_problems.py --seed 2 --train 4000 --steps 1 2

Folder: `train.jsonl`, `eval.jsonl`, and `complete.json`, written last. The same arguments give the
same bytes. A row has GSM8K's two keys, its calculator marks (`<<3*4=12>>`), and `steps`, the number
of operations. Every number of questions and answers is a whole one, none is negative. A template
with its numbers lies on one side only, whatever the names, so no held-out problem is a training
problem with another name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    ("Ada", "she"),
    ("Ben", "he"),
    ("Clara", "she"),
    ("David", "he"),
    ("Emma", "she"),
    ("Felix", "he"),
    ("Grace", "she"),
    ("Hugo", "he"),
    ("Ivy", "she"),
    ("Jonas", "he"),
    ("Lena", "she"),
    ("Marco", "he"),
    ("Nina", "she"),
    ("Oscar", "he"),
    ("Priya", "she"),
    ("Sam", "he"),
)
THINGS = ("apples", "marbles", "stickers", "pencils", "shells", "cookies", "cards", "books")
HELD_OUT_OF_1000 = 150
MOST = {"train": 20_000, "eval": 2_000}
"""Rows that the templates have different questions for."""
Numbers = Mapping[str, int]
Work = Callable[[Numbers], tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Template:
    """A kind of problem. `text` has {name}, {he}, {He}, {things} and numbers {a}, {b}, {c}."""

    text: str
    ranges: Mapping[str, tuple[int, int]]
    work: Work
    """Numbers → (operation as written, its result), the last one the answer."""


ONE_STEP = (
    Template(
        "{name} has {a} {things}. {He} finds {b} more. How many {things} does {name} have now?",
        {"a": (2, 20), "b": (2, 20)},
        lambda n: ((f"{n['a']}+{n['b']}", n["a"] + n["b"]),),
    ),
    Template(
        "{name} has {a} {things} and gives {b} of them away. How many {things} are left?",
        {"a": (12, 30), "b": (2, 11)},
        lambda n: ((f"{n['a']}-{n['b']}", n["a"] - n["b"]),),
    ),
    Template(
        "{name} fills {a} boxes with {b} {things} each. How many {things} are in the boxes?",
        {"a": (2, 9), "b": (2, 10)},
        lambda n: ((f"{n['a']}*{n['b']}", n["a"] * n["b"]),),
    ),
    Template(
        "{name} saves {a} dollars every week. How many dollars does {he} save in {b} weeks?",
        {"a": (2, 10), "b": (2, 9)},
        lambda n: ((f"{n['a']}*{n['b']}", n["a"] * n["b"]),),
    ),
    Template(
        "A shelf holds {a} {things}. {name} takes {b}. How many {things} stay on the shelf?",
        {"a": (12, 40), "b": (2, 11)},
        lambda n: ((f"{n['a']}-{n['b']}", n["a"] - n["b"]),),
    ),
    Template(
        "{name} reads {a} pages on Monday and {b} on Tuesday. How many pages is that in all?",
        {"a": (5, 30), "b": (5, 30)},
        lambda n: ((f"{n['a']}+{n['b']}", n["a"] + n["b"]),),
    ),
)
TWO_STEPS = (
    Template(
        "{name} buys {a} bags of {b} {things} and loses {c}. How many {things} are left?",
        {"a": (2, 6), "b": (4, 10), "c": (1, 7)},
        lambda n: (
            (f"{n['a']}*{n['b']}", n["a"] * n["b"]),
            (f"{n['a'] * n['b']}-{n['c']}", n["a"] * n["b"] - n["c"]),
        ),
    ),
    Template(
        "{name} has {a} {things}. {He} finds {b}, then gives {c} away. How many are left?",
        {"a": (5, 20), "b": (2, 20), "c": (1, 6)},
        lambda n: (
            (f"{n['a']}+{n['b']}", n["a"] + n["b"]),
            (f"{n['a'] + n['b']}-{n['c']}", n["a"] + n["b"] - n["c"]),
        ),
    ),
    Template(
        "A ticket costs {a} dollars and a snack {b}. {name} buys both for {c} friends. How many "
        "dollars does {he} pay?",
        {"a": (3, 12), "b": (1, 8), "c": (2, 6)},
        lambda n: (
            (f"{n['a']}+{n['b']}", n["a"] + n["b"]),
            (f"{n['a'] + n['b']}*{n['c']}", (n["a"] + n["b"]) * n["c"]),
        ),
    ),
    Template(
        "{name} shares {a} packs of {b} {things} equally among {b} children. {He} then gives each "
        "child {c} more. How many {things} does each child have?",
        {"a": (2, 9), "b": (2, 6), "c": (1, 8)},
        lambda n: (
            (f"{n['a'] * n['b']}/{n['b']}", n["a"]),
            (f"{n['a']}+{n['c']}", n["a"] + n["c"]),
        ),
    ),
)
BY_STEPS = {1: ONE_STEP, 2: TWO_STEPS}


def is_held_out(template: Template, numbers: Numbers) -> bool:
    """So many of 1000 combinations, by a hash of the template and its numbers alone."""
    told = json.dumps([template.text, sorted(numbers.items())]).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "big") % 1000 < HELD_OUT_OF_1000


def row_of(template: Template, numbers: Numbers, name: tuple[str, str], things: str) -> dict:
    """A row of the file."""
    who, he = name
    words = {"name": who, "he": he, "He": he.capitalize(), "things": things}
    work = template.work(numbers)
    lines = [f"{operation} = <<{operation}={result}>>{result}" for operation, result in work]
    return {
        "question": template.text.format(**words, **numbers),
        "answer": "\n".join([*lines, f"#### {work[-1][1]}"]),
        "steps": len(work),
    }


def problems(seed: int, steps: list[int], held_out: bool) -> Iterator[dict]:
    """Rows, each question once, their templates by chance; at most `MOST` of them are there."""
    draw = random.Random(f"{seed} {held_out}")
    templates = [template for count in steps for template in BY_STEPS[count]]
    seen: set[str] = set()
    while True:
        template = draw.choice(templates)
        numbers = {key: draw.randint(*ends) for key, ends in template.ranges.items()}
        row = row_of(template, numbers, draw.choice(NAMES), draw.choice(THINGS))
        if is_held_out(template, numbers) == held_out and row["question"] not in seen:
            seen.add(row["question"])
            yield row


def write(folder: Path, asked: Mapping) -> None:
    """Both files and `complete.json`, in a folder that appears whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        for name, held_out in (("train", False), ("eval", True)):
            rows = problems(asked["seed"], asked["steps"], held_out)
            lines = (json.dumps(next(rows)) + "\n" for _ in range(asked[name]))
            (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (temporary / "complete.json").write_text(json.dumps(asked) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_complete(folder: Path, asked: Mapping) -> bool:
    """Whether the folder holds what these arguments make."""
    marker = folder / "complete.json"
    return marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == asked


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: models/word-problems-s<seed>")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=2000, help="rows (default: 2000)")
    parser.add_argument("--eval", type=int, default=100, help="rows (default: 100)")
    parser.add_argument(
        "--steps", type=int, nargs="+", choices=list(BY_STEPS), default=[1], help="(default: 1)"
    )
    options = parser.parse_args(argv)
    for name, most in MOST.items():
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name} {getattr(options, name)}: from 1 to {most}")
    folder = options.out or Path(f"models/word-problems-s{options.seed}")
    asked = {"seed": options.seed, "steps": sorted(set(options.steps))}
    asked |= {"train": options.train, "eval": options.eval}
    if is_complete(folder, asked):
        print(f"{folder} is there")
        return 0
    write(folder, asked)
    print(f"{folder}: {options.train} problems to train on, {options.eval} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
