"""Prompts whose responses could not be scored too often: they are never drawn again.

Counted over the run on the global table, so every rank comes to the same prompts without asking.
A response with an id the tokenizer does not know says nothing of its prompt and is not counted;
one that got the declared penalty could not be scored and is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.contracts.records import STATUSES, Prompt
from megarl.data.table import SampleTable
from megarl.rewards.score import penalised
from megarl.rewards.scorer import PENALTY

FILE = "quarantine.jsonl"
MOST_TOLD = 3


@dataclass(frozen=True)
class Quarantined:
    """One prompt that is drawn no more, and why."""

    prompt_id: str
    iteration: int
    counts: dict[str, int]
    """`error` or `timeout` → responses over the run."""
    detail: str
    """The commonest one."""


class Quarantine:
    """The run's quarantined prompts, the same on every rank; rank 0 writes `quarantine.jsonl`."""

    def __init__(self, after: int, folder: Path | None) -> None:
        """`after` so many unscored responses a prompt is quarantined, 0: never. `folder` is the
        run's, None on every rank but 0."""
        self._after = after
        self._path = None if folder is None else folder / FILE
        self._failures: dict[str, Counter[tuple[str, str]]] = {}
        self.prompt_ids: set[str] = set()

    @property
    def state(self) -> dict[str, Any]:
        """What was counted so far; plain JSON."""
        failures = {
            prompt_id: sorted([status, detail, count] for (status, detail), count in counts.items())
            for prompt_id, counts in sorted(self._failures.items())
        }
        return {"failures": failures, "prompt_ids": sorted(self.prompt_ids)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count on where the quarantine with `state` stopped."""
        self._failures = {
            prompt_id: Counter({(status, detail): count for status, detail, count in counts})
            for prompt_id, counts in state["failures"].items()
        }
        self.prompt_ids = set(state["prompt_ids"])

    def note(
        self, iteration: int, table: SampleTable, prompts: Sequence[Prompt]
    ) -> list[Quarantined]:
        """Count the iteration's unscored responses; `prompts` by draw index.

        Returns the prompts that are quarantined from here on, in the order they were drawn.
        """
        if not self._after:
            return []
        found = []
        for draw in sorted(set(self._count(table, prompts))):
            prompt_id = prompts[draw].prompt_id
            failures = self._failures[prompt_id]
            if failures.total() >= self._after and prompt_id not in self.prompt_ids:
                found.append(_described(prompt_id, iteration, failures))
        self.prompt_ids |= {item.prompt_id for item in found}
        if found and self._path is not None:
            with open(self._path, "a", encoding="utf-8") as out:
                for item in found:
                    out.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
        return found

    def _count(self, table: SampleTable, prompts: Sequence[Prompt]) -> list[int]:
        """Adds to the failures; the draw index of each."""
        scores = table.scores
        with_penalty = penalised(scores)
        rows = np.flatnonzero((~scores.ok | with_penalty) & ~table.invalid)
        for row in rows.tolist():
            status = str(STATUSES[scores.status_code[row]])
            detail = scores.details[scores.detail_code[row]]
            if with_penalty[row]:
                status, _, detail = detail.removeprefix(PENALTY).partition(": ")
            prompt_id = prompts[table.draw_index[row]].prompt_id
            self._failures.setdefault(prompt_id, Counter())[status, detail] += 1
        return table.draw_index[rows].tolist()


def _described(prompt_id: str, iteration: int, failures: Counter[tuple[str, str]]) -> Quarantined:
    counts: Counter[str] = Counter()
    for (status, _), count in failures.items():
        counts[status] += count
    # Of equally common ones the first in the alphabet: rows may come in any order.
    (_, detail), _ = min(failures.items(), key=lambda item: (-item[1], item[0]))
    return Quarantined(prompt_id, iteration, dict(sorted(counts.items())), detail)


def quarantine_notes(found: Sequence[Quarantined]) -> list[str]:
    """For people: a line for each of the first, one for the rest."""
    lines = [
        f"prompt {item.prompt_id} is drawn no more: {sum(item.counts.values())} responses to it "
        f"could not be scored, most often {item.detail}"
        for item in found[:MOST_TOLD]
    ]
    rest = len(found) - len(lines)
    return lines + [f"and {rest} more, see {FILE}"] * (rest > 0)
