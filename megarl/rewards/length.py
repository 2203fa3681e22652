"""`length`: how well a response's length in tokens fits, as a score or a penalty.

With n tokens in the response (its end token among them):

- `max`, `buffer`: a penalty, the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13) with
  L_max = `max`, L_cache = `buffer`::

      0                            n <= max - buffer
      (max - buffer - n) / buffer  max - buffer < n <= max
      -1                           n > max

- `target`, `buffer`: a score, 1 at `target` tokens and 0 from `buffer` tokens away from it::

      1 - min(1, |n - target| / buffer)
"""

from __future__ import annotations

from megarl.rewards.options import check_whole
from megarl.rewards.scorer import Response, Scorer


def make(*, max: int | None = None, target: int | None = None, buffer: int) -> Scorer:
    """Options in tokens, exactly one of the first two:

    - `max`: length from which the penalty is -1; more than 0.
    - `target`: length that scores 1; 0 or more.
    - `buffer`: with `max`, over how many tokens before it the penalty grows, at most `max`; with
      `target`, how far from it the score is 0. More than 0.
    """
    longest = max
    if (longest is None) == (target is None):
        raise ValueError("give max or target, one of the two")
    for name, value, least in (("max", longest, 1), ("target", target, 0), ("buffer", buffer, 1)):
        if value is not None or name == "buffer":
            check_whole(name, value, least, "whole number of tokens")
    if longest is None:
        return lambda response: 1.0 - min(1.0, abs(len(response.token_ids) - target) / buffer)
    if buffer > longest:
        raise ValueError(f"buffer ({buffer}) is more than max ({longest})")

    def overlong(response: Response) -> float:
        tokens = len(response.token_ids)
        if tokens <= longest - buffer:
            return 0.0
        return (longest - buffer - tokens) / buffer if tokens <= longest else -1.0

    return overlong
