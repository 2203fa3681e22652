"""The roles of a run that are megatron models: the actor that learns, the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.pack_shape import PackShape
from megarl.data.packing import MicroBatch, Pack
from megarl.models.build import (
    ModelChunks,
    PackedGPT,
    build_model,
    initialize_mesh,
    weights_of,
)
from megarl.models.logprobs import TokenScores, token_scores
from megarl.models.pipeline import from_last_stage, run_packs
from megarl.models.step import LossPart, StepResult, Trainer
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World

Loss = Callable[[Any, MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Of a pack's `TokenScores`, or of a model with a value head its values float32 [A]: (loss, sums),
the loss already weighted so that the sum over all packs of all ranks is *the* loss, and scalars
that `merge_sums` joins over micro-batches."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Scorer:
    """A model and the one forward that all uses share: bits do not depend on who asks."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        world: World,
        model_section: Any,
        actor_section: Any,
        temperature: float,
    ) -> None:
        if temperature <= 0:
            raise ValueError(
                f"rollout.temperature={temperature}: training needs a temperature above 0"
            )
        initialize_mesh(world.mesh, world.timeout.total_seconds())
        self.spec = spec
        self.world = world
        self.temperature = temperature
        self.chunk = actor_section.logprob_chunk_tokens
        self.pack_shape = PackShape.of(
            world.mesh,
            experts=spec.moe is not None,
            sequence_parallel=actor_section.sequence_parallel,
        )
        """What packs for this role must look like; `padded` makes them so."""
        self.model: PackedGPT | ModelChunks = build_model(
            spec,
            folder,
            world.mesh,
            world.rank,
            DTYPES[model_section.dtype],
            world.device,
            actor_section.recompute,
            actor_section.sequence_parallel,
        )

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters under megatron's names, of a rank with virtual stages
        `chunk0.…`, `chunk1.…`; written in place by steps. With them the weights that are never
        trained, a router's bias."""
        return weights_of(self.model)

    def padded(self, packs: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
        """`packs[minibatch][pack]` of this rank with the lengths that the layout needs. Collective
        over all ranks."""
        return self.pack_shape.pad(packs, self.world.maximum)

    def _check_ids(self, packs: Sequence[Pack]) -> None:
        """Raises `ValueError` for a token id that the model does not have."""
        for pack in packs:
            largest = int(pack.token_ids_T.max())
            if largest >= self.spec.vocab or int(pack.token_ids_T.min()) < 0:
                raise ValueError(
                    f"a pack holds token id {largest}, the model has {self.spec.vocab}: "
                    "tokenizer and model do not belong together"
                )

    def _scores(self, hidden_TH: Tensor, pack: Pack) -> TokenScores:
        """Scores of the pack's response tokens, [A], from the last stage's hidden states; with a
        gradient where grad is enabled. Collective over the tensor-parallel group.
        """
        return token_scores(
            hidden_TH.index_select(0, pack.predictor_A),
            self.model.output_weight,
            pack.target_A,
            temperature=self.temperature,
            vocab=self.spec.vocab,
            chunk=self.chunk,
            group=self.model.pg_collection.tp,
        )

    def _values(self, hidden_TH: Tensor, pack: Pack) -> Tensor:
        """As `values`, of one pack on the last stage, with a gradient where grad is enabled."""
        return self.model.value_head(hidden_TH.index_select(0, pack.predictor_A))

    @property
    def has_values(self) -> bool:
        """Whether the model has a value head, and no output layer."""
        return self.spec.head == "value"

    @torch.no_grad()
    def log_probs(self, packs: Sequence[Pack]) -> list[TokenScores]:
        """Scores per pack, in eval mode and without grad, bit for bit those of an update's forward
        on the same packs and weights; the same on every rank that holds the packs.

        Collective over the tensor- and pipeline-parallel groups and the ranks that share experts.
        Raises `ValueError` for a token id that the model does not have, for packs of lengths that
        the layout does not take (see `padded`), and for a model with a value head.
        """
        if self.has_values:
            raise ValueError("a model with a value head has no log-probabilities")

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, TokenScores]:
            scores = self._scores(hidden_TH, packs[number])
            return scores.log_probs_A, scores

        scores = self._scored(packs, finish)
        columns = [[s.log_probs_A for s in scores], [s.entropy_A for s in scores]]
        return [TokenScores(*part) for part in self._on_every_stage(packs, columns)]

    @torch.no_grad()
    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        """float32 [A] per pack: the value of the state in which response token a was drawn, that is
        the head on the last hidden state at `pack.predictor_A`, which has seen the prompt and the
        response tokens before a, not a itself. Nothing is the value of what follows the last token.

        Otherwise as `log_probs`. Raises `ValueError` for a model without a value head.
        """
        if not self.has_values:
            raise ValueError("a model without a value head has no values")

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, Tensor]:
            values = self._values(hidden_TH, packs[number])
            return values, values

        values = self._scored(packs, finish)
        return [part for (part,) in self._on_every_stage(packs, [values])]

    def _scored(self, packs: Sequence[Pack], finish: Callable) -> list:
        self._check_ids(packs)
        self.model.eval()
        return run_packs(self.model, packs, finish, learn=False)

    def _on_every_stage(
        self, packs: Sequence[Pack], columns: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """`columns[column][pack]`, float32 [A] of the last stage, by pack; one broadcast."""
        if self.world.mesh.pp == 1:
            return list(zip(*columns, strict=True))
        none = torch.zeros(0, device=self.world.device)
        counts = [len(pack.target_A) for pack in packs]
        flat = [torch.cat([none, *column]) for column in columns]
        shared = from_last_stage(flat, sum(counts), self.world.device)
        return [part.unbind(0) for part in shared.split(counts, dim=1)]


class Actor(_Scorer):
    """The policy that learns. `folder` is the HF checkpoint; `total_steps` ends the lr decay."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        world: World,
        model_section: Any,
        actor_section: Any,
        temperature: float,
        total_steps: int,
        seed: int = 1,
    ) -> None:
        """Collective. `seed` (the recipe's) sets torch's generator, which no forward draws from."""
        super().__init__(spec, folder, world, model_section, actor_section, temperature)
        torch.manual_seed(seed)
        self.trainer = Trainer(self.model, world, actor_section, total_steps)

    @property
    def optimizer_step(self) -> int:
        """Steps taken so far: the policy version's number."""
        return self.trainer.steps

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> StepResult:
        """One optimizer step on one minibatch, or none (`StepResult.skipped_reason`).

        Collective over all ranks, each with its own packs and the same number of them. Raises
        `ValueError` as `log_probs`.
        """
        packs = [batch.pack for batch in micro_batches]
        self._check_ids(packs)

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, LossPart]:
            batch = micro_batches[number]
            outputs = self._values if self.has_values else self._scores
            value, sums = loss(outputs(hidden_TH, batch.pack), batch)
            told = {name: torch.as_tensor(part).detach() for name, part in sums.items()}
            return value, (value.detach(), told)

        return self.trainer.update(
            micro_batches, lambda: run_packs(self.model, packs, finish, learn=True)
        )

    def synchronize_masters(self) -> None:
        """After writing into `named_parameters()`: make the optimizer's masters follow."""
        self.trainer.synchronize_masters()


class Reference(_Scorer):
    """The frozen policy of a KL term: the actor's forward and bits, no optimizer, never stepped.

    Parameters keep `requires_grad`, since torch picks a matrix product by it and the bits would
    differ from the actor's; `log_probs` makes no gradient.
    """

    optimizer_step = 0
    """It stands where the actor stood before its first step, also as the policy of a run that only
    collects."""
