"""The recipe's section about the algorithm: advantages, loss, minibatches.

Keys that are left empty and depend on other keys are filled when a recipe is read, so that code and
the stored recipe have one value each.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megarl.recipe.sections import Natural, Positive, Section

ESTIMATORS = ("grpo", "rloo", "reinforce", "reinforce_baseline", "gae")
"""Built-in values of `algorithm.advantage`."""
GROUP_RELATIVE = ("grpo", "rloo", "reinforce_baseline")
"""Those that compare the responses to one prompt."""
WHITENED = ("reinforce", "reinforce_baseline", "gae")
"""Those whose advantages are whitened unless the recipe says otherwise."""
OBJECTIVES = ("ppo_clip", "gspo", "cispo")
"""Built-in values of `algorithm.objective`."""

ZeroOrMore = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(min_length=1)]


class GaeSection(Section):
    """Generalised advantage estimation, with a critic."""

    lam: Annotated[float, Field(ge=0, le=1)] = Field(0.95, description="GAE's λ.")
    truncation: Literal["bootstrap", "terminal"] = Field(
        "bootstrap",
        description="A response that was cut off: the critic's value of what it leads to, or "
        "nothing follows it.",
    )


class OverlongSection(Section):
    """What becomes of long and cut off responses (DAPO, arXiv:2503.14476)."""

    buffer_tokens: Natural = Field(
        0,
        description="The last so many tokens below rollout.max_response_tokens cost a linearly "
        "growing part of the penalty; 0: no such penalty.",
    )
    penalty: ZeroOrMore = Field(1.0, description="Taken off the reward at full length.")
    mask_truncated: bool = Field(
        False,
        description="Responses that were cut off are compared within their group and not trained "
        "on.",
    )


class ImportanceSection(Section):
    """Correction of the gap between trainer and generator: exp(old − rollout) log-probs, constant,
    as a weight of the policy term."""

    level: Literal["none", "token", "sequence", "sequence_mean"] = Field(
        "none",
        description="Ratios of single tokens, their product over the response, or its geometric "
        "mean; none: no correction.",
    )
    mode: Literal["truncate", "mask"] = Field(
        "truncate",
        description="Ratios above high count as high; or those outside low … high count 0.",
    )
    low: ZeroOrMore = Field(0.0, description="Lower bound, of mask.")
    high: AboveZero = Field(2.0, description="Upper bound.")


class KlSection(Section):
    """KL to the reference policy, in the loss or in the reward."""

    beta: ZeroOrMore = Field(
        0.0, description="Weight of the KL term; 0: no reference model is loaded."
    )
    place: Literal["loss", "reward", "both"] | None = Field(
        None,
        description="loss: a term with a gradient; reward: β (log π_old − log π_ref) is taken off "
        "each token's reward; empty: loss for grpo, reward for ppo.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Of the loss, with l = log π − log π_ref: k1 = l, k2 = l²/2, "
        "k3 = exp(−l) + l − 1.",
    )
    target: AboveZero | None = Field(
        None,
        description="KL of a response, nats, towards which β is steered (arXiv:1909.08593); "
        "empty: β stays.",
    )
    horizon: Positive = Field(
        10000, description="Responses over which a steered β changes by about its own size."
    )


class DynamicSamplingSection(Section):
    """Drawing more prompts until enough groups would train (DAPO, arXiv:2503.14476)."""

    max_rounds: Positive = Field(
        1,
        description="Rounds of drawing and generating, all by one policy version, until "
        "rollout.prompts_per_iteration groups are complete and not dropped for equal rewards; "
        "1: off.",
    )


class AlgorithmSection(Section):
    """Advantages, loss and minibatches."""

    name: Literal["grpo", "ppo"] = Field(
        "grpo", description="ppo learns a critic besides the actor, grpo does not."
    )
    advantage: Name | None = Field(
        None,
        description=f"Estimator: {', '.join(ESTIMATORS)}, or an own function as "
        "`import.path:function`; empty: gae for ppo, else grpo.",
    )
    group_std: Literal["sample", "population", "leave_one_out", "none"] = Field(
        "sample",
        description="Of grpo: divide by the group's standard deviation with ddof 1, with ddof 0, "
        "by that of the others around their mean, or not at all (Dr. GRPO).",
    )
    advantage_eps: ZeroOrMore = Field(1e-6, description="Added to that standard deviation.")
    rewards: Literal["outcome", "process"] = Field(
        "outcome", description="Credit the total of a response, or the scores of its steps."
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Discount of later tokens' rewards, of gae and reinforce."
    )
    gae: GaeSection = Field(GaeSection(), description="")
    whiten: Literal["none", "full", "scale"] | None = Field(
        None,
        description="Advantages over the iteration's trained tokens: as they are, mean 0 and "
        f"deviation 1, or deviation 1 alone; empty: full for {', '.join(WHITENED)}, else none.",
    )
    overlong: OverlongSection = Field(OverlongSection(), description="")
    minibatches: Positive = Field(description="Optimizer steps in each pass over an iteration.")
    minibatch_groups: Literal["whole", "split"] = Field(
        "whole", description="Whether the responses to a prompt stay in one minibatch."
    )
    epochs: Positive = Field(1, description="Passes over the same minibatches, in the same order.")
    target_kl: AboveZero | None = Field(
        None,
        description="Approximate KL(old ‖ π) per token at which the rest of an iteration's actor "
        "steps is left out; empty: none is.",
    )
    objective: Name = Field(
        "ppo_clip",
        description=f"Policy term: {', '.join(OBJECTIVES)}, or an own function as "
        "`import.path:function`.",
    )
    clip_low: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2, description="PPO clip: the ratio's lower bound is 1 − clip_low."
    )
    clip_high: ZeroOrMore = Field(
        0.2, description="PPO clip: the ratio's upper bound is 1 + clip_high."
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="Of ppo_clip: bound c > 1 on the loss of negative advantages; empty: none.",
    )
    importance: ImportanceSection = Field(ImportanceSection(), description="")
    reduction: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = Field(
        "token_mean", description="How token losses become one number, over the global minibatch."
    )
    entropy_coefficient: ZeroOrMore = Field(0.0, description="Weight of the entropy bonus.")
    kl: KlSection = Field(KlSection(), description="")
    zero_variance: Literal["drop", "keep"] | None = Field(
        None,
        description="Groups whose rewards are all equal: out of every denominator, or kept; "
        "empty: dropped where responses are compared, else kept.",
    )
    partial_groups: Literal["drop", "keep_scored"] | None = Field(
        None,
        description="Groups with a lost or unscored sample: dropped whole, or the scored kept; "
        "empty: dropped where responses are compared, else kept.",
    )
    dynamic_sampling: DynamicSamplingSection = Field(DynamicSamplingSection(), description="")

    @model_validator(mode="after")
    def _fill(self) -> AlgorithmSection:
        """What is empty, by what it depends on."""
        if self.advantage is None:
            object.__setattr__(self, "advantage", "gae" if self.name == "ppo" else "grpo")
        defaults = {
            "whiten": "full" if self.advantage in WHITENED else "none",
            "zero_variance": "drop" if self.group_relative else "keep",
            "partial_groups": "drop" if self.group_relative else "keep_scored",
        }
        for key, value in defaults.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        if self.kl.place is None:
            place = "reward" if self.name == "ppo" else "loss"
            object.__setattr__(self, "kl", self.kl.model_copy(update={"place": place}))
        return self

    @property
    def group_relative(self) -> bool:
        """Whether the responses to one prompt are compared: then a lone one teaches nothing."""
        return self.advantage in GROUP_RELATIVE or (
            self.name == "grpo" and self.advantage not in ESTIMATORS
        )

    @property
    def needs_values(self) -> bool:
        """Whether there is a critic."""
        return self.name == "ppo"

    @property
    def needs_reference(self) -> bool:
        return self.kl.beta > 0

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.beta > 0 and self.kl.place in ("loss", "both")

    @property
    def kl_in_reward(self) -> bool:
        return self.kl.beta > 0 and self.kl.place in ("reward", "both")

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration at most."""
        return self.epochs * self.minibatches
