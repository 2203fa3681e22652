"""Held-out prompts that are training prompts too: they would measure memory.

Two counts of held-out prompts:

exact    a training prompt has the same text, after NFC, case folding and white space made one space
n-gram   `words` words in a row (`\\w+` of the case-folded text) are in a training prompt too, as in
         GPT-3's report on contamination (Brown et al. 2020, appendix C, with 13 words). A held-out
         prompt with fewer words counts where a training prompt has just these words and no others.

Of a conversation what the user wrote in all messages is compared, a line break between two: the
last message alone ("go on") is often another conversation's too, and system messages are the same
in all. Training prompts pass by once; what is held in memory is of the held-out ones alone, words
and n-grams as 64-bit numbers that are the same in every process. Scripts without spaces have few
and long "words": there the n-gram count sees little but whole prompts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from megarl.data.prompts import PromptSet
from megarl.data.refusals import PromptError
from megarl.data.renderings import normal

EXAMPLES = 3
_BLOCK = 512
"""Training prompts that are looked at together."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that a word at any place of an n-gram decides about its number."""
_WORD = re.compile(r"\w+")


class Pair(NamedTuple):
    """A held-out prompt and a training prompt, as `file:line (id …)`."""

    held_out: str
    train: str


@dataclass(frozen=True)
class Overlap:
    """How many of the `held_out` prompts are among the training prompts."""

    exact: int
    ngram: int
    """Exact ones are among them; 0 where n-grams were not looked for."""
    held_out: int
    examples: tuple[Pair, ...] = ()
    """Up to three, exact ones first."""
    words: int = 0
    """Length of the n-grams; 0: not looked for."""

    def check(self, section: Any) -> None:
        """Raise `PromptError` where a share is above its limit in the recipe's `data`."""
        for count, what, key in (
            (self.exact, "are training prompts too, word for word", "max_overlap"),
            (self.ngram, f"{self._shared} with a training prompt", "max_ngram_overlap"),
        ):
            limit = getattr(section, key)
            if count and count / self.held_out > limit:
                raise PromptError(
                    f"{count} of {self.held_out} held-out prompts {what}, data.{key} is "
                    f"{limit:g}: {self._told_examples}; take them out of data.train or data.eval, "
                    "or raise the limit"
                )

    def notes(self) -> list[str]:
        """What a person should hear of it, a line each; nothing where there is no overlap."""
        told = []
        if self.exact:
            told.append(
                f"{self.exact} of {self.held_out} held-out prompts are training prompts too, word "
                f"for word: {self._told_examples}"
            )
        if self.ngram > self.exact:
            examples = "" if self.exact else f": {self._told_examples}"
            told.append(
                f"{self.ngram} of {self.held_out} held-out prompts {self._shared} with a training "
                f"prompt{examples}"
            )
        return told

    def facts(self) -> dict[str, Any]:
        """What `data.json` says of it; plain JSON."""
        return {
            "held_out": self.held_out,
            "exact": self.exact,
            "ngram": self.ngram if self.words else None,
            "words": self.words,
            "examples": [pair._asdict() for pair in self.examples],
        }

    @property
    def _shared(self) -> str:
        return f"share {self.words} words in a row (or all of fewer)"

    @property
    def _told_examples(self) -> str:
        return "; ".join(f"{held_out} and {train}" for held_out, train in self.examples)


def overlap_of(train: PromptSet, held_out: PromptSet, words: int) -> Overlap:
    """Compare two sets; `words` 0 looks for equal texts alone. The same on every rank."""
    exact, shared = _Texts(held_out.user_texts), _NGrams(held_out.user_texts, words)
    for start in range(0, len(train), _BLOCK):
        texts = [normal(text) for text in train.user_texts[start : start + _BLOCK]]
        exact.look(texts, start)
        if words:
            shared.look(texts, start)
    pairs = shared.found | exact.found
    first = sorted(pairs, key=lambda row: (row not in exact.found, row))[:EXAMPLES]
    return Overlap(
        exact=len(exact.found),
        ngram=len(pairs) if words else 0,
        held_out=len(held_out),
        examples=tuple(Pair(_named(held_out, row), _named(train, pairs[row])) for row in first),
        words=words,
    )


