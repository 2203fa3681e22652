"""Small random HF models and the numbers that generator tests share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megarl.contracts.samples import SamplingContract
from megarl.contracts.version import PolicyVersion

EOS, STOP = 2, 5
VOCABULARY = 304
"""Not a multiple of 64: SGLang pads it to 320 rows."""


def save_model(folder: Path, layout: str, seed: int, dtype: str, ffn: int) -> Path:
    """A random two-layer HF checkpoint with odd theta, eps and head size; logits of spread ~2."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 3e-6,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "rope_theta": 5e4,
    }
    torch.manual_seed(seed)
    if layout == "llama":
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
        model = transformers.Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def section(**changes: Any) -> SimpleNamespace:
    """A rollout section as the recipe gives it."""
    values: dict[str, Any] = {
        "tp": 1,
        "ep": 1,
        "dtype": "float32",
        "attention_backend": "auto",
        "max_total_tokens": 4096,
        "max_running_requests": 64,
        "chunked_prefill_tokens": 512,
        "retries": 1,
        "release": False,
    }
    return SimpleNamespace(**(values | changes))


def sampling(**changes: Any) -> SamplingContract:
    values: dict[str, Any] = {
        "n": 1,
        "temperature": 1.0,
        "max_response_tokens": 12,
        "stop_token_ids": (),
        "seed": 7,
        "dtype": "float32",
        "attention_backend": "auto",
    }
    return SamplingContract(**(values | changes))


def version(step: int = 0) -> PolicyVersion:
    return PolicyVersion("test", step, 0, f"weights{step}", "tokenizer", "config")
