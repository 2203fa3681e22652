"""Which keys may change when a run is resumed: a decision for every key of the schema.

Not covered: that a free key really changes no number, which the resumed runs show, and contents
behind paths, which the resume itself compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.recipe import Recipe, RecipeError, load_recipe, recipe_of_tree
from megarl.recipe.data import SourceSection
from megarl.recipe.differences import resume_differences
from megarl.recipe.keys import key_table
from megarl.recipe.learning import ScorerSection

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"

# Key → another value than the quickstart's. A new key belongs into one of the two.
FREE = {
    "run.name": "other",
    "run.folder": "elsewhere",
    "run.overwrite": True,
    "run.iterations": 80,
    "model.path": "moved/model",
    "data.train": [SourceSection(path="moved/train.jsonl").model_dump()],
    "data.eval": None,
    "world.ranks": 4,
    "world.device": "cuda",
    "world.timeout_seconds": 60.0,
    "world.stage_timeouts": {"generate": 30.0},
    "actor.tp": 1,
    "actor.pp": 2,
    "actor.stage_layers": [1, 1],
    "actor.virtual_stages": 2,
    "actor.ep": 2,
    "actor.expert_tp": 1,
    "actor.sequence_parallel": True,
    "actor.offload": "optimizer",
    "actor.tokens_per_micro_batch": 4096,
    "actor.recompute": "full",
    "actor.logprob_chunk_tokens": 64,
    "critic.path": "moved/critic",
    "critic.tokens_per_micro_batch": 4096,
    "critic.recompute": "full",
    "critic.offload": "optimizer",
    "critic.tp": 2,
    "critic.pp": 1,
    "critic.stage_layers": [1, 1],
    "critic.virtual_stages": 1,
    "critic.ep": 1,
    "critic.expert_tp": 1,
    "critic.sequence_parallel": False,
    "critic.distributed_optimizer": True,
    "reference.path": "moved/model",
    "reference.offload": "weights",
    "rollout.tp": 2,
    "rollout.ep": 2,
    "rollout.verify_every": 3,
    "rollout.max_total_tokens": 9000,
    "rollout.max_running_requests": 12,
    "rollout.chunked_prefill_tokens": 64,
    "rollout.release": True,
    "rollout.bucket_bytes": 1024,
    "reward.workers": 3,
    "reward.max_pending": 8,
    "reward.concurrency": 4,
    "data.max_overlap": 0.5,
    "data.overlap_words": 0,
    "data.max_ngram_overlap": 0.5,
    "parity.max": 1.0,
    "parity.mean": 0.5,
    "parity.action": "warn",
    "eval.every": 3,
    "eval.sampled": False,
    "eval.max_prompts": 8,
    "eval.samples": 4,
    "eval.pass_at": [1, 4],
    "eval.solved_at": 0.5,
    "eval.temperature": 0.7,
    "eval.confidence": 0.9,
    "eval.probes": [ScorerSection(name="format").model_dump(mode="json")],
    "experience.keep": 2,
    "experience.keep_every": 10,
    "checkpoint.every": 3,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 30,
    "checkpoint.background": False,
    "checkpoint.export_every": 5,
    "checkpoint.export_best": True,
    "resume.from": "runs/other",
    "resume.use": "reuse_sealed",
    "resume.allow": ["actor.lr"],
    "observe.tensorboard": False,
    "observe.console": "plain",
}
CHANGES_THE_RUN = {
    "seed": 2,
    "model.dtype": "bfloat16",
    "data.prompt_key": "question",
    "data.answer_key": "solution",
    "data.source_key": "source",
    "data.template": "none",
    "data.system_prompt": "Be brief.",
    "data.max_prompt_tokens": 16,
    "data.max_refused_share": 0.5,
    "data.reward_key": "reward",
    "data.max_row_bytes": 1000,
    "data.curriculum": "mine:keep",
    "actor.lr": 1e-5,
    "actor.lr_schedule": "cosine",
    "actor.lr_warmup_steps": 5,
    "actor.min_lr": 1e-6,
    "actor.betas": [0.9, 0.99],
    "actor.eps": 1e-6,
    "actor.weight_decay": 0.1,
    "actor.clip_grad": 0.5,
    "actor.distributed_optimizer": False,
    "actor.max_skipped_steps": 9,
    "rollout.prompts_per_iteration": 16,
    "rollout.group_size": 4,
    "rollout.temperature": 0.5,
    "rollout.max_response_tokens": 16,
    "rollout.dtype": "bfloat16",
    "rollout.attention_backend": "torch_native",
    "rollout.stop": ["."],
    "rollout.retries": 0,
    "rollout.max_lost_share": 0.5,
    "rollout.top_p": 0.9,
    "rollout.top_k": 5,
    "rollout.min_p": 0.1,
    "rollout.frequency_penalty": 0.1,
    "rollout.presence_penalty": 0.1,
    "rollout.repetition_penalty": 1.1,
    "reward.scorers": [ScorerSection(name="format").model_dump(mode="json")],
    "reward.deadline_seconds": 1.0,
    "reward.memory_gb": 1.0,
    "reward.on_status.timeout": "stop",
    "reward.on_status.error": "stop",
    "reward.penalty": -1.0,
    "reward.violated": -1.0,
    "reward.max_error_share": 0.5,
    "reward.quarantine_after": 1,
    "actor.router": "frozen",
    "actor.router_aux_loss": 0.01,
    "actor.replay_routing": True,
    "critic.lr": 1e-3,
    "critic.lr_schedule": "linear",
    "critic.lr_warmup_steps": 3,
    "critic.min_lr": 1e-7,
    "critic.betas": [0.9, 0.99],
    "critic.eps": 1e-6,
    "critic.weight_decay": 0.1,
    "critic.clip_grad": 0.5,
    "critic.max_skipped_steps": 9,
    "critic.value_clip": None,
    "critic.warmup_iterations": 3,
    "reference.refresh_every": 5,
    "algorithm.name": "ppo",
    "algorithm.advantage": "rloo",
    "algorithm.group_std": "none",
    "algorithm.advantage_eps": 1e-4,
    "algorithm.rewards": "process",
    "algorithm.gamma": 0.9,
    "algorithm.gae.lam": 0.5,
    "algorithm.gae.truncation": "terminal",
    "algorithm.whiten": "full",
    "algorithm.overlong.buffer_tokens": 8,
    "algorithm.overlong.penalty": 0.5,
    "algorithm.overlong.mask_truncated": True,
    "algorithm.minibatches": 4,
    "algorithm.minibatch_groups": "split",
    "algorithm.epochs": 2,
    "algorithm.target_kl": 0.1,
    "algorithm.objective": "gspo",
    "algorithm.importance.level": "token",
    "algorithm.importance.mode": "mask",
    "algorithm.importance.low": 0.5,
    "algorithm.importance.high": 5.0,
    "algorithm.kl.place": "both",
    "algorithm.kl.target": 3.0,
    "algorithm.kl.horizon": 100,
    "algorithm.clip_low": 0.1,
    "algorithm.clip_high": 0.1,
    "algorithm.dual_clip": 3.0,
    "algorithm.reduction": "sequence_mean",
    "algorithm.entropy_coefficient": 0.1,
    "algorithm.kl.beta": 0.1,
    "algorithm.kl.estimator": "k1",
    "algorithm.zero_variance": "keep",
    "algorithm.partial_groups": "keep_scored",
    "algorithm.dynamic_sampling.max_rounds": 2,
}


@pytest.fixture(scope="module")
def ran() -> Recipe:
    return load_recipe(QUICKSTART)


def changed(recipe: Recipe, key: str, value: Any) -> Recipe:
    """`recipe` with one key set, whatever the keys' cross-checks say of it."""
    tree = recipe.model_dump(mode="json")
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        node = node[section]
    assert leaf in node
    node[leaf] = value
    if key == "algorithm.name":  # there is one algorithm so far
        section = recipe.algorithm.model_copy(update={"name": value})
        return recipe.model_copy(update={"algorithm": section})
    return Recipe.model_validate_json(json.dumps(tree))


