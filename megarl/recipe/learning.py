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
        description="A built-in scorer (docs/rewards.md), or an own function as "
        "`import.path:function`."
    )
    component: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Its name in records and metrics; empty: name, or the function's."
    )
    weight: float = Field(1.0, description="Factor of its score in the total.")
    at_least: float | None = Field(
        None,
        description="A lower score makes the total reward.violated, whatever the others say; "
        "empty: no such constraint.",
    )
    only: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Reward names (data.reward_key, a source's `reward`) of the rows it scores; "
        "empty: all rows.",
    )
    batch: Positive = Field(
        1, description="An own function is given lists of up to so many responses, where above 1."
    )

    @property
    def title(self) -> str:
        """Name of its component."""
        return self.component or self.name.rpartition(":")[2]

    def scores(self, reward: str) -> bool:
        """Whether it scores rows of this reward name."""
        return not self.only or reward in self.only

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
        description="List of `{name, component, weight, at_least, only, batch, …options}`; the "
        "reward is the weighted sum, accuracy in evaluations the score of the first that scores "
        "the row."
    )
    workers: Positive = Field(1, description="Scoring processes of each generator replica.")
    deadline_seconds: Annotated[float, Field(gt=0)] = Field(
        10.0, description="Time one sample may take before its worker is killed."
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        4.0,
        description="Memory of a scoring process beyond what it has when its scorers are loaded; "
        "empty: no limit.",
    )
    max_pending: Positive = Field(
        4096, description="Responses that may wait for a worker before generation waits for them."
    )
    concurrency: Positive = Field(
        32, description="Responses that an `async` scorer works on at once in a worker."
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
