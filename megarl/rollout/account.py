"""The ledger of one iteration: sampled = trained + dropped + refused, by reason, and what was lost.

Beside the account proper it says how the samples came about (prompts, rounds, losses) and where
the dropped and refused ones lie, by source and by response length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megarl.rollout.selection import DROPPED, REFUSED, VERDICTS, Selection, Verdict

LENGTH_BUCKETS = 4
"""Equal parts of the longest allowed response."""


class LedgerError(RuntimeError):
    """Samples that are neither trained, dropped nor refused, or more than one of these."""


def ledger(selection: Selection, trained: np.ndarray | None = None) -> dict:
    """The iteration's account: sampled = trained + dropped + refused, the latter two by reason.

    `trained` bool [N] is what was really packed for the updates, when known.
    Raises `LedgerError` naming the first samples when the account does not close.
    """
    trained = selection.kept if trained is None else np.asarray(trained, dtype=bool)
    wrong = np.flatnonzero(trained != (selection.verdict == 0))
    if len(wrong):
        told = ", ".join(
            f"{selection.draw_index[row]}/{selection.candidate[row]} is {selection.reason(row)} "
            f"and {'was' if trained[row] else 'was not'} trained"
            for row in wrong[:3]
        )
        raise LedgerError(f"the ledger does not close for {len(wrong)} samples: {told}")
    tally = np.bincount(selection.verdict, minlength=len(VERDICTS)).tolist()
    by_reason = dict(zip(VERDICTS, tally, strict=True))
    account = {
        "sampled": selection.counts["samples"],
        "trained": int(trained.sum()),
        "dropped": {str(reason): by_reason[reason] for reason in DROPPED if by_reason[reason]},
        "refused": {str(reason): by_reason[reason] for reason in REFUSED if by_reason[reason]},
        "lost": selection.counts["samples_lost"],
    }
    out = sum(account["dropped"].values()) + sum(account["refused"].values())
    if account["sampled"] != account["trained"] + out:
        raise LedgerError(f"the ledger does not close: {account}")
    return account


@dataclass(frozen=True)
class Drawn:
    """How an iteration's samples came about; global facts, the same on every rank."""

    sources: Sequence[str]
    """Of each drawn prompt, by draw index."""
    rounds: int = 1
    lost: Mapping[str, int] = field(default_factory=dict)
    """Reason → responses that stayed lost after their retries."""

    def account(self, selection: Selection, lengths: np.ndarray, longest: int) -> dict:
        """What the ledger says besides `ledger`; `lengths` int [N], response tokens.

        `lost_reasons`, `prompts`, `rounds`, and verdicts counted by source and by length bucket.
        Raises `LedgerError` when the losses are not what is missing of the samples.
        """
        missing = selection.counts["samples_lost"]
        if sum(self.lost.values()) != missing:
            raise LedgerError(
                f"{missing} responses are missing of {selection.counts['groups']} groups, but "
                f"{sum(self.lost.values())} were lost: {dict(self.lost)}"
            )
        sources, source = np.unique(np.array(self.sources, dtype=object), return_inverse=True)
        buckets, bucket = length_buckets(lengths, longest)
        return {
            "lost_reasons": dict(sorted(self.lost.items())),
            "prompts": len(self.sources),
            "rounds": self.rounds,
            "by_source": count_by(selection, sources.tolist(), source[selection.draw_index]),
            "by_length": count_by(selection, buckets, bucket),
        }


def length_buckets(lengths: np.ndarray, longest: int) -> tuple[list[str], np.ndarray]:
    """Names of the buckets, such as `9-16`, and int64 [N], the bucket of each response length."""
    edges = sorted({-(-longest * part // LENGTH_BUCKETS) for part in range(LENGTH_BUCKETS + 1)})
    names = [f"{low + 1}-{high}" for low, high in pairwise(edges)]
    return names, np.searchsorted(edges[1:], lengths)


def count_by(
    selection: Selection, names: Sequence[str], label: np.ndarray
) -> dict[str, dict[str, int]]:
    """For each name with rows its rows by verdict; `label` int [N] says whose each row is."""
    kinds = len(VERDICTS)
    tally = np.bincount(label * kinds + selection.verdict, minlength=len(names) * kinds)
    return {
        name: {str(VERDICTS[kind]): row[kind] for kind in range(kinds) if row[kind]}
        for name, row in zip(names, tally.reshape(len(names), kinds).tolist(), strict=True)
        if any(row)
    }


def drop_rates(counted: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Of each name's samples (see `count_by`) the share that does not train."""
    totals = {name: sum(tally.values()) for name, tally in counted.items()}
    return {
        name: (totals[name] - tally.get(Verdict.TRAINED, 0)) / totals[name]
        for name, tally in counted.items()
    }
