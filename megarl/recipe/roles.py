"""The recipe's sections about models beside the actor: the critic and the reference.

Megatron has one parallel state in a process, so every role has the actor's layout.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.recipe.sections import (
    ActorSection,
    FilePath,
    Natural,
    Positive,
    Section,
    Share,
)

LAYOUT_KEYS = (
    "tp",
    "pp",
    "stage_layers",
    "virtual_stages",
    "ep",
    "expert_tp",
    "sequence_parallel",
    "distributed_optimizer",
)
"""Of `critic`: only the actor's."""
OWN_KEYS = (
    "lr",
    "lr_schedule",
    "lr_warmup_steps",
    "min_lr",
    "betas",
    "eps",
    "weight_decay",
    "clip_grad",
    "max_skipped_steps",
    "tokens_per_micro_batch",
    "recompute",
    "offload",
)
"""Of `critic`: its own, where it has them, in place of the actor's."""

_OWN_ROUTERS = {"router": "trained", "router_aux_loss": 0.0, "replay_routing": False}
_ACTORS = "empty: the actor's."
_ONLY = "Only the actor's: leave it empty."


class CriticSection(Section):
    """The value model of ppo: where it begins, its optimizer, its micro-batches."""

    path: FilePath | None = Field(
        None,
        description="Hugging Face folder it begins from: a causal language model, whose body it "
        "takes under a value head of zeros, or a sequence or token classification of one label (a "
        "reward model); empty: model.path.",
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        None, description=f"Peak learning rate; {_ACTORS}"
    )
    lr_schedule: Literal["constant", "linear", "cosine"] | None = Field(None, description=_ACTORS)
    lr_warmup_steps: Natural | None = Field(None, description=_ACTORS)
    min_lr: Annotated[float, Field(ge=0)] | None = Field(None, description=_ACTORS)
    betas: tuple[Share, Share] | None = Field(None, strict=False, description=_ACTORS)
    eps: Annotated[float, Field(gt=0)] | None = Field(None, description=_ACTORS)
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(None, description=_ACTORS)
    clip_grad: Annotated[float, Field(gt=0)] | None = Field(None, description=_ACTORS)
    max_skipped_steps: Positive | None = Field(None, description=_ACTORS)
    tokens_per_micro_batch: Positive | None = Field(
        None, description="Token budget of its packed micro-batches; empty: the actor's packs."
    )
    recompute: Literal["none", "full"] | None = Field(None, description=_ACTORS)
    offload: Literal["none", "optimizer"] | None = Field(None, description=_ACTORS)
    value_clip: Annotated[float, Field(gt=0)] | None = Field(
        0.2, description="Values move at most so far from those sealed; empty: no clip."
    )
    warmup_iterations: Natural = Field(
        0, description="First iterations in which only the critic learns."
    )
    tp: Positive | None = Field(None, description=_ONLY)
    pp: Positive | None = Field(None, description=_ONLY)
    stage_layers: tuple[Positive, ...] | None = Field(None, strict=False, description=_ONLY)
    virtual_stages: Positive | None = Field(None, description=_ONLY)
    ep: Positive | None = Field(None, description=_ONLY)
    expert_tp: Positive | None = Field(None, description=_ONLY)
    sequence_parallel: bool | None = Field(None, description=_ONLY)
    distributed_optimizer: bool | None = Field(None, description=_ONLY)

    def over(self, actor: ActorSection) -> ActorSection:
        """The critic's section as a learner reads one: the actor's, with its own values. Its
        routers, where it has experts, learn from its own loss alone."""
        own = {key: getattr(self, key) for key in OWN_KEYS if getattr(self, key) is not None}
        return actor.model_copy(update=own | _OWN_ROUTERS)


class ReferenceSection(Section):
    """The policy that the KL term looks back at; only loaded where algorithm.kl.beta is above 0."""

    path: FilePath | None = Field(
        None,
        description="Hugging Face folder; empty: model.path, also where a run is resumed.",
    )
    refresh_every: Natural = Field(
        0,
        description="Iterations after which it takes the actor's weights, again and again; "
        "0: never.",
    )
    offload: Literal["none", "weights"] = Field(
        "none",
        description="Between its forwards: stay on the device, or in host memory; same numbers.",
    )
