"""Which prompts are drawn next: an endless order of all rows, gone through once an epoch.

Every epoch is a shuffle of its own. A row is drawn at most once an iteration: a row that comes up
again in the same one steps back and is the first of the next iteration, so that each row still
comes once an epoch. What is drawn follows from the cursor's state alone, which says what was
consumed, so a run that continues draws what an uninterrupted one would.

Where the recipe weighs its sources each has an order and epochs of its own, and turns are dealt by
weight (`streams.Turns`). A turn that its source cannot fill, since this iteration has drawn all its
rows, or all are in quarantine or refused by the curriculum, goes to another one: by weight again,
and nothing is owed for it later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

from megarl.contracts.records import Prompt
from megarl.data.curriculum import Curriculum
from megarl.data.prompts import PromptError, PromptSet
from megarl.data.streams import Stream, Turns, stream_key
from megarl.data.table import SampleTable


class PromptCursor:
    """Draws the rows of one prompt set, iteration by iteration; the same on every rank.

    Example: rows a … e, three an iteration, epochs `d b a e c` and `e a d c b`: the draws are
    `d b a`, `e c a` (e has just come and steps back), `e d c`, …
    """

    def __init__(
        self,
        prompts: PromptSet,
        seed: int,
        per_iteration: int,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Raises `PromptError` when one iteration wants more prompts than there are, of all sources
        or of a weighted one, `CurriculumError` for a curriculum that cannot be asked."""
        self._rows = prompts.rows
        self._row_of = {prompt.prompt_id: row for row, prompt in enumerate(prompts.rows)}
        self._seed = seed
        self._fingerprint = prompts.fingerprint
        self.curriculum = curriculum
        """What says which prompts may be drawn; None: all may."""
        self._drawn: set[int] = set()
        """Rows of the iteration that goes on."""
        self._names: tuple[str, ...] = ()
        """Of the weighted sources; none where every row comes once an epoch."""
        if per_iteration > len(prompts):
            raise PromptError(
                f"rollout.prompts_per_iteration is {per_iteration}, but there are only "
                f"{len(prompts)} usable prompts; a row is drawn at most once an iteration"
            )
        if prompts.weights is None:
            self._streams = [Stream(np.arange(len(prompts)), stream_key(seed))]
            self._check_curriculum()
            return
        self._names = tuple(prompts.sources)
        self._turns = Turns(prompts.weights)
        rows = [np.flatnonzero(prompts.source_of_row == index) for index in range(len(self._names))]
        self._check_sizes(rows, per_iteration)
        self._streams = [Stream(mine, stream_key(seed, at)) for at, mine in enumerate(rows)]
        self._taken = [0] * len(rows)
        """Turns that each source had, filled by itself or not."""
        self._stood_in = [0] * len(rows)
        """Turns of others that each one filled."""
        self._check_curriculum()

    def _check_curriculum(self) -> None:
        if self.curriculum is not None:
            self.curriculum.check([self._rows[stream.rows[0]] for stream in self._streams])

    def _check_sizes(self, rows: Sequence[np.ndarray], per_iteration: int) -> None:
        for index, name in enumerate(self._names):
            wanted = ceil(per_iteration * self._turns.share(index))
            if wanted > len(rows[index]):
                raise PromptError(
                    f"data.train: source {name} has {len(rows[index])} usable prompts, but by its "
                    f"weight an iteration draws {wanted} of rollout.prompts_per_iteration = "
                    f"{per_iteration} from it, and a row at most once; lower its weight or "
                    "rollout.prompts_per_iteration, or give it more rows"
                )

    @property
    def rows(self) -> tuple[Prompt, ...]:
        """All that may be drawn, in the order of the file."""
        return self._rows

    @property
    def state(self) -> dict[str, Any]:
        """What was consumed, between two iterations; plain JSON."""
        head = {"fingerprint": self._fingerprint, "seed": self._seed}
        if not self._names:
            return head | _consumed(self._streams[0])
        return head | {
            "streams": [
                {"source": name, **_consumed(stream), "taken": taken, "stood_in": stood_in}
                for name, stream, taken, stood_in in zip(
                    self._names, self._streams, self._taken, self._stood_in, strict=True
                )
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where the cursor with `state` stopped.

        Raises `PromptError` when that one went through other rows or in another order.
        """
        mine = self.state
        for key in ("fingerprint", "seed"):
            if state.get(key) != mine[key]:
                raise PromptError(
                    f"the run to continue drew its prompts with {key} {state.get(key)!r}, this one "
                    f"has {mine[key]!r}: the order would differ; resume with the same data and "
                    "recipe"
                )
        told = state.get("streams", [])
        names = tuple(each["source"] for each in told)
        if names != self._names:
            raise PromptError(
                f"the run to continue drew its prompts from {_named(names)}, this one from "
                f"{_named(self._names)}: the order would differ; resume with the same data and "
                "recipe"
            )
        for stream, consumed in zip(self._streams, told or [state], strict=True):
            stream.restore(int(consumed["position"]), consumed["back"])
        if told:
            self._taken = [int(each["taken"]) for each in told]
            self._stood_in = [int(each["stood_in"]) for each in told]
        self._drawn = set()

    @property
    def epoch(self) -> float:
        """How many times the rows have been gone through, over all sources."""
        return sum(stream.epoch * len(stream) for stream in self._streams) / len(self._rows)

    @property
    def epochs(self) -> dict[str, float]:
        """Weighted source → how many times its rows have been gone through."""
        return {
            name: stream.epoch for name, stream in zip(self._names, self._streams, strict=False)
        }

    def begin(self, iteration: int = 0) -> None:
        """An iteration begins: every row that the curriculum keeps in it may be drawn again."""
        self._drawn = set()
        for stream in self._streams:
            stream.begin()
        if self.curriculum is not None:
            self.curriculum.begin(iteration)

    def draw(self, count: int, excluded: Collection[str] = ()) -> tuple[Prompt, ...]:
        """The next `count` prompts, none of which this iteration has drawn.

        `excluded` are prompt ids that are passed over and never drawn again: it only grows. Fewer
        come, perhaps none, when fewer are left to this iteration. Raises `CurriculumError`.
        """
        barred = {self._row_of[prompt_id] for prompt_id in excluded}
        gone = np.zeros(len(self._rows), dtype=bool)
        gone[list(self._drawn | barred)] = True
        able = [at for at, stream in enumerate(self._streams) if not gone[stream.rows].all()]

        def may(row: int) -> bool:
            if row in barred:
                return False
            return self.curriculum is None or self.curriculum.keeps(self._rows[row])

        chosen: list[int] = []
        while len(chosen) < count:
            row = self._take(able, may)
            if row is None:
                break
            self._drawn.add(row)
            chosen.append(row)
        return tuple(self._rows[row] for row in chosen)

    def _take(self, able: list[int], may: Callable[[int], bool]) -> int | None:
        """The row of the next turn; sources that turn out to have none leave `able`. None when
        no source is left, and then no turn was dealt."""
        turn = self._turns.next(self._taken) if self._names else 0
        while able:
            mine = turn if turn in able else self._turns.stand_in(self._stood_in, able)
            row = self._streams[mine].take(self._drawn, may)
            if row is None:
                able.remove(mine)
                continue
            if self._names:
                self._taken[turn] += 1
                self._stood_in[mine] += mine != turn
            return row
        return None

    def emptied(self, found: Collection[str], excluded: Collection[str]) -> list[str]:
        """A line for people on every weighted source of which nothing is left since the prompts
        `found` are `excluded` too, all by id."""
        if not found or not self._names:
            return []
        latest, barred = ([self._row_of[each] for each in ids] for ids in (found, excluded))
        return [
            f"every prompt of source {name} is in quarantine: other sources fill its turns"
            for name, stream in zip(self._names, self._streams, strict=True)
            if np.isin(latest, stream.rows).any() and np.isin(stream.rows, barred).all()
        ]

    def note(self, table: SampleTable, prompts: Sequence[Prompt]) -> None:
        """What an iteration scored, for the curriculum; `prompts` by draw index."""
        if self.curriculum is not None:
            self.curriculum.history.note(table, prompts)

    @property
    def history(self) -> dict[str, Any]:
        """What the curriculum knows of the run so far; plain JSON, empty without one."""
        return {} if self.curriculum is None else self.curriculum.history.state

    def restore_history(self, state: Mapping[str, Any]) -> None:
        """Go on with what the curriculum of the run to continue knew; an empty `state`: nothing."""
        if self.curriculum is not None:
            self.curriculum.history.restore(state)


def _consumed(stream: Stream) -> dict[str, Any]:
    return {"position": stream.position, "back": stream.back}


def _named(sources: Sequence[str]) -> str:
    return f"weighted sources {', '.join(sources)}" if sources else "all rows alike"
