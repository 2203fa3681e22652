"""The files beside a model's weights: its JSON files are JSON, its tokenizer loads and fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megarl.checkpoint.safetensors_folder import COMPANIONS
from megarl.convert.boxes import ConvertError
from megarl.convert.processes import one_line

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with none of these has no tokenizer."""
REMEDY = "repair it, or take it out of the folder"
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""How a `tokenizer.model` begins that is none of sentencepiece's."""


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZERS)


def refuse_broken_companions(folder: Path, vocab: int) -> None:
    """Raises `ConvertError` naming one of `COMPANIONS` in `folder` that is not JSON though it is
    called so, a tokenizer that its own library does not load, or a token of it that the embedding
    has no row for."""
    for name in COMPANIONS:
        path = folder / name
        if path.suffix == ".json" and path.is_file():
            told = _json(path)
            if name == "tokenizer.json":
                _refuse_other_vocabulary(path, told, vocab)
    if (folder / "tokenizer.json").is_file():
        _refuse_unloadable(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        _refuse_other_pieces(folder / "tokenizer.model", vocab)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConvertError(f"{path}: not JSON: {error}; {REMEDY}") from error


def _refuse_other_vocabulary(path: Path, tokenizer: Any, vocab: int) -> None:
    try:
        model = tokenizer.get("model") or {}
        words = model.get("vocab") or {}
        # Of a unigram model it is a list of [token, score].
        ids = words if isinstance(words, dict) else {word[0]: at for at, word in enumerate(words)}
        ids = ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        token = max(ids, key=ids.__getitem__, default=None)
        last = -1 if token is None else int(ids[token])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConvertError(f"{path}: no tokenizer: {error!r}; {REMEDY}") from error
    if last >= vocab:
        raise ConvertError(
            f"{path}: token {token!r} has id {last}, config.json has vocab_size {vocab}: "
            "tokenizer and weights are of two models"
        )


def _refuse_unloadable(path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConvertError(f"{path}: does not load: {one_line(error)}; {REMEDY}") from error


def _refuse_other_pieces(path: Path, vocab: int) -> None:
    with path.open("rb") as file:
        if _TIKTOKEN.match(file.readline()):
            return
    from sentencepiece import SentencePieceProcessor

    try:
        count = SentencePieceProcessor(model_file=str(path)).vocab_size()
    except RuntimeError as error:
        raise ConvertError(f"{path}: does not load: {one_line(error)}; {REMEDY}") from error
    if count > vocab:
        raise ConvertError(
            f"{path}: has {count} pieces, config.json has vocab_size {vocab}: "
            "tokenizer and weights are of two models"
        )
