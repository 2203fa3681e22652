"""Curricula of one's own, named in a recipe by import path."""

from megarl.contracts.records import Prompt
from megarl.data.curriculum import Seen


def middling(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    """Hard ones from the second iteration on; no prompt again whose responses got 0.5."""
    if prompt.source == "hard" and iteration < 1:
        return False
    return seen.last_reward is None or seen.last_reward < 0.5


def other(prompt: Prompt, seen: Seen, iteration: int) -> bool:
    return middling(prompt, seen, iteration) and iteration >= 0
