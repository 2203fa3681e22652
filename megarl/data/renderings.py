"""What a template makes of rows' own texts, as far as a person should hear of it.

A row's text is trusted: it is rendered as it stands, so that special tokens that are written in it
become special ids, as a template's own do.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.contracts.records import Prompt
from megarl.contracts.tokens import Tokens
from megarl.data.refusals import PromptError

Place = Callable[[int], str]
"""Row → `file:line`."""


@dataclass
class Written:
    """What usable rows bring themselves that templates have too. Filled row by row."""

    own_system: int = 0
    """Rows that begin with a system message of their own where the recipe gives one."""
    special: int = 0
    """Rows with special tokens written in their text."""
    first_special: tuple[int, str] = (0, "")
    """The first such row, and the token."""

    def add(self, row: int, own_system: bool, special: str) -> None:
        """Count row number `row`; `special` is the first such token in it, if any."""
        self.own_system += own_system
        if special:
            self.first_special = self.first_special if self.special else (row, special)
            self.special += 1

    def notes(self, rows: int, files: str, place: Place) -> list[str]:
        """For people, of a set of `rows` rows."""
        told = []
        if self.own_system:
            told.append(
                f"{self.own_system} of {rows} rows keep their own system message, so that "
                f"system_prompt is not in them: {files}"
            )
        if self.special:
            row, token = self.first_special
            told.append(
                f"{self.special} of {rows} rows of {files} have special tokens written in their "
                f"own text, which become special ids; first {place(row)}: {token}"
            )
        return told


@dataclass(frozen=True)
class Alike:
    """Prompts of other texts than an earlier one that have its very ids."""

    count: int = 0
    example: tuple[int, int] = (0, 0)
    """Rows: the earlier one and the first of these."""

    def notes(self, rows: int, files: str, place: Place) -> list[str]:
        """For people, of a set of `rows` rows."""
        if not self.count:
            return []
        earlier, later = self.example
        return [
            f"{self.count} of {rows} prompts of {files} have the token ids of an earlier one and "
            f"another text (does the template leave a part out?); first {place(later)}, as "
            f"{place(earlier)}"
        ]


def alike(
    rows: Sequence[Prompt], texts: Sequence[str], sources: np.ndarray, place: Place, template: str
) -> Alike:
    """Prompts that differ in text, case and white space aside, and not in ids.

    `texts` and `sources` are of each row. Raises `PromptError` where all rows of a source, or of
    all sources, are the same ids and not the same text: the template leaves the question out.
    """
    first: dict[tuple[int, ...], int] = {}
    firsts = np.zeros(len(rows), np.int64)
    found: list[tuple[int, int]] = []
    for row, prompt in enumerate(rows):
        earlier = firsts[row] = first.setdefault(prompt.token_ids, row)
        if texts[earlier] != texts[row] and normal(texts[earlier]) != normal(texts[row]):
            found.append((earlier, row))
    if not found:
        return Alike()
    for these in (np.arange(len(rows)), *(np.flatnonzero(sources == at) for at in set(sources))):
        if len(set(firsts[these])) > 1:
            continue
        shown = {normal(texts[row]): int(row) for row in reversed(these)}
        if len(shown) > 1:
            one, other = sorted(shown.values())[:2]
            raise PromptError(
                f"{place(one)}, {place(other)}: different texts, and data.template ({template}) "
                f"makes the same {len(rows[one].token_ids)} tokens of these and of all "
                f"{len(these)} rows; it leaves the question out: correct it"
            )
    return Alike(len(found), found[0])


def normal(text: str) -> str:
    """What two texts have in common that differ in form, case or white space only."""
    folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    return " ".join(folded.split())


def special_tokens(tokens: Tokens) -> Callable[[str | Sequence[Mapping[str, Any]]], str]:
    """A function that tells the first special token written in a prompt; empty where none is."""
    names = tokens.pieces(sorted(tokens.special_ids))
    # Some names are no text that the tokenizer reads as the token.
    read = [name for name in names if name and tokens.special_ids & set(tokens.encode(name))]
    if not read:
        return lambda prompt: ""
    pattern = re.compile("|".join(map(re.escape, sorted(read, key=len, reverse=True))))

    def first(prompt: str | Sequence[Mapping[str, Any]]) -> str:
        texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
        return next((found[0] for text in texts if (found := pattern.search(text))), "")

    return first
