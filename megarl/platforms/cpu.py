"""The CPU: its choices, and stand-ins that let SGLang be imported and run without CUDA.

SGLang imports triton, sgl_kernel and torchvision at module level although its CPU path calls
none of them. Each stand-in is set only when the real package is absent, and whatever of it is
called raises. Nothing here is used where CUDA is available.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from megarl.platforms.interface import KV_CACHE, Platform

_ENVIRONMENT = {
    # SGLang picks CUDA, not the CPU, unless told.
    "SGLANG_USE_CPU_ENGINE": "1",
    # It compiles rotary embedding and sampling with torch.compile at the first request: 11 s and
    # a C++ compiler for functions of microseconds.
    "TORCHDYNAMO_DISABLE": "1",
}


class CpuPlatform(Platform):
    """The host itself: nothing to wait for, nothing to give back."""

    device_type = "cpu"
    backend = "gloo"

    def refusal(self) -> str | None:
        return None

    def prepare(self) -> None:
        # Megatron, SGLang and their patches ask torch whether there is a GPU, not the recipe.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: torch.device) -> None:
        """Nothing runs ahead of Python on a CPU."""

    def release_cached(self) -> None:
        """Torch keeps no host memory."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        return None

    def restore_rng(self, device: torch.device, state: torch.Tensor | None) -> None:
        """The host's generator is not the device's business."""

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def engine_arguments(self, section: Any) -> dict[str, Any]:
        chosen = section.attention_backend
        return {
            "device": self.device_type,
            "attention_backend": "torch_native" if chosen == "auto" else chosen,
            # Its profile of free memory must not be what limits the pool; the generator checks.
            "mem_fraction_static": 0.5,
        }

    def prepare_engine(self, section: Any) -> None:
        """Keep SGLang from binding this rank's OpenMP threads to NUMA nodes.

        Replaces its default binding, which wants one NUMA node per rank of the tensor-parallel
        group and `sgl_kernel`; the rank's thread count stays what `world.py` set.
        """
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * section.tp)

    def engine_device(self, rank_in_replica: int) -> int:
        return rank_in_replica

    def adapt_engine(self, scheduler: Any) -> None:
        """As `Scheduler.run_event_loop` does for a CPU, which is not entered here."""
        scheduler.schedule_stream.synchronize = lambda: None
        scheduler._war_barrier_enabled = False

    def cache_tags(self) -> tuple[str, ...]:
        return (KV_CACHE,)


def install_stand_ins() -> None:
    """Set environment and stand-ins; must precede `import sglang`, idempotent."""
    if "sglang" not in sys.modules:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        _stand_in_for_triton()
        _stand_in_for_sgl_kernel()
        _stand_in_for_torchvision()


def _absent(package: str) -> bool:
    return package not in sys.modules and importlib.util.find_spec(package) is None


def _triton_stubs() -> ModuleType:
    """SGLang's own mock of triton, which it ships for macOS and installs only there.

    It is loaded by path because `sglang/__init__` itself needs it.
    """
    package = importlib.util.find_spec("sglang").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(
        "_sglang_platform_stubs", os.path.join(package, "_platform_stubs.py")
    )
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.insert(0, stubs._TritonFinder())
    return stubs


def _stand_in_for_triton() -> None:
    """Decorated kernels become plain functions that nobody calls."""
    if not _absent("triton"):
        return
    stubs = _triton_stubs()

    def mock(name: str, **attributes: Any) -> None:
        module = stubs._make_mock(name)
        for key, value in attributes.items():
            setattr(module, key, value)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)

    def base(name: str, parent: type = object) -> type:
        return type(name, (parent,), {})

    class Constexpr:
        def __init__(self, value: Any = None) -> None:
            self.value = value

    # The classes below are subclassed or compared at import, so they must be real classes.
    mock(
        "triton",
        __version__="3.0.0",
        cdiv=stubs._cdiv,
        next_power_of_2=stubs._next_power_of_2,
        Config=stubs._Config,
    )
    mock("triton.language", constexpr=Constexpr)
    for name in ("language.extra", "language.extra.libdevice", "runtime", "compiler", "backends"):
        mock(f"triton.{name}")
    mock(
        "triton.runtime.jit",
        JITFunction=base("JITFunction"),
        KernelInterface=base("KernelInterface", stubs._StubBase),
    )
    mock("triton.runtime.cache", triton_key=stubs._triton_key)
    mock(
        "triton.runtime.autotuner",
        OutOfResources=base("OutOfResources", Exception),
        PTXASError=base("PTXASError", Exception),
    )
    sys.modules["triton.compiler"].CompiledKernel = base("CompiledKernel", stubs._StubBase)
    mock(
        "triton.compiler.compiler",
        ASTSource=base("ASTSource", stubs._StubBase),
        triton_key=stubs._triton_key,
    )
    mock("triton.backends.compiler", GPUTarget=base("GPUTarget", stubs._StubBase))
    for name in ("runtime.driver", "testing", "tools", "tools.tensor_descriptor"):
        mock(f"triton.{name}")


def _package(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _stand_in_for_sgl_kernel() -> None:
    """Replaces the compiled kernels of `sgl_kernel` by names only; calling one raises."""
    if not _absent("sgl_kernel"):
        return

    def kernel(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU machine")

        return missing

    module = _package("sgl_kernel")
    module.__version__ = "0.0.0"
    module.__getattr__ = kernel


def _stand_in_for_torchvision() -> None:
    """Replaces `torchvision` for SGLang's image models, which it imports for their configs.

    transformers must go on believing that torchvision is absent, so it is asked first (it caches
    the answer) and its `AutoImageProcessor`, which refuses to load without torchvision, is
    replaced by one that can only be registered with.
    """
    if not _absent("torchvision"):
        return
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        raise ImportError("transformers sees a torchvision that cannot be imported; reinstall it")

    class AnyMember(type):
        def __getattr__(cls, name: str) -> str:
            if name.startswith("__"):
                raise AttributeError(name)
            return name

    def member(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return AnyMember(name, (), {})

        def missing(*args: Any, **kwargs: Any) -> None:
            raise ImportError(f"torchvision.{name}: torchvision is not installed")

        return missing

    for name in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
        "torchvision.io",
        "torchvision.ops",
    ):
        _package(name).__getattr__ = member

    class AutoImageProcessor:
        @classmethod
        def register(cls, *args: Any, **kwargs: Any) -> None:
            """Accepted and forgotten: no image model is ever built."""

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
            raise ImportError("AutoImageProcessor: torchvision is not installed")

    import sglang  # noqa: F401  (its import may rebuild the transformers module)

    sys.modules["transformers"].AutoImageProcessor = AutoImageProcessor
