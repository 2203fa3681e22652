"""The whole run: models, ranks, rows, summary, exit code."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.contracts.errors import InputError
from megarl.reshard.families import read_spec
from tools.layouts import table
from tools.layouts.crew import Crew, RankError, forking
from tools.layouts.job import WORK, Job
from tools.layouts.layouts import QUICK
from tools.layouts.models import MODELS, make_models, stored_dtype

BOUND = 3e-5
"""Between float32 log-probs of two libraries; they are as far from float64."""


@dataclass(frozen=True)
class Options:
    """As `check_layouts.py --help` tells them."""

    families: tuple[str, ...]
    model: Path | None
    ranks: tuple[int, ...]
    quick: bool
    every: bool
    json: Path | None
    dtype: str
    bound: float
    fault: str | None = None


def check(options: Options) -> int:
    """Print the table; 0 when every row is right, else 1. Raises `InputError` for a model folder
    that cannot be used, `RankError` when the tiny models cannot be made."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as place:
        jobs = _jobs(options, Path(place))
        if not jobs:
            raise InputError(
                f"the quick selection has no pair of {', '.join(options.families)} on "
                f"{', '.join(map(str, options.ranks))} ranks; leave out --quick"
            )
        print(table.head(), flush=True)
        for world in options.ranks:
            for row in _of_ranks([job for job in jobs if job.world == world], Path(place)):
                if row["kind"] == "refused":
                    refused.append(row)
                    continue
                rows.append(row)
                print(table.line(row), flush=True)
    numbers = table.summary(rows, refused, time.monotonic() - began)
    print(table.closing(numbers, refused), flush=True)
    if options.json is not None:
        whole = {"rows": rows, "refused": refused, "summary": numbers}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(not rows or any(not row["ok"] for row in rows))


def _jobs(options: Options, place: Path) -> list[Job]:
    if options.model is not None:
        read_spec(options.model)
        stored = {stored_dtype(options.model): str(options.model)}
        return [
            _job(options, world, options.model.name, stored, str(options.model))
            for world in options.ranks
        ]
    names = [name for name, (family, *_) in MODELS.items() if family in options.families]
    maker = forking().Process(target=make_models, args=(str(place), names))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RankError("the tiny models could not be made; the traceback is above")
    jobs = []
    for world in options.ranks:
        for name in names:
            folders = {dtype: str(place / name / dtype) for dtype in ("float32", "bfloat16")}
            job = _job(options, world, name, folders, folders["float32"])
            if options.quick:
                chosen = (pair for model, *pair in QUICK.get(world, ()) if model == name)
                job = replace(job, only=frozenset(map(tuple, chosen)))
            if job.only is None or job.only:
                jobs.append(job)
    return jobs


def _job(options: Options, world: int, name: str, folders: dict[str, str], folder: str) -> Job:
    return Job(
        world,
        name,
        folders,
        folder,
        options.dtype,
        options.bound,
        every=options.every,
        fault=options.fault,
    )


class _Progress:
    """How far one job is, over the ranks that failed at it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._begun: dict[str, str] | None = None
        self._since = 0.0
        self._refused: set[tuple[str, str]] = set()

    def take(self, told: dict[str, Any]) -> dict[str, Any] | None:
        """The row to show of what rank 0 tells, or None."""
        kind = told["kind"]
        if kind == "begin":
            self._begun, self._since = told, time.monotonic()
            return None
        if kind == "refused":
            key = told["side"], told["layout"]
            if key in self._refused:
                return None
            self._refused.add(key)
        elif kind == "handover":
            self._is_done(told["train"], told["rollout"])
        else:
            self._trip_is_done(told["train"])
        return self._row(told)

    def failed(self, error: RankError) -> dict[str, Any]:
        """The row that the ranks failed at; the job goes on behind it. Raises `error` where they
        had begun none."""
        if self._begun is None:
            raise error
        train, rollout = self._begun["train"], self._begun["rollout"]
        row = {
            "train": train,
            "ok": False,
            "why": str(error),
            "seconds": time.monotonic() - self._since,
        }
        if (train, rollout) in self.job.done:
            self._trip_is_done(train)
            row |= {"kind": "round trip", "dtype": "?"}
        else:
            self._is_done(train, rollout)
            row |= {"kind": "handover", "rollout": rollout}
        self._begun = None
        return self._row(row)

    def _row(self, told: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.job.model, "ranks": self.job.world} | told

    def _is_done(self, train: str, rollout: str) -> None:
        self.job = replace(self.job, done=self.job.done | {(train, rollout)})

    def _trip_is_done(self, train: str) -> None:
        self.job = replace(self.job, trips=self.job.trips | {train})


def _of_ranks(jobs: list[Job], place: Path) -> Iterator[dict[str, Any]]:
    """Rows of jobs of one number of ranks. One whose ranks fail is told as failed, with the
    traceback, and new ranks do the others."""
    crew: Crew | None = None
    try:
        for progress in map(_Progress, jobs):
            over = False
            while not over:
                crew = crew or Crew(progress.job.world, place)
                try:
                    for told in crew.run(WORK, progress.job):
                        row = progress.take(told)
                        if row is not None:
                            yield row
                    over = True
                except RankError as error:
                    crew.close()
                    crew = None
                    yield progress.failed(error)
    finally:
        if crew is not None:
            crew.close()
