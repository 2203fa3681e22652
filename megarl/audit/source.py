"""What the commands about samples read of a run, besides its sealed parts: words, logs by id.

Everything is found inside the run's folder, so that one which was moved or copied tells the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.audit.earlier import before
from megarl.audit.view import RunView, open_run
from megarl.contracts.tokens import Tokens, TokensError
from megarl.observe.runfolder import TOKENIZER_FOLDER, NotARun


class NotThere(ValueError):
    """What was asked for does not exist in the run: the question is wrong, not the run."""


def open_sealed(folder: Path, before_resume: int | None = None) -> RunView:
    """`open_run`; raises `NotARun` also where no iteration is sealed, `RecipeError` for a recipe
    that cannot be read. `before_resume`: as it was before that resume of it."""
    run = open_run(folder)
    if before_resume is not None:
        run = before(run, before_resume)
    if not run.sealed:
        raise NotARun(f"{folder}: no iteration of this run is sealed (no experience/iter_*)")
    run.recipe  # noqa: B018 - read early: everything here needs it
    return run


def version_lines(run: RunView, kind: str) -> dict[str, dict[str, Any]]:
    """Version id → its line: `version` as the trainer committed it, `loaded` as the generator's
    own parameters were found to be."""
    return {line["id"]: line.told for line in run.versions if line["kind"] == kind}


def updates_of(run: RunView, iteration: int) -> Sequence[dict[str, Any]]:
    """Lines of updates.jsonl of an iteration: one where it trained, none where it did not."""
    return [line.told for line in run.updates if line["iteration"] == iteration]


@dataclass(frozen=True)
class Words:
    """Ids as text, where the tokenizer they were made with is at hand."""

    tokens: Tokens | None
    told: str
    """Where the words come from, or why there are none."""

    def text(self, ids: np.ndarray) -> str | None:
        """Decoded without special tokens; an id that the tokenizer does not know is told as such.

        None where there is no tokenizer.
        """
        if self.tokens is None:
            return None
        try:
            return self.tokens.decode(ids.tolist())
        except TokensError:
            pieces = zip(ids.tolist(), self.tokens.pieces(ids.tolist()), strict=True)
            return "".join(p for id_, p in pieces if id_ not in self.tokens.special_ids)

    def pieces(self, ids: np.ndarray) -> list[str] | None:
        """One text per id, special tokens by name; None where there is no tokenizer."""
        return None if self.tokens is None else self.tokens.pieces(ids.tolist())


def words_of(run: RunView, tokenizer_hash: str) -> Words:
    """The tokenizer that has the sealed hash: one of the run's own copies, else the model
    folder's. Resumes set aside what they went on without."""
    refused = []
    aside = [item.folder / TOKENIZER_FOLDER for item in run.resumes]
    copies = [run.root / TOKENIZER_FOLDER, *filter(Path.is_dir, aside)]
    for folder in (*copies, Path(run.recipe.model.path)):
        if not folder.is_dir():
            refused.append(f"{folder} does not exist")
            continue
        try:
            tokens = Tokens.load(folder)
        except TokensError as error:
            refused.append(str(error))
            continue
        if tokens.hash == tokenizer_hash:
            return Words(tokens, str(folder))
        refused.append(f"{folder} holds another tokenizer than the sealed {tokenizer_hash[:19]}…")
    return Words(None, f"token ids only: {'; '.join(refused)}")


def flatten(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted key → value; lists stay whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat
