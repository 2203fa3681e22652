"""The roles of a run that are megatron models: the actor and the critic, which learn, and the
reference, which does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.contracts.errors import InputError
from megarl.data.packing import MicroBatch, Pack, ValueBatch
from megarl.models.pipeline import run_packs
from megarl.models.router_loss import BalanceLoss, ExpertCounts, RouterTargets, watching
from megarl.models.scorer import DTYPES, PackValues, Scorer
from megarl.models.step import LossPart, StepResult, Trainer, Veto
from megarl.reshard.families import read_spec
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World

__all__ = ["DTYPES", "Actor", "Critic", "Learner", "Loss", "PackValues", "Reference", "Scorer"]

Loss = Callable[[Any, Any], tuple[Tensor, Mapping[str, Tensor]]]
"""(a pack's `TokenScores`, its `MicroBatch`), or of the critic (its values float32 [A], its
`ValueBatch`) → (loss, sums): the loss already weighted so that the sum over all packs of all ranks
is *the* loss, and scalars that `merge_sums` joins over micro-batches."""


class Learner(Scorer):
    """A model with an optimizer."""

    name = "actor"
    """The recipe's section; errors say it."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        world: World,
        model_section: Any,
        section: Any,
        temperature: float,
        total_steps: int,
        seed: int = 1,
        body: ModelSpec | None = None,
    ) -> None:
        """Collective. `folder` is the HF checkpoint; `section` holds layout and optimizer;
        `total_steps` ends the lr decay. `seed` (the recipe's) sets torch's generator, which no
        forward draws from. `body`: as in `build_model`."""
        super().__init__(spec, folder, world, model_section, section, temperature, body)
        torch.manual_seed(seed)
        self.trainer = Trainer(self.model, world, section, total_steps, self.name)
        if section.replay_routing:
            self.replay_routing()

    @property
    def optimizer_step(self) -> int:
        """Steps taken so far: the version's number."""
        return self.trainer.steps

    def update(
        self,
        batches: Sequence[MicroBatch] | Sequence[ValueBatch],
        loss: Loss,
        veto: Veto | None = None,
        router: RouterTargets | None = None,
    ) -> StepResult:
        """One optimizer step on one minibatch, or none (`StepResult.skipped_reason`).

        `router`: what `counting_experts` told of the minibatch; the loss that balances experts is
        then added, also to the result's, with its value in the sums as `router_aux`.

        `veto` may still refuse it, see `Trainer.update`. Collective over all ranks, each with its
        own packs and the same number of them. Raises `ValueError` as `log_probs`.
        """
        packs = [batch.pack for batch in batches]
        self._check_ids(packs)

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, LossPart]:
            batch = batches[number]
            outputs = self._values if self.has_values else self._scores
            value, sums = loss(outputs(hidden_TH, batch.pack), batch)
            told = {name: torch.as_tensor(part).detach() for name, part in sums.items()}
            return value, (value.detach(), told)

        def learn() -> list[LossPart]:
            if router is None:
                return run_packs(self.model, packs, finish, learn=True)
            balance = BalanceLoss(
                router, self.trainer.section.router_aux_loss, self.spec.moe, self.world.device
            )
            with watching(self.model, balance):
                parts = run_packs(self.model, packs, finish, learn=True)
            return balance.added_to(parts)

        return self.trainer.update(batches, learn, veto)

    def synchronize_masters(self) -> None:
        """After writing into `named_parameters()`: make the optimizer's masters follow."""
        self.trainer.synchronize_masters()


class Actor(Learner):
    """The policy that learns."""

    def _check_ids(self, packs: Sequence[Pack]) -> None:
        """Also for packs without the experts of this model that actor.replay_routing needs."""
        super()._check_ids(packs)
        if not self.trainer.section.replay_routing or self.spec.moe is None:
            return
        columns = self.spec.layers * self.spec.moe.per_token
        for pack in packs:
            experts = pack.experts_TX
            if pack.is_empty:
                continue
            if experts is None:
                raise ValueError(
                    "actor.replay_routing is true, and the samples do not tell to which experts "
                    "their tokens went: have them generated under it, or set it to false"
                )
            if experts.shape[1] != columns or int(experts.max()) >= self.spec.moe.experts:
                raise ValueError(
                    f"samples tell {experts.shape[1]} experts of a token, the largest "
                    f"{int(experts.max())}: the model has {columns} of {self.spec.moe.experts}"
                )

    @contextmanager
    def counting_experts(self, packs: Sequence[int]) -> Iterator[list[RouterTargets]]:
        """The scope in which `log_probs` scores the packs of an iteration's minibatches in order,
        `packs[minibatch]` of them on this rank. At its end the list holds what `update` needs of
        each minibatch to balance experts; it stays empty where nothing asks for that
        (actor.router_aux_loss 0, or no experts).

        Collective over all ranks. Raises as `ExpertCounts.targets`.
        """
        targets: list[RouterTargets] = []
        if self.spec.moe is None or self.trainer.section.router_aux_loss == 0:
            yield targets
            return
        counts = ExpertCounts()
        with watching(self.model, counts):
            yield targets
        targets += counts.targets(self.world, self.spec.moe, packs)


class Critic(Learner):
    """The values that learn: a model of `spec.head` "value", of any size and with its own
    optimizer, on the actor's mesh (PPO, arXiv:1707.06347).

    Megatron's process groups are the actor's, so `section` has the actor's layout.
    """

    name = "critic"

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        world: World,
        model_section: Any,
        section: Any,
        temperature: float,
        total_steps: int,
        seed: int = 1,
        fresh_head: bool = False,
    ) -> None:
        """Collective; as `Learner`. `spec` and `fresh_head` are `critic_spec`'s. With a fresh head
        `folder` holds a causal LM: its body is loaded, its output layer is not, and the head's
        weight is 0, so every value is 0 until the first step.

        Raises `InputError` naming critic.path when the mesh does not cut this model, or its folder
        does not hold it.
        """
        if spec.head != "value":
            raise InputError(f"critic.path: {folder}: the critic needs a value head")
        body = read_spec(folder) if fresh_head else None
        try:
            super().__init__(
                spec, folder, world, model_section, section, temperature, total_steps, seed, body
            )
        except ValueError as error:
            raise InputError(f"critic.path: {folder}: {error}") from error


class Reference(Scorer):
    """The frozen policy of a KL term: the actor's forward and bits, no optimizer, never stepped.

    Parameters keep `requires_grad`, since torch picks a matrix product by it and the bits would
    differ from the actor's; `log_probs` makes no gradient.
    """

    optimizer_step = 0
    """The actor's step that its weights are of: 0 until `refresh_from`, also as the policy of a run
    that only collects."""

    @torch.no_grad()
    def refresh_from(self, actor: Scorer) -> None:
        """Copy the actor's weights as they are, bit for bit, into this role's own; of one layout,
        so nothing is sent. Not collective, but every rank must do it.

        Raises `ValueError` when the two hold other parameters, `RuntimeError` while the weights of
        either are offloaded; before anything is written.
        """
        mine, theirs = self.named_parameters(), actor.named_parameters()
        for name in sorted(mine.keys() | theirs.keys()):
            told = [_kind(held.get(name)) for held in (mine, theirs)]
            if told[0] != told[1]:
                raise ValueError(
                    f"the reference cannot take the actor's weights: {name} is {told[0]} here and "
                    f"{told[1]} there; they must be models of one size and dtype"
                )
        for name, tensor in [*mine.items(), *theirs.items()]:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise RuntimeError(
                    f"{name} is in host memory: refresh the reference where it may score"
                )
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        self.optimizer_step = actor.optimizer_step


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
