"""The quickstart's tokenizer: BPE, trained on the task itself in 0.1 s.

Sentencepiece's, or Qwen2's where transformers would read nothing else.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer

from tools.quickstart.task import Problem, all_problems

PIECES = 304
BOS, EOS = "<s>", "</s>"
LINES = 20_000

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}A: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""A question becomes "Q: …\\nA:"; the answer that follows begins with a space."""


def prompt_text(problem: Problem) -> str:
    """What the chat template makes of a problem, without BOS."""
    return f"Q: {problem.question}\nA:"


class Pieces(Protocol):
    """What is needed of a tokenizer, as sentencepiece names it."""

    def encode(self, text: str) -> list[int]: ...
    def get_piece_size(self) -> int: ...
    def bos_id(self) -> int: ...
    def eos_id(self) -> int: ...


@dataclass(frozen=True)
class Qwen2Pieces:
    """Transformers' Qwen2 tokenizer under sentencepiece's names."""

    tokenizer: Qwen2Tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def get_piece_size(self) -> int:
        return len(self.tokenizer)

    def bos_id(self) -> int:
        return self.tokenizer.bos_token_id

    def eos_id(self) -> int:
        return self.tokenizer.eos_token_id


def make_tokenizer(folder: Path, seed: int, family: str) -> Pieces:
    """Write the tokenizer's files into `folder`."""
    # transformers reads every folder of this model_type with its own class.
    return train_qwen2(folder, seed) if family == "qwen2" else train_tokenizer(folder, seed)


def train_qwen2(folder: Path, seed: int) -> Qwen2Pieces:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`: byte-level BPE, digits
    stay single."""
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    trainer = BpeTrainer(
        vocab_size=PIECES,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = Qwen2Tokenizer(vocab={BOS: 0, EOS: 1}, merges=[], **names)
    tokenizer.backend_tokenizer.train_from_iterator(_lines(seed), trainer)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return Qwen2Pieces(tokenizer)


def _lines(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    problems = all_problems(held_out=False)
    return (
        prompt_text(problem) + (problem.worked() if rng.random() < 0.5 else problem.estimate())
        for problem in rng.choices(problems, k=LINES)
    )


def train_tokenizer(folder: Path, seed: int) -> SentencePieceProcessor:
    """Write `tokenizer.model` and `tokenizer_config.json` into `folder`.

    Digits stay single, spaces stay as written, bytes stand in for unseen characters.
    """
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=_lines(seed),
        model_writer=model,
        vocab_size=PIECES,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n"],
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return SentencePieceProcessor(model_proto=model.getvalue())
