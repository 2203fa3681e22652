"""`repetition`: the share of a response's n-grams that are repeats, as a penalty or a score.

Over all runs of `n` neighbouring words (or tokens) of the response::

    repeats = 1 - distinct runs / runs        penalty: -repeats        score: 1 - repeats

A response shorter than `n` has no runs, and so no repeats.
"""

from __future__ import annotations

from megarl.rewards.options import check_whole, check_word
from megarl.rewards.scorer import Response, Scorer


def make(*, n: int = 4, of: str = "words", give: str = "penalty") -> Scorer:
    """Options:

    - `n`: length of a run, from 1.
    - `of`: `words`: what white space separates, in lower case. `tokens`: token ids, for languages
      that do not write spaces.
    - `give`: `penalty`, in (-1, 0], or `score`, in (0, 1]; 0 and 1 are without a repeat.
    """
    check_whole("n", n, 1)
    check_word("of", of, ("words", "tokens"))
    check_word("give", give, ("penalty", "score"))

    def score(response: Response) -> float:
        units = response.token_ids if of == "tokens" else response.text.lower().split()
        runs = list(zip(*(units[start:] for start in range(n)), strict=False))
        repeats = 1.0 - len(set(runs)) / len(runs) if runs else 0.0
        return 0.0 - repeats if give == "penalty" else 1.0 - repeats

    return score
