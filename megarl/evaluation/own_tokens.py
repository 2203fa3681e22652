"""The tokenizer that lies in a model folder, held against the one that an evaluation uses.

Prompts are rendered and responses decoded with model.path's tokenizer, whosever weights are
evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.contracts.template import MODEL
from megarl.contracts.tokens import PROBES, TOKENIZER_FILES, Tokens, TokensError
from megarl.evaluation.targets import OPTION, EvaluationError


@dataclass(frozen=True)
class OwnTokens:
    """What was found of a folder's own tokenizer."""

    hash: str | None
    """None where it has none, or none that can be read."""
    note: str | None
    """How it differs, in one line for a person; None where it does not."""


def own_tokens(folder: Path, used: Tokens, template: str) -> OwnTokens:
    """The tokenizer in `folder` against `used`; `template` is the recipe's data.template.

    Raises `EvaluationError` naming the first difference where the same text is other token ids, or
    where one of them alone knows an id that is not special: the model would read another text than
    was written.
    """
    whose = f"model.path {used.folder}'s tokenizer is used"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return OwnTokens(None, f"{folder} has no tokenizer; {whose}")
    try:
        own = Tokens.load(folder)
    except TokensError as error:
        return OwnTokens(None, f"{error}; {whose}")
    if own.hash == used.hash:
        return OwnTokens(own.hash, None)
    _refuse_other_ids(folder, own, used)
    differ = []
    if template == MODEL and own.chat_template != used.chat_template:
        differ.append("another chat template")
    differ += [
        f"other {name} ({mine} against {theirs})"
        for name, mine, theirs in (
            ("ids that end a response", list(own.eos_ids), list(used.eos_ids)),
            ("ids that begin a text", _begins(own), _begins(used)),
            ("special ids", sorted(own.special_ids), sorted(used.special_ids)),
        )
        if mine != theirs
    ]
    what = " and ".join(differ or ["other tokenizer files, of the same ids,"])
    return OwnTokens(
        own.hash,
        f"{folder} has {what} than model.path {used.folder}, whose own are used; to use the "
        f"folder's: model.path={folder}, without {OPTION}",
    )


def _refuse_other_ids(folder: Path, own: Tokens, used: Tokens) -> None:
    first = None
    size = min(own.vocab_size, used.vocab_size)
    for number in np.flatnonzero(own.known_ids[:size] != used.known_ids[:size]).tolist():
        one = own if own.known_ids[number] else used
        if number not in one.special_ids:
            first = f"id {number} ({one.pieces([number])[0]!r}) is in {one.folder} alone"
            break
    for text in PROBES:
        mine, theirs = own.encode(text), used.encode(text)
        if first is None and mine != theirs:
            first = f"{text!r} is {list(mine)} there and {list(theirs)} here"
    if first is not None:
        raise EvaluationError(
            f"{OPTION} {folder}: its tokenizer has other ids than model.path {used.folder}: "
            f"{first}; evaluate it as model.path={folder}, without {OPTION}"
        )


def _begins(tokens: Tokens) -> list[int]:
    return [tokens.bos_id] if tokens.adds_bos and tokens.bos_id is not None else []
