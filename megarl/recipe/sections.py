"""The recipe's sections about the run, its processes and its models.

Every key is documented where it is declared: `--help` and docs/recipe.md are made from it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megarl.stages import STAGES

Dtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
FilePath = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
StageName = Literal[STAGES]

RESUME_CONTENTS = (
    "tokenizer",
    "model",
    "critic",
    "data",
    "eval_data",
    "sampling",
    "scorer",
    "algorithm",
    "curriculum",
    "records",
)
"""What a resume compares besides recipe keys; `resume.allow` takes these names too."""


class Section(BaseModel):
    """Frozen, refuses unknown keys, never converts one type into another (an int is a float)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Folder name of the run; empty: `<recipe file's stem>-s<seed>`."
    )
    folder: FilePath = Field("runs", description="Where run folders are made.")
    overwrite: bool = Field(
        False, description="Set an earlier run of the name aside, as `<name>.replaced-<n>`."
    )
    iterations: Positive = Field(description="Iterations: one rollout and its updates each.")


class ModelSection(Section):
    """The model that is trained."""

    path: FilePath = Field(
        description="Hugging Face checkpoint folder: config, tokenizer, weights."
    )
    dtype: Dtype = Field("float32", description="Dtype of the actor's and reference's forwards.")


class WorldSection(Section):
    """The processes of the run."""

    ranks: Positive = Field(description="Processes (ranks) in all, one per accelerator.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where models live.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Longest a stage may take; then the ranks stuck in it are named."
    )
    stage_timeouts: dict[StageName, Annotated[float, Field(gt=0)]] = Field(
        {}, description=f"Other limits, by stage: {', '.join(STAGES)}."
    )


class ActorSection(Section):
    """The trained model on megatron-core: layout, optimizer, micro-batches."""

    tp: Positive = Field(1, description="Tensor-parallel size.")
    pp: Positive = Field(
        1, description="Pipeline-parallel size; it must divide the layers, or set stage_layers."
    )
    stage_layers: tuple[Positive, ...] = Field(
        (),
        strict=False,
        description="Layers of each pipeline stage (pp × virtual_stages of them, in depth order); "
        "empty: the same number in all.",
    )
    virtual_stages: Positive = Field(
        1,
        description="Pieces of the model that each pipeline rank holds; more of them leave less of "
        "the pipeline idle and send more often.",
    )
    ep: Positive = Field(
        1, description="Expert-parallel size: ranks over which a layer's experts are dealt."
    )
    expert_tp: Positive | None = Field(
        None, description="Tensor-parallel size of experts; empty: tp."
    )
    sequence_parallel: bool = Field(
        False,
        description="Cut norms and residuals along the tokens over the tp ranks: less memory. "
        "Experts with tp above 1 need it.",
    )
    lr: Annotated[float, Field(gt=0)] = Field(description="Peak learning rate (Adam).")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up: constant, or decay to min_lr by the last step."
    )
    lr_warmup_steps: Natural = Field(
        0, description="Optimizer steps over which the rate rises from 0."
    )
    min_lr: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Rate at the end of a linear or cosine decay."
    )
    betas: tuple[Share, Share] = Field((0.9, 0.95), strict=False, description="Adam's decay rates.")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Adam's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Decoupled weight decay; norms and biases are spared."
    )
    clip_grad: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Global gradient norm above which gradients are scaled down."
    )
    distributed_optimizer: bool = Field(
        True, description="Cut optimizer state over the data-parallel ranks."
    )
    router: Literal["trained", "frozen"] = Field(
        "trained", description="Of a model with experts: whether its routers learn."
    )
    router_aux_loss: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Of a model with experts: weight of the loss that balances their load over the "
        "global minibatch; 0: none.",
    )
    replay_routing: bool = Field(
        False,
        description="Of a model with experts: the trainer sends each token to the experts that the "
        "generator chose for it (arXiv:2510.11370), weighted by its own scores.",
    )
    offload: Literal["none", "optimizer"] = Field(
        "none",
        description="Outside of updates: keep everything on the device, or the optimizer state in "
        "host memory and no gradients at all; same numbers.",
    )
    tokens_per_micro_batch: Positive = Field(
        description="Token budget of a packed micro-batch (prompt + response), per rank."
    )
    recompute: Literal["none", "full"] = Field(
        "none",
        description="full: make every layer's activations again for the backward; less memory, "
        "more time, same numbers.",
    )
    logprob_chunk_tokens: Positive = Field(
        1024, description="Tokens whose logits exist at a time; less memory, same numbers."
    )
    max_skipped_steps: Positive = Field(
        3, description="Steps in a row with a non-finite loss or gradient before the run stops."
    )


