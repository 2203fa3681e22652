"""What a family's file declares: its names, and what of a config.json it understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.reshard.families.config import Config
from megarl.reshard.families.decoder import decoder_rules
from megarl.reshard.families.rules import Rule
from megarl.reshard.families.spec import MLASpec, ModelSpec, MoESpec

HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys that change nothing in the arithmetic of a trained model, or (labels) are read apart."""

NUMBERS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    }
)
"""Keys that every family reads and none may leave to a default."""

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})

ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0),
    "auto_map": (None,),
    "chunk_size_feed_forward": (0,),
    "classifier_dropout": (None, 0, 0.0),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
}
"""Keys of every family that change the arithmetic, with the values that are handled."""

ROPE_KINDS = ("linear", "llama3", "yarn")

WINDOW_OFF: Mapping[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
WINDOW_UNUSED = frozenset({"sliding_window", "max_window_layers", "layer_types"})
"""For families with `use_sliding_window`, without which these change nothing; `layer_types` is
checked by value."""


def no_experts(config: Config) -> MoESpec | None:
    """Of a dense family."""
    return None


def not_latent(config: Config) -> MLASpec | None:
    """Of a family whose attention keeps keys and values as they are."""
    return None


@dataclass(frozen=True)
class Family:
    """A family is one of these, named `FAMILY`, in a file named as its `model_type`."""

    prefix: str
    """Of HF's class names: `Llama` of `LlamaForCausalLM`."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the arithmetic beyond `ONLY`, with the values that are handled."""
    required: frozenset[str] = frozenset()
    """Keys whose absence transformers fills with a fixed number: never left to it."""
    optional: frozenset[str] = frozenset({"head_dim", "tie_word_embeddings"})
    """Keys that are read where they are there, and absent mean what transformers means."""
    harmless: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float | None = None
    """Where config.json tells none; None: it must tell one."""
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    """Stretched rotary embeddings that transformers, SGLang and the trainer compute alike."""
    whole_theta: bool = False
    """Whether SGLang cuts off what theta has after the point."""
    head_dim_free: bool = True
    """Whether SGLang reads a `head_dim` other than hidden size / heads."""
    window: bool = False
    """`sliding_window` holds wherever it is set, with no switch."""
    latent: Callable[[Config], MLASpec | None] = not_latent
    experts: Callable[[Config], MoESpec | None] = no_experts
    rules: Callable[[ModelSpec], tuple[Rule, ...]] = decoder_rules

    def faults(self, values: Mapping[str, Any]) -> list[str]:
        """Each key of a config.json that is missing or not handled, by name. Empty: none."""
        only = {**ONLY, **self.only}
        known = HARMLESS | NUMBERS | ROPE_KEYS | {"architectures"} | only.keys()
        known |= self.required | self.optional | self.harmless
        found = [f"{key} is missing" for key in sorted(self.required - values.keys())]
        for key in sorted(values):
            if key not in known:
                found.append(f"{key} = {values[key]!r} (unknown; it may change the arithmetic)")
            elif key in only and not _among(values[key], only[key]):
                handled = " or ".join(repr(value) for value in only[key])
                found.append(f"{key} = {values[key]!r} (handled: {handled})")
        kinds = values.get("layer_types") or ()
        odd = sorted({str(kind) for kind in kinds} - {"full_attention"})
        if odd:
            found.append(f"layer_types with {odd} (handled: full_attention)")
        return found


def _among(value: Any, handled: tuple[Any, ...]) -> bool:
    """Not `in`: 0 and False, 1 and True are equal to Python."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in handled
    )
