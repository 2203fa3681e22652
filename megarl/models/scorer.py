"""A megatron model that scores packs: what all roles share, and the one forward they all use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.data.pack_shape import PackShape
from megarl.data.packing import Pack
from megarl.models.build import (
    ModelChunks,
    PackedGPT,
    build_model,
    initialize_mesh,
    weights_of,
)
from megarl.models.logprobs import TokenScores, token_scores
from megarl.models.pipeline import from_last_stage, run_packs
from megarl.models.router_loss import RouterTargets
from megarl.models.routers import freeze_routers
from megarl.reshard.families.spec import ModelSpec
from megarl.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PackValues:
    """What a model with a value head says of one pack; float32, the same on every rank that holds
    the pack."""

    values_A: Tensor
    """V of the state in which response token a was drawn: the head on the last hidden state at
    `pack.predictor_A`, which has seen the prompt and the response tokens before a, not a itself."""
    last_S: Tensor
    """[n], one for each of `pack.rows`: the head at the sequence's own last token, which has seen
    all of it. Where a response was cut off, V of the state that its next token would be drawn in.
    """


class Scorer:
    """A model and the one forward that all uses share: bits do not depend on who asks."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        world: World,
        model_section: Any,
        actor_section: Any,
        temperature: float,
        body: ModelSpec | None = None,
    ) -> None:
        """Collective. `folder` is the HF checkpoint; `actor_section` tells layout and chunks.
        `body`: as in `build_model`."""
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
            body,
        )
        if actor_section.router == "frozen":
            freeze_routers(self.model)

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters under megatron's names, of a rank with virtual stages
        `chunk0.…`, `chunk1.…`; written in place by steps. With them the weights that are never
        trained, a router's bias."""
        return weights_of(self.model)

    def padded(self, packs: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
        """`packs[minibatch][pack]` of this rank with the lengths that the layout needs. Collective
        over all ranks."""
        return self.pack_shape.pad(packs, self.world.maximum)

    def replay_routing(self) -> None:
        """From here on tokens go to the experts that their packs name, as actor.replay_routing asks
        of the policy that generated them."""
        for chunk in self.model.chunks:
            chunk.replays = True

    @contextmanager
    def counting_experts(self, packs: Sequence[int]) -> Iterator[list[RouterTargets]]:
        """Of a role that learns no balance of its experts: the list stays empty (see `Actor`)."""
        yield []

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
        """`PackValues.values_A` on the last stage, with a gradient where grad is enabled."""
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
        the layout does not take (see `padded`), and for a model with a value head; `RuntimeError`
        naming a module that is in training mode.
        """
        if self.has_values:
            raise ValueError("a model with a value head has no log-probabilities")

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, TokenScores]:
            scores = self._scores(hidden_TH, packs[number])
            return scores.log_probs_A, scores

        scores = self._scored(packs, finish)
        columns = [[s.log_probs_A for s in scores], [s.entropy_A for s in scores]]
        counts = [len(pack.target_A) for pack in packs]
        return [TokenScores(*part) for part in self._on_every_stage(counts, columns)]

    @torch.no_grad()
    def values(self, packs: Sequence[Pack]) -> list[PackValues]:
        """Values per pack, all of one forward, `values_A` bit for bit those of an update's.

        Otherwise as `log_probs`. Raises `ValueError` for a model without a value head.
        """
        if not self.has_values:
            raise ValueError("a model without a value head has no values")

        def finish(hidden_TH: Tensor, number: int) -> tuple[Tensor, Tensor]:
            pack = packs[number]
            values_A = self._values(hidden_TH, pack)
            # A product of its own: with more rows the other's bits might not be an update's.
            last_S = self.model.value_head(hidden_TH.index_select(0, _last_tokens(pack)))
            return values_A, torch.cat([values_A, last_S])

        values = self._scored(packs, finish)
        counts = [len(pack.target_A) + len(pack.rows) for pack in packs]
        told = self._on_every_stage(counts, [values])
        return [
            PackValues(part[: len(pack.target_A)], part[len(pack.target_A) :])
            for pack, (part,) in zip(packs, told, strict=True)
        ]

    def _scored(self, packs: Sequence[Pack], finish: Callable) -> list:
        self._check_ids(packs)
        return run_packs(self.model, packs, finish, learn=False)

    def _on_every_stage(
        self, counts: Sequence[int], columns: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Tensor, ...]]:
        """`columns[column][pack]`, float32 [counts[pack]] of the last stage, by pack; one
        broadcast."""
        if self.world.mesh.pp == 1:
            return list(zip(*columns, strict=True))
        none = torch.zeros(0, device=self.world.device)
        flat = [torch.cat([none, *column]) for column in columns]
        shared = from_last_stage(flat, sum(counts), self.world.device)
        return [part.unbind(0) for part in shared.split(list(counts), dim=1)]


def _last_tokens(pack: Pack) -> Tensor:
    """int64 [n], index in T of the last token of each of `pack.rows`; padding comes after them."""
    return pack.cu_seqlens[1 : len(pack.rows) + 1].long() - 1
