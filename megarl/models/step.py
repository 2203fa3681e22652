"""One optimizer step: gradients summed over micro-batches and data-parallel ranks, agreed, taken.

Losses carry global denominators (Σ weights · loss over all packs of all ranks is *the* loss), so
gradients are summed everywhere and averaged nowhere: `pipeline.py` runs forward and backward
without dividing by the number of micro-batches, and megatron's DDP scales by 1
(`calculate_per_token_loss`). Experts' gradients are summed over the ranks with the same experts:
the tokens of all others arrived through the layer itself. The optimizer is megatron's: AdamW, fp32
masters and gradients, sharded over data-parallel ranks when `distributed_optimizer` is on, one for
experts and one for all else. Weight decay leaves out biases and one-dimensional parameters (norms),
as megatron does.

Before the step all ranks tell whether their loss and gradients are finite and whether they hold
anything to learn from; a veto may look at the sums of all ranks. Then either every rank steps or
none does. The model is in training mode while it learns, and only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from megarl.algorithms.objectives import merge_sums
from megarl.data.packing import MicroBatch, ValueBatch
from megarl.models.build import ModelChunks, PackedGPT
from megarl.models.schedule import learning_rate
from megarl.platforms.megatron_patches import cpu_mode
from megarl.world import World

Veto = Callable[[Mapping[str, float]], str | None]
"""(sums of all ranks' micro-batches, merged by `merge_sums`) → why nobody steps, or None. A pure
function: every rank asks its own and must hear the same."""

LossPart = tuple[Tensor, Mapping[str, Tensor]]
"""A micro-batch's part of the loss and sums to report, both without a gradient."""

Learn = Callable[[], Sequence[LossPart]]
"""Forward and backward of a minibatch's micro-batches on this rank; tells of each on the last
pipeline stage and nothing on the others."""


class TooManySkippedSteps(RuntimeError):
    """Loss or gradients were not finite in several steps in a row."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one minibatch did. The same on every rank, but for `loss` and `sums`."""

    stepped: bool
    skipped_reason: str | None
    """Why nobody stepped: not finite (naming the ranks), an empty minibatch, or a veto."""
    grad_norm: float
    """Global L2 norm before clipping; 0 for an empty minibatch."""
    lr: float
    """The learning rate of this step, or the one a skipped step would have had."""
    loss: float
    """This rank's part of the loss; 0 before the last pipeline stage."""
    sums: dict[str, float]
    """Summed over this rank's micro-batches; names ending in `_max` are the largest of them. Empty
    before the last pipeline stage."""
    stopped: bool = False
    """Whether a veto kept everybody from a step that was fit to be taken."""


class Trainer:
    """Megatron's DDP and optimizer around one model, and the count of its steps.

    `section` is the recipe's `actor` (lr, lr_schedule, lr_warmup_steps, min_lr, betas, eps,
    weight_decay, clip_grad, distributed_optimizer, max_skipped_steps); `total_steps` ends the
    decay of the learning rate; errors name keys of `role`. The masters are made from the model's
    weights as they are.
    """

    def __init__(
        self,
        model: PackedGPT | ModelChunks,
        world: World,
        section: Any,
        total_steps: int,
        role: str = "actor",
    ) -> None:
        self.model = model
        self.world = world
        self.section = section
        self.total_steps = total_steps
        self.role = role
        self.steps = 0
        """Optimizer steps taken; what the schedule counts."""
        self.skipped_steps = 0
        """Steps refused for values that were not finite, over the whole run."""
        self.empty_minibatches = 0
        self._skipped_in_a_row = 0
        with cpu_mode():
            self.ddps = [
                DistributedDataParallel(
                    chunk.config,
                    DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True,
                        overlap_grad_reduce=False,
                        use_distributed_optimizer=section.distributed_optimizer,
                    ),
                    chunk,
                )
                for chunk in model.chunks
            ]
            """One for each of the model's chunks, in depth order."""
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=section.lr,
                    adam_beta1=section.betas[0],
                    adam_beta2=section.betas[1],
                    adam_eps=section.eps,
                    weight_decay=section.weight_decay,
                    clip_grad=section.clip_grad,
                    bf16=model.config.bf16,
                    use_distributed_optimizer=section.distributed_optimizer,
                ),
                self.ddps,
                use_gloo_process_groups=False,
            )

    @property
    def state(self) -> dict[str, int]:
        """What is counted besides the optimizer's own state."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "empty_minibatches": self.empty_minibatches,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Count on where the trainer with `state` stopped: the schedule goes on too."""
        self.steps = state["steps"]
        self.skipped_steps = state["skipped_steps"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.empty_minibatches = state["empty_minibatches"]

    def learning_rate(self) -> float:
        """The rate that the next step will have."""
        return learning_rate(
            self.steps + 1,
            lr=self.section.lr,
            schedule=self.section.lr_schedule,
            warmup_steps=self.section.lr_warmup_steps,
            total_steps=self.total_steps,
            min_lr=self.section.min_lr,
        )

    def synchronize_masters(self) -> None:
        """Take the model's parameters into the optimizer's fp32 masters.

        Call it whenever parameters were written by anything but a step; a step writes the masters
        back over them.
        """
        with cpu_mode():
            self.optimizer.reload_model_params()

    def update(
        self,
        micro_batches: Sequence[MicroBatch] | Sequence[ValueBatch],
        learn: Learn,
        veto: Veto | None = None,
    ) -> StepResult:
        """One minibatch, one optimizer step or none: `learn` runs `micro_batches`. Collective over
        all ranks, which must have the same number of them (an empty pack where there is no sample).

        `veto` is asked after the backward, on every rank with the same sums, those of all ranks,
        and only where the step could be taken. Where it gives a reason nobody steps: weights,
        moments, schedule and the counts in `state` stay as they are (`StepResult.stopped`).

        Raises `TooManySkippedSteps` on every rank at `max_skipped_steps` refusals in a row.
        """
        for ddp in self.ddps:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.train()
        try:
            parts = learn()
        finally:
            self.model.eval()
        # Read after the last backward: each number read waits for the device.
        loss = float(torch.stack([part for part, _ in parts]).double().sum()) if parts else 0.0
        sums = merge_sums([told for _, told in parts])
        with cpu_mode():
            finalize_model_grads(self.ddps)
            self.optimizer.prepare_grads()
            norm = self.optimizer.get_grad_norm()
        lr = self.learning_rate()
        weighted = any(bool(batch.weights_A.any()) for batch in micro_batches)
        reason, stopped = self._refusal(loss, norm, weighted), False
        if reason is None and veto is not None:
            reason = veto(self._sums_of_all(sums))
            stopped = reason is not None
        if reason is None:
            self._skipped_in_a_row = 0
            with cpu_mode():
                self.step(lr, norm)
        return StepResult(
            stepped=reason is None,
            skipped_reason=reason,
            grad_norm=norm,
            lr=lr,
            loss=loss,
            sums=sums,
            stopped=stopped,
        )

    def _sums_of_all(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`sums` of all data-parallel parts, each told by one rank that has them, in rank order:
        the same bits on every rank. Collective over all ranks."""
        told = self.world.gather(dict(sums) if self.world.leads_owners else None)
        return merge_sums([part for part in told if part is not None])

    def _gradients_finite(self) -> bool:
        """Of everything this rank holds: a norm leaves out the copies of other TP ranks."""
        return all(
            bool(torch.isfinite(buffer.grad_data.sum()))
            for ddp in self.ddps
            for buffer in ddp.buffers + ddp.expert_parallel_buffers
        )

    def _refusal(self, loss: float, norm: float, weighted: bool) -> str | None:
        """Why no rank can step, the same on every rank, or None. Counts refusals."""
        faults = {
            f"loss {loss}": math.isfinite(loss),
            "gradients": self._gradients_finite(),
            f"gradient norm {norm}": math.isfinite(norm),
        }
        told = [text for text, finite in faults.items() if not finite]
        reports = self.world.gather((" and ".join(told), weighted))
        bad = [f"{text} on rank {rank}" for rank, (text, _) in enumerate(reports) if text]
        if bad:
            self.skipped_steps += 1
            self._skipped_in_a_row += 1
            reason = "not finite: " + ", ".join(bad)
            if self._skipped_in_a_row >= self.section.max_skipped_steps:
                raise TooManySkippedSteps(
                    f"{self._skipped_in_a_row} steps in a row were refused (step {self.steps + 1}; "
                    f"{reason}); lower {self.role}.lr, or look at rewards and advantages; "
                    f"{self.role}.max_skipped_steps is the limit"
                )
            return reason
        if not any(weighted for _, weighted in reports):
            self.empty_minibatches += 1
            return "empty minibatch: no token has a weight"
        return None

    def step(self, lr: float, norm: float) -> None:
        """Clip to `clip_grad` (0: not at all), set the rates, step, gather the parameters."""
        for optimizer in self.optimizer.chained_optimizers:
            if self.section.clip_grad > 0 and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(
                    optimizer.get_parameters(), self.section.clip_grad, norm
                )
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.section.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.steps += 1
