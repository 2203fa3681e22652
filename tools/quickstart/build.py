"""Makes the quickstart: tokenizer, data, and a warmed-up model in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megarl.contracts.tokens import Tokens
from megarl.reshard.families import FAMILIES
from tools.quickstart.accuracy import accuracy
from tools.quickstart.task import Problem, all_problems, shuffled
from tools.quickstart.tokenizer import Pieces, make_tokenizer
from tools.quickstart.warmup import WarmUp, warm_up

EXPERTS = {"num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS
    | {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    },
    "mistral": {"sliding_window": None},
    # Experts of half the width: a token meets as many weights as in a dense model.
    "mixtral": EXPERTS | {"num_local_experts": 4, "intermediate_size": 192},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": EXPERTS
    | {
        "head_dim": 32,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
        "num_experts": 4,
    },
}
"""What a family's config says beyond, or other than, the numbers of all."""


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


def model_config(pieces: Pieces, family: str = "llama") -> PreTrainedConfig:
    """472 k parameters as Llama; heads, groups and ffn divide by tensor parallel sizes 1 and 2.

    The vocabulary is the pieces exactly (every id that can be sampled can be decoded), and half of
    the ffn is a multiple of 32, so that SGLang's CPU shards carry no padding.
    """
    numbers: dict[str, Any] = dict(
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
    kind = getattr(transformers, f"{FAMILIES[family].prefix}Config")
    return kind(**numbers | MORE.get(family, {}))


def build(
    folder: Path,
    seed: int,
    settings: WarmUp,
    on_step: Callable[[int, float], None],
    family: str = "llama",
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
    pieces = make_tokenizer(model_folder, seed, family)
    model = AutoModelForCausalLM.from_config(model_config(pieces, family))
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
