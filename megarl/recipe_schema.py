"""The typed recipe: one frozen pydantic model per section, every key documented where declared.

Needs neither torch nor megatron nor sglang. `megarl/recipe.py` reads YAML into these models,
`megarl/recipe_checks.py` compares keys with each other. A key's description is its documentation:
`--help` and docs/recipe.md are made from it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ruamel.yaml import YAML

from megarl.contracts.hashes import contract_hash
from megarl.stages import STAGES

Dtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
FilePath = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
StatusRule = Literal["drop", "retry", "stop", "penalty"]
StageName = Literal[STAGES]

# Largest and mean |trainer − generator| log-prob gap, in nats, that rounding alone can explain. In
# bfloat16 a token of probability near 0 moves by tenths while the mean stays below 2e-3: it is the
# mean that tells other weights from rounding there.
PARITY_DEFAULTS = {"float32": (1e-4, 1e-5), "bfloat16": (0.5, 5e-3)}


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


class DataSection(Section):
    """Prompts: JSON Lines, one row a line."""

    train: FilePath = Field(description="Prompts to train on.")
    eval: FilePath | None = Field(None, description="Held-out prompts; empty: no evaluation.")
    prompt_key: str = Field("prompt", description="Row key of the prompt: text or chat messages.")
    answer_key: str = Field("answer", description="Row key of the answer the scorers compare with.")
    source_key: str | None = Field(
        None,
        description="Row key that names a row's source, which scorers see; empty: the file's stem.",
    )
    template: Literal["model", "none"] = Field(
        "model", description="Chat template: the model folder's own, or none (plain text)."
    )
    system_prompt: str | None = Field(None, description="System message put before each prompt.")
    max_prompt_tokens: Positive = Field(
        description="Longest prompt, in tokens after the template; longer rows are refused."
    )
    max_refused_share: Share = Field(
        0.0, description="Share of rows that may be refused before the run stops at start."
    )


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
    pp: Positive = Field(1, description="Pipeline-parallel size; it must divide the layers.")
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
    top_p: float = Field(
        1.0, description="Only 1.0 (off): samples of a filtered distribution cannot be trained on."
    )
    top_k: int = Field(-1, description="Only -1 (off).")
    min_p: float = Field(0.0, description="Only 0.0 (off).")
    frequency_penalty: float = Field(0.0, description="Only 0.0 (off).")
    presence_penalty: float = Field(0.0, description="Only 0.0 (off).")
    repetition_penalty: float = Field(1.0, description="Only 1.0 (off).")
    bucket_bytes: Positive = Field(
        64 * 2**20, description="Size of a weight-transfer bucket, in bytes."
    )


class ScorerSection(Section):
    """One scorer; keys besides these are its own options."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)] = Field(
        description="`exact_match`, `format`, or an own function as `import.path:function`."
    )
    weight: float = Field(1.0, description="Factor of its score in the total.")

    @property
    def options(self) -> dict[str, Any]:
        """The scorer's own keys."""
        return dict(self.model_extra or {})


class OnStatusSection(Section):
    """What a sample without a score leads to."""

    timeout: StatusRule = Field(
        "drop",
        description="Deadline missed: drop the sample, retry, stop the run, or give penalty.",
    )
    error: StatusRule = Field("drop", description="The scorer failed: the same choices.")


class RewardSection(Section):
    """Scoring of responses; a failure is a status, never a 0."""

    scorers: Annotated[tuple[ScorerSection, ...], Field(min_length=1, strict=False)] = Field(
        description="List of `{name, weight, …options}`; the reward is the weighted sum, "
        "accuracy in evaluations is the first one's score."
    )
    workers: Positive = Field(1, description="Scoring processes of each generator replica.")
    deadline_seconds: Annotated[float, Field(gt=0)] = Field(
        10.0, description="Time one sample may take before its worker is killed."
    )
    on_status: OnStatusSection = Field(OnStatusSection(), description="")
    penalty: float | None = Field(
        None, description="Reward that `penalty` rules give; required by them."
    )
    max_error_share: Share = Field(
        0.1, description="Share of an iteration's samples that may fail before the run stops."
    )


class KlSection(Section):
    """KL to the reference policy, in the loss."""

    beta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the KL term; 0: no reference model is loaded."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="With l = log π − log π_ref: k1 = l, k2 = l²/2, k3 = exp(−l) + l − 1.",
    )


