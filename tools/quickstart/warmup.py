"""The quickstart's supervised warm-up, in plain torch on the Hugging Face model.

First only worked sums, then a mix of estimates and worked sums: the model can do the task and
prefers not to. AdamW; the rate rises, stays, and decays over the second half (worth a factor of two
in steps on this task).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tools.quickstart.task import Problem
from tools.quickstart.tokenizer import Pieces, prompt_text

IGNORED = -100


@dataclass(frozen=True)
class WarmUp:
    """Settings; the seed is not one of them."""

    steps: int = 300
    batch: int = 48
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    lr_warmup_steps: int = 50
    final_lr_share: float = 0.1
    clip_grad: float = 1.0
    mix_from: float = 0.85
    """Share of the steps after which estimates come in."""
    estimates: tuple[float, ...] = (0.88, 0.42)
    """Share of estimates in the mix, per phrasing of the question. One above and one below a half:
    sampled, a third of the answers are worked out; greedy, those to the second phrasing are."""

    def lr_at(self, step: int) -> float:
        """Linear rise, plateau until half of the steps, linear decay to `final_lr_share`."""
        rise = min(1.0, (step + 1) / self.lr_warmup_steps)
        half = self.steps / 2
        late = max(0.0, (step + 1 - half) / half)
        return self.lr * min(rise, 1.0 - (1.0 - self.final_lr_share) * late)


def warm_up(
    model: PreTrainedModel,
    pieces: Pieces,
    problems: Sequence[Problem],
    settings: WarmUp,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train `model` in place; the loss runs over answers and their end only.

    `on_step(step, loss)` after every step.
    """
    rng = random.Random(seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
    )
    model.train()
    for step in range(settings.steps):
        mixed = step >= settings.mix_from * settings.steps
        estimates = settings.estimates if mixed else (0.0,) * len(settings.estimates)
        ids_BT, targets_BT = _batch(rng, pieces, problems, settings.batch, estimates)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        wanted = targets_BT != IGNORED
        loss = cross_entropy(model.lm_head(hidden_BTH[wanted]), targets_BT[wanted])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        optimizer.step()
        on_step(step, loss.item())
    model.eval()


def _batch(
    rng: random.Random,
    pieces: Pieces,
    problems: Sequence[Problem],
    size: int,
    estimates: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [B, T] ids, padded on the right with EOS, and int64 [B, T] targets."""
    rows, targets = [], []
    for problem in rng.choices(problems, k=size):
        estimated = rng.random() < estimates[problem.phrasing]
        answer = problem.estimate() if estimated else problem.worked()
        prompt = [pieces.bos_id(), *pieces.encode(prompt_text(problem))]
        response = [*pieces.encode(answer), pieces.eos_id()]
        rows.append(prompt + response)
        # The token at position t is predicted where t − 1 was read.
        targets.append([IGNORED] * (len(prompt) - 1) + response)
    width = max(map(len, rows))
    eos = pieces.eos_id()
    ids_BT = torch.tensor([row + [eos] * (width - len(row)) for row in rows])
    targets_BT = torch.tensor([row + [IGNORED] * (width - len(row)) for row in targets])
    return ids_BT, targets_BT