def _named(prompts: PromptSet, row: int) -> str:
    return f"{prompts.place(row)} (id {prompts.rows[row].prompt_id})"


class _Texts:
    """Rows of the held-out set by their text. `found`: row → the first training row of its text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.found: dict[int, int] = {}
        self._rows: dict[bytes, list[int]] = {}
        for row, text in enumerate(texts):
            self._rows.setdefault(_digest(normal(text)), []).append(row)

    def look(self, texts: Sequence[str], start: int) -> None:
        """Training prompts from row `start` on, normalised."""
        for train, text in enumerate(texts, start):
            for row in self._rows.pop(_digest(text), ()):
                self.found[row] = train


class _NGrams:
    """The same of n-grams; a held-out text of fewer words is one n-gram, whole."""

    def __init__(self, texts: Sequence[str], words: int) -> None:
        self.found: dict[int, int] = {}
        self._words = words
        self._numbers: dict[str, int] = {}
        """Each word of the held-out set as a number, never 0; training words that it lacks are 0,
        and no n-gram with one is looked up."""
        self._short: dict[tuple[str, ...], list[int]] = {}
        if not words:
            return
        hashes, rows = [], []
        for row, text in enumerate(texts):
            found = _WORD.findall(normal(text))
            if len(found) < words:
                if found:
                    self._short.setdefault(tuple(found), []).append(row)
                continue
            for word in found:
                if word not in self._numbers:
                    self._numbers[word] = int.from_bytes(_digest(word)[:8], "little") | 1
            numbers = np.array([self._numbers[word] for word in found], np.uint64)
            own = np.unique(_windows(numbers, words))
            hashes.append(own)
            rows.append(np.full(len(own), row, np.int32))
        all_ = np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)
        order = np.argsort(all_, kind="stable")
        self._rows = np.concatenate(rows)[order] if rows else np.zeros(0, np.int32)
        self._hashes, starts = np.unique(all_[order], return_index=True)
        self._starts = np.append(starts, len(all_))
        """`_rows[_starts[i] : _starts[i + 1]]` have `_hashes[i]`."""
        self._met = np.zeros(len(self._hashes), dtype=bool)
        """Hashes that a training prompt had: later ones find no other row by them."""

    def look(self, texts: Sequence[str], start: int) -> None:
        """Training prompts from row `start` on, normalised."""
        numbers, owners = [], []
        for train, text in enumerate(texts, start):
            found = _WORD.findall(text)
            if len(found) < self._words:
                for row in self._short.pop(tuple(found), ()):
                    self.found[row] = train
                continue
            get = self._numbers.get
            numbers += [get(word, 0) for word in found]
            numbers.append(0)  # no n-gram goes over the end of a prompt
            owners += [train] * (len(found) + 1)
        if len(numbers) < self._words or not len(self._hashes):
            return
        array = np.array(numbers, np.uint64)
        foreign = np.concatenate([[0], np.cumsum(array == 0)])
        whole = np.flatnonzero(foreign[self._words :] == foreign[: -self._words])
        windows = _windows(array, self._words)[whole]
        for index, at in self._matches(windows):
            for row in self._rows[self._starts[index] : self._starts[index + 1]].tolist():
                self.found.setdefault(row, owners[whole[at]])

    def _matches(self, windows: np.ndarray) -> list[tuple[int, int]]:
        """(index of a hash, its first window) of each hash that had no match before, in the order
        of the windows. Each comes once in all, so that what all training prompts begin with costs
        no more than the rows of the held-out set that do, whatever their product is."""
        at = np.searchsorted(self._hashes, windows)
        at[at == len(self._hashes)] = 0
        hits = np.flatnonzero((self._hashes[at] == windows) & ~self._met[at])
        indices, first = np.unique(at[hits], return_index=True)
        self._met[indices] = True
        order = np.argsort(first)
        return list(zip(indices[order].tolist(), hits[first[order]].tolist(), strict=True))


def _windows(numbers: np.ndarray, words: int) -> np.ndarray:
    """uint64 [n] → uint64 [n − words + 1]: one number for every `words` of them in a row."""
    last = len(numbers) - words + 1
    total = np.zeros(last, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(words):
            total = total * _FACTOR + numbers[place : place + last]
    return total


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
