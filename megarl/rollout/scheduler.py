"""SGLang's own Scheduler, driven inside this rank: requests in, finished requests out.

No sockets, no second process, no tokenizer. Every rank of a tensor-parallel block must submit the
same requests in the same order; each then finishes them at the same step.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.contracts.samples import SamplingContract
from megarl.platforms import platform_of, prepare_sglang
from megarl.platforms.interface import KV_CACHE
from megarl.rollout.requests import Request

prepare_sglang()  # before the first import of sglang

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.managers import scheduler as scheduling  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    AbortReq,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.scheduler_components.ipc_channels import (  # noqa: E402
    SchedulerIpcChannels,
)
from sglang.srt.managers.scheduler_components.output_streamer import (  # noqa: E402
    SchedulerOutputStreamer,
)
from sglang.srt.model_loader import weight_utils  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: E402

from megarl.platforms import sglang_patches  # noqa: E402
from megarl.platforms.sglang_results import PlainResults, mark_plain  # noqa: E402


class Outbox:
    """Takes the place of SGLang's outgoing sockets: hands finished requests to `on_finished`."""

    def __init__(self) -> None:
        self.on_finished: Callable[[Req], None] | None = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """`AbortReq` answers are dropped: the driver finds what is missing by itself."""
        if isinstance(output, Req) and self.on_finished is not None:
            self.on_finished(output)


class FinishedRequests(SchedulerOutputStreamer):
    """Replaces SGLang's streaming payloads by the finished request itself."""

    def stream_output(
        self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None
    ) -> None:
        for request in reqs:
            if request is not skip_req and request.finished() and not request.finished_output:
                request.finished_output = True
                self.send_to_detokenizer.send_output(request)


