"""Of a sample's story (`story.py`), the advantage: how it came about, and what was trained on."""

from __future__ import annotations

from typing import Any

from megarl.audit.text import number

Story = dict[str, Any]


def formula(advantage: Story, group: Story) -> str | None:
    """How the advantage came about, with its numbers; None where that is not told."""
    if advantage["recomputed"] is None:
        if not advantage["by_group_alone"]:
            return None
        return "none: nothing to compare this sample with"
    value = number(advantage["recomputed"], 10)
    if not advantage["by_group_alone"]:
        return f"{_estimator(advantage)}; mean of its action tokens {value}"
    reward, mean = number(advantage["reward"], 10), number(group["mean"], 10)
    if group["std"] == 0 or advantage["recomputed"] == 0 == group["std"]:
        return f"A = {value}: all rewards of the group are equal"
    if advantage["estimator"] == "rloo":
        return f"A = r − mean of the others, r = {reward}, = {value}"
    std, eps = number(group["std"], 10), number(advantage["eps"])
    match advantage["group_std"]:
        case "none":
            return f"A = r − mean = {reward} − {mean} = {value}"
        case "sample":
            return f"A = (r − mean) / (std + eps) = ({reward} − {mean}) / ({std} + {eps}) = {value}"
        case "population":
            return f"A = (r − mean) / (std of ddof 0 + {eps}), r = {reward}, = {value}"
        case _:
            told = "A = (r − mean of the others) / (their std + eps)"
            return f"{told}, r = {reward}, eps = {eps}, = {value}"


def _estimator(advantage: Story) -> str:
    told = f"algorithm.advantage {advantage['estimator']}, {advantage['rewards']} rewards"
    if advantage["estimator"] in ("gae", "reinforce"):
        told += f", gamma {number(advantage['gamma'])}"
    if advantage["estimator"] == "gae":
        told += f", lam {number(advantage['lam'])}"
    if advantage["kl_beta"] is not None:
        told += f", less {number(advantage['kl_beta'])} (log π_old − log π_ref) on each token"
    return told if advantage["whiten"] == "none" else f"{told}, whitened ({advantage['whiten']})"


def trained_on(advantage: Story) -> str:
    """What the sample trained on, and whether it is what the facts give."""
    if advantage["trained_on"] is None:
        return "no advantage: the sample did not train"
    mean = number(advantage["trained_on"], 9)
    if advantage["lowest"] == advantage["highest"]:
        told = f"{mean} on every action token (float32, sealed)"
    else:
        ends = f"{number(advantage['lowest'])} to {number(advantage['highest'])}"
        told = f"{mean} in the mean, {ends} on its action tokens (float32, sealed)"
    if advantage["equal"] is None:
        return told
    return told + (": equal, bit for bit" if advantage["equal"] else "; THE FACTS SAY OTHERWISE")
