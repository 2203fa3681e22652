"""What a run draws from, and what it is good with: prompts loaded and checked, contracts, facts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.algorithms.registry import code_hashes
from megarl.assemble_roles import critic_folder
from megarl.contracts.hashes import contract_hash
from megarl.contracts.records import Prompt
from megarl.contracts.samples import SamplingContract
from megarl.contracts.tokens import Tokens
from megarl.data.curriculum import Curriculum
from megarl.data.cursor import PromptCursor
from megarl.data.overlap import overlap_of
from megarl.data.prompts import PromptSet, check_rewards
from megarl.evaluation.held_out import first_of_each_source
from megarl.experience.tokenizer import keep_tokenizer
from megarl.models.critic_spec import critic_spec
from megarl.observe.console import Console
from megarl.observe.environment import write_environment
from megarl.observe.runfolder import DATA_FILE
from megarl.recipe import Recipe
from megarl.reshard.families.spec import ModelSpec
from megarl.rewards.score import ScoringPool
from megarl.world import World


@dataclass(frozen=True)
class Inputs:
    """A run's prompts, the same on every rank."""

    tokens: Tokens
    train: PromptSet
    held_out: PromptSet | None
    curriculum: Curriculum | None
    cursor: PromptCursor

    def notes(self) -> Iterator[str]:
        """For people."""
        yield from self.train.notes()
        if self.held_out is not None:
            yield from self.held_out.notes()

    def evaluated(self, most: int | None) -> tuple[Prompt, ...]:
        """Held-out prompts, at most so many of each source."""
        return first_of_each_source(self.held_out.rows if self.held_out else (), most)

    def write_facts(self, world: World, folder: Path) -> None:
        """environment.json, data.json and tokenizer/: what this run ran on and with. Collective."""
        hosts = world.gather(socket.gethostname())
        if not world.is_main:
            return
        keep_tokenizer(self.tokens, folder)
        write_environment(folder / "environment.json", hosts)
        held_out = self.held_out.facts() if self.held_out else None
        facts = self.train.facts() | {"held_out": held_out}
        (folder / DATA_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_inputs(recipe: Recipe, console: Console | None = None) -> Inputs:
    """Tokenizer and prompts, all checked, and the order in which they are drawn.

    Raises `PromptError` for rows that cannot be used, rewards that no scorer gives, held-out
    prompts that are training prompts, and fewer prompts than an iteration draws.
    """

    def progress(rows: int, path: str) -> None:
        if console is not None:
            console.progress(f"load data: {rows:,} rows, in {path}")

    section = recipe.data
    tokens = Tokens.load(Path(recipe.model.path))
    train = PromptSet.load(section.training, tokens, section, progress=progress)
    check_rewards(train, recipe.reward)
    held_out = None
    if section.eval is not None:
        held_out = PromptSet.load(section.held_out, tokens, section, progress=progress)
        check_rewards(held_out, recipe.reward, held_out=True)
        overlap = overlap_of(train, held_out, section.overlap_words)
        overlap.check(section)
        held_out = replace(held_out, overlap=overlap)
    curriculum = Curriculum.of(section.curriculum)
    wanted = recipe.rollout.prompts_per_iteration
    cursor = PromptCursor(train, recipe.seed, wanted, curriculum)
    return Inputs(tokens, train, held_out, curriculum, cursor)


def sampling_of(recipe: Recipe, tokens: Tokens) -> SamplingContract:
    """What responses are drawn from; refused when the trainer cannot score it."""
    rollout = recipe.rollout
    contract = SamplingContract(
        n=rollout.group_size,
        temperature=rollout.temperature,
        max_response_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(sorted({*tokens.eos_ids, *tokens.ids_of(rollout.stop)})),
        seed=recipe.seed,
        dtype=rollout.dtype,
        attention_backend=rollout.attention_backend,
    )
    contract.check_trainable()
    return contract


def contracts_of(
    recipe: Recipe, spec: ModelSpec, inputs: Inputs, pool: ScoringPool | None
) -> dict[str, str]:
    """What a position is only good with, as hashes; the scorer's on ranks that score."""
    found = {
        "tokenizer": inputs.tokens.hash,
        "model": spec.config_hash,
        "data": inputs.train.fingerprint,
        "sampling": sampling_of(recipe, inputs.tokens).hash,
    }
    if inputs.held_out is not None:
        found["eval_data"] = inputs.held_out.fingerprint
    if pool is not None:
        found["scorer"] = pool.version
    if recipe.algorithm.needs_values:
        found["critic"] = critic_spec(critic_folder(recipe), spec)[0].config_hash
    if own := code_hashes(recipe.algorithm):
        found["algorithm"] = contract_hash(own)
    if inputs.curriculum is not None:
        found["curriculum"] = inputs.curriculum.code_hash
    return found
