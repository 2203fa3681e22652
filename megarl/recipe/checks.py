"""Cross-checks of a recipe: what single keys cannot know. Each refusal says what to change.

A check yields `(keys, message)` for what it refuses; the keys, most telling first, say where the
error is shown. Keys compared with the model's own config are checked where that config is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.recipe.checks_data import data_refusals
from megarl.recipe.checks_learning import learning_refusals
from megarl.recipe.keys import key_table, nearest_key
from megarl.recipe.schema import Recipe
from megarl.recipe.sections import RESUME_CONTENTS

# Of the 255 bytes that file systems give a name; `.replay-<n>.replaced-<n>` may follow.
LONGEST_NAME = 200

Refusal = tuple[tuple[str, ...], str]

# SGLang keeps up to 6 tokens of a request's room to itself (one at the end, five at the input).
GENERATOR_RESERVE_TOKENS = 8

# Neutral values: the distribution sampled is exactly the one the trainer scores.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}

# bfloat16 keeps 8 bits: gaps below this are out of reach, so such a bound would stop any run.
BFLOAT16_PARITY_FLOOR = {"max": 1e-2, "mean": 1e-3}


def refusals(recipe: Recipe) -> Iterator[Refusal]:
    """Everything the recipe's keys refuse about each other, most basic first."""
    yield from _name(recipe)
    yield from _layout(recipe)
    yield from learning_refusals(recipe)
    yield from _tokens(recipe)
    yield from _sampling(recipe)
    yield from _memory(recipe)
    yield from data_refusals(recipe)
    yield from _parity(recipe)
    yield from _experience(recipe)
    yield from _checkpoint(recipe)
    yield from _resume(recipe)


