"""The recipe's sections about prompts to train on and held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from megarl.recipe.learning import ScorerSection
from megarl.recipe.sections import FilePath, Natural, Positive, Section, Share

MAPPED = ("prompt_key", "answer_key", "source_key", "reward_key", "system_prompt")
"""What a source may say otherwise than `data`."""


class SourceSection(Section):
    """One file of prompts. A key that is empty has the value of `data`."""

    path: FilePath = Field(description="JSONL or Parquet; JSONL may be gzip or zstd compressed.")
    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Its name in ids and metrics; empty: the file's, up to the first dot."
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Its share of the prompts drawn, against the other sources' weights; empty in "
        "all: every row once an epoch.",
    )
    prompt_key: str | None = Field(None, description="As data.prompt_key, and so are the others:")
    answer_key: str | None = Field(None, description="")
    source_key: str | None = Field(None, description="")
    reward_key: str | None = Field(None, description="")
    system_prompt: str | None = Field(None, description="")
    reward: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Reward name of its rows (reward.scorers' `only`); empty: their source."
    )


Sources = tuple[SourceSection, ...]


class DataSection(Section):
    """Prompts: JSON Lines or Parquet."""

    train: Annotated[Sources, Field(min_length=1, strict=False)] = Field(
        description="Prompts to train on: a path, or a list of sources `{path, name, weight, "
        "reward, prompt_key, …}`."
    )
    eval: Annotated[Sources, Field(min_length=1, strict=False)] | None = Field(
        None, description="Held-out prompts, in the same way; empty: no evaluation."
    )
    prompt_key: str = Field(
        "prompt",
        description="Row key of the prompt, text or chat messages; `a.b` is key b within key a.",
    )
    answer_key: str = Field("answer", description="Row key of the answer the scorers compare with.")
    source_key: str | None = Field(
        None,
        description="Row key that names a row's source, which scorers and metrics see; empty: the "
        "name of the file's entry.",
    )
    reward_key: str | None = Field(
        None,
        description="Row key that names a row's reward (reward.scorers' `only`); empty: see the "
        "source's `reward`.",
    )
    template: Annotated[str, Field(min_length=1)] = Field(
        "model",
        description="Chat template: `model` (the model folder's own), `none` (plain text), or the "
        "path of a Jinja file.",
    )
    system_prompt: str | None = Field(
        None,
        description="System message put before each prompt; a row that begins with one of its own "
        "keeps that instead.",
    )
    max_prompt_tokens: Positive = Field(
        description="Longest prompt, in tokens after the template; longer rows are refused."
    )
    max_row_bytes: Positive = Field(
        16 * 2**20, description="Longest row, in bytes of JSON; longer ones are refused unread."
    )
    max_refused_share: Share = Field(
        0.0, description="Share of rows that may be refused before the run stops at start."
    )
    max_overlap: Share = Field(
        0.0,
        description="Share of the held-out prompts that may be training prompts too, word for word "
        "(case and white space aside), before the run stops at start.",
    )
    overlap_words: Natural = Field(
        13,
        description="Held-out prompts that share so many words in a row with a training prompt are "
        "counted at start; shorter ones count whole; 0: not looked for.",
    )
    max_ngram_overlap: Share = Field(
        1.0, description="Share of such held-out prompts before the run stops at start."
    )
    curriculum: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Own function `import.path:function` that says which prompts may be drawn, "
        "from how they went so far; empty: all.",
    )

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        """A path is a list of one source."""
        return [{"path": value}] if isinstance(value, str) else value

    def filled(self, source: SourceSection) -> SourceSection:
        """The source with its name, and with this section's value for every key it leaves out."""
        mine = {key: getattr(self, key) for key in MAPPED if getattr(source, key) is None}
        name = source.name or Path(source.path).name.partition(".")[0] or source.path
        return source.model_copy(update=mine | {"name": name})

    @property
    def training(self) -> Sources:
        """Sources to train on, filled."""
        return tuple(self.filled(source) for source in self.train)

    @property
    def held_out(self) -> Sources:
        """Held-out sources, filled; none where there is no evaluation."""
        return tuple(self.filled(source) for source in self.eval or ())


class EvalSection(Section):
    """Held-out evaluation, when data.eval is set."""

    every: Positive = Field(
        10,
        description="Iterations between evaluations, besides one before the first update and "
        "one at the end.",
    )
    sampled: bool = Field(True, description="Sample at the temperature too, besides greedy.")
    samples: Positive = Field(1, description="Sampled responses to each prompt.")
    pass_at: tuple[Positive, ...] = Field(
        (1,),
        strict=False,
        description="k of pass@k: the chance that one of k sampled responses is right.",
    )
    solved_at: float = Field(
        1.0, description="Score from which a response counts as right, for pass@k."
    )
    temperature: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Of the sampled responses; empty: rollout.temperature."
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="Level of the intervals that an evaluation reports."
    )
    max_prompts: Positive | None = Field(
        None, description="Use the first so many of each source; empty: all."
    )
    probes: tuple[ScorerSection, ...] = Field(
        (),
        strict=False,
        description="Scorers that are only evaluated (`eval/probe/…`), never trained on; written "
        "as reward.scorers.",
    )
