"""The recipe's sections about rewards and the parity that learning rests on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from megarl.recipe.sections import Natural, Positive, Section, Share

StatusRule = Literal["drop", "retry", "stop", "penalty"]

# Largest and mean |trainer − generator| log-prob gap, in nats, that rounding alone can explain. In
# bfloat16 a token of probability near 0 moves by tenths while the mean stays below 2e-3: it is the
# mean that tells other weights from rounding there.
PARITY_DEFAULTS = {"float32": (1e-4, 1e-5), "bfloat16": (0.5, 5e-3)}


class ScorerSection(Section):
    """One scorer; keys besides these are its own options."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)] = Field(
        description="`exact_match`, `format`, or an own function as `import.path:function`."
    )
    weight: float = Field(1.0, description="Factor of its score in the total.")
    at_least: float | None = Field(
        None,
        description="A lower score makes the total reward.violated, whatever the others say; "
        "empty: no such constraint.",
    )

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
    violated: float | None = Field(
        None, description="Total where a scorer's at_least is not met; required by at_least."
    )
    max_error_share: Share = Field(
        0.1, description="Share of an iteration's samples that may fail before the run stops."
    )
    quarantine_after: Natural = Field(
        3,
        description="Responses to a prompt, over the run, that may go unscored (error or timeout) "
        "before it is never drawn again; 0: never.",
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
