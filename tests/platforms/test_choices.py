"""What the platforms choose, held against the installed libraries.

Not covered: whether a GPU does what the CUDA choices expect; `tests/gpu` asks that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megarl.platforms import interface, platform_of, prepare_sglang
from tests.reshard.models import make_spec
from tests.rollout import tiny

MEGARL = Path(__file__).parents[2] / "megarl"


@pytest.fixture
def saver(monkeypatch) -> SimpleNamespace:
    """`torch_memory_saver` by name, whose package needs CUDA to do anything."""
    module = ModuleType("torch_memory_saver")
    module.__spec__ = SimpleNamespace(name="torch_memory_saver")
    module.torch_memory_saver = SimpleNamespace(_impl=None, hook_mode=None)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    for name in ("LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", raising=False)
    return module.torch_memory_saver


def test_only_cpu_and_cuda_are_offered() -> None:
    assert platform_of("cpu").backend == "gloo"
    assert platform_of("cuda").backend == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match="choose cpu or cuda"):
        platform_of("mps")


def test_no_other_room_asks_for_a_gpu() -> None:
    asks = re.compile(r"torch\.cuda\.(is_available|synchronize|empty_cache|get_rng|set_)")
    rooms = [path for path in MEGARL.rglob("*.py") if "platforms" not in path.parts]
    assert [path.name for path in rooms if asks.search(path.read_text())] == []


def test_the_tags_are_sglangs() -> None:
    prepare_sglang()  # before the import
    from sglang.srt import constants

    assert constants.GPU_MEMORY_TYPE_KV_CACHE == interface.KV_CACHE
    assert constants.GPU_MEMORY_TYPE_WEIGHTS == interface.WEIGHTS
    assert constants.GPU_MEMORY_TYPE_CUDA_GRAPH == interface.CUDA_GRAPH


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglang_takes_the_cuda_choices_and_keeps_them(tmp_path, dtype, release) -> None:
    prepare_sglang()  # before the import
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    folder = tiny.save_model(tmp_path / "model", "llama", 0, dtype, 192)
    section = tiny.section(dtype=dtype, release=release)
    chosen = platform_of("cuda").engine_arguments(section)
    arguments = ServerArgs(
        model_path=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        max_total_tokens=section.max_total_tokens,
        max_running_requests=section.max_running_requests,
        chunked_prefill_size=section.chunked_prefill_tokens,
        disable_overlap_schedule=True,
        **chosen,
    )
    if dtype == "bfloat16":
        # Here SGLang would choose by the GPU it sees.
        arguments.attention_backend = "triton"
    arguments.resolve_once()
    resolved = resolved_view(arguments)
    for name in ("device", "mem_fraction_static", "enable_memory_saver"):
        assert getattr(resolved, name) == chosen[name], name
    assert resolved.disable_overlap_schedule and resolved.disable_custom_all_reduce
    assert resolved.sampling_backend == "pytorch"
    assert resolved.max_total_tokens == section.max_total_tokens
    assert resolved.chunked_prefill_size == section.chunked_prefill_tokens
    graphs = resolved.cuda_graph_config
    assert graphs.prefill.backend == "disabled"
    if dtype == "float32":
        assert resolved.attention_backend == "torch_native"
    else:
        assert max(graphs.decode.bs) == section.max_running_requests


def test_a_chosen_attention_backend_is_passed_on() -> None:
    section = tiny.section(attention_backend="triton")
    for name in ("cpu", "cuda"):
        assert platform_of(name).engine_arguments(section)["attention_backend"] == "triton"


def test_megatron_takes_its_config_for_cuda() -> None:
    from megarl.contracts.mesh import Mesh
    from megarl.models.build import transformer_config

    device = torch.device("cuda")
    config = transformer_config(make_spec(), Mesh(1, tp=1), torch.bfloat16, device, "none")
    assert not config.use_cpu_initialization and config.bf16


def test_cuda_environment_is_set_unless_the_user_did() -> None:
    code = (
        "import os; from megarl.platforms import platform_of; platform_of('cuda').prepare(); "
        "print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], os.environ['NCCL_CUMEM_ENABLE'])"
    )
    for given, told in (({}, "1 0"), ({"NCCL_CUMEM_ENABLE": "1"}, "1 1")):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NCCL_"))}
        done = subprocess.run(
            [sys.executable, "-c", code], env=kept | given, capture_output=True, text=True
        )
        assert done.stdout.strip() == told, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_so_in_one_line() -> None:
    refusal = platform_of("cuda").refusal()
    assert "torch sees no GPU" in refusal and "\n" not in refusal
    assert platform_of("cpu").refusal() is None


def test_the_memory_saver_allocates_through_torch(saver) -> None:
    cuda = platform_of("cuda")
    cuda.prepare_engine(tiny.section(release=True))
    assert saver.hook_mode == "torch"
    assert cuda.cache_tags() == ("kv_cache",)
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in os.environ


def test_a_preloaded_memory_saver_also_keeps_the_graphs(saver, monkeypatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/x/torch_memory_saver_hook_mode_preload_cu12.abi3.so")
    cuda = platform_of("cuda")
    cuda.prepare_engine(tiny.section(release=True))
    assert saver.hook_mode is None
    assert cuda.cache_tags() == ("kv_cache", "cuda_graph")
    assert os.environ.pop("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == "1"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_the_memory_saver(saver, monkeypatch, name) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(ValueError, match=f"unset {name}"):
        platform_of("cuda").prepare_engine(tiny.section(release=True))
    platform_of("cuda").prepare_engine(tiny.section(release=False))


def test_a_missing_memory_saver_is_named() -> None:
    if "torch_memory_saver" not in sys.modules:
        with pytest.raises(ValueError, match="pip install torch_memory_saver"):
            platform_of("cuda").prepare_engine(tiny.section(release=True))
