"""Pairs of rules for the reference, all spelled out, and recipe keys for the house, in which what
the house fills by itself is left empty.

Groups of a minibatch by hand, after `split_minibatches`: the largest first, in turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.reference.rules import GROUP_SIZE, Row, Rules

COMPLETE = ((0, 4), (3, 5))  # of groups 0, 3, 4, 5
SCORED = ((0, 4, 2), (3, 5))  # and of 2, which is smaller
EVERY = ((0, 3, 5), (1, 4, 2))  # and of 1, which is equal
BY_STEPS = ((0, 3, 5), (1, 4))  # 1 is not equal in its step scores
LONG = ((0, 4), (1, 5, 3))  # nor in shaped rewards; without what was cut off 5 has three, 3 has two
GRPO = Rules(minibatches=COMPLETE)
PLAIN = Rules(  # no comparison among the responses to a prompt
    compares=False, drop_equal=False, drop_partial=False, minibatches=EVERY
)
PPO = replace(
    PLAIN, advantage="gae", whiten="full", critic=True, kl_in_reward=True, beta=0.1, gamma=0.97
)
PPO_KEYS = ("name=ppo", "kl.beta=0.1", "gamma=0.97")
LOSS_KL = {"beta": 0.2, "kl_in_loss": True}


@dataclass(frozen=True)
class Case:
    """`keys` belong under `algorithm`, but for those of another section, in full."""

    rules: Rules
    keys: tuple[str, ...] = ()
    critic: str | None = None
    """`own`: a reward model's folder; `fresh`: the actor's body under zeros."""
    group_size: int = GROUP_SIZE

    def rows(self, rows: list[Row]) -> list[Row]:
        """What is sampled: the first responses to each prompt."""
        return [row for row in rows if row.candidate < self.group_size]

    @property
    def overrides(self) -> list[str]:
        return [
            key if key.startswith("critic.") else f"algorithm.{key}"
            for key in (f"minibatches={len(self.rules.minibatches)}", *self.keys)
        ]


def _grpo(*keys: str, **rules) -> Case:
    return Case(replace(GRPO, **rules), keys)


def _plain(*keys: str, **rules) -> Case:
    return Case(replace(PLAIN, **rules), keys)


def _ppo(*keys: str, critic: str = "own", group_size: int = GROUP_SIZE, **rules) -> Case:
    return Case(replace(PPO, **rules), PPO_KEYS + keys, critic, group_size)


MAIN = {
    "grpo": _grpo("epochs=2", "kl.beta=0.2", "clip_high=0.28", epochs=2, clip_high=0.28, **LOSS_KL),
    "ppo": _ppo("epochs=2", epochs=2),
}
"""What every layout is compared on: four steps, the last two on what was trained on before."""

VARIANTS = {
    "grpo, what is scored": _grpo(
        "partial_groups=keep_scored", drop_partial=False, minibatches=SCORED
    ),
    "grpo, all kept": _grpo(
        "partial_groups=keep_scored",
        "zero_variance=keep",
        drop_partial=False,
        drop_equal=False,
        minibatches=EVERY,
    ),
    "grpo, population": _grpo("group_std=population", group_std="population"),
    "grpo, leave one out": _grpo("group_std=leave_one_out", group_std="leave_one_out"),
    "dr. grpo": _grpo(
        "group_std=none",
        "reduction=sequence_sum_constant",
        group_std="none",
        reduction="sequence_sum_constant",
    ),
    "grpo of the paper": _grpo(
        "reduction=sequence_mean", "kl.beta=0.2", reduction="sequence_mean", **LOSS_KL
    ),
    "grpo, dual clip": _grpo("dual_clip=1.02", "epochs=2", dual_clip=1.02, epochs=2),
    "grpo, entropy": _grpo("entropy_coefficient=0.3", entropy=0.3),
    "grpo, one pass": _grpo(),
    "grpo, whitened": _grpo("whiten=full", whiten="full"),
    "grpo, scaled": _grpo("whiten=scale", whiten="scale"),
    "grpo, overlong": _grpo(
        "overlong={buffer_tokens: 5, penalty: 0.6, mask_truncated: true}",
        buffer_tokens=5,
        penalty=0.6,
        mask_truncated=True,
        minibatches=LONG,
    ),
    "grpo, process": _grpo("rewards=process", process=True, minibatches=BY_STEPS),
    "grpo, kl in reward": _grpo("kl={beta: 0.2, place: reward}", beta=0.2, kl_in_reward=True),
    "grpo, steered": _grpo("kl={beta: 0.1, target: 6.0}", beta=0.25, kl_in_loss=True),
    "grpo, empty minibatches": _grpo(minibatches=((0,), (3,), (4,), (5,), (), ())),
    "grpo, split groups": _grpo("minibatch_groups=split", split=True),
    "grpo, stopped": _grpo("epochs=2", "target_kl=0.01", epochs=2, target_kl=0.01),
    "rloo, kl in reward": _grpo(
        "advantage=rloo",
        "kl={beta: 0.2, place: reward}",
        advantage="rloo",
        beta=0.2,
        kl_in_reward=True,
    ),
    "rloo": _grpo("advantage=rloo", advantage="rloo"),
    "reinforce_baseline": _grpo(
        "advantage=reinforce_baseline", advantage="reinforce_baseline", whiten="full"
    ),
    "reinforce": _plain(
        "advantage=reinforce", "gamma=0.9", advantage="reinforce", gamma=0.9, whiten="full"
    ),
    "reinforce, kl in reward": _plain(
        "advantage=reinforce",
        "kl={beta: 0.2, place: reward}",
        "whiten=none",
        advantage="reinforce",
        beta=0.2,
        kl_in_reward=True,
    ),
    "reinforce, process": _plain(
        "advantage=reinforce",
        "rewards=process",
        advantage="reinforce",
        process=True,
        whiten="full",
    ),
    "gspo": _grpo(
        "objective=gspo",
        "epochs=2",
        "clip_low=0.03",
        "clip_high=0.04",
        objective="gspo",
        epochs=2,
        clip_low=0.03,
        clip_high=0.04,
    ),
    "gspo, sequence mean": _grpo(
        "objective=gspo", "reduction=sequence_mean", objective="gspo", reduction="sequence_mean"
    ),
    "cispo": _grpo("objective=cispo", "epochs=2", objective="cispo", epochs=2),
    "k1": _grpo("kl={beta: 0.2, estimator: k1}", estimator="k1", **LOSS_KL),
    "k2": _grpo("kl={beta: 0.2, estimator: k2}", estimator="k2", **LOSS_KL),
    "importance, token": _grpo(
        "importance={level: token, high: 1.2}", importance="token", importance_high=1.2
    ),
    "importance, token mask": _grpo(
        "importance={level: token, mode: mask, low: 0.7, high: 1.4}",
        importance="token",
        importance_mode="mask",
        importance_low=0.7,
        importance_high=1.4,
    ),
    "importance, sequence": _grpo(
        "importance={level: sequence, high: 1.5}", importance="sequence", importance_high=1.5
    ),
    "importance, sequence mean": _grpo(
        "importance={level: sequence_mean, mode: mask, low: 0.8, high: 1.2}",
        importance="sequence_mean",
        importance_mode="mask",
        importance_low=0.8,
        importance_high=1.2,
    ),
    "ppo, fresh critic": _ppo(critic="fresh"),
    "ppo, cut off is over": _ppo("gae.truncation=terminal", bootstrap=False),
    "ppo, no value clip": _ppo("critic.value_clip=null", value_clip=None),
    "ppo, as they are": _ppo("whiten=none", "gae.lam=0.7", whiten="none", lam=0.7),
    "ppo, both kl": _ppo("kl.place=both", kl_in_loss=True),
    "ppo, sequence mean": _ppo("reduction=sequence_mean", reduction="sequence_mean"),
    "ppo, process": _ppo("rewards=process", process=True),
    "ppo, one pass": _ppo(),
    "ppo, steered": _ppo("kl={place: both, beta: 0.1, target: 6.0}", kl_in_loss=True, beta=0.25),
    "ppo, one response": _ppo(group_size=1, minibatches=((0, 2, 4), (1, 3, 5))),
    "ppo, stopped": _ppo("epochs=2", "target_kl=0.01", epochs=2, target_kl=0.01),
    "ppo, overlong": _ppo(
        "overlong={buffer_tokens: 5, penalty: 0.6}", buffer_tokens=5, penalty=0.6
    ),
    "ppo, own packs": _ppo("critic.tokens_per_micro_batch=25"),
}
