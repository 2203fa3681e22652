"""Held-out prompts among the training prompts: counts against a plain oracle, limits, messages.

Not covered: near copies that share no words in a row (translations, other numbers).
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tracemalloc
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.contracts.records import Prompt
from megarl.data import overlap as overlap_module
from megarl.data.overlap import Overlap, normal, overlap_of
from megarl.data.prompts import PromptSet
from megarl.data.refusals import PromptError


def prompts(texts: list[str], file: str) -> PromptSet:
    rows = tuple(Prompt(f"{file}{n}", "s", text, (), "1") for n, text in enumerate(texts))
    return PromptSet(rows, (), {}, "x", number_of_row=range(1, len(rows) + 1), files=(file,))


def compare(train: list[str], held_out: list[str], words: int) -> Overlap:
    return overlap_of(prompts(train, "train"), prompts(held_out, "eval"), words)


def limits(**keys: float) -> Any:
    return SimpleNamespace(**{"max_overlap": 0.0, "max_ngram_overlap": 1.0} | keys)


SENTENCE = "Janet has 3 ducks and 16 eggs; how many eggs does she sell each day in May?"


@pytest.mark.parametrize(
    ("held_out", "exact", "ngram"),
    [
        (SENTENCE, 1, 1),
        (SENTENCE.upper(), 1, 1),
        ("  " + SENTENCE.replace(" ", " \n\t"), 1, 1),
        (SENTENCE.replace("eggs;", "eggs:"), 0, 1),  # another text, the same words
        ("Now " + SENTENCE + " Explain.", 0, 1),
        ("Peter" + SENTENCE.removeprefix("Janet"), 0, 1),  # 16 words, the last 15 are shared
        (SENTENCE.replace("16", "17").replace("she", "he"), 0, 0),
        ("in May?", 0, 0),  # fewer words count whole
        ("", 0, 0),
    ],
)
def test_a_text_and_its_variants(held_out, exact, ngram):
    found = compare([SENTENCE, "2 + 2"], [held_out], 13)
    assert (found.exact, found.ngram, found.held_out) == (exact, ngram, 1)


@pytest.mark.parametrize(
    ("train", "held_out", "exact", "ngram"),
    [
        ("café Straße", unicodedata.normalize("NFD", "CAFÉ STRASSE"), 1, 1),
        ("What is 2 + 2?", "what is 2 - 2", 0, 1),  # four words each, the same
        ("What is 2 + 2?", "What is 2 + 2? Say it.", 0, 0),
        ("∀ ∃", "∀  ∃", 1, 1),
        ("+", "-", 0, 0),  # no words at all
    ],
)
def test_short_texts_count_whole(train, held_out, exact, ngram):
    found = compare([train], [held_out], 13)
    assert (found.exact, found.ngram) == (exact, ngram)


def oracle(train: list[str], held_out: list[str], words: int) -> tuple[set[int], set[int]]:
    """The definition, word lists against word lists."""

    def parts(text: str) -> set[tuple[str, ...]]:
        found = re.findall(r"\w+", text.casefold())
        if len(found) < words:
            return {("whole", *found)} if found else set()
        return {tuple(found[at : at + words]) for at in range(len(found) - words + 1)}

    plain = [" ".join(text.casefold().split()) for text in train]
    exact = {row for row, text in enumerate(held_out) if " ".join(text.casefold().split()) in plain}
    there = set().union(*map(parts, train))
    return exact, exact | {row for row, text in enumerate(held_out) if parts(text) & there}


@pytest.mark.parametrize("seed", range(30))
def test_counts_are_the_definitions(seed, monkeypatch):
    """Few words, so that much is shared; blocks of a few prompts, so that their ends matter."""
    monkeypatch.setattr(overlap_module, "_BLOCK", 1 + seed % 4)
    draw = random.Random(seed)
    words = draw.randint(1, 5)

    def text() -> str:
        return " ".join(draw.choice("aAbcd+") for _ in range(draw.randint(0, 9)))

    train = [text() for _ in range(draw.randint(1, 12))]
    held_out = [text() for _ in range(draw.randint(1, 12))]
    exact, ngram = oracle(train, held_out, words)
    found = compare(train, held_out, words)
    assert (found.exact, found.ngram) == (len(exact), len(ngram))
    assert len(found.examples) == min(3, len(ngram))
    for pair in found.examples:
        row = int(re.fullmatch(r"eval:\d+ \(id eval(\d+)\)", pair.held_out)[1])
        other = int(re.fullmatch(r"train:\d+ \(id train(\d+)\)", pair.train)[1])
        exact_here, ngram_here = oracle([train[other]], [held_out[row]], words)
        assert exact_here if row in exact else ngram_here
    unsearched = compare(train, held_out, 0)
    assert (unsearched.exact, unsearched.ngram, unsearched.words) == (len(exact), 0, 0)


def test_all_that_the_user_wrote_is_compared():
    """The last messages are the same, the conversations are not."""
    rows = tuple(Prompt(f"{n}", "s", "go on", (), "1") for n in range(2))
    train = PromptSet(rows, (), {}, "x", user_texts=("tell a tale\ngo on", "sing\ngo on"))
    held_out = PromptSet(rows, (), {}, "x", user_texts=("count\ngo on", "Sing\ngo on"))
    found = overlap_of(train, held_out, 13)
    assert (found.exact, found.ngram) == (1, 1)
    assert found.examples == ((":0 (id 1)", ":0 (id 1)"),)


def test_a_share_above_its_limit_stops_with_counts_limits_and_examples():
    held_out = ["a b c", "b c d e", "x y z", "q"]
    found = compare(["A b  c", "n b c d", "X y z"], held_out, 3)
    assert (found.exact, found.ngram) == (2, 3)
    with pytest.raises(PromptError) as caught:
        found.check(limits(max_overlap=0.49))
    told = str(caught.value)
    assert "2 of 4 held-out prompts are training prompts too, word for word" in told
    assert "data.max_overlap is 0.49" in told and "\n" not in told
    assert "eval:1 (id eval0) and train:1 (id train0)" in told
    found.check(limits(max_overlap=0.5))
    found.check(limits(max_overlap=0.5, max_ngram_overlap=0.75))
    with pytest.raises(PromptError, match=r"3 of 4 .* share 3 words .*max_ngram_overlap is 0\.74:"):
        found.check(limits(max_overlap=0.5, max_ngram_overlap=0.74))
    exact, shared = found.notes()
    assert "2 of 4" in exact and "eval:3 (id eval2) and train:3 (id train2)" in exact
    assert "3 of 4 held-out prompts share 3 words in a row" in shared
    assert found.facts()["examples"][0] == {
        "held_out": "eval:1 (id eval0)",
        "train": "train:1 (id train0)",
    }


def test_a_limit_met_exactly_is_no_breach():
    """29 of 100 at 0.29, which times 100 is a little less than 29."""
    texts = [f"w{n}" for n in range(100)]
    compare(texts[:29], texts, 13).check(limits(max_overlap=0.29))


def test_nothing_in_common_is_no_word():
    found = compare(["a"], ["b"], 13)
    found.check(limits(max_ngram_overlap=0.0))
    assert found.notes() == [] and found.examples == ()


def test_every_process_finds_the_same():
    """Python's own hashes of texts differ between processes."""
    code = (
        "from tests.data.test_overlap import compare\n"
        "texts = [' '.join(str(n * k % 7) for k in range(20)) for n in range(40)]\n"
        "print(compare(texts[::2], texts[1::2], 4))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent.parent,
        env={"PYTHONHASHSEED": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    texts = [" ".join(str(n * k % 7) for k in range(20)) for n in range(40)]
    assert done.stdout.strip() == str(compare(texts[::2], texts[1::2], 4))


def test_memory_follows_the_held_out_set():
    """Training prompts with 120,000 words of their own pass by."""
    train = prompts([" ".join(f"w{n}x{k}" for k in range(40)) for n in range(3000)], "train")
    held_out = prompts([" ".join(f"w{n}x{k}" for k in range(40)) for n in range(0, 900, 9)], "eval")
    tracemalloc.start()
    try:
        found = overlap_of(train, held_out, 13)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.exact, found.ngram) == (100, 100)
    assert peak < 5 << 20


def test_what_normal_texts_have_in_common():
    assert normal("  ÀB\u00a0\n c ") == normal("àb C") == "àb c"


def test_what_all_prompts_begin_with_costs_no_more_than_the_words(monkeypatch):
    """Each of 300 held-out rows has the 20 n-grams that each of 400 training prompts has."""
    monkeypatch.setattr(overlap_module, "_BLOCK", 50)
    head = " ".join(f"solve{n}" for n in range(32))
    train = [f"{head} a{n} b{n}" for n in range(400)]
    held_out = [f"{head} c{n} d{n}" for n in range(300)] + ["c1 d1 solve1"]
    met: list[tuple[int, int]] = []
    matches = overlap_module._NGrams._matches

    def counted(self: Any, windows: Any) -> list[tuple[int, int]]:
        met.extend(found := matches(self, windows))
        return found

    monkeypatch.setattr(overlap_module._NGrams, "_matches", counted)
    found = compare(train, held_out, 13)
    assert (found.exact, found.ngram) == (0, 300)
    assert {pair.train for pair in found.examples} == {"train:1 (id train0)"}
    assert len(met) == 20
