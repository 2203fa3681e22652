"""The stand-ins and patches around SGLang, and what they rely on in the pinned release.

Not covered: CUDA, where no stand-in is set and SGLang's triton kernel makes the same hash.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl import platforms
from megarl.platforms import cpu

RELIED_ON = {
    # Replaced or driven by `rollout/scheduler.py`.
    "sglang.srt.managers.scheduler:Scheduler.__init__": "c37d5cff",
    "sglang.srt.managers.scheduler:Scheduler.init_ipc_channels": "f53a7954",
    "sglang.srt.managers.scheduler:Scheduler.ingest_requests": "3f8ec429",
    "sglang.srt.managers.scheduler:Scheduler.event_loop_normal": "c328a45b",
    "sglang.srt.managers.scheduler:Scheduler.run_event_loop": "faae8efd",
    "sglang.srt.managers.scheduler:Scheduler.is_fully_idle": "664f8312",
    "sglang.srt.managers.scheduler:Scheduler.flush_cache": "46d57865",
    "sglang.srt.managers.scheduler:Scheduler.init_req_max_new_tokens": "ea5d8cf1",
    "sglang.srt.managers.scheduler_components.ipc_channels:SchedulerIpcChannels": "427dc679",
    "sglang.srt.managers.scheduler_components.output_streamer:"
    "SchedulerOutputStreamer.stream_output": "829bf4ca",
    "sglang.srt.managers.io_struct:TokenizedGenerateReqInput": "3e942f62",
    "sglang.srt.managers.schedule_batch:Req.update_finish_state": "e351e67c",
    "sglang.srt.managers.schedule_batch:Req._check_token_based_finish": "619a1b24",
    "sglang.srt.distributed.parallel_state:destroy_model_parallel": "7979cdd8",
    # Replaced by `platforms/sglang_patches.py`.
    "sglang.srt.distributed.parallel_state:GroupCoordinator.__init__": "c98d7d89",
    "sglang.srt.managers.tp_worker:broadcast_pyobj": "ed29d8e4",
    "sglang.srt.managers.scheduler_components.invariant_checker:"
    "create_scheduler_watchdog": "94e7ebf8",
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch": "182967d8",
    "sglang.srt.layers.sampler:Sampler.forward": "cda51917",
    "sglang.srt.layers.sampler:create_sampler": "5a60117f",
    "sglang.srt.layers.sampler:multinomial_with_seed": "5802a0ad",
    "sglang.kernels.ops.sampling.murmur_hash:murmur_hash32_kernel": "60f22453",
    "sglang.srt.layers.logits_processor:LogitsProcessor._copy_logits_to_buffer": "8d88229d",
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend": "c681bb92",
    "sglang.srt.configs.update_config:adjust_config_with_unaligned_cpu_tp": "f8191062",
    # Replaced by `platforms/sglang_experts.py`, or what gives it its numbers and its weights.
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native": "53b7e130",
    "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod.forward_cpu": "91121973",
    "sglang.srt.layers.moe.token_dispatcher.standard:StandardDispatcher.dispatch": "0feeaea0",
    "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE._load_w13": "dfb50517",
    "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE._load_w2": "972acbd2",
    "sglang.srt.runtime_context:derive_spawn_ranks": "e58cc660",
    # Where SGLang keeps to which experts it sent tokens, on the host.
    "sglang.srt.mem_cache.pool_host.common:alloc_with_host_register": "79a1586d",
    "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer": "198a1565",
    "sglang.srt.state_capturer.base:BaseTopkCapturer": "913f0848",
    "sglang.srt.layers.moe.topk:capture_routed_experts_if_allowed": "d81816f9",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts": "0a42f229",
    # Replaced by `platforms/sglang_latent.py`, or called again after weights were written.
    "sglang.srt.layers.rotary_embedding.factory:get_rope_cpu": "e4dff05b",
    "sglang.srt.layers.rotary_embedding.factory:get_rope_wrapper": "7847ad65",
    "sglang.srt.models.deepseek_common.attention_backend_handler:"
    "AttentionBackendRegistry": "798170f0",
    "sglang.srt.models.deepseek_common.deepseek_weight_loader:"
    "DeepseekV2WeightLoaderMixin.post_load_weights": "9fcce55c",
    # Log-probs of prompts.
    "sglang.srt.managers.schedule_batch:compute_extend_logprob_start_len": "c8646397",
    # Replaced by `platforms/sglang_results.py`, or what it leaves out for requests of megarl's.
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor.process_batch_result_decode": "58f0802c",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._handle_finish_state_updated_req": "1c1fdffa",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._apply_decode_logprobs": "1bfeaa5b",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._mamba_prefix_cache_update": "7ec9eb05",
    "sglang.srt.managers.scheduler:Scheduler.init_batch_result_processor": "de5d77fb",
    "sglang.srt.managers.scheduler:Scheduler._add_request_to_queue": "f75b6a4d",
    "sglang.srt.mem_cache.common:maybe_cache_unfinished_req": "7c703be9",
    "sglang.srt.mem_cache.common:release_kv_cache": "dceef436",
    # Loaded by path by `platforms/cpu.py`.
    "sglang._platform_stubs:_MockModule": "ed1a26a7",
}
"""First eight hex digits of the sha256 of each one's source in the pinned release."""