class AlgorithmSection(Section):
    """Advantages, loss and minibatches."""

    name: Literal["grpo"] = Field("grpo", description="The algorithm.")
    normalize_std: bool = Field(
        True, description="Divide by the group's standard deviation (ddof 1)."
    )
    advantage_eps: Annotated[float, Field(ge=0)] = Field(
        1e-6, description="Added to that standard deviation."
    )
    minibatches: Positive = Field(description="Optimizer steps per iteration.")
    clip_low: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2, description="PPO clip: the ratio's lower bound is 1 − clip_low."
    )
    clip_high: Annotated[float, Field(ge=0)] = Field(
        0.2, description="PPO clip: the ratio's upper bound is 1 + clip_high."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound c > 1 on the loss of negative advantages; empty: none."
    )
    reduction: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = Field(
        "token_mean", description="How token losses become one number, over the global minibatch."
    )
    entropy_coefficient: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the entropy bonus."
    )
    kl: KlSection = Field(KlSection(), description="")
    zero_variance: Literal["drop", "keep"] = Field(
        "drop", description="Groups whose rewards are all equal: out of every denominator, or kept."
    )
    partial_groups: Literal["drop", "keep_scored"] = Field(
        "drop", description="Groups with an unscored sample: dropped whole, or the scored kept."
    )


class ParitySection(Section):
    """The gap between the trainer's and the generator's log-probs, checked before each update."""

    max: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest gap of a token, nats; empty: 1e-4 (bfloat16: 0.5)."
    )
    mean: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Mean gap, nats; empty: 1e-5 (bfloat16: 5e-3)."
    )
    action: Literal["stop", "warn"] = Field("stop", description="What a larger gap leads to.")


class EvalSection(Section):
    """Held-out evaluation, when data.eval is set."""

    every: Positive = Field(
        10,
        description="Iterations between evaluations, besides one before the first update and "
        "one at the end.",
    )
    sampled: bool = Field(True, description="Sample at the temperature too, besides greedy.")
    max_prompts: Positive | None = Field(None, description="Use the first so many; empty: all.")


class ObserveSection(Section):
    """What a person sees."""

    tensorboard: bool = Field(True, description="Write TensorBoard events.")
    console: Literal["auto", "plain", "rich"] = Field(
        "auto", description="Live display or plain lines; auto: live on a terminal."
    )


class Recipe(Section):
    """A whole run."""

    seed: Natural = Field(1, description="Drives data order and sampling; `{seed}` in a path too.")
    run: RunSection
    model: ModelSection
    data: DataSection
    world: WorldSection
    actor: ActorSection
    rollout: RolloutSection
    reward: RewardSection
    algorithm: AlgorithmSection
    parity: ParitySection = ParitySection()
    eval: EvalSection = EvalSection()
    observe: ObserveSection = ObserveSection()

    @model_validator(mode="after")
    def _fill_parity(self) -> Recipe:
        """Give `parity` the bounds of the coarser dtype where it says nothing."""
        coarse = "bfloat16" in (self.model.dtype, self.rollout.dtype)
        largest, mean = PARITY_DEFAULTS["bfloat16" if coarse else "float32"]
        largest = largest if self.parity.max is None else self.parity.max
        mean = min(mean, largest) if self.parity.mean is None else self.parity.mean
        filled = self.parity.model_copy(update={"max": largest, "mean": mean})
        object.__setattr__(self, "parity", filled)
        return self

    @property
    def run_folder(self) -> Path:
        """`<run.folder>/<run.name>`; the name is set by `load_recipe`."""
        if self.run.name is None:
            raise ValueError("run.name is not set: read recipes with load_recipe, or name the run")
        return Path(self.run.folder) / self.run.name

    @property
    def hash(self) -> str:
        """`sha256:…` of all that can change a number: the run's name, folder and display cannot."""
        content = self.model_dump(mode="json")
        del content["observe"]
        content["run"] = {"iterations": self.run.iterations}
        return contract_hash(content)

    def resolved_yaml(self) -> str:
        """Every key with its value, in declared order; itself a recipe that resolves to the same.

        Environment variables are never expanded, so no secret can get in that the recipe's own
        text does not hold.
        """
        writer = YAML(typ="safe", pure=True)
        writer.default_flow_style = False
        writer.allow_unicode = True
        writer.width = 100
        writer.sort_base_mapping_type_on_output = False
        stream = io.StringIO()
        writer.dump(self.model_dump(mode="json"), stream)
        return stream.getvalue()
