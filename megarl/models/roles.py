"""The roles of a run that are megatron models: the actor that learns, the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.packing import MicroBatch, Pack
from megarl.models.build import PackedGPT, build_model, initialize_mesh
from megarl.models.logprobs import TokenScores, token_scores
from megarl.models.pipeline import from_last_stage, run_packs
from megarl.models.step import LossPart, StepResult, Trainer
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World

Loss = Callable[[TokenScores, MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""(loss, sums): the loss already weighted so that the sum over all packs of all ranks is *the*
loss, and scalars that `merge_sums` joins over micro-batches."""

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
        self.model: PackedGPT = build_model(
            spec,
            folder,
            world.mesh,
            world.rank,
            DTYPES[model_section.dtype],
            world.device,
            actor_section.recompute,
        )

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters under megatron's names; written in place by steps."""
        return dict(self.model.named_parameters())

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

    @torch.no_grad()
    def log_probs(self, packs: Sequence[Pack]) -> list[TokenScores]:
        """Scores per pack, in eval mode and without grad, bit for bit those of an update's forward
        on the same packs and weights; the same on every rank that holds the packs.

        Collective over the tensor- and pipeline-parallel groups. Raises `ValueError` for a token id
        that the model does not have, and for packs of several lengths in a pipeline.
        """
        self._check_ids(packs)
        self.model.eval()

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, TokenScores]:
            scores = self._scores(hidden_TH, packs[number])
            return scores.log_probs_A, scores

        scores = run_packs(self.model, packs, finish, learn=False)
        return scores if self.world.mesh.pp == 1 else self._on_every_stage(packs, scores)

    def _on_every_stage(
        self, packs: Sequence[Pack], scores: Sequence[TokenScores]
    ) -> list[TokenScores]:
        """The last stage's scores, one broadcast for all packs."""
        none = torch.zeros(0, device=self.world.device)
        log_probs = torch.cat([none, *(part.log_probs_A for part in scores)])
        entropy = torch.cat([none, *(part.entropy_A for part in scores)])
        counts = [len(pack.target_A) for pack in packs]
        shared = from_last_stage([log_probs, entropy], sum(counts), self.world.device)
        return [TokenScores(*part) for part in shared.split(counts, dim=1)]


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

        Collective over all ranks, each with its own packs and the same number of them.
        """
        packs = [batch.pack for batch in micro_batches]
        self._check_ids(packs)

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, LossPart]:
            batch = micro_batches[number]
            value, sums = loss(self._scores(hidden_TH, batch.pack), batch)
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
