"""What an audit found, and how it is told: one line a check, one line a finding, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TextIO

PROGRESS_SECONDS = 2.0
"""How often a long audit says where it is."""
MOST_TOLD = 20
"""Findings of one check that are told one by one; JSON has all of them."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something wrong in a file, as a check yields it."""

    file: str
    """Relative to the run's folder, with a line number where there is one."""
    what: str
    sample: str | None = None
    """A sample id."""
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Finding(Found):
    """`Found` with the name of the check that found it."""

    check: str = ""

    def __str__(self) -> str:
        about = [self.sample, self.field]
        tail = "".join(f", {word}" for word in about if word)
        return f"{self.check}: {self.file}: {self.what}{tail}"


@dataclass
class Outcome:
    """One check over a run."""

    name: str
    line: str
    """What it makes sure of."""
    looked_at: int = 0
    """How often it ran: once, or once for every sealed iteration."""
    skipped: int = 0
    """Iterations it could not look at, because what it needs could not be read."""
    findings: list[Finding] = field(default_factory=list)

    def take(self, found: Iterable[Found]) -> None:
        self.looked_at += 1
        self.add(found)

    def add(self, found: Iterable[Found]) -> None:
        for item in found:
            self.findings.append(Finding(item.file, item.what, item.sample, item.field, self.name))


@dataclass
class Report:
    """All checks of one run."""

    run: str
    outcomes: list[Outcome]
    notes: list[str]
    """What is so and not wrong: a run that failed, iterations that retention let go."""

    @property
    def findings(self) -> list[Finding]:
        return [finding for outcome in self.outcomes for finding in outcome.findings]

    def to_json(self) -> str:
        return json.dumps(
            {
                "run": self.run,
                "ok": not self.findings,
                "checks": [
                    {
                        "name": outcome.name,
                        "looked_at": outcome.looked_at,
                        "skipped": outcome.skipped,
                        "findings": len(outcome.findings),
                    }
                    for outcome in self.outcomes
                ],
                "findings": [asdict(finding) for finding in self.findings],
                "notes": self.notes,
            }
        )

    def write(self, out: TextIO) -> None:
        for line in self._lines():
            print(line, file=out)

    def _lines(self) -> Iterator[str]:
        width = max(len(outcome.name) for outcome in self.outcomes)
        for outcome in self.outcomes:
            times = f"×{outcome.looked_at}" if outcome.looked_at > 1 else ""
            yield f"{_word(outcome):>8}{times:>6}  {outcome.name:<{width}}  {outcome.line}"
        for note in self.notes:
            yield f"    note  {note}"
        for outcome in self.outcomes:
            for finding in outcome.findings[:MOST_TOLD]:
                yield str(finding)
            more = len(outcome.findings) - MOST_TOLD
            if more > 0:
                yield f"{outcome.name}: and {more} more; --json has them all"
        yield self._verdict()

    def _verdict(self) -> str:
        counts = Counter(finding.check for finding in self.findings)
        if not counts:
            return f"{self.run}: {len(self.outcomes)} checks, nothing found"
        told = ", ".join(f"{count} by {name}" for name, count in counts.items())
        return f"{self.run}: {counts.total()} findings: {told}"


def _word(outcome: Outcome) -> str:
    if outcome.findings:
        return "FOUND"
    if outcome.skipped:
        return "skipped"
    return "ok" if outcome.looked_at else "-"


class Progress:
    """Says on stderr, every few seconds, where a long audit is."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, where: str) -> None:
        if time.monotonic() - self._told > PROGRESS_SECONDS:
            self._told = time.monotonic()
            print(f"… {where}", file=sys.stderr, flush=True)
