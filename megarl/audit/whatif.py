"""Which recipe keys can be changed over sealed facts, and why the others cannot."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megarl.audit.source import flatten
from megarl.recipe import Recipe

RECOMPUTABLE = (
    "algorithm.advantage",
    "algorithm.group_std",
    "algorithm.advantage_eps",
    "algorithm.rewards",
    "algorithm.gamma",
    "algorithm.gae.lam",
    "algorithm.gae.truncation",
    "algorithm.whiten",
    "algorithm.overlong.buffer_tokens",
    "algorithm.overlong.penalty",
    "algorithm.overlong.mask_truncated",
    "algorithm.zero_variance",
    "algorithm.partial_groups",
    "algorithm.minibatches",
    "algorithm.minibatch_groups",
    "algorithm.objective",
    "algorithm.importance.level",
    "algorithm.importance.mode",
    "algorithm.importance.low",
    "algorithm.importance.high",
    "algorithm.reduction",
    "algorithm.kl.beta",
    "algorithm.kl.estimator",
    "algorithm.kl.place",
    "reward.scorers",
    "reward.violated",
    "reward.penalty",
)
"""Keys that only functions of sealed facts read. Of scorers, `weight` and `at_least` alone."""

_REPLAY = "redo the update instead: bash launch/grpo.sh RECIPE --replay RUN@N"
_RATIO = (
    "it bounds the ratio to the policy being updated, whose log-probs are not sealed (at ratio 1 "
    f"it changes nothing); {_REPLAY}"
)
_STEERED = (
    "it moves beta by the KL of each iteration's policy, and other betas would have made other "
    "policies"
)
_ROLLOUT = "it decides what is sampled, which needs a new rollout"
_NO_NUMBER = "no number that is derived from sealed facts depends on it"

REASONS = (
    ("algorithm.clip_low", _RATIO),
    ("algorithm.clip_high", _RATIO),
    ("algorithm.dual_clip", _RATIO),
    (
        "algorithm.entropy_coefficient",
        "entropy needs whole distributions, of which only the sampled token's log-prob is sealed; "
        + _REPLAY,
    ),
    ("algorithm.dynamic_sampling", _ROLLOUT),
    (
        "algorithm.name",
        "it decides whether there is a critic, whose values need forwards; collect with "
        "`--only rollout` and algorithm.name=ppo",
    ),
    ("algorithm.epochs", f"later passes are of ratios that are not sealed; {_REPLAY}"),
    ("algorithm.target_kl", f"it stops updates by ratios that are not sealed; {_REPLAY}"),
    ("algorithm.kl.target", _STEERED),
    ("algorithm.kl.horizon", _STEERED),
    ("algorithm", "it is not known to follow from sealed facts alone"),
    ("rollout", _ROLLOUT),
    ("data", _ROLLOUT),
    ("seed", _ROLLOUT),
    ("model", "it decides weights and log-probs, which need a new rollout and forward"),
    ("critic", f"it acts in forwards and optimizer steps, not on what is derived; {_REPLAY}"),
    ("reference", "it decides the reference's log-probs, which need its forward"),
    ("actor", f"it acts in forwards and optimizer steps, not on what is derived; {_REPLAY}"),
    ("reward.quarantine_after", "it decides which prompts are drawn, which needs a new rollout"),
    (
        "reward",
        "it decides scores, which need the responses scored again: "
        "bash launch/grpo.sh RECIPE --only score --from RUN",
    ),
    ("", _NO_NUMBER),
)
"""The first prefix that fits tells why a key is refused."""


class Refused(ValueError):
    """An override whose effect does not follow from sealed facts; names key and reason."""


def changed_keys(before: Recipe, after: Recipe) -> list[str]:
    """Keys whose values differ, in declared order."""
    old, new = (flatten(recipe.model_dump(mode="json")) for recipe in (before, after))
    return [key for key in old | new if old.get(key) != new.get(key)]


def check_recomputable(before: Recipe, after: Recipe, sealed: Collection[str]) -> None:
    """Raise `Refused`, naming each key, unless everything that differs can be recomputed. `sealed`
    are the roles (`ref`, `critic`) whose columns all iterations have."""
    refused = [
        f"{key}: {_reason(key)}"
        for key in changed_keys(before, after)
        if not any(key == known or key.startswith(known + ".") for known in RECOMPUTABLE)
    ]
    if [(s.name, s.options) for s in before.reward.scorers] != [
        (s.name, s.options) for s in after.reward.scorers
    ]:
        refused.append(
            "reward.scorers: only weight and at_least can change over sealed scores; others "
            "need the responses scored again: bash launch/grpo.sh RECIPE --only score --from RUN"
        )
    kl, was = after.algorithm.kl, before.algorithm.kl
    if kl.target is not None and kl.beta != was.beta:
        refused.append(f"algorithm.kl.beta {kl.beta:g}: with algorithm.kl.target {_STEERED}")
    if after.algorithm.advantage == "gae" and "critic" not in sealed:
        refused.append(
            f"algorithm.advantage gae: no values are sealed (the run had algorithm.name "
            f"{before.algorithm.name}, so no critic), and they need a critic's forward: run with "
            "algorithm.name=ppo"
        )
    if "ref" not in sealed and kl.beta > 0 and kl != was:
        refused.append(
            f"algorithm.kl.beta {kl.beta:g}: no reference log-probs are sealed (the run had beta "
            f"{was.beta:g}, so no reference model was loaded), and KL needs them; "
            "they need a forward of the reference: run with algorithm.kl.beta above 0"
        )
    if refused:
        raise Refused("cannot be recomputed: " + "; ".join(refused))


def _reason(key: str) -> str:
    return next(
        reason
        for prefix, reason in REASONS
        if not prefix or key == prefix or key.startswith(prefix + ".")
    )


def told(before: Recipe, after: Recipe) -> Sequence[str]:
    """`key old → new` of everything that differs."""
    old, new = (flatten(recipe.model_dump(mode="json")) for recipe in (before, after))
    return [f"{key} {old.get(key)} → {new.get(key)}" for key in changed_keys(before, after)]
