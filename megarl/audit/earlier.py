"""A run as it was before one of its resumes: what was set aside, joined with what it was cut from.

    before resume k   = what is before k's position in the state after k, and `resumes/00k/`

A resume that was killed while it set things aside left them to the next one; both count as one.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from megarl.audit.logs import Log, read_bytes, read_log
from megarl.audit.view import RunView
from megarl.experience.manifest import MANIFEST_FILE, iteration_folders
from megarl.observe.runfolder import NotARun


class EarlierView(RunView):
    """The run before resume `at` (an index into the run's resumes)."""

    def __init__(self, run: RunView, at: int, later: RunView) -> None:
        """`later`: the run before the resume after it, or all that lies in its folder."""
        super().__init__(run.resumes[at].folder)
        self.root, self.resumes, self.begun = run.root, run.resumes, at
        self.resumed, self._run, self._later = run.resumes[at], run, later

    @cached_property
    def went_on(self) -> bool:
        """The resume came to a state of its own; otherwise it may not have set all aside."""
        return any(line["time"] >= self.resumed.time for line in self._later.journal)

    @cached_property
    def cut_at(self) -> int:
        """The first iteration that was set aside."""
        later = self._later
        if self.went_on or not isinstance(later, EarlierView):
            return self.resumed.cut
        return min(self.resumed.cut, later.cut_at)

    @property
    def cut(self) -> None:
        return None

    @cached_property
    def members(self) -> tuple[EarlierView, ...]:
        """This one, and those of resumes that set aside what it had left."""
        later = self._later
        more = isinstance(later, EarlierView) and not self.went_on
        return (self, *(later.members if more else ()))

    def holds(self, file: str) -> bool:
        """Whether a finding's file is of what was set aside here."""
        return any(file.startswith(member.file("") + "/") for member in self.members)

    def log(self, file: str) -> Log:
        """Lines that were set aside name their file in `resumes/`, and only its problems are told:
        the others' are told of the run."""
        name = self.file(file)
        there = (self.folder / file).exists()
        tail = read_log(self.folder, file, name) if there else Log(name, (), (), False)
        lines = getattr(self._later, Path(file).stem).lines
        if self.went_on:
            lines = tuple(line for line in lines if line["iteration"] < self.resumed.cut)
            return Log(name, lines + tail.lines, tail.problems, tail.torn)
        told = [line.told for line in tail.lines]
        copied = bool(told) and [line.told for line in lines[-len(told) :]] == told
        kept = tuple(line for line in lines if line["iteration"] < self.resumed.cut)
        # Of a file that was cut, no more is left than a hand-over whose facts are used again.
        if not copied and all(line.told in told for line in lines[len(kept) :]):
            lines = kept + tail.lines
        return Log(name, lines, tail.problems, tail.torn)

    @cached_property
    def homes(self) -> dict[int, Path]:
        later, cut, reused = self._later.homes.items(), self.resumed.cut, self.resumed.reused
        kept = {n: home for n, home in later if not self.went_on or n < cut or n == reused}
        # Of an iteration whose facts were used again only derived files are here.
        aside = {
            number: self.folder
            for number, path in iteration_folders(self.folder)
            if number != reused or (path / MANIFEST_FILE).exists()
        }
        return kept | aside

    @property
    def set_aside(self) -> tuple[int, ...]:
        """Sealed iterations that no later state of the run has."""
        again = {member.resumed.reused for member in self.members}
        return tuple(n for n in self.sealed if n >= self.cut_at and n not in again)

    def bytes_of(self, file: str) -> bytes:
        """What a line file held, as far as its whole lines can be read."""
        later, tail = self._later.bytes_of(file), read_bytes(self.folder / file)
        kept = _lines_before(later, self.resumed.cut)
        if self.went_on:
            return kept + tail
        if tail and later.endswith(tail):
            return later
        left = later.removeprefix(kept).splitlines()
        return kept + tail if set(left) <= set(tail.splitlines()) else later


def _lines_before(body: bytes, iteration: int) -> bytes:
    kept = []
    for line in body.splitlines(keepends=True):
        try:
            told = json.loads(line).get("iteration")
        except (ValueError, AttributeError):
            continue  # `records` tells it
        if isinstance(told, int) and told < iteration:
            kept.append(line)
    return b"".join(kept)


def every_state(run: RunView) -> list[EarlierView]:
    """The run before each of its resumes, by number."""
    if isinstance(run, EarlierView):
        return [view for view in every_state(run._run) if view.begun < run.begun]
    return run.earlier_states(lambda at, later: EarlierView(run, at, later))


def earlier(run: RunView) -> list[EarlierView]:
    """Those of them that were whole: a resume whose predecessor was killed while it set things
    aside found what that one had left."""
    found = every_state(run)
    whole = [view for at, view in enumerate(found) if at == 0 or found[at - 1].went_on]
    # Nothing was there where a run began with another one's checkpoint.
    return [view for view in whole if len(view.journal) or view.homes or view.resumed.own]


def before(run: RunView, number: int) -> EarlierView:
    """The run before resume `number`. Raises `NotARun` in one line where there is none."""
    views = {view.resumed.number: view for view in earlier(run)}
    if number not in views:
        there = ", ".join(map(str, views)) or "none"
        raise NotARun(f"{run.folder}: no resume {number}; resumes: {there}")
    return views[number]


def rolled_back(run: RunView, iteration: int) -> list[EarlierView]:
    """The earlier states in which `iteration` is sealed and which no later one has."""
    return [view for view in earlier(run) if iteration in view.set_aside]
