"""What is asked of the generator, with which seed, on which replica, and what stays lost. Pure.

Seeds and assignment are the same on every rank, and a sample is a function of weights, prompt
and seed alone, so results do not depend on replicas, batches or order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate: candidate `candidate` of the prompt drawn as `draw_index`."""

    draw_index: int
    candidate: int
    prompt_ids: tuple[int, ...]
    seed: int
    """In [0, 2^63), from `request_seed`."""


class LostGeneration(RuntimeError):
    """Responses did not come back, also after their retries."""


class LostReason(StrEnum):
    """Why a response is lost, as the ledger counts it."""

    ABORTED = "aborted"
    NOT_RETURNED = "not_returned"
    WITHOUT_LOG_PROBS = "without_log_probs"


@dataclass(frozen=True, slots=True)
class Loss:
    """A response that stayed lost after its retries."""

    draw_index: int
    candidate: int
    reason: LostReason
    told: str
    """In words, at the last attempt."""

    def __str__(self) -> str:
        return f"draw {self.draw_index} candidate {self.candidate} ({self.told})"


def request_seed(run_seed: int, iteration: int, prompt_id: str, candidate: int) -> int:
    """63 bits of sha256 over the four: the seed of one sample, unrelated to its neighbours'."""
    text = f"{run_seed}\x1f{iteration}\x1f{prompt_id}\x1f{candidate}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def assign_replicas(
    requests: Sequence[Request], replicas: int, max_response_tokens: int
) -> list[list[int]]:
    """Row numbers of `requests` per replica, each list rising; every row exactly once.

    Longest processing time first over expected tokens (prompt + `max_response_tokens`), by prompt
    group: a group goes whole to the least loaded replica, which then reuses its prefix, when
    that keeps the replica within an even share; else it is spread request by request. No load
    exceeds the mean by more than one request, and a replica gets none only when there are fewer
    requests than replicas. Pure: ties break by row.
    """
    if replicas < 1:
        raise ValueError(f"cannot assign requests to {replicas} replicas")
    groups: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(request.draw_index, []).append(row)
    cost = [len(request.prompt_ids) + max_response_tokens for request in requests]
    share = sum(cost) / replicas
    loads = [0] * replicas
    assigned: list[list[int]] = [[] for _ in range(replicas)]

    def place(rows: Sequence[int]) -> None:
        replica = min(range(replicas), key=loads.__getitem__)
        assigned[replica] += rows
        loads[replica] += sum(cost[row] for row in rows)

    left = len(cost)
    for rows in sorted(groups.values(), key=lambda rows: (-sum(cost[r] for r in rows), rows[0])):
        left -= len(rows)
        idle = sum(not held for held in assigned)
        fits = min(loads) + sum(cost[row] for row in rows) <= share
        if fits and idle - 1 <= left:  # what comes after can still busy the other idle ones
            place(rows)
        else:
            for row in rows:
                place([row])
    return [sorted(rows) for rows in assigned]
