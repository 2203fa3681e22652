"""TRL's side: GRPOTrainer on the quickstart's model and task, timed per rollout.

Runs in TRL's own environment and imports nothing of megarl's:

    python -m torch.distributed.run --nproc_per_node N trl_run.py JOB.json
    python trl_run.py JOB.json

One iteration is one generation batch and the optimizer steps on it, as megarl counts them.
Rank 0 writes `JOB["result"]`: one row per iteration.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class ForcedLengths(LogitsProcessor):
    """Row i ends with EOS as its `lengths[i]`-th token, and not before."""

    def __init__(self, lengths: list[int], eos_id: int, vocabulary: int) -> None:
        self._last = torch.tensor(lengths) - 1
        self._eos_id = eos_id
        self._only_eos = torch.full((vocabulary,), -torch.inf)
        self._only_eos[eos_id] = 0.0
        self._made = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self._eos_id] = -torch.inf
        scores = torch.where((self._last == self._made)[:, None], self._only_eos, scores)
        self._made += 1
        return scores


class Clock(TrainerCallback):
    """Seconds of each iteration and of its stages."""

    def __init__(self, steps_per_iteration: int) -> None:
        self.rows: list[dict[str, float]] = []
        self._steps = steps_per_iteration
        self._stages: dict[str, float] = {}
        self._started = time.perf_counter()

    def timed(self, owner: Any, method: str, stage: str) -> None:
        """Add the seconds of `owner.method` to `stage`."""
        stock = getattr(owner, method)

        @wraps(stock)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = stock(*args, **kwargs)
            self.add(stage, time.perf_counter() - started)
            return result

        setattr(owner, method, clocked)

    def add(self, stage: str, amount: float) -> None:
        self._stages[stage] = self._stages.get(stage, 0.0) + amount

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps:
            return
        now = time.perf_counter()
        self.rows.append({"iteration": now - self._started} | self._stages)
        self._stages = {}
        self._started = now


def reward_function(kind: str, pattern: str) -> Callable[..., list[float]]:
    """`exact`: the quickstart's exact_match; `digits`: the share of digits, which always varies."""
    expression = re.compile(pattern)

    def exact(completions: list, completion_ids: list, answer: list, **_: Any) -> list[float]:
        rewards = []
        for completion, ids, wanted in zip(completions, completion_ids, answer, strict=True):
            matches = expression.findall(completion[0]["content"].strip())
            found = matches[-1].strip() if matches else ""
            rewards.append(float(ids[-1] == EOS and found == wanted))
        return rewards

    def digits(completions: list, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]

    return {"exact": exact, "digits": digits}[kind]


EOS = 2


def force_lengths(trainer: GRPOTrainer, lengths: list[int]) -> None:
    """Each process generates a contiguous part of the batch; give it its part of `lengths`."""
    share = len(lengths) // WORLD
    mine = lengths[RANK * share : (RANK + 1) * share]
    model = trainer.model
    stock = model.generate
    vocabulary = model.config.vocab_size

    @wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        forced = LogitsProcessorList([ForcedLengths(mine, EOS, vocabulary)])
        return stock(*args, logits_processor=forced, **kwargs)

    model.generate = generate


def settings(job: dict[str, Any]) -> GRPOConfig:
    """The quickstart's optimizer and loss under TRL's names."""
    minibatches = job["minibatches"]
    fixed = {"min_new_tokens": job["max_tokens"]} if job["fixed"] else None
    return GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=job["iterations"] * minibatches,
        per_device_train_batch_size=job["samples"] // minibatches // WORLD,
        gradient_accumulation_steps=1,
        steps_per_generation=minibatches,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        generation_kwargs=fixed,
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over the tokens of the global batch
        scale_rewards="group",
        use_transformers_continuous_batching=job.get("continuous", False),
        logging_steps=minibatches,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=job["seed"],
    )


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    lines = Path(job["data"]).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
            for row in rows
        ]
    )
    clock = Clock(job["minibatches"])
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward_function(job["reward"], job["pattern"]),
        args=settings(job),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[clock],
    )
    if job["lengths"]:
        force_lengths(trainer, job["lengths"])
    count_tokens(trainer, clock)
    clock.timed(trainer, "_generate_single_turn", "generate")
    clock.timed(trainer, "_calculate_rewards", "grade")
    clock.timed(trainer, "_generate_and_score_completions", "prepare")
    trainer.train()
    tokens = torch.tensor([row["tokens"] for row in clock.rows], dtype=torch.float64)
    if WORLD > 1:
        torch.distributed.all_reduce(tokens)
    rows = [row | {"tokens": n} for row, n in zip(clock.rows, tokens.tolist(), strict=True)]
    if RANK == 0:
        Path(job["result"]).write_text(json.dumps(rows) + "\n")
    if WORLD > 1:
        # Left to the interpreter's end, a thread of gloo's now and then aborts the process.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def count_tokens(trainer: GRPOTrainer, clock: Clock) -> None:
    """Response tokens of this process that the trainer will learn from."""
    stock = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        completion_ids, log_probs = stock(*args, **kwargs)
        clock.add("tokens", float(sum(map(len, completion_ids))))
        return completion_ids, log_probs

    trainer._generate_single_turn = counted


if __name__ == "__main__":
    main(sys.argv[1])
