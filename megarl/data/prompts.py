"""Prompts: rows of one or several sources, checked once at start.

Every row becomes a `Prompt` with the very ids the engine executes, or a refusal with file, line and
reason. Nothing is truncated and the order of sources and files is kept. Files are streamed
(`data.readers`); what stays in memory are the usable rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from megarl.contracts.hashes import canonical_json
from megarl.contracts.records import Prompt
from megarl.contracts.template import NONE, Template
from megarl.contracts.tokens import Tokens
from megarl.data.readers import read_rows
from megarl.data.refusals import KEPT, PromptError, Refusal, Refused, Tally
from megarl.data.renderings import Alike, Written, alike
from megarl.data.rows import MANY_NAMES, Checked, RowChecks, checked_row
from megarl.recipe.data import SourceSection

if TYPE_CHECKING:  # it compares sets
    from megarl.data.overlap import Overlap

__all__ = ["Progress", "PromptError", "PromptSet", "Refusal"]

Progress = Callable[[int, str], None]
"""Told the rows that are done and the path of the file, a few times a second at most."""

_BATCH_ROWS = 256
_BATCH_CHARACTERS = 1 << 22
"""Rows that become ids together: as many as both allow."""
_SECONDS = 0.5
"""Between two words on progress."""


@dataclass(frozen=True)
class PromptSet:
    """The usable rows of all sources, in their order."""

    rows: tuple[Prompt, ...]
    refusals: tuple[Refusal, ...]
    """The first 10,000 rows that are left out."""
    refused: dict[str, int]
    """Kind of refusal → rows, e.g. `{"too_long": 2, "empty_answer": 1}`."""
    fingerprint: str
    """Over ids, rendered token ids, answers, sources, metadata and reward names, in order, and over
    the sources' weights where they have some."""
    weights: tuple[float, ...] | None = None
    """Of each source; None where every row comes once an epoch."""
    sources: tuple[str, ...] = ("",)
    """Names."""
    source_of_row: np.ndarray | None = None
    """int32 [rows], index into `sources`."""
    number_of_row: np.ndarray | None = None
    """int64 [rows], line or table row in its file, from 1."""
    files: tuple[str, ...] = ()
    """Path of each source."""
    tallies: tuple[Tally, ...] = ()
    """Of each source, what is refused and why."""
    named: tuple[bool, ...] = ()
    """Of each source, whether the recipe or its rows name their rewards."""
    user_texts: tuple[str, ...] = ()
    """Of each row, what the user wrote in all messages; of one message it is the row's text."""
    template_hash: str = ""
    overlap: Overlap | None = None
    """Of held-out prompts, with those to train on."""
    written: Written = field(default_factory=Written)
    alike: Alike = Alike()

    def __post_init__(self) -> None:
        count = len(self.rows)
        for name, dtype in (("source_of_row", np.int32), ("number_of_row", np.int64)):
            value = getattr(self, name)
            value = np.zeros(count, dtype) if value is None else np.asarray(value, dtype)
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        if not self.user_texts:
            object.__setattr__(self, "user_texts", tuple(row.text for row in self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def load(
        sources: Sequence[SourceSection],
        tokens: Tokens,
        section: Any,
        *,
        progress: Progress | None = None,
    ) -> PromptSet:
        """Read and check every row of `sources`, filled; `section` is the recipe's `data`.

        Raises `PromptError` for a file that cannot be read as rows, for a source without a usable
        row, where the refused share of a source exceeds `section.max_refused_share`, naming the
        first rows and the count per kind, and for a template that makes the same ids of all rows,
        whatever their text; `TokensError` for a template that cannot be used.
        """
        template = tokens.template(section.template)
        weights = _weights(sources, template)
        loading = _Loading(tokens, template, section, progress)
        for index, source in enumerate(sources):
            loading.read(index, source)
        return loading.done(sources, weights)

    @property
    def counts(self) -> dict[str, int]:
        """Source → usable rows."""
        found = np.bincount(self.source_of_row, minlength=len(self.sources))
        return dict(zip(self.sources, found.tolist(), strict=True))

    @property
    def duplicates(self) -> int:
        """Rows whose text an earlier row has too, to the letter."""
        return len(self.user_texts) - len(set(self.user_texts))

    def place(self, row: int) -> str:
        """`file:line` of a row."""
        file = self.files[self.source_of_row[row]] if self.files else ""
        return f"{file}:{self.number_of_row[row]}"

    def facts(self) -> dict[str, Any]:
        """What `data.json` says of the set; plain JSON."""
        refused = {
            name: tally.kinds.total()
            for name, tally in zip(self.sources, self.tallies, strict=False)
        }
        sources = {
            name: {"rows": rows, "refused": refused.get(name, 0)}
            for name, rows in self.counts.items()
        }
        for name, weight in zip(self.sources, self.weights or (), strict=False):
            sources[name]["weight"] = weight
        facts: dict[str, Any] = {
            "files": list(self.files),
            "fingerprint": self.fingerprint,
            "rows": len(self.rows),
            "sources": sources,
            "duplicates": self.duplicates,
            "template": self.template_hash,
            "refused_by_kind": self.refused,
            "refused": [f"{where}: {why}" for where, why in self.refusals],
        }
        return facts if self.overlap is None else facts | {"overlap": self.overlap.facts()}

    def notes(self, *, refused: bool = True) -> list[str]:
        """What a person should hear of the set, a line each; of `refused` rows too, or not."""
        told = []
        count, files = sum(self.refused.values()), ", ".join(self.files)
        if count and refused:
            first = self.refusals[0]
            told.append(
                f"{count} rows of {files} refused, see data.json; first {first.where}: {first.why}"
            )
        if self.duplicates:
            told.append(
                f"{self.duplicates} of {len(self)} prompts of {files} have the "
                "text of an earlier one; each is a prompt of its own"
            )
        told += self.written.notes(len(self), files, self.place)
        told += self.alike.notes(len(self), files, self.place)
        names = len({row.source for row in self.rows})
        if names > MANY_NAMES:
            told.append(
                f"rows of {files} are from {names} sources (data.source_key); each "
                f"kind of metric by source has {names} names"
            )
        return told if self.overlap is None else [*told, *self.overlap.notes()]


def _weights(sources: Sequence[SourceSection], template: Template) -> tuple[float, ...] | None:
    """The sources' weights. Raises `PromptError` for sources that do not go together."""
    paths: dict[str | None, str] = {}
    for source in sources:
        if source.name in paths:
            raise PromptError(
                f"two sources are called {source.name!r}: {paths[source.name]} and {source.path}; "
                "set `name` of one"
            )
        paths[source.name] = source.path
        if template.text is None and source.system_prompt is not None:
            raise PromptError(
                f"{source.path}: a system prompt needs a chat template, data.template is "
                f'"{NONE}"; leave one of them out'
            )
    weights = [source.weight for source in sources]
    if all(weight is None for weight in weights):
        return None
    if None in weights:
        name = sources[weights.index(None)].name
        raise PromptError(f"source {name!r} has no weight, others have; give all or none a weight")
    return tuple(weights)


class _Loading:
    """The set while it is read, source after source."""

    def __init__(
        self, tokens: Tokens, template: Template, section: Any, progress: Progress | None
    ) -> None:
        self._tokens, self._template, self._section = tokens, template, section
        self._progress, self._told = progress, time.monotonic()
        self._done = 0
        self._seen: dict[str, str] = {}
        self._names: set[str] = set()
        self._rows: list[Prompt] = []
        self._user_texts: list[str] = []
        self._sources: list[int] = []
        self._numbers: list[int] = []
        self._refusals: list[Refusal] = []
        self._tallies: list[Tally] = []
        self._written = Written()
        self._hasher = blake3()
        # One object for each id: a row's ids then cost 8 bytes each, not 36.
        self._ids = list(range(tokens.vocab_size))

    def read(self, index: int, source: SourceSection) -> None:
        """Raises `PromptError`."""
        tally = Tally(source.path)
        self._tallies.append(tally)
        checks = RowChecks(
            source, self._tokens, self._template, self._section, self._seen, self._names
        )
        limit = self._section.max_row_bytes
        waiting: list[tuple[int, Checked | Refused]] = []
        characters = 0
        for number, raw in read_rows(source, limit):
            try:
                row = checked_row(raw, limit)
                tally.keys(row)
                found: Checked | Refused = checks.check(number, row)
                characters += len(found.rendered)
            except Refused as refused:
                found = refused
            waiting.append((number, found))
            if len(waiting) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
                self._take(index, checks, waiting)
                waiting, characters = [], 0
        self._take(index, checks, waiting)
        tally.check(self._section.max_refused_share)

    def _take(
        self, index: int, checks: RowChecks, waiting: Sequence[tuple[int, Checked | Refused]]
    ) -> None:
        """Rows become prompts together, in the order of the file."""
        tally = self._tallies[index]
        texts = [row.rendered for _, row in waiting if isinstance(row, Checked)]
        ids = iter(self._tokens.executed(texts))
        for number, row in waiting:
            try:
                if isinstance(row, Refused):
                    raise row
                prompt = checks.prompt(row, self._shared(next(ids)))
            except Refused as refused:
                refusal = Refusal(f"{tally.path}:{number}", refused.why)
                tally.refuse(refusal, refused.kind)
                if len(self._refusals) < KEPT:
                    self._refusals.append(refusal)
                continue
            tally.kept += 1
            self._written.add(len(self._rows), row.own_system, row.special)
            self._rows.append(prompt)
            self._user_texts.append(row.user_text)
            self._sources.append(index)
            self._numbers.append(number)
            self._hasher.update(_fingerprint_line(prompt))
        self._tell(len(waiting), tally.path)

    def _shared(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        size = len(self._ids)
        return tuple([self._ids[id_] if id_ < size else id_ for id_ in ids])

    def _tell(self, more: int, path: str) -> None:
        self._done += more
        now = time.monotonic()
        if self._progress is not None and now - self._told >= _SECONDS:
            self._told = now
            self._progress(self._done, path)

    def done(
        self, sources: Sequence[SourceSection], weights: tuple[float, ...] | None
    ) -> PromptSet:
        """The whole set."""
        if weights is not None:
            told = [
                [source.name, weight, tally.kept]
                for source, weight, tally in zip(sources, weights, self._tallies, strict=True)
            ]
            self._hasher.update(canonical_json({"weights": told}).encode() + b"\n")
        kinds = sum((tally.kinds for tally in self._tallies), Counter())
        found = PromptSet(
            rows=tuple(self._rows),
            refusals=tuple(self._refusals),
            refused=dict(kinds),
            fingerprint="blake3:" + self._hasher.hexdigest(),
            weights=weights,
            sources=tuple(str(source.name) for source in sources),
            source_of_row=np.array(self._sources, np.int32),
            number_of_row=np.array(self._numbers, np.int64),
            files=tuple(source.path for source in sources),
            tallies=tuple(self._tallies),
            named=tuple(bool(source.reward or source.reward_key) for source in sources),
            user_texts=tuple(self._user_texts),
            template_hash=self._template.hash,
            written=self._written,
        )
        same = alike(
            found.rows, found.user_texts, found.source_of_row, found.place, self._template.name
        )
        return replace(found, alike=same)


def _fingerprint_line(prompt: Prompt) -> bytes:
    """A reward name that is the source's, as it is where nobody gives one, is left out."""
    told = [prompt.prompt_id, prompt.token_ids, prompt.answer, prompt.source, prompt.metadata]
    if prompt.reward != prompt.source:
        told.append(prompt.reward)
    return canonical_json(told).encode() + b"\n"
