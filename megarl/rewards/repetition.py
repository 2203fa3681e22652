"""`repetition`: the share of a response's n-grams that are repeats, as a penalty or a score.

Over all runs of `n` neighbouring words (or tokens) of the response::

    repeats = 1 - distinct runs / runs        penalty: -repeats        score: 1 - repeats

A response shorter than `n` has no runs, and so no repeats.
"""

from __future__ import annotations

from megarl.rewards.scorer import Response, Scorer


def make(*, n: int = 4, of: str = "words", give: str = "penalty") -> Scorer:
    """Options:

    - `n`: length of a run, from 1.
    - `of`: `words`: what white space separates, in lower case. `tokens`: token ids, for languages
      that do not write spaces.
    - `give`: `penalty`, in (-1, 0], or `score`, in (0, 1]; 0 and 1 are without a repeat.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n must be a whole number from 1, not {n!r}")
    if of not in ("words", "tokens"):
        raise ValueError(f"of must be words or tokens, not {of!r}")
    if give not in ("penalty", "score"):
        raise ValueError(f"give must be penalty or score, not {give!r}")

    def score(response: Response) -> float:
        units = response.token_ids if of == "tokens" else response.text.lower().split()
        runs = list(zip(*(units[start:] for start in range(n)), strict=False))
        repeats = 1.0 - len(set(runs)) / len(runs) if runs else 0.0
        return 0.0 - repeats if give == "penalty" else 1.0 - repeats

    return score
