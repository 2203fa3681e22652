"""What SGLang 0.5.21 does on the host with each token of a decode step, without its options.

Importing this module imports SGLang; call `megarl.platforms.prepare_sglang()` first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)


@dataclasses.dataclass(kw_only=True, frozen=True)
class PlainResults(SchedulerBatchResultProcessor):
    """Replaces the per-token bookkeeping of `SchedulerBatchResultProcessor` in decode steps.

    SGLang asks every request, for every token, about beams, grammars, speculation, reasoning,
    stop strings, hidden states and more: half as long as the step's forward on a CPU. Requests
    here (`rollout.scheduler.engine_request`) use none of it: a token is appended with its log-prob,
    and only a request that may end at it goes through SGLang's own finish and release. Whatever
    else turns up takes the stock way.
    """

    @classmethod
    def taking_over(cls, stock: SchedulerBatchResultProcessor) -> PlainResults:
        fields = dataclasses.fields(SchedulerBatchResultProcessor)
        return cls(**{field.name: getattr(stock, field.name) for field in fields})

    def process_batch_result_decode(self, batch: Any, result: Any) -> None:
        if not self._is_plain(batch, result):
            super().process_batch_result_decode(batch, result)
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()
        logits_output = result.logits_output
        ids = result.next_token_ids.tolist()
        log_probs = logits_output.next_token_logprobs.tolist()
        self.metrics_reporter.num_generated_tokens += len(ids)
        self.token_to_kv_pool_allocator.free_group_begin()
        finished = []
        for row, (request, token, log_prob) in enumerate(
            zip(batch.reqs, ids, log_probs, strict=True)
        ):
            request.output_ids.append(token)
            request.logprob.output_token_logprobs_val.append(log_prob)
            request.logprob.output_token_logprobs_idx.append(token)
            if _may_end(request, token):
                request.update_finish_state(1)
                if request.finished():
                    request.time_stats.set_last_decode_finish_time()
                    self._handle_finish_state_updated_req(
                        request, batch, result, row, logits_output
                    )
                    finished.append(request)
        self.output_streamer.stream_output(finished, batch.return_logprob)
        self.token_to_kv_pool_allocator.free_group_end()
        reporter = self.metrics_reporter
        reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
        reporter.report_decode_stats(
            result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=len(ids)
        )

    def _is_plain(self, batch: Any, result: Any) -> bool:
        return (
            batch.return_logprob
            and batch.spec_algorithm.is_none()
            and batch.mamba_track_mask_cpu is None
            and not (self.enable_overlap or self.enable_overlap_mlx)
            and result.auxiliary_host_output is None
            and result.routed_experts_output is None
            and result.indexer_topk_output is None
            and result.logits_output.customized_info is None
            and all(request.is_plain for request in batch.reqs)
        )


def mark_plain(request: Any) -> None:
    """Set `request.is_plain`, once per request: whether `PlainResults` knows all that it asks."""
    parameters = request.sampling_params
    request.is_plain = bool(
        request.return_logprob
        and request.logprob.top_logprobs_num == 0
        and request.logprob.token_ids_logprob is None
        and request.beam_group is None
        and request.grammar is None
        and request.multimodal_inputs is None
        and not request.return_sampling_mask
        and not request.return_hidden_states
        and not request.require_reasoning
        and not parameters.stop_strs
        and not parameters.stop_regex_strs
    )


def _may_end(request: Any, token: int) -> bool:
    """True where `Req.update_finish_state` could say that the request is finished."""
    parameters = request.sampling_params
    return (
        token in (parameters.stop_token_ids or ())
        or len(request.output_ids) >= parameters.max_new_tokens
        or request.to_finish is not None
        or not 0 <= token < request.vocab_size
        or (request.eos_token_ids is not None and token in request.eos_token_ids)
    )
