"""Rollout of one draw of prompts: requests → replicas → samples, graded while others generate.

Who generates what is a pure function of the requests, so every rank knows it without asking; seeds
depend on (run seed, iteration, prompt, candidate) alone, so samples do not depend on who did it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from megarl.contracts.records import UNKNOWN_TOKEN, Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import Sample, Samples, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.rewards.score import Failures, ScoringPool
from megarl.rollout.requests import (
    Loss,
    LostGeneration,
    LostReason,
    Request,
    assign_replicas,
    request_seed,
)
from megarl.world import World

if TYPE_CHECKING:  # deciding what a rollout gave takes no SGLang, whose import takes seconds
    from megarl.rollout.generator import Generator

TOLD_LOSSES = 5


def make_requests(
    prompts: Sequence[Prompt], sampling: SamplingContract, iteration: int, first_draw: int = 0
) -> list[Request]:
    """`sampling.n` requests per prompt in canonical order: (draw index, candidate). The first
    prompt has the draw index `first_draw`."""
    return [
        Request(
            draw_index=draw_index,
            candidate=candidate,
            prompt_ids=prompt.token_ids,
            seed=request_seed(sampling.seed, iteration, prompt.prompt_id, candidate),
        )
        for draw_index, prompt in enumerate(prompts, first_draw)
        for candidate in range(sampling.n)
    ]


class Grading:
    """Grades this replica's samples as they finish, on the replica's leading rank only.

    A sample with an id the tokenizer does not know is not scorable: its record is an error.
    """

    def __init__(
        self,
        pool: ScoringPool | None,
        prompts: Sequence[Prompt],
        known_ids: np.ndarray,
        first_draw: int = 0,
    ) -> None:
        """`prompts` by draw index from `first_draw` on, `known_ids` is bool [vocabulary]. `pool` is
        None where this rank does not grade."""
        self._pool = pool
        self._prompts = prompts
        self._known = known_ids
        self._first_draw = first_draw
        self.failures = Failures()
        """After `collect`: of this rank's samples."""
        self._refused: list[RewardRecord] = []
        self._submitted: list[tuple[int, int]] = []

    def submit(self, sample: Sample) -> None:
        if self._pool is None:
            return
        if not self._known[sample.response_ids].all():
            self._refused.append(
                RewardRecord(
                    draw_index=sample.draw_index,
                    candidate=sample.candidate,
                    total=None,
                    components={},
                    scorer_version=self._pool.version,
                    status=RewardStatus.ERROR,
                    detail=UNKNOWN_TOKEN,
                )
            )
            return
        self._pool.submit(sample, self._prompts[sample.draw_index - self._first_draw])
        self._submitted.append((sample.draw_index, sample.candidate))

    def collect(self) -> list[RewardRecord]:
        """All records of this rank's samples; empty where this rank does not grade."""
        if self._pool is None:
            return []
        records = self._pool.collect(self._submitted, check_share=False)
        self.failures = self._pool.failures
        return records + self._refused


def check_failures(world: World, mine: Failures, max_share: float) -> None:
    """Collective. Raise `RewardError` on every rank when too large a share of all ranks' samples
    could not be scored."""
    sum(world.gather(mine), Failures()).check(max_share)


def count_losses(
    world: World, mine: Sequence[Loss], asked: int, max_share: float
) -> dict[LostReason, int]:
    """Collective. All replicas' lost responses by reason, the same on every rank.

    `asked` are the requests of all replicas. Raises `LostGeneration` on every rank when a larger
    share of them than `max_share` is lost, naming the first ones.
    """
    parts = world.gather(list(mine) if world.leads_replica else [])
    losses = sorted(chain(*parts), key=lambda loss: (loss.draw_index, loss.candidate))
    if len(losses) > max_share * asked:
        told = "; ".join(map(str, losses[:TOLD_LOSSES]))
        more = f"; and {len(losses) - TOLD_LOSSES} more" * (len(losses) > TOLD_LOSSES)
        raise LostGeneration(
            f"{len(losses)} of {asked} responses are lost after their retries, "
            f"rollout.max_lost_share is {max_share:g}: {told}{more}"
        )
    return dict(sorted(Counter(loss.reason for loss in losses).items()))


def rollout(
    world: World,
    generator: Generator,
    requests: Sequence[Request],
    sampling: SamplingContract,
    version: PolicyVersion,
    grading: Grading,
) -> tuple[Samples, list[Loss]]:
    """This replica's samples in canonical order, and what of its requests stayed lost after the
    retries; the same on all its ranks. What the losses lead to is decided over all replicas.

    Raises `RuntimeError` when a request came back doubled, under another name or not at all.
    """
    mine = assign_replicas(requests, world.mesh.replicas, sampling.max_response_tokens)
    mine = mine[world.replica]
    wanted = [requests[index] for index in mine]
    losses: list[Loss] = []
    done = generator.generate(
        wanted,
        sampling,
        version,
        on_completion=grading.submit,
        on_loss=losses.append,
        aborted=[0] if world.board.is_losing else [],
    )
    expected = [(request.draw_index, request.candidate) for request in wanted]
    got = [(part.draw_index, part.candidate) for part in (*done, *losses)]
    if sorted(got) != sorted(expected):
        raise RuntimeError(
            f"replica {world.replica} asked for {len(expected)} samples and got other ones: "
            f"{sorted(set(expected) ^ set(got))[:4]} …"
        )
    return Samples.from_rows(done, version.id).canonical(), losses
