"""Makes the quickstart: tokenizer, data, and a warmed-up model in Hugging Face's Llama layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from sentencepiece import SentencePieceProcessor
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.contracts.tokens import Tokens
from tools.quickstart.accuracy import accuracy
from tools.quickstart.task import Problem, all_problems, shuffled
from tools.quickstart.tokenizer import train_tokenizer
from tools.quickstart.warmup import WarmUp, warm_up


@dataclass(frozen=True)
class Built:
    """What came out."""

    parameters: int
    train_rows: int
    eval_rows: int
    greedy: float
    """Held-out accuracy, greedy decoding."""
    sampled: float
    """Held-out accuracy, sampled at temperature 1."""


def model_config(pieces: SentencePieceProcessor) -> LlamaConfig:
    """472 k parameters; heads, groups and ffn divide by tensor parallel sizes 1 and 2.

    The vocabulary is the pieces exactly (every id that can be sampled can be decoded), and half of
    the ffn is a multiple of 32, so that SGLang's CPU shards carry no padding.
    """
    return LlamaConfig(
        vocab_size=pieces.get_piece_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        # Wider than the usual 0.02, which is made for wide models: halves the steps to learn here.
        initializer_range=0.05,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=pieces.bos_id(),
        eos_token_id=pieces.eos_id(),
        pad_token_id=None,
        dtype="float32",
    )


def build(
    folder: Path, seed: int, settings: WarmUp, on_step: Callable[[int, float], None]
) -> Built:
    """Fill the empty `folder` with `model/` and `data/`; the same bytes for the same seed.

    Raises `TokensError` when transformers would read the tokenizer differently than sentencepiece.
    """
    transformers.utils.logging.disable_progress_bar()
    # One thread: two share this little work badly, and sums keep their order on any machine.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model_folder = folder / "model"
    model_folder.mkdir()
    pieces = train_tokenizer(model_folder, seed)
    model = LlamaForCausalLM(model_config(pieces))
    train = shuffled(all_problems(held_out=False), seed)
    held_out = shuffled(all_problems(held_out=True), seed)
    write_rows(folder / "data" / "train.jsonl", train)
    write_rows(folder / "data" / "eval.jsonl", held_out)
    warm_up(model, pieces, train, settings, seed, on_step)
    model.save_pretrained(model_folder)
    tokens = Tokens.load(model_folder)
    return Built(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_rows=len(train),
        eval_rows=len(held_out),
        greedy=accuracy(model, tokens, held_out, greedy=True),
        sampled=accuracy(model, tokens, held_out, greedy=False),
    )


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON row a line: id, prompt (the user's message) and answer."""
    path.parent.mkdir(exist_ok=True)
    rows = [{"id": p.id, "prompt": p.question, "answer": p.answer} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
