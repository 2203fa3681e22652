"""Small model folders with real tokenizers, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tools.quickstart.tokenizer import PIECES, train_tokenizer

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


def write_config(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": PIECES, "eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def sentencepiece_folder(folder: Path, **config: Any) -> Path:
    """The quickstart's tokenizer and template, 304 pieces."""
    write_config(folder, **config)
    train_tokenizer(folder, seed=0)
    return folder


def character_folder(
    folder: Path, template: str | None = None, adds_bos: bool = False, bos: bool = True
) -> Path:
    """One token per character and the merge `a b` → `ab`; BOS `<s>` 0, EOS `</s>` 1."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for piece in [*CHARACTERS, "ab"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return _save(tokenizer, folder, template, len(vocabulary), bos)


def metaspace_folder(folder: Path) -> Path:
    """Words and characters with a dummy prefix: every text of its own begins with a space."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2}
    for character in CHARACTERS[1:]:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _save(tokenizer, folder, "{{ messages[0]['content'] }}", len(vocabulary), bos=True)


def _save(tokenizer: Tokenizer, folder: Path, template: str | None, size: int, bos: bool) -> Path:
    named = {"bos_token": "<s>"} if bos else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **named)
    fast.chat_template = template
    fast.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": size, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
