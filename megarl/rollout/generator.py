"""The rollout generator: SGLang inside the rank, one policy version at a time.

A replica is a block of `rollout.tp` ranks. Its ranks call every method in step, with the same
requests, and get the same samples.

The life of a version::

    generator.wake()                           # weights have memory again, and mean nothing
    ... write generator.named_parameters() in place, verify ...
    generator.activate(version)                # flushes the prefix cache, then admits the version
    samples = generator.generate(requests, sampling, version)
    generator.sleep()                          # with rollout.release its memory is the trainer's
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.contracts.mesh import Mesh
from megarl.contracts.samples import Sample, SamplingContract
from megarl.contracts.version import PolicyVersion
from megarl.platforms import platform_of
from megarl.platforms.interface import WEIGHTS
from megarl.rollout import scheduler as engine
from megarl.rollout.collected import Collected, named
from megarl.rollout.requests import (
    Loss,
    LostGeneration,
    Request,
    assign_replicas,
    request_seed,
)
from megarl.rollout.sizes import check_divides

__all__ = [
    "Generator",
    "LostGeneration",
    "NotFlushed",
    "Request",
    "WrongVersion",
    "assign_replicas",
    "request_seed",
]

Parameters = dict[str, torch.Tensor]
ONE_TOKEN = SamplingContract(
    n=1,
    temperature=0.0,
    max_response_tokens=1,
    stop_token_ids=(),
    seed=0,
    dtype="",
    attention_backend="",
)
"""What is asked for where only the prompt is read: SGLang ends no request without a token."""


class WrongVersion(RuntimeError):
    """Generation was asked for weights that the generator does not hold."""


class NotFlushed(RuntimeError):
    """The prefix cache could not be flushed: it may hold keys and values of other weights."""


class Generator:
    """One replica's share of SGLang on this rank.

    `active` is the policy version the weights and the prefix cache belong to, or None. It is None
    after construction: whoever vouches for the loaded weights activates a version.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        rank: int,
        section: Any,
        seed: int,
        device: torch.device,
        experts: bool = False,
    ) -> None:
        """Load `folder` (an HF checkpoint) and allocate the key-value cache. Collective.

        `section` is the recipe's rollout section: tp, ep, dtype, attention_backend,
        max_total_tokens, max_running_requests, chunked_prefill_tokens, retries, release. The
        default process group must exist and have `mesh.world` ranks. No random generator of this
        process changes. `experts`: samples tell to which experts their tokens went, of a model with
        experts. Raises `ValueError` when the sizes asked for cannot be had, and where the
        model does not divide by tp and ep.
        """
        config = json.loads((Path(folder) / "config.json").read_text())
        check_divides(config, mesh.rollout_tp, section.ep, str(folder))
        self.active: PolicyVersion | None = None
        self.replica = mesh.replica(rank)
        self._section = section
        self._experts = experts
        self._device = device
        self._closed = False
        self._platform = platform_of(device.type)
        self._released: tuple[str, ...] = ()
        """What has no memory now, by SGLang's names."""
        with engine.preserved_rng(device):
            self._scheduler = engine.build_scheduler(
                Path(folder), mesh.rollout_tp, section, seed, device, experts
            )
        config = self._scheduler.model_config
        self.eos_ids = frozenset(config.hf_eos_token_id or ())
        """What the checkpoint calls end of sequence."""
        # Only the sampling contract says where a response stops.
        config.hf_eos_token_id = None
        self._model = self._scheduler.tp_worker.model_runner.model
        self._check_sizes()

    def _check_sizes(self) -> None:
        section, scheduler = self._section, self._scheduler
        problem = None
        if scheduler.max_total_num_tokens != section.max_total_tokens:
            problem = (
                f"rollout.max_total_tokens={section.max_total_tokens} does not fit: there is "
                f"memory for {scheduler.max_total_num_tokens}; lower it or free memory"
            )
        elif scheduler.max_running_requests != section.max_running_requests:
            problem = (
                f"rollout.max_running_requests={section.max_running_requests} became "
                f"{scheduler.max_running_requests} for {section.max_total_tokens} tokens of cache; "
                "lower it or raise rollout.max_total_tokens"
            )
        if problem is not None:
            self.close()
            raise ValueError(problem)

    # --- Weights and versions -----------------------------------------------------------------

    def named_parameters(self) -> Parameters:
        """SGLang's live parameters on this rank, by its own names, for writing in place.

        Fused and sharded as SGLang holds them (`qkv_proj`, `gate_up_proj`, `experts.w13_weight`).
        Tied models have no `lm_head.weight`. Call `deactivate` before the first write.
        """
        return dict(self._model.named_parameters())

    def padding(self) -> dict[str, tuple[int, int]]:
        """Local rows [first, last) of each parameter that hold no element of the checkpoint.

        SGLang pads the vocabulary; these rows are never sampled from, whatever they hold.
        """
        rows: dict[str, tuple[int, int]] = {}
        for name, module in self._model.named_modules():
            shard = getattr(module, "shard_indices", None)
            if shard is not None and shard.num_org_vocab_padding:
                rows[f"{name}.weight"] = (shard.num_org_elements, shard.num_org_elements_padded)
        return rows

    def deactivate(self) -> None:
        """Declare the weights unknown; `generate` refuses until the next `activate`."""
        self.active = None

    def flush(self) -> None:
        """Empty the prefix cache. Raises `NotFlushed` unless it is certain to be empty."""
        if not self._scheduler.flush_cache(empty_cache=False):
            self.active = None
            raise NotFlushed(
                f"replica {self.replica}: SGLang would not flush its prefix cache because requests "
                "are pending; the run must stop, stale keys and values would be reused"
            )

    def activate(self, version: PolicyVersion) -> None:
        """Flush, then admit `version`: the weights as they now lie are said to be its.

        The cache of a generator that slept comes back here, after the flush: what it held before
        is of other weights. Raises `NotFlushed`; no version is active then.
        """
        self.active = None
        if WEIGHTS in self._released:
            raise RuntimeError(f"replica {self.replica} is asleep, wake() comes before the weights")
        self.flush()
        self._scheduler.remake_derived()
        self._resume(self._released)
        self.active = version

    # --- Generation ---------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingContract,
        version: PolicyVersion,
        on_completion: Callable[[Sample], None] | None = None,
        on_loss: Callable[[Loss], None] | None = None,
        aborted: Collection[int] = (),
    ) -> list[Sample]:
        """Responses to this replica's `requests`, in their order.

        `on_completion` is called on every rank of the replica with each sample when it is
        finished, in order of completion, while others are still generated. A response that
        SGLang aborts or does not return is generated again with its seed, `rollout.retries`
        times; past these `on_loss` is called with it and the others are returned. Ids, log-probs
        and ends are the engine's; nothing is added or cut. `aborted`, of tests: rows of `requests`
        that SGLang is told to abort at every attempt.

        Raises `WrongVersion` unless `version` is active, `ValueError` for requests or sampling
        that cannot be served as asked, `LostGeneration` past the retries without `on_loss`,
        `FloatingPointError` when a log-prob is not a number.
        """
        self._check_version(version)
        self._check_requests(requests, sampling)
        collected = Collected(requests, sampling, self.eos_ids, on_completion, self._experts)
        with engine.preserved_rng(self._device):
            for _ in range(1 + self._section.retries):
                # One canonical order on all ranks of the replica: they must step together.
                missing = collected.missing()
                if not missing:
                    break
                collected.started = time.time()
                self._scheduler.drive(
                    [
                        engine.engine_request(
                            str(row), requests[row], sampling, experts=self._experts
                        )
                        for row in missing
                    ],
                    collected.accept,
                    [str(row) for row in missing if row in aborted],
                )
        losses = collected.losses()
        if losses and on_loss is None:
            told = "; ".join(map(str, losses))
            raise LostGeneration(f"lost after {1 + self._section.retries} attempts: {told}")
        for loss in losses:
            on_loss(loss)
        return collected.samples()

    def prompt_log_probs(
        self, prompts: Sequence[Sequence[int]], version: PolicyVersion
    ) -> list[np.ndarray]:
        """Log-probs of prompt tokens but the first, at temperature 1: float32 [length - 1] each.

        By the same weights, kernels and layout as `generate`, for holding a layout against another
        model; no cached prefix is used. Collective over the replica. Raises what `generate` does.
        """
        self._check_version(version)
        requests = [Request(row, 0, tuple(prompt), seed=0) for row, prompt in enumerate(prompts)]
        self._check_requests(requests, ONE_TOKEN)
        asked = [
            engine.engine_request(str(row), request, ONE_TOKEN, of_prompt=True)
            for row, request in enumerate(requests)
        ]
        finished: dict[int, np.ndarray] = {}

        def accept(request: engine.Req) -> None:
            # SGLang has none of the first token's.
            told = (request.logprob.input_token_logprobs_val or [None])[1:]
            finished[int(request.rid)] = np.array(told, dtype=np.float32)

        with engine.preserved_rng(self._device):
            self._scheduler.drive(asked, accept)
        for row, request in enumerate(requests):
            told = finished.get(row)
            if told is None or len(told) != len(request.prompt_ids) - 1:
                raise LostGeneration(f"{named(request)}: SGLang gave no log-probs of the prompt")
            if not np.isfinite(told).all():
                raise FloatingPointError(f"{named(request)}: the prompt's log-probs have no value")
        return [finished[row] for row in range(len(requests))]

    def _check_version(self, version: PolicyVersion) -> None:
        if self.active != version:
            raise WrongVersion(
                f"replica {self.replica} holds {self.active or 'no version'}, not {version}; "
                "publish the actor's weights first"
            )

    def _check_requests(self, requests: Sequence[Request], sampling: SamplingContract) -> None:
        # Greedy differs from what can be trained on by its temperature alone.
        replace(sampling, temperature=sampling.temperature or 1.0).check_trainable()
        limit = self._scheduler.max_req_len - 1 - sampling.max_response_tokens
        vocabulary = self._scheduler.model_config.vocab_size
        for request in requests:
            name = named(request)
            if not request.prompt_ids:
                raise ValueError(f"{name}: empty prompt")
            # SGLang would shorten the response, or the prompt, without saying so.
            if len(request.prompt_ids) > min(limit, self._scheduler.max_req_input_len - 1):
                raise ValueError(
                    f"{name}: {len(request.prompt_ids)} prompt tokens and "
                    f"{sampling.max_response_tokens} response tokens exceed the "
                    f"{self._scheduler.max_req_len - 1} tokens that a request may have; raise "
                    "rollout.max_total_tokens or use a model with more positions"
                )
            if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
                raise ValueError(f"{name}: prompt ids outside the vocabulary of {vocabulary}")

    # --- Residence and end --------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the device to training: no version is active and the cache is flushed.

        With `section.release` the memory of weights, cache and graphs goes back to the device
        (on a CPU nothing does, but the same calls are made). Again is harmless. Collective over
        the replica.
        """
        self.deactivate()
        self.flush()
        if self._section.release and not self._released:
            self._released = (*self._platform.cache_tags(), WEIGHTS)
            self._scheduler.release(self._released)

    def wake(self) -> None:
        """Before the first weight is written: no version is active, and weights have memory.

        They hold anything; every element must be written. `activate` brings the cache back.
        """
        self.deactivate()
        if WEIGHTS in self._released:
            self._platform.release_cached()
            self._resume((WEIGHTS,))
            parameters = self.named_parameters()
            for name, (first, last) in self.padding().items():
                # Nobody writes padding, and it goes through the output layer's product.
                parameters[name].data[first:last].zero_()

    def _resume(self, tags: tuple[str, ...]) -> None:
        if tags:
            self._scheduler.resume(tags)
            self._released = tuple(tag for tag in self._released if tag not in tags)

    def close(self) -> None:
        """Destroy SGLang's process groups and state; the default process group stays.

        Afterwards another generator can be built in this process. Idempotent.
        """
        if not self._closed:
            self._closed = True
            self.active = None
            self._model = self._scheduler = None
            engine.destroy_scheduler()