class RolloutSection(Section):
    """Generation by SGLang in the same processes."""

    tp: Positive = Field(1, description="Tensor-parallel size of a generator replica.")
    ep: Positive = Field(
        1,
        description="Expert-parallel size within a replica; it divides tp, and an expert is cut "
        "over tp / ep ranks.",
    )
    prompts_per_iteration: Positive = Field(description="Prompts drawn in an iteration.")
    group_size: Positive = Field(description="Responses per prompt (the group).")
    temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Sampling temperature; the trainer scores at the same one."
    )
    max_response_tokens: Positive = Field(description="Longest response, in tokens.")
    max_total_tokens: Positive = Field(
        description="Tokens a replica's KV cache holds; fixed, so that batches never vary."
    )
    max_running_requests: Positive = Field(description="Requests a replica decodes together.")
    chunked_prefill_tokens: Positive = Field(description="Prompt tokens a replica reads at a time.")
    dtype: Dtype = Field("float32", description="Dtype of the generator's weights.")
    attention_backend: str = Field(
        "auto", description="SGLang attention backend; auto: the platform's."
    )
    release: bool = Field(
        False,
        description="Give the memory of weights and KV cache to training while nothing is "
        "generated; needs world.device cuda and torch_memory_saver.",
    )
    stop: tuple[str, ...] = Field(
        (), strict=False, description="Texts of one token each that end a response, besides EOS."
    )
    retries: Natural = Field(
        1, description="Times a lost generation is run again, with its own seed."
    )
    max_lost_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Share of an iteration's responses, over all replicas, that may stay lost "
        "after the retries before the run stops; their groups follow algorithm.partial_groups.",
    )
    top_p: float = Field(
        1.0, description="Only 1.0 (off): samples of a filtered distribution cannot be trained on."
    )
    top_k: int = Field(-1, description="Only -1 (off).")
    min_p: float = Field(0.0, description="Only 0.0 (off).")
    frequency_penalty: float = Field(0.0, description="Only 0.0 (off).")
    presence_penalty: float = Field(0.0, description="Only 0.0 (off).")
    repetition_penalty: float = Field(1.0, description="Only 1.0 (off).")
    bucket_bytes: Positive = Field(
        64 * 2**20,
        description="Size of a weight-transfer bucket, in bytes; a transfer needs at most two more "
        "of memory on a rank.",
    )
    verify_every: Positive = Field(
        1,
        description="Policy versions between those whose weights are read back from the generator "
        "and compared; the first after each start always is, the others are marked unverified.",
    )


class ExperienceSection(Section):
    """Sealed experience on disk: `experience/iter_N/` in the run's folder."""

    keep: Positive | None = Field(
        None, description="Newest iterations whose experience stays; empty: all."
    )
    keep_every: Natural = Field(
        0, description="Besides these every so many iterations stay; 0: no others."
    )


class CheckpointSection(Section):
    """Training positions on disk, `checkpoints/iter_N/` in the run's folder, and exports beside."""

    every: Natural = Field(
        10,
        description="Iterations between checkpoints, besides one at the end; 0: only that one. "
        "What was learnt since the last one is lost with the run.",
    )
    keep: Positive = Field(
        2,
        description="Newest whole checkpoints that stay; each holds weights and optimizer state.",
    )
    keep_every: Natural = Field(
        0,
        description="Besides these every so many iterations stay, a multiple of every; 0: no "
        "others.",
    )
    background: bool = Field(
        True,
        description="Write from a copy in host memory while training goes on; false: training "
        "waits for the disk.",
    )
    export_every: Natural = Field(
        0,
        description="Iterations between Hugging Face exports into `exports/iter_N/`, all of which "
        "stay; 0: only hf/ at the end.",
    )
    export_best: bool = Field(
        False,
        description="Export whenever held-out accuracy is the highest so far; `exports/best` "
        "points to it. Needs data.eval.",
    )


class ResumeSection(Section):
    """What a run continues from: it must fit, or the run is refused with old and new value."""

    # `from` is a word of Python's own, so the field has another name; settings never see it.
    model_config = ConfigDict(serialize_by_alias=True)

    from_: FilePath = Field(
        "auto",
        alias="from",
        description="auto: the newest whole checkpoint of the run's own folder, without one the "
        "start; never: the start, and refuse a folder that holds a run; or the path of a "
        "checkpoint or a run folder, here or of another run.",
    )
    use: Literal["regenerate", "reuse_sealed"] = Field(
        "regenerate",
        description="What an iteration that was cut off leads to: it is generated again, or "
        "trained from its own sealed experience, where there is one of the weights resumed from.",
    )
    allow: tuple[str, ...] = Field(
        (),
        strict=False,
        description="What may differ from the run resumed from though it changes the maths or the "
        f"data: recipe keys, and {', '.join(RESUME_CONTENTS)}.",
    )


class ObserveSection(Section):
    """What a person sees."""

    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    console: Literal["auto", "plain", "rich"] = Field(
        "auto", description="Live display or plain lines; auto: live on a terminal."
    )