def test_every_key_is_decided_once(ran: Recipe) -> None:
    decided = [*FREE, *CHANGES_THE_RUN]
    assert sorted(decided) == sorted(row.key for row in key_table())
    assert list(ran.flat()) == [row.key for row in key_table()]


@pytest.mark.parametrize("key", FREE)
def test_a_free_key_is_no_difference(ran: Recipe, key: str) -> None:
    recipe = changed(ran, key, FREE[key])
    assert recipe.flat()[key] == FREE[key] != ran.flat()[key]
    assert resume_differences(recipe, ran) == {}


@pytest.mark.parametrize("key", CHANGES_THE_RUN)
def test_any_other_key_is_told_with_old_and_new_value(ran: Recipe, key: str) -> None:
    recipe = changed(ran, key, CHANGES_THE_RUN[key])
    assert resume_differences(recipe, ran) == {key: (ran.flat()[key], CHANGES_THE_RUN[key])}


def test_the_same_recipe_has_no_differences(ran: Recipe) -> None:
    assert resume_differences(load_recipe(QUICKSTART), ran) == {}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_depends_on_the_iterations(ran: Recipe, schedule: str) -> None:
    decaying = changed(ran, "actor.lr_schedule", schedule)
    longer = changed(decaying, "run.iterations", 80)
    assert resume_differences(longer, decaying) == {"run.iterations": (40, 80)}
    told = {"actor.lr_schedule": (schedule, "constant"), "run.iterations": (80, 40)}
    assert resume_differences(ran, longer) == told


def test_values_that_python_takes_for_equal_are_told_apart(ran: Recipe) -> None:
    one, true = (
        changed(ran, "reward.scorers", [{"name": "mine:score", "strict": value}])
        for value in (1, True)
    )
    (key, (old, new)) = resume_differences(one, true).popitem()
    assert key == "reward.scorers"
    assert (old[0]["strict"], new[0]["strict"]) == (True, 1)


def test_how_a_recipe_is_written_makes_no_difference(ran: Recipe) -> None:
    scorers = ran.flat()["reward.scorers"]
    again = [dict(reversed(scorer.items())) for scorer in scorers]
    assert resume_differences(changed(ran, "reward.scorers", again), ran) == {}


def test_a_stored_tree_is_the_recipe_again(ran: Recipe) -> None:
    tree = json.loads(json.dumps(ran.model_dump(mode="json")))
    assert recipe_of_tree(tree) == ran
    del tree["checkpoint"], tree["resume"]  # a recipe from before these sections
    assert recipe_of_tree(tree) == ran
    tree["actor"]["lr"] = "fast"
    with pytest.raises(RecipeError, match='^recipe: actor.lr: must be a number, got "fast"$'):
        recipe_of_tree(tree)
    tree["actor"]["momentum"] = 0.9
    with pytest.raises(RecipeError, match="^recipe: actor.momentum: unknown key"):
        recipe_of_tree(tree)
