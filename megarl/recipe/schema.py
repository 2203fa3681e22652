"""The typed recipe: one frozen pydantic model per section, every key documented where declared.

Needs neither torch nor megatron nor sglang. The package itself reads YAML into these models,
`megarl/recipe/checks.py` compares keys with each other. A key's description is its documentation:
`--help` and docs/recipe.md are made from it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from ruamel.yaml import YAML

from megarl.contracts.hashes import contract_hash
from megarl.recipe.algorithm import AlgorithmSection
from megarl.recipe.data import DataSection, EvalSection
from megarl.recipe.learning import PARITY_DEFAULTS, ParitySection, RewardSection
from megarl.recipe.roles import CriticSection, ReferenceSection
from megarl.recipe.sections import (
    ActorSection,
    CheckpointSection,
    ExperienceSection,
    ModelSection,
    Natural,
    ObserveSection,
    ResumeSection,
    RolloutSection,
    RunSection,
    Section,
    WorldSection,
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
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    parity: ParitySection = ParitySection()
    eval: EvalSection = EvalSection()
    experience: ExperienceSection = ExperienceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    resume: ResumeSection = ResumeSection()
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
        """`sha256:…` of all that can change a number: the run's name, folder and display cannot,
        nor can what is kept of it, nor where it was continued from."""
        content = self.model_dump(mode="json")
        for section in ("observe", "experience", "checkpoint", "resume"):
            del content[section]
        content["run"] = {"iterations": self.run.iterations}
        return contract_hash(content)

    @property
    def critic_section(self) -> ActorSection:
        """What the critic is built and learns by."""
        return self.critic.over(self.actor)

    @property
    def critic_steps(self) -> int:
        """Optimizer steps that the critic takes in the run; the length of its decay."""
        return self.run.iterations * self.algorithm.steps_per_iteration

    @property
    def actor_steps(self) -> int:
        """Those of the actor at most: it has none while a critic warms up."""
        learning = max(0, self.run.iterations - self.critic.warmup_iterations)
        return learning * self.algorithm.steps_per_iteration

    def flat(self) -> dict[str, Any]:
        """Dotted key → value as plain JSON data, in declared order; lists and mappings whole."""
        found: dict[str, Any] = {}

        def walk(section: Section, told: dict[str, Any], prefix: str) -> None:
            for field, info in type(section).model_fields.items():
                name, value = info.alias or field, getattr(section, field)
                if isinstance(value, Section):
                    walk(value, told[name], f"{prefix}{name}.")
                else:
                    found[prefix + name] = told[name]

        walk(self, self.model_dump(mode="json"), "")
        return found

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
