"""Real runs for tests: a tiny random model with the quickstart's tokenizer, real torchrun ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.warm import run_ranks

ROOT = Path(__file__).resolve().parents[2]


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "use_sliding_window": False,
}
"""Qwen3-MoE's own keys."""


def make_model(
    folder: Path, seed: int = 1, *, tied: bool = False, layers: int = 2, experts: bool = False
) -> Path:
    """A random HF folder (0.2 M parameters), Llama's or with experts Qwen3-MoE's, and prompts of
    sums beside it."""
    import torch
    import transformers

    from tools.quickstart.tokenizer import train_tokenizer

    model = folder / "model"
    model.mkdir(parents=True)
    pieces = train_tokenizer(model, seed)
    torch.manual_seed(seed)
    prefix = "Qwen3Moe" if experts else "Llama"
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=pieces.get_piece_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rope_theta=5e4,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        tie_word_embeddings=tied,
        **(EXPERTS if experts else {}),
    )
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(model)
    rows = [
        {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(10, 20)
        for b in range(10, 50)
    ]
    random.Random(seed).shuffle(rows)
    for name, part in (("eval", rows[:24]), ("train", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def settings(data: Path, runs: Path, **overrides: Any) -> list[str]:
    """Overrides of recipes/quickstart.yaml for a short run on `make_model`'s folder."""
    values = {
        "model.path": data / "model",
        "data.train": data / "train.jsonl",
        "data.eval": data / "eval.jsonl",
        "run.folder": runs,
        "run.iterations": 3,
        "rollout.prompts_per_iteration": 8,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 12,
        "rollout.max_running_requests": 32,
        "rollout.max_total_tokens": 4096,
        "eval.every": 2,
        "world.timeout_seconds": 30,
    }
    return [f"{key}={value}" for key, value in (values | overrides).items()]


@dataclass(frozen=True)
class Finished:
    """A run that ended."""

    folder: Path
    code: int
    output: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("logs/rank_*.log"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def environment() -> dict[str, str]:
    """The caller's, without what another launcher put there, and with the tests importable."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(name: str, arguments: list[str], runs: Path, timeout: float = 150) -> Finished:
    """`bash launch/grpo.sh recipes/quickstart.yaml run.name=… …`; the output is both streams."""
    arguments = ["recipes/quickstart.yaml", f"run.name={name}", *arguments]
    return start(arguments, runs / name, timeout)


def run_warm(
    name: str,
    arguments: list[str],
    runs: Path,
    timeout: float = 150,
    entry: Callable[[], int] | None = None,
    **variables: str,
) -> Finished:
    """The run that `launch` would start, by ranks whose imports are done (`tests/warm.py`)."""
    arguments = ["recipes/quickstart.yaml", f"run.name={name}", *arguments]
    given = environment() | variables
    return Finished(runs / name, *run_ranks(arguments, given, timeout, entry))


def start(arguments: list[str], folder: Path, timeout: float = 150) -> Finished:
    """`bash launch/grpo.sh …` with all its arguments; `folder` is where it will write."""
    done = subprocess.run(
        ["bash", "launch/grpo.sh", *arguments],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )
    return Finished(folder, done.returncode, done.stdout)