def _name(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.run.name
    if name is None:
        return
    told = _brief(name)
    size = len(name.encode(errors="replace"))
    if name in (".", "..") or "/" in name:
        yield (
            ("run.name",),
            f"{told} is not a plain folder name; runs lie in run.folder, change that instead",
        )
    elif name != name.strip() or not name.isprintable():
        yield (
            ("run.name",),
            f"{told} has white space around it or characters that cannot be seen; leave them out",
        )
    elif size > LONGEST_NAME:
        yield (
            ("run.name",),
            f"{told} is {size} bytes long; a folder's name, with what is added for replays and "
            f"replaced runs, has room for {LONGEST_NAME}",
        )


def _brief(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")


def _layout(recipe: Recipe) -> Iterator[Refusal]:
    ranks, rollout, actor = recipe.world.ranks, recipe.rollout, recipe.actor
    yield from _divides(ranks, {"actor.tp": actor.tp, "actor.pp": actor.pp})
    if actor.ep > 1 or actor.expert_tp is not None:
        sizes = {"actor.ep": actor.ep, "actor.pp": actor.pp}
        sizes["actor.tp" if actor.expert_tp is None else "actor.expert_tp"] = (
            actor.tp if actor.expert_tp is None else actor.expert_tp
        )
        yield from _divides(ranks, sizes)
    if ranks % rollout.tp:
        yield (
            ("rollout.tp", "world.ranks"),
            f"{ranks} ranks do not divide by rollout.tp {rollout.tp}; make world.ranks a multiple "
            f"of {rollout.tp} or change rollout.tp",
        )
    if rollout.tp % rollout.ep:
        yield (
            ("rollout.ep", "rollout.tp"),
            f"rollout.ep {rollout.ep} does not divide rollout.tp {rollout.tp}; set it to 1 or to a "
            "divisor",
        )
    if actor.virtual_stages > 1 and actor.pp == 1:
        yield (
            ("actor.virtual_stages", "actor.pp"),
            f"{actor.virtual_stages} virtual stages need a pipeline; set actor.pp above 1 or leave "
            "virtual_stages out",
        )
    stages = actor.pp * actor.virtual_stages
    if actor.stage_layers and len(actor.stage_layers) != stages:
        yield (
            ("actor.stage_layers", "actor.pp"),
            f"{len(actor.stage_layers)} numbers of layers for {stages} stages (actor.pp × "
            f"actor.virtual_stages); list {stages}, in depth order",
        )


def _divides(ranks: int, sizes: dict[str, int]) -> Iterator[Refusal]:
    """Refuses where `ranks` do not divide by the product of these keys' sizes."""
    size = math.prod(sizes.values())
    if ranks % size == 0:
        return
    used = {key: value for key, value in sizes.items() if value > 1}
    beside_tp = [key for key in reversed(used) if key != "actor.tp"]
    product = " × ".join(f"{key} {value}" for key, value in used.items())
    yield (
        (*beside_tp, "world.ranks", "actor.tp"),
        f"{ranks} ranks do not divide by {product}; make world.ranks a multiple of {size} or "
        f"change {' or '.join(used)}",
    )


def _tokens(recipe: Recipe) -> Iterator[Refusal]:
    rollout, budget = recipe.rollout, recipe.actor.tokens_per_micro_batch
    longest = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    how = (
        f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + rollout.max_response_tokens "
        f"{rollout.max_response_tokens}"
    )
    if budget < longest:
        yield (
            ("actor.tokens_per_micro_batch", "rollout.max_response_tokens"),
            f"{budget} tokens cannot hold the longest sample, {longest} ({how}); raise it to "
            f"{longest} or more",
        )
    need = longest + GENERATOR_RESERVE_TOKENS
    if rollout.max_total_tokens < need:
        yield (
            ("rollout.max_total_tokens", "rollout.max_response_tokens"),
            f"{rollout.max_total_tokens} tokens of KV cache cannot hold the longest sample, "
            f"{longest} ({how}), and the generator's reserve of {GENERATOR_RESERVE_TOKENS}; raise "
            f"it to {need} or more (about rollout.max_running_requests × {longest} keeps all "
            "requests running)",
        )
    elif rollout.chunked_prefill_tokens > rollout.max_total_tokens:
        yield (
            ("rollout.chunked_prefill_tokens", "rollout.max_total_tokens"),
            f"a prefill chunk of {rollout.chunked_prefill_tokens} tokens does not fit into "
            f"rollout.max_total_tokens {rollout.max_total_tokens}; lower it to that or less",
        )


def _sampling(recipe: Recipe) -> Iterator[Refusal]:
    for key, neutral in NEUTRAL_SAMPLING.items():
        value = getattr(recipe.rollout, key)
        if value != neutral:
            yield (
                (f"rollout.{key}",),
                f"sampling with {key} {value} cannot be trained on: the trainer scores the full "
                "distribution, the samples would come from a filtered or penalised one; leave it "
                f"out or set {neutral}",
            )


def _memory(recipe: Recipe) -> Iterator[Refusal]:
    if recipe.rollout.release and recipe.world.device == "cpu":
        yield (
            ("rollout.release", "world.device"),
            "a CPU cannot give the generator's memory back while it trains; set rollout.release "
            "to false, or world.device to cuda",
        )


def _parity(recipe: Recipe) -> Iterator[Refusal]:
    parity = recipe.parity
    assert parity.max is not None and parity.mean is not None
    coarse = [
        key
        for key, dtype in (
            ("model.dtype", recipe.model.dtype),
            ("rollout.dtype", recipe.rollout.dtype),
        )
        if dtype == "bfloat16"
    ]
    if coarse and parity.action == "stop":
        for name, floor in BFLOAT16_PARITY_FLOOR.items():
            bound = getattr(parity, name)
            if bound < floor:
                yield (
                    (f"parity.{name}", coarse[0]),
                    f"{bound} nats cannot hold with {coarse[0]} bfloat16 and would stop the run; "
                    f"set {floor} or more, leave it out, or set {coarse[0]} to float32",
                )
    if parity.mean > parity.max:
        yield (
            ("parity.mean", "parity.max"),
            f"the mean bound {parity.mean} is above the largest allowed gap {parity.max}, so it "
            "never applies; lower parity.mean or raise parity.max",
        )


def _experience(recipe: Recipe) -> Iterator[Refusal]:
    experience = recipe.experience
    if experience.keep_every and experience.keep is None:
        yield (
            ("experience.keep_every",),
            "without experience.keep every iteration stays; set experience.keep, or leave "
            "keep_every out",
        )


def _checkpoint(recipe: Recipe) -> Iterator[Refusal]:
    checkpoint = recipe.checkpoint
    every, keep_every = checkpoint.every, checkpoint.keep_every
    if keep_every and not every:
        yield (
            ("checkpoint.keep_every", "checkpoint.every"),
            "with checkpoint.every 0 there is one checkpoint, at the end, and it stays anyway; "
            "set checkpoint.every, or leave keep_every out",
        )
    elif keep_every and keep_every % every:
        yield (
            ("checkpoint.keep_every", "checkpoint.every"),
            f"{keep_every} is no multiple of checkpoint.every {every}, so most of the checkpoints "
            f"it would keep are never made; set {every * max(1, round(keep_every / every))}",
        )
    if checkpoint.export_best and recipe.data.eval is None:
        yield (
            ("checkpoint.export_best", "data.eval"),
            "without held-out prompts no weights are the best; set data.eval, or leave "
            "export_best out",
        )


def _resume(recipe: Recipe) -> Iterator[Refusal]:
    resume = recipe.resume
    known = [*RESUME_CONTENTS, *(row.key for row in key_table())]
    for index, name in enumerate(resume.allow):
        if name not in known:
            near = nearest_key(name, known)
            hint = f"; did you mean {near}?" if near else "; see --help for the keys"
            yield (
                (f"resume.allow.{index}", "resume.allow"),
                f"{_brief(name)} is neither a recipe key nor one of "
                f"{', '.join(RESUME_CONTENTS)}{hint}",
            )
        elif name in resume.allow[:index]:
            yield ((f"resume.allow.{index}",), f"{name} is listed twice; keep one")
