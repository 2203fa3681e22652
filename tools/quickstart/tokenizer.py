"""The quickstart's tokenizer: sentencepiece BPE, trained on the task itself in 0.1 s."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

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


def train_tokenizer(folder: Path, seed: int) -> SentencePieceProcessor:
    """Write `tokenizer.model` and `tokenizer_config.json` into `folder`.

    Digits stay single, spaces stay as written, bytes stand in for unseen characters.
    """
    rng = random.Random(seed)
    problems = all_problems(held_out=False)
    lines = (
        prompt_text(problem) + (problem.worked() if rng.random() < 0.5 else problem.estimate())
        for problem in rng.choices(problems, k=LINES)
    )
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=lines,
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
