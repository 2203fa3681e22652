"""What a run draws from, and what it is good with: prompts loaded and checked, contracts, facts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl.algorithms.registry import code_hashes
from megarl.assemble_roles import critic_folder
from megarl.contracts.errors import InputError
from megarl.contracts.hashes import contract_hash
from megarl.contracts.records import Prompt
from megarl.contracts.samples import SamplingContract
from megarl.contracts.tokens import Tokens
from megarl.data.curriculum import Curriculum
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptSet
from megarl.data.sets import read_sets
from megarl.evaluation.held_out import first_of_each_source
from megarl.experience.tokenizer import keep_tokenizer
from megarl.models.critic_spec import critic_spec
from megarl.observe.console import Console
from megarl.observe.environment import write_environment
from megarl.observe.logs import one_line
from megarl.observe.runfolder import DATA_FILE
from megarl.recipe import Recipe
from megarl.reshard.families.spec import ModelSpec
from megarl.rewards.score import ScoringPool
from megarl.world import World

MOST_TOLD = 8
"""Ranks, and things that are wrong with them, in a line for people."""

Loaded = TypeVar("Loaded")


class InputsDiffer(InputError):
    """Ranks that loaded other inputs than the others, or none; one line that names them."""

    told_by_all = True


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
        body = json.dumps(self.facts(), indent=1) + "\n"
        (folder / DATA_FILE).write_text(body, encoding="utf-8")

    def facts(self) -> dict[str, Any]:
        """What `data.json` says."""
        held_out = self.held_out.facts() if self.held_out else None
        return self.train.facts() | {"held_out": held_out}


def load_inputs(
    recipe: Recipe, console: Console | None = None, world: World | None = None
) -> Inputs:
    """Tokenizer and prompts, all checked, and the order in which they are drawn.

    Raises `PromptError` for rows that cannot be used, rewards that no scorer gives or no row has,
    held-out prompts that are training prompts, and fewer prompts than an iteration draws. With a
    `world` it is collective, and raises `InputsDiffer` as `loaded_alike` does.
    """

    def facts(inputs: Inputs) -> dict[str, str]:
        found = facts_of(inputs.tokens, {"train": inputs.train, "eval": inputs.held_out})
        own = code_hashes(recipe.algorithm)
        found |= {"own functions of algorithm": contract_hash(own)} if own else {}
        if inputs.curriculum is not None:
            found["data.curriculum"] = inputs.curriculum.code_hash
        return found

    def load() -> Inputs:
        return _load(recipe, console)

    return load() if world is None else loaded_alike(world, load, facts)


def facts_of(tokens: Tokens, sets: Mapping[str, PromptSet | None]) -> dict[str, str]:
    """What must be the same on all ranks of a tokenizer and of sets by their key in `data`."""
    found = {"tokenizer": tokens.hash}
    for key, prompts in sets.items():
        if prompts is not None:
            found |= {f"data.{key}": prompts.fingerprint, "data.template": prompts.template_hash}
    return found


def loaded_alike(
    world: World, load: Callable[[], Loaded], facts: Callable[[Loaded], Mapping[str, str]]
) -> Loaded:
    """What `load` gives, where `facts` of it are the same on every rank. Collective.

    Nodes may have copies of their own of files and code. Raises `InputsDiffer` on every rank, in
    the same words, where some ranks cannot load or have loaded something else; where none can, for
    the same reason, each raises its own error.
    """
    loaded, mine = None, {}
    error: Exception | None = None
    try:
        loaded = load()
        mine = facts(loaded)
    except (InputError, OSError) as caught:
        error = caught
    told = world.gather(("" if error is None else one_line(error), dict(mine)))
    problems = [problem for problem, _ in told]
    if error is not None and len(set(problems)) == 1:
        raise error
    line = _not_loaded(problems) if any(problems) else _differing([found for _, found in told])
    if line:
        raise InputsDiffer(line) from error
    return loaded


def _not_loaded(problems: list[str]) -> str:
    """Of what each rank could not load, by rank; at least one could not."""
    groups: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        groups.setdefault(problem, []).append(rank)
    fine = groups.pop("", [])
    lines = [f"{_ranks(ranks)}: {problem}" for problem, ranks in groups.items()]
    others = f" ({_ranks(fine)} could)" if fine else ""
    return f"inputs that cannot be loaded on every rank{others}; {_first(lines)}"


def _differing(told: list[dict[str, str]]) -> str:
    """Which ranks have other values than most, of what; empty where all have the same."""
    odd: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for facts in told for name in facts):
        values = [facts.get(name) for facts in told]
        usual = max(dict.fromkeys(values), key=values.count)  # of as many, the first rank's
        others = tuple(rank for rank, value in enumerate(values) if value != usual)
        if others:
            odd.setdefault(others, []).append(name)
    lines = [f"{_ranks(ranks)}: another {', '.join(names)}" for ranks, names in odd.items()]
    if not lines:
        return ""
    return (
        f"ranks have loaded other inputs than the others; {_first(lines)}; every machine needs the "
        "same files and code"
    )


def _first(lines: Sequence[str]) -> str:
    return "; ".join(lines[:MOST_TOLD]) + ("; …" if len(lines) > MOST_TOLD else "")


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2`; of many the first and how many there are."""
    first = ", ".join(map(str, ranks[:MOST_TOLD]))
    more = f" … ({len(ranks)} ranks)" if len(ranks) > MOST_TOLD else ""
    return f"rank {first}" if len(ranks) == 1 else f"ranks {first}{more}"


def _load(recipe: Recipe, console: Console | None) -> Inputs:
    """This rank's."""

    def progress(rows: int, path: str) -> None:
        if console is not None:
            console.progress(f"load data: {rows:,} rows, in {path}")

    sets = read_sets(recipe, progress)
    return Inputs(sets.tokens, sets.train, sets.held_out, sets.curriculum, sets.cursor)


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
