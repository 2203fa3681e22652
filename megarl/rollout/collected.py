"""What one call of the generator got back from SGLang, by row of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.contracts.samples import END_OF_REASON, EndReason, Sample, SamplingContract
from megarl.rollout import scheduler as engine
from megarl.rollout.requests import Loss, LostReason, Request


class Collected:
    """Samples of one `generate`, by row of its requests."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: SamplingContract,
        eos_ids: frozenset[int],
        on_completion: Callable[[Sample], None] | None,
        experts: bool = False,
    ) -> None:
        """`experts`: every sample must come with those of its tokens."""
        self.requests = requests
        self.started = 0.0
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._on_completion = on_completion
        self._experts = experts
        self._samples: dict[int, Sample] = {}
        self._reasons: dict[int, tuple[LostReason, str]] = {}

    def missing(self) -> list[int]:
        return [row for row in range(len(self.requests)) if row not in self._samples]

    def samples(self) -> list[Sample]:
        """What came back, in the order of the requests."""
        return [self._samples[row] for row in sorted(self._samples)]

    def accept(self, finished: engine.Req) -> None:
        """Take a finished request from SGLang."""
        row = int(finished.rid)
        request = self.requests[row]
        reason, told = end_reason(finished.finished_reason.to_json(), self._eos_ids)
        if reason is EndReason.ABORT:
            self._reasons[row] = LostReason.ABORTED, told
            return
        ids = np.array(finished.output_ids_through_stop, dtype=np.int32)
        log_probs = np.array(finished.logprob.output_token_logprobs_val, dtype=np.float32)
        if not np.isfinite(log_probs).all():
            raise FloatingPointError(f"{named(request)}: the generator's log-probs have no value")
        if len(ids) != len(log_probs) or not len(ids):
            told = f"{len(ids)} ids came with {len(log_probs)} log-probs"
            self._reasons[row] = LostReason.WITHOUT_LOG_PROBS, told
            return
        sample = Sample(
            draw_index=request.draw_index,
            candidate=request.candidate,
            prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
            response_ids=ids,
            action_mask=np.ones(len(ids), dtype=np.bool_),
            rollout_log_probs=log_probs,
            end=END_OF_REASON[reason],
            end_reason=reason,
            seed=request.seed,
            started=self.started,
            finished=time.time(),
            experts=self._experts_of(finished, len(request.prompt_ids) + len(ids) - 1),
        )
        self._samples[row] = sample
        if self._on_completion is not None:
            self._on_completion(sample)

    def _experts_of(self, finished: engine.Req, read: int) -> np.ndarray:
        """int16 [read tokens, layers, k] flat; empty where nobody asked."""
        if not self._experts:
            return np.zeros(0, np.int16)
        told = finished.routed_experts
        if told is None or len(told) != read:
            raise RuntimeError(
                f"{named(self.requests[int(finished.rid)])}: SGLang read {read} tokens and told "
                f"the experts of {'none' if told is None else len(told)}"
            )
        return told.numpy().astype(np.int16).ravel()

    def losses(self) -> list[Loss]:
        """What is missing, in the order of the requests."""
        nothing = LostReason.NOT_RETURNED, "SGLang returned nothing"
        return [
            Loss(
                self.requests[row].draw_index,
                self.requests[row].candidate,
                *self._reasons.get(row, nothing),
            )
            for row in self.missing()
        ]


def end_reason(finish: Mapping[str, Any], eos_ids: frozenset[int]) -> tuple[EndReason, str]:
    """SGLang's finish reason (its JSON form) as an `EndReason`, and its words.

    Raises `ValueError` for an end that this generator never asks for.
    """
    kind = finish["type"]
    if kind == "length":
        return EndReason.MAX_TOKENS, "length"
    if kind == "abort":
        return EndReason.ABORT, str(finish["message"])
    matched = finish.get("matched")
    if kind == "stop" and isinstance(matched, int):
        return (EndReason.EOS if matched in eos_ids else EndReason.STOP), f"token {matched}"
    raise ValueError(f"SGLang ended a response in an unknown way: {dict(finish)}")


def named(request: Request) -> str:
    return f"draw {request.draw_index} candidate {request.candidate}"
