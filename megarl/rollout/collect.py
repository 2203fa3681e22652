"""Rollout of one draw of prompts: requests → replicas → samples, graded while others generate.

Who generates what is a pure function of the requests, so every rank knows it without asking; seeds
depend on (run seed, iteration, prompt, candidate) alone, so samples do not depend on who did it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.contracts.records import UNKNOWN_TOKEN, Prompt, RewardRecord, RewardStatus
from megarl.contracts.samples import Sample, Samples, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.rewards.score import Failures, ScoringPool
from megarl.rollout.generator import Generator, Request, assign_replicas, request_seed
from megarl.world import World


def make_requests(
    prompts: Sequence[Prompt], sampling: SamplingContract, iteration: int
) -> list[Request]:
    """`sampling.n` requests per prompt in canonical order: (draw index, candidate)."""
    return [
        Request(
            draw_index=draw_index,
            candidate=candidate,
            prompt_ids=prompt.token_ids,
            seed=request_seed(sampling.seed, iteration, prompt.prompt_id, candidate),
        )
        for draw_index, prompt in enumerate(prompts)
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
    ) -> None:
        """`known_ids` is bool [vocabulary]. `pool` is None where this rank does not grade."""
        self._pool = pool
        self._prompts = prompts
        self._known = known_ids
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
        self._pool.submit(sample, self._prompts[sample.draw_index])
        self._submitted.append((sample.draw_index, sample.candidate))

    def collect(self) -> list[RewardRecord]:
        """All records of this rank's samples; empty where this rank does not grade."""
        if self._pool is None:
            return []
        return self._pool.collect(self._submitted, check_share=False) + self._refused

    def check_failures(self, world: World, max_share: float) -> None:
        """Collective. Raise `RewardError` on every rank when too large a share of all ranks'
        samples could not be scored."""
        mine = Failures() if self._pool is None else self._pool.failures
        sum(world.gather(mine), Failures()).check(max_share)


def rollout(
    world: World,
    generator: Generator,
    requests: Sequence[Request],
    sampling: SamplingContract,
    version: PolicyVersion,
    grading: Grading,
) -> Samples:
    """This replica's samples, the same on all its ranks, in canonical order.

    Raises `RuntimeError` when a request came back missing, doubled or under another name.
    """
    mine = assign_replicas(requests, world.mesh.replicas, sampling.max_response_tokens)
    mine = mine[world.replica]
    wanted = [requests[index] for index in mine]
    done = generator.generate(wanted, sampling, version, on_completion=grading.submit)
    expected = [(request.draw_index, request.candidate) for request in wanted]
    got = [(sample.draw_index, sample.candidate) for sample in done]
    if sorted(got) != sorted(expected):
        raise RuntimeError(
            f"replica {world.replica} asked for {len(expected)} samples and got other ones: "
            f"{sorted(set(expected) ^ set(got))[:4]} …"
        )
    return Samples.from_rows(done, version.id).canonical()
