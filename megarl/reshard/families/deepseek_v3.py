"""DeepSeek-V3: latent attention; experts in limited groups, sigmoid router, a shared expert."""

from __future__ import annotations

from megarl.reshard.families.config import Config
from megarl.reshard.families.family import Family
from megarl.reshard.families.latent import latent
from megarl.reshard.families.spec import MoESpec


def experts(config: Config) -> MoESpec:
    """Experts in every layer but the first `first_k_dense_replace`.

    Raises `FolderError` for numbers that leave a token without experts, or a layer.
    """
    count = config.either("n_routed_experts", "num_local_experts")
    number, chosen = config.integer(count), config.integer("num_experts_per_tok")
    groups, kept = config.integer("n_group"), config.integer("topk_group")
    layers = config.integer("num_hidden_layers")
    dense = config.natural("first_k_dense_replace")
    if dense >= layers:
        raise config.fail(
            f"first_k_dense_replace {dense} of {layers} layers leaves none with experts"
        )
    # A group counts as much as its two best experts.
    if number % groups or number // groups < 2:
        raise config.fail(f"{count} {number} do not make n_group {groups} groups of two or more")
    if kept > groups or chosen > kept * (number // groups):
        raise config.fail(
            f"num_experts_per_tok {chosen}: topk_group {kept} of n_group {groups} groups of "
            f"{number // groups} experts are too few"
        )
    width = config.integer("moe_intermediate_size")
    return MoESpec(
        experts=number,
        per_token=chosen,
        ffn=width,
        layers=tuple(range(dense, layers)),
        normalize=config.flag("norm_topk_prob", True),
        shared_ffn=width * config.integer("n_shared_experts"),
        router="sigmoid",
        router_bias=True,
        groups=groups,
        top_groups=kept,
        scale=config.real("routed_scaling_factor"),
    )


AUTO_MAP = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
"""Of the published folders: code from before transformers had its own."""

FAMILY = Family(
    prefix="DeepseekV3",
    only={
        "attention_bias": (False,),
        "auto_map": (None, AUTO_MAP),
        "moe_layer_freq": (1,),
        # The layer that predicts a token further is not trained, and would no longer fit the rest.
        "num_nextn_predict_layers": (0, None),
        "pretraining_tp": (1, None),
        # Of the two norms within attention transformers takes this whatever config.json says, and
        # SGLang what it says.
        "rms_norm_eps": (1e-6,),
        "scoring_func": ("sigmoid",),
        "tie_word_embeddings": (False,),
        "topk_method": ("noaux_tc",),
    },
    required=frozenset(
        {
            "first_k_dense_replace",
            "kv_lora_rank",
            "moe_intermediate_size",
            # SGLang has no defaults for these three.
            "moe_layer_freq",
            "scoring_func",
            "topk_method",
            "n_group",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_key_value_heads",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "routed_scaling_factor",
            "topk_group",
            "v_head_dim",
        }
    ),
    optional=frozenset(
        {"head_dim", "n_routed_experts", "num_local_experts", "qk_head_dim", "rope_interleave"}
    ),
    # Of losses for balance, which transformers does not have, and of how the experts were laid out.
    harmless=frozenset({"aux_loss_alpha", "ep_size", "seq_aux"}),
    # SGLang computes every kind but the default as this one.
    rope_kinds=("yarn",),
    latent=latent,
    experts=experts,
)