def _digests() -> dict[str, str]:
    platforms.prepare_sglang()
    found = {}
    for name in RELIED_ON:
        module, _, path = name.partition(":")
        thing = importlib.import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
        thing = inspect.unwrap(getattr(thing, "fn", thing))
        found[name] = hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:8]
    return found


@pytest.mark.dist
def test_what_is_replaced_or_relied_on_is_as_it_was(ranks) -> None:
    """After an upgrade, read each named thing again before its digest is renewed here."""
    changed = {k: v for k, v in ranks.run(1, _digests)[0].items() if RELIED_ON[k] != v}
    assert not changed


@pytest.mark.parametrize("version", ["0.5.20", "0.5.22"])
def test_another_sglang_is_refused_in_one_line(monkeypatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError) as caught:
        platforms.prepare_sglang()
    assert version in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_sglang_says_how_to_install_it(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"pip install --no-deps sglang==0\.5\.21$"):
        platforms.require_sglang()


def test_no_stand_in_is_set_where_cuda_is_available(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "install_stand_ins", lambda: pytest.fail("stand-ins were set"))
    platforms.prepare_sglang()


def _stand_ins() -> list[str]:
    platforms.prepare_sglang()
    told = []
    for call in (
        lambda: sys.modules["sgl_kernel"].rmsnorm(1),
        lambda: sys.modules["torchvision"].io.decode_jpeg(1),
        lambda: sys.modules["transformers"].AutoImageProcessor.from_pretrained("x"),
    ):
        try:
            call()
            told.append("nothing was raised")
        except (NotImplementedError, ImportError) as error:
            told.append(str(error))
    return told


@pytest.mark.dist
def test_stand_ins_hold_names_only(ranks) -> None:
    kernel, image, processor = ranks.run(1, _stand_ins)[0]
    assert "sgl_kernel.rmsnorm" in kernel
    assert "torchvision is not installed" in image and "torchvision is not installed" in processor


def _murmur3(message: bytes, seed: int = 0) -> int:
    """MurmurHash3 x86 32 bit of whole 4-byte blocks, from its published definition."""
    state, mask = seed, 0xFFFFFFFF
    for start in range(0, len(message), 4):
        key = int.from_bytes(message[start : start + 4], "little") * 0xCC9E2D51 & mask
        key = (key << 15 | key >> 17) * 0x1B873593 & mask
        state ^= key
        state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
    state ^= len(message)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def _hashes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    platforms.prepare_sglang()
    from megarl.platforms.sglang_patches import murmur_hash

    seeds = np.array([0, 1, 2**31, 2**32 + 5, 2**63 - 1, 0x0123456789ABCDEF], dtype=np.int64)
    positions = np.array([0, 7, 511, 32767, 2**31 - 1, 13], dtype=np.int64)
    return seeds, positions, murmur_hash(seeds, positions, 300)


@pytest.mark.dist
def test_the_seed_hash_is_murmur3_of_seed_position_and_column(ranks) -> None:
    assert _murmur3(b"test") == 0xBA6BD213  # published values
    assert _murmur3(b"test", 0x9747B28C) == 0x704B81DC
    seeds, positions, hashed = ranks.run(1, _hashes)[0]
    assert hashed.dtype == np.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in (0, 1, 255, 256, 299):
            message = b"".join(
                int(number).to_bytes(size, "little")
                for number, size in ((seed, 8), (position, 4), (column, 4))
            )
            assert hashed[row, column] == _murmur3(message)


