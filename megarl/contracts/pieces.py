"""Which piece of text each token id stands for, read from a model folder's tokenizer files alone.

Weaker than `Tokens`, and quick: no template, no normalizer, no transformers. It tells whether two
models mean the same by an id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.contracts.tokens import TokensError

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
VOCABULARY = "vocab.json"


@dataclass(frozen=True)
class Pieces:
    """The ids of one tokenizer."""

    file: Path
    """What the vocabulary was read from: `tokenizer.json`, else `tokenizer.model`, else
    `vocab.json`, as transformers prefers them."""
    by_id: dict[int, str]
    """With the added tokens, also those of `tokenizer_config.json` and `added_tokens.json`."""


def read_pieces(folder: Path) -> Pieces | None:
    """None for a folder without a tokenizer.

    Raises `TokensError` naming a file that is not what its name says.
    """
    for name, read in (
        (TOKENIZER_JSON, _tokenizers),
        (SENTENCEPIECE, _sentencepiece),
        (VOCABULARY, _vocabulary),
    ):
        path = Path(folder) / name
        if path.is_file():
            return Pieces(path, read(path) | _added(Path(folder), name))
    return None


def _tokenizers(path: Path) -> dict[int, str]:
    told = _json(path)
    try:
        vocab = told["model"]["vocab"]
        if isinstance(vocab, list):  # of a unigram model: (token, score), by id
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = {each["id"]: each["content"] for each in told.get("added_tokens") or ()}
        return {number: token for token, number in vocab.items()} | added
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokensError(
            f"{path}: not a tokenizer of the tokenizers library: {error!r}"
        ) from error


def _sentencepiece(path: Path) -> dict[int, str]:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError as error:
        raise TokensError(f"{path}: not a sentencepiece model") from error
    return {number: model.id_to_piece(number) for number in range(model.vocab_size())}


def _vocabulary(path: Path) -> dict[int, str]:
    try:
        return {number: token for token, number in _json(path).items()}
    except (TypeError, AttributeError) as error:
        raise TokensError(f"{path}: not a vocabulary: {error!r}") from error


def _added(folder: Path, name: str) -> dict[int, str]:
    """What is added to the vocabulary in the file `name` by files beside it."""
    found: dict[int, str] = {}
    path = folder / "added_tokens.json"
    if name != TOKENIZER_JSON and path.is_file():
        found |= _vocabulary(path)
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            decoder = _json(path).get("added_tokens_decoder") or {}
            found |= {int(number): token["content"] for number, token in decoder.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokensError(f"{path}: no added_tokens_decoder: {error!r}") from error
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokensError(f"{path}: not JSON: {error}") from error
