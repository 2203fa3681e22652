"""Sections, samples and pools for scoring tests. Tokens are characters: id = code point."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from megarl.contracts.records import Prompt, RewardRecord
from megarl.contracts.samples import END_OF_REASON, EndReason, Sample
from megarl.recipe.learning import RewardSection
from megarl.rewards.score import ScoringPool

GRADERS = "tests.rewards.graders"


class Characters:
    """The one method of `Tokens` that scoring needs, for any text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(id_) for id_ in ids)


def section(*scorers: str | dict[str, Any], **keys: Any) -> RewardSection:
    named = [{"name": s} if isinstance(s, str) else s for s in scorers]
    defaults = {"workers": 1, "deadline_seconds": 20.0, "max_error_share": 1.0}
    return RewardSection(scorers=named, **defaults | keys)


def sample(text: str, draw: int = 0, candidate: int = 0, reason: EndReason = EndReason.EOS):
    ids = np.array([ord(character) for character in text], dtype=np.int32)
    return Sample(
        draw_index=draw,
        candidate=candidate,
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=ids,
        action_mask=np.ones(len(ids), dtype=bool),
        rollout_log_probs=np.zeros(len(ids), dtype=np.float32),
        end=END_OF_REASON[reason],
        end_reason=reason,
        seed=0,
        started=0.0,
        finished=0.0,
    )


def prompt(answer: str = "46", prompt_id: str = "p") -> Prompt:
    return Prompt(prompt_id, "sums", "What is 8 + 38?", (1, 2), answer, {"level": 2})


@contextmanager
def scoring(*scorers: str | dict[str, Any], **keys: Any) -> Iterator[ScoringPool]:
    pool = ScoringPool(section(*scorers, **keys), Characters())
    try:
        yield pool
    finally:
        pool.close()


def score(pool: ScoringPool, texts: Sequence[str], **keys: Any) -> list[RewardRecord]:
    """Records of `texts`, one draw each."""
    for index, text in enumerate(texts):
        pool.submit(sample(text, index), prompt(prompt_id=f"p{index}"))
    return pool.collect([(index, 0) for index in range(len(texts))], **keys)


def child_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def left_of(before: set[int], seconds: float = 5.0) -> list[str]:
    """What still runs of the processes started since `before`, by its status and command line.

    A killed process is gone a moment after it was told to, so there is some patience.
    """
    until = time.monotonic() + seconds
    while (left := child_processes() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return [_described(pid) for pid in left]


def _described(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} {process.status()} child of {process.ppid()}: {process.cmdline()}"
    except psutil.NoSuchProcess:
        return f"{pid} ended just now"


def is_running(pid: int) -> bool:
    """False also for a zombie: it runs no more, and only its parent can remove it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