class InProcessScheduler(scheduling.Scheduler):
    """A `Scheduler` whose event loop runs until what `drive` was given is done."""

    _read_at_once = False

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        """Replaces the ZeroMQ sockets (25 to 40 file descriptors and a thread per engine)."""
        self.outbox = Outbox()
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.outbox,
            send_to_detokenizer=self.outbox,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return FinishedRequests

    def init_batch_result_processor(self) -> None:
        super().init_batch_result_processor()
        self.batch_result_processor = PlainResults.taking_over(self.batch_result_processor)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        mark_plain(req)
        req.skip_radix_cache_insert = self._read_at_once
        super()._add_request_to_queue(req, is_retracted)

    def ingest_requests(self) -> list:
        """Replaces polling the sockets: takes the inbox, and leaves the loop when idle."""
        requests, self.inbox = self.inbox, []
        if requests:
            self.process_input_requests(requests)
        elif self.is_fully_idle():
            self.gracefully_exit = True
        return requests

    def drive(
        self,
        requests: Sequence[TokenizedGenerateReqInput],
        on_finished: Callable[[Req], None],
        aborted: Sequence[str] = (),
    ) -> None:
        """Run `requests` to their ends through SGLang's own event loop.

        `on_finished` is called with each finished request at the step that finished it. Those
        named in `aborted` are told to end before they begin (SGLang compares beginnings of names).
        """
        self.inbox, self.gracefully_exit = list(requests), False
        self.inbox += [AbortReq(rid=name) for name in aborted]
        self._read_at_once = self._fit_one_prefill(requests)
        self.outbox.on_finished = on_finished
        try:
            with torch.no_grad(), self.device_module.StreamContext(self.schedule_stream):
                scheduling.dispatch_event_loop(self)
        finally:
            self.outbox.on_finished = None

    def _fit_one_prefill(self, requests: Sequence[TokenizedGenerateReqInput]) -> bool:
        """Whether all prompts are read in one step: a prefix put into the cache would then be
        found by nobody, and putting it there costs as much as sampling several tokens.
        """
        prompts = sum(len(request.input_ids) for request in requests)
        responses = sum(request.sampling_params.max_new_tokens for request in requests)
        return (
            len(requests) <= self.max_running_requests
            and prompts <= self.chunked_prefill_size
            and prompts + responses <= self.max_total_num_tokens
        )

    def abort(self, name: str) -> None:
        """Abort the running request of that name; it ends with what it has."""
        self.abort_request(AbortReq(rid=name))

    def release(self, tags: Sequence[str]) -> None:
        """Give the memory of `tags` back to the device; its contents are lost. Only when idle."""
        self.weight_updater.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=list(tags))
        )

    def resume(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` again, at its old addresses.

        Of the weights only buffers (rotary tables) come back as they were; the cache is zero.
        """
        self.weight_updater.resume_memory_occupation(
            ResumeMemoryOccupationReqInput(tags=list(tags))
        )
        if KV_CACHE in tags:
            # As SGLang made it. Attention reads slots that nobody wrote and weighs them by 0,
            # and batches that fill up a captured graph read the first row: 0 times a number that
            # is none would be none.
            self.req_to_token_pool.req_to_token.zero_()
            cache = self.token_to_kv_pool_allocator.get_kvcache()
            latent = getattr(cache, "kv_buffer", None)
            for tensor in latent or (*cache.k_buffer, *cache.v_buffer):
                tensor.zero_()

    def remake_derived(self) -> None:
        """Make again what SGLang made of the weights when it loaded them.

        Latent attention multiplies by two transposed halves of `kv_b_proj`, which are no
        parameters: whoever writes parameters in place leaves them behind.
        """
        remake = getattr(self.tp_worker.model_runner.model, "post_load_weights", None)
        if remake is not None:
            with torch.no_grad():
                remake()


def build_scheduler(
    folder: Path, tp: int, section: Any, seed: int, device: torch.device, experts: bool = False
) -> InProcessScheduler:
    """A scheduler on this rank's block of `tp` ranks of the default process group.

    Collective over the whole world. `section` is the recipe's rollout section; all sizes come
    from it, none from free memory, so that batches and bits do not vary between machines.
    `experts`: keep to which experts tokens go, for requests that ask for it.
    """
    sglang_patches.install()
    platform = platform_of(device.type)
    platform.prepare_engine(section)
    arguments = ServerArgs(
        model_path=str(folder),
        tp_size=tp,
        ep_size=section.ep,
        dtype=section.dtype,
        skip_tokenizer_init=True,
        # Else some devices keep DeepSeek's shared expert under the routed ones' names.
        disable_shared_experts_fusion=True,
        sampling_backend=sglang_patches.SAMPLING_BACKEND,
        max_total_tokens=section.max_total_tokens,
        max_running_requests=section.max_running_requests,
        chunked_prefill_size=section.chunked_prefill_tokens,
        disable_overlap_schedule=True,
        enable_return_routed_experts=experts,
        random_seed=seed % 2**31,
        log_level="error",
        **platform.engine_arguments(section),
    )
    rank = dist.get_rank() % tp
    placement = SpawnRanks(world_rank=rank, gpu_id=platform.engine_device(rank))
    publish(arguments, role="scheduler", ranks=placement)
    scheduler = None
    try:
        with sglang_patches.replica_of_world(tp), _no_progress_bars():
            scheduler = InProcessScheduler(arguments, PortArgs.init_new(arguments))
    finally:
        if scheduler is None:  # leave nothing of a failed start to the next one
            destroy_scheduler()
    platform.adapt_engine(scheduler)
    scheduler.metrics_reporter.start_scheduler_time_accounting()
    return scheduler


def destroy_scheduler() -> None:
    """Give back SGLang's process groups and global state; the default group stays."""
    parallel_state.destroy_model_parallel()
    # It leaves these two. The next engine of this process would take over the second one, and its
    # ranks would then count their process groups differently from a rank that has to make it.
    for name in ("_WORLD", "_SELF_PP"):
        group = getattr(parallel_state, name)
        if group is not None:
            group.destroy()
            setattr(parallel_state, name, None)
    reset_context()


def engine_request(
    name: str,
    request: Request,
    sampling: SamplingContract,
    of_prompt: bool = False,
    experts: bool = False,
) -> TokenizedGenerateReqInput:
    """SGLang's form of `request`, with log-probs of its output tokens, and of its prompt's.

    The prompt's are at temperature 1 and taken from the weights: no cached prefix is used.
    `experts`: also to which experts its tokens went, those of a cached prefix too.
    """
    parameters = SamplingParams(
        max_new_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        stop_token_ids=set(sampling.stop_token_ids),
        sampling_seed=request.seed,
    )
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", request.prompt_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=True,
        logprob_start_len=0 if of_prompt else -1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        return_routed_experts=experts,
    )


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leave python's, numpy's and torch's generators as they were: they are the trainer's.

    SGLang seeds all of them when it is built.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    platform = platform_of(device.type)
    on_device = platform.rng_state(device)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        platform.restore_rng(device, on_device)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """SGLang draws a bar per weight file on standard error, whatever its log level."""
    bars = weight_utils.tqdm
    weight_utils.tqdm = weight_utils.DisabledTqdm
    try:
        yield
    finally:
        weight_utils.tqdm = bars