def _races() -> tuple[torch.Tensor, torch.Tensor]:
    platforms.prepare_sglang()
    from megarl.platforms import sglang_patches as patches

    generator = torch.Generator().manual_seed(1)
    log_probs = torch.log_softmax(3 * torch.randn(400, 300, generator=generator), dim=-1)
    seeds = torch.randint(2**62, (400,), generator=generator)
    positions = torch.randint(4096, (400,), generator=generator)
    ours = patches.seeded_scores(log_probs, seeds, positions).argmax(dim=-1)

    def hashed(seed: torch.Tensor, position: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        rows = patches.murmur_hash(seed.view(torch.int64).numpy(), position.numpy(), len(columns))
        return torch.from_numpy(rows)

    stock = patches.sampling.murmur_hash32
    patches.sampling.murmur_hash32 = hashed
    try:
        theirs = patches.sampling.multinomial_with_seed(log_probs, seeds, positions)
    finally:
        patches.sampling.murmur_hash32 = stock
    return ours, theirs.squeeze(1)


@pytest.mark.dist
def test_the_race_draws_what_sglangs_gumbel_maximum_draws(ranks) -> None:
    ours, theirs = ranks.run(1, _races)[0]
    assert ours.tolist() == theirs.tolist()
    assert len(set(ours.tolist())) > 50


def _how(heads: int, groups: int, causal: bool) -> dict[str, Any]:
    """What SGLang's attention layer passes by name."""
    return {
        "scaling": 0.3,
        "enable_gqa": heads != groups,
        "causal": causal,
        "is_cross_attn": False,
        "sliding_window_size": None,
    }


def _attention(heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    platforms.prepare_sglang()
    from megarl.platforms.sglang_attention import BatchedAttention, TorchNativeAttnBackend

    torch.manual_seed(heads + groups)
    lengths, size = torch.tensor([1, 9, 4, 30]), 16
    table = torch.randint(200, (8, 64), dtype=torch.int32)
    table[3, 9:] = 10_000  # stale entries past a sequence's end
    rows = torch.tensor([6, 3, 0, 5])
    query = torch.randn(4, heads, size)
    keys, values = torch.randn(200, groups, size), torch.randn(200, groups, size)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(),
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        seq_lens=lengths,
        req_pool_indices=rows,
        out_cache_loc=None,
    )
    outputs = []
    for backend in (BatchedAttention(runner), TorchNativeAttnBackend(runner)):
        backend.init_forward_metadata(batch)
        output = torch.empty(4, heads, size)
        backend._run_sdpa_forward_decode(
            query,
            output,
            keys,
            values,
            table,
            rows,
            lengths,
            None,
            **_how(heads, groups, causal=False),
        )
        outputs.append(output)
    return outputs[0], outputs[1]


@pytest.mark.dist
@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (5, 1)])
def test_batched_decode_attention_is_the_loops(ranks, heads: int, groups: int) -> None:
    ours, theirs = ranks.run(1, _attention, heads, groups)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _prefill(heads: int, groups: int, lengths: list[int], prefixes: list[int]) -> list[Any]:
    """Outputs of both backends for the last tokens of prompts, and of how many loops ours ran."""
    platforms.prepare_sglang()
    from megarl.platforms.sglang_attention import BatchedAttention, TorchNativeAttnBackend

    torch.manual_seed(heads + groups)
    whole, cached, size = torch.tensor(lengths), torch.tensor(prefixes), 16
    table = torch.full((8, 64), 10_000, dtype=torch.int32)  # stale past a sequence's end
    rows = torch.tensor([6, 3, 0, 5])
    slots = torch.randperm(200, dtype=torch.int32)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length], slots = slots[:length], slots[length:]
    tokens = int((whole - cached).sum())
    query = torch.randn(tokens, heads, size)
    keys, values = torch.randn(200, groups, size), torch.randn(200, groups, size)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(),
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: False), out_cache_loc=None
    )
    loops: list[int] = []

    class Counting(TorchNativeAttnBackend):
        def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loops.append(1)
            return super()._run_sdpa_forward_extend(*args, **kwargs)

    class Ours(BatchedAttention, Counting):
        pass

    outputs = []
    for backend in (Ours(runner), TorchNativeAttnBackend(runner)):
        backend.init_forward_metadata(batch)
        output = torch.full((tokens, heads, size), torch.nan)
        backend._run_sdpa_forward_extend(
            query,
            output,
            keys,
            values,
            table,
            rows,
            whole,
            cached,
            whole - cached,
            None,
            **_how(heads, groups, causal=True),
        )
        outputs.append(output)
    return [*outputs, len(loops)]


@pytest.mark.dist
@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(
    "lengths, prefixes, loops",
    [
        ([10, 12, 9, 11], [0, 0, 0, 0], 0),
        ([1, 9, 4, 30], [0, 0, 0, 0], 1),  # more padding than prompts
        ([10, 12, 9, 11], [0, 5, 0, 0], 1),  # a prefix is there already
    ],
)
def test_batched_prefill_attention_is_the_loops(ranks, heads, groups, lengths, prefixes, loops):
    ours, theirs, looped = ranks.run(1, _prefill, heads, groups, lengths, prefixes)[0]
    assert looped == loops
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
