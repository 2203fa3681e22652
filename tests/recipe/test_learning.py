"""Keys about learning: what is filled, and what they refuse of each other.

Not covered: what the numbers mean, which is the algorithms' business.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recipe import load_recipe
from megarl.recipe.checks_learning import learning_notes
from megarl.recipe.differences import update_differences
from tests.recipe.files import MINIMAL, ROOT, refusal

PPO = ["algorithm.name=ppo"]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MINIMAL)
    return path


def test_what_depends_on_the_estimator_is_filled(recipe_file: Path) -> None:
    grpo = load_recipe(recipe_file).algorithm
    assert (grpo.advantage, grpo.whiten, grpo.kl.place) == ("grpo", "none", "loss")
    assert (grpo.zero_variance, grpo.partial_groups) == ("drop", "drop")
    assert grpo.group_relative and not grpo.needs_values
    ppo = load_recipe(recipe_file, PPO).algorithm
    assert (ppo.advantage, ppo.whiten, ppo.kl.place) == ("gae", "full", "reward")
    assert (ppo.zero_variance, ppo.partial_groups) == ("keep", "keep_scored")
    assert not ppo.group_relative and ppo.needs_values
    for name, whiten, relative in (
        ("rloo", "none", True),
        ("reinforce", "full", False),
        ("reinforce_baseline", "full", True),
        ("my.own:function", "none", True),
    ):
        chosen = load_recipe(recipe_file, [f"algorithm.advantage={name}"]).algorithm
        assert (chosen.whiten, chosen.group_relative) == (whiten, relative), name
    kept = load_recipe(recipe_file, [*PPO, "algorithm.zero_variance=drop"]).algorithm
    assert kept.zero_variance == "drop"


def test_a_filled_recipe_resolves_to_itself(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, PPO)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.resolved_yaml())
    assert load_recipe(resolved) == recipe
    assert load_recipe(resolved).hash == recipe.hash


def test_where_the_kl_term_goes(recipe_file: Path) -> None:
    def places(*overrides: str) -> tuple[bool, bool]:
        algorithm = load_recipe(recipe_file, list(overrides)).algorithm
        return algorithm.kl_in_loss, algorithm.kl_in_reward

    assert places() == (False, False)
    assert places("algorithm.kl.beta=0.1") == (True, False)
    assert places("algorithm.kl.beta=0.1", *PPO) == (False, True)
    assert places("algorithm.kl.beta=0.1", *PPO, "algorithm.kl.place=both") == (True, True)


def test_the_critic_has_the_actors_values_but_for_its_own(recipe_file: Path) -> None:
    own = ["critic.lr=1e-3", "critic.tokens_per_micro_batch=128", "critic.betas=[0.5, 0.9]"]
    recipe = load_recipe(recipe_file, [*PPO, "actor.weight_decay=0.3", *own])
    section = recipe.critic_section
    assert (section.lr, section.tokens_per_micro_batch) == (1e-3, 128)
    assert (section.betas, section.weight_decay, section.tp) == ((0.5, 0.9), 0.3, 2)
    assert recipe.actor.lr == 2e-4


REFUSED = [
    (["algorithm.advantage=gae"], "algorithm.advantage", "gae needs a critic's values"),
    ([*PPO, "algorithm.advantage=rloo"], "algorithm.advantage", "rloo reads no values"),
    (["algorithm.advantage=grop"], "algorithm.advantage", "there is no grop; built in are grpo"),
    (["algorithm.objective=gsop"], "algorithm.objective", "there is no gsop; built in are ppo_"),
    (["rollout.group_size=1"], "rollout.group_size", "grpo compares the responses of one prompt"),
    (
        [*PPO, "rollout.group_size=1", "algorithm.zero_variance=drop"],
        "algorithm.zero_variance",
        "every sample would be dropped",
    ),
    (["algorithm.minibatches=5"], "algorithm.minibatches", "cannot be made of 4 whole groups"),
    (
        ["algorithm.minibatches=17", "algorithm.minibatch_groups=split"],
        "algorithm.minibatches",
        "17 minibatches cannot be made of 16 samples",
    ),
    (
        ["algorithm.advantage=rloo", "algorithm.group_std=none"],
        "algorithm.group_std",
        "rloo does not read it, only grpo",
    ),
    (["algorithm.gamma=0.9"], "algorithm.gamma", "grpo does not read it, only gae and reinforce"),
    (["algorithm.gae.lam=0.9"], "algorithm.gae", "grpo does not read it, only gae"),
    (
        ["algorithm.objective=cispo", "algorithm.dual_clip=3"],
        "algorithm.dual_clip",
        "cispo does not read it, only ppo_clip",
    ),
    (["algorithm.overlong.buffer_tokens=17"], "algorithm.overlong.buffer_tokens", "set 16 or less"),
    (["algorithm.importance.high=3"], "algorithm.importance.high", "nothing is weighted at level"),
    (
        ["algorithm.importance={level: token, low: 0.5}"],
        "algorithm.importance.low",
        "truncate has an upper bound",
    ),
    (
        ["algorithm.importance={level: token, mode: mask, low: 3}"],
        "algorithm.importance.low",
        "every token would count 0",
    ),
    (["algorithm.kl.target=3"], "algorithm.kl.target", "never leaves 0"),
    (
        ["algorithm.kl={beta: 0.1, place: reward}", "algorithm.overlong.mask_truncated=true"],
        "algorithm.overlong.mask_truncated",
        "responses that are masked get no log-probs",
    ),
    (
        ["algorithm.rewards=process", "algorithm.advantage=rloo"],
        "algorithm.rewards",
        "rloo compares totals",
    ),
    (
        ["algorithm.rewards=process", "algorithm.kl={beta: 0.1, place: reward}"],
        "algorithm.kl.place",
        "grpo compares step scores",
    ),
    (
        ["algorithm.rewards=process", "algorithm.overlong.buffer_tokens=4"],
        "algorithm.overlong.buffer_tokens",
        "it changes the total of a response",
    ),
    (
        ["actor.router=frozen", "actor.router_aux_loss=0.1"],
        "actor.router_aux_loss",
        "it teaches routers, and they are frozen",
    ),
    (["critic.lr=1e-3"], "critic.lr", "grpo has no critic"),
    ([*PPO, "critic.tp=1"], "critic.tp", "1, but the actor has 2: megatron has one layout"),
    ([*PPO, "critic.pp=2"], "critic.pp", "2, but the actor has 1"),
    (
        ["algorithm.group_std=none", "algorithm.advantage_eps=1e-3"],
        "algorithm.advantage_eps",
        "nothing is divided",
    ),
    (
        ["algorithm.minibatches=1", "algorithm.target_kl=0.1"],
        "algorithm.target_kl",
        "a KL of exactly 0",
    ),
    (["algorithm.overlong.penalty=2"], "algorithm.overlong.penalty", "there is no penalty"),
    (["algorithm.kl={beta: 0.1, horizon: 5}"], "algorithm.kl.horizon", "stays as it is"),
    ([*PPO, "critic.tokens_per_micro_batch=31"], "critic.tokens_per_micro_batch", "raise it"),
    ([*PPO, "critic.min_lr=1"], "critic.min_lr", "is above lr"),
    ([*PPO, "critic.lr_warmup_steps=8"], "critic.lr_warmup_steps", "the run has 8"),
    (["reference.refresh_every=2"], "reference.refresh_every", "no reference is loaded"),
    (["reference.path=elsewhere"], "reference.path", "no reference is loaded"),
]


@pytest.mark.parametrize(("overrides", "key", "says"), REFUSED, ids=lambda part: str(part)[:40])
def test_keys_refuse_each_other_in_one_line(
    recipe_file: Path, overrides: list[str], key: str, says: str
) -> None:
    message = refusal(recipe_file, overrides)
    assert f": {key}: " in message
    assert says in message


def test_a_section_given_as_nothing_has_its_defaults(recipe_file: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    keys = "\nalgorithm:\n  name: ppo\n  minibatches: 2\n  gae: {lam: 0.5}\ncritic: {lr: 1e-3}\n"
    base.write_text(MINIMAL.replace("algorithm:\n  minibatches: 2\n", keys))
    to_grpo = ["algorithm.name=grpo", "algorithm.gae=", "critic="]
    assert load_recipe(base, to_grpo).algorithm == load_recipe(recipe_file).algorithm
    child = tmp_path / "child.yaml"
    child.write_text("base: base.yaml\nalgorithm:\n  name: grpo\n  gae:\ncritic:\n")
    assert load_recipe(child).critic == load_recipe(recipe_file).critic
    message = refusal(base, ["algorithm.name=grpo", "critic="])
    assert "leave it out (algorithm.gae=)" in message
    assert "must be a section of keys" in refusal(recipe_file, ["actor="])


def test_what_a_person_would_want_to_know_is_noted(recipe_file: Path) -> None:
    def notes(*overrides: str) -> list[str]:
        return list(learning_notes(load_recipe(recipe_file, list(overrides))))

    assert notes() == notes(*PPO) == []
    (alone,) = notes(*PPO, "critic.warmup_iterations=4")
    assert "the actor does not learn" in alone
    (nothing,) = notes("algorithm.kl={beta: 0.1, estimator: k1}")
    assert "regularises nothing" in nothing


def test_what_fits_is_let_through(recipe_file: Path) -> None:
    for overrides in (
        [*PPO, "critic.tp=2", "critic.sequence_parallel=false"],
        [*PPO, "rollout.group_size=1", "algorithm.epochs=3", "algorithm.target_kl=0.02"],
        [*PPO, "algorithm.kl={beta: 0.1, target: 6}", "reference.refresh_every=2"],
        ["algorithm.minibatches=16", "algorithm.minibatch_groups=split"],
        ["algorithm.advantage=my.own", "algorithm.gamma=0.5", "algorithm.group_std=none"],
    ):
        load_recipe(recipe_file, overrides)


def test_the_steps_of_a_warm_up_are_those_of_all_epochs(recipe_file: Path) -> None:
    overrides = ["actor.lr_warmup_steps=15", "algorithm.epochs=2"]
    assert load_recipe(recipe_file, overrides).algorithm.steps_per_iteration == 4
    assert "the run has 8" in refusal(recipe_file, overrides[:1])


def test_an_update_reads_the_critics_optimizer_and_not_its_packing(recipe_file: Path) -> None:
    ran = load_recipe(recipe_file, PPO)
    other = load_recipe(recipe_file, [*PPO, "critic.lr=1", "critic.tokens_per_micro_batch=64"])
    assert set(update_differences(other, ran)) == {"critic.lr"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_of_the_house_is_whole(path: Path) -> None:
    load_recipe(path)
