"""Multi-head latent attention of SGLang 0.5.21 on CPU, without `sgl_kernel`.

Importing this module imports SGLang; call `megarl.platforms.prepare_sglang()` first.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers


def rope(*arguments: Any) -> Any:
    """Replaces `factory.get_rope_cpu`, which knows one kind of scaling and refuses to have none.

    `factory.get_rope_wrapper`, its one caller, passes by position what `factory.get_rope` takes and
    last the device.
    """
    return factory.get_rope(*arguments[:-1])


rope.__wrapped__ = factory.get_rope_cpu


def absorbed(attention: Any, forward_batch: Any) -> Any:
    """Of `AttentionBackendRegistry`: the attention of a step, whatever the step.

    Prompts too attend in the latent space, as decode steps do. SGLang would expand keys and values
    of a prompt and hand them to the attention backend, but the CPU's reads the cache, which holds
    the latent ones.
    """
    return handlers.AttnForwardMethod.MLA


def install(attention_backend: str) -> None:
    """Let latent attention run on `attention_backend`; idempotent."""
    factory.get_rope_cpu = rope
    handlers.AttentionBackendRegistry.register(attention_backend, absorbed)
