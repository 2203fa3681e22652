"""Which start of a run an iteration is from, and the recipe that it then had. Plain Python.

    first start    iterations 0 …
    resume k       from its position N on: what the run had beyond N lies in `resumes/00k/`

A resume at or before the position of an earlier one leaves nothing of that one. The recipe of a
start is what the next resume found and kept: `resumes/00{k+1}/recipe.yaml`, the run's own
`recipe.yaml` after the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.resume import FOLDER, RESUME_FILE
from megarl.observe.runfolder import RECIPE_FILE

_NAME = re.compile(r"\d{3,}")


@dataclass(frozen=True)
class Resumed:
    """`resume.json`: one resume of a run, as it was claimed."""

    folder: Path
    number: int
    iteration: int
    """The position: the first iteration that it ran."""
    attempt: int
    own: bool
    """From the run's own checkpoint, or its start; not from another run's."""
    checkpoint: str | None
    """None: from the start, iteration 0."""
    reused: int | None
    """The iteration whose sealed facts it went on from."""
    time: float
    may_differ: frozenset[str]
    """What was allowed to differ, and differed: recipe keys and contents."""
    told: dict[str, Any]
    """All of the file."""

    @property
    def cut(self) -> int:
        """The first iteration that went aside: all of them before another run's position."""
        return self.iteration if self.own else 0


@dataclass(frozen=True)
class Segment:
    """The iterations of a run folder that one start made, as far as they are still its own."""

    first: int
    start: Resumed | None
    """None: the run's first start."""
    recipe: Path


def read_resumes(run_folder: Path) -> tuple[list[Resumed], list[tuple[Path, str]]]:
    """The resumes of a run by number, and what is wrong with files that tell of none."""
    good, bad = [], []
    for folder in resume_folders(run_folder):
        path = folder / RESUME_FILE
        if not path.exists():
            continue  # it had not been claimed yet: nothing was set aside
        try:
            good.append(_resumed(folder, json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError) as error:
            bad.append((path, str(error)))
    return sorted(good, key=lambda resumed: resumed.number), bad


def resume_folders(run_folder: Path) -> list[Path]:
    """What lies where resumes do, by number."""
    found = (run_folder / FOLDER).glob("*")
    folders = (path for path in found if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(folders, key=lambda path: (int(path.name), path.name))


def _resumed(folder: Path, told: Any) -> Resumed:
    """Raises `ValueError` naming the field."""
    if not isinstance(told, dict):
        raise ValueError("no JSON object")
    kinds: dict[str, Any] = {"number": int, "iteration": int, "attempt": int, "own": bool}
    kinds |= {"checkpoint": str | None, "reused": int | None, "time": int | float}
    kinds |= {"allowed": list, "meant": list, "changes": dict}
    for name, kind in kinds.items():
        if name not in told:
            raise ValueError(f"has no field {name!r}")
        value = told[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"field {name!r} is {type(value).__name__}")
    plain = {name: told[name] for name in kinds if name not in ("allowed", "meant", "changes")}
    may_differ = frozenset(map(str, told["allowed"] + told["meant"]))
    return Resumed(folder, **plain, may_differ=may_differ, told=told)


def segments(
    resumes: Sequence[Resumed], run_folder: Path, upto: int | None = None
) -> list[Segment]:
    """The starts whose iterations lie in the run's folder after its first `upto` resumes (all of
    them if None), by first iteration. The last one's recipe is the run's own, or what the resume
    after it set aside."""
    count = len(resumes) if upto is None else upto
    places = [*(resumed.folder for resumed in resumes), run_folder]
    found = [Segment(0, None, places[0] / RECIPE_FILE)]
    for at, resumed in enumerate(resumes[:count]):
        found = [segment for segment in found if segment.first < resumed.cut]
        found.append(Segment(resumed.iteration, resumed, places[at + 1] / RECIPE_FILE))
    return found


def segment_of(found: Sequence[Segment], iteration: int) -> Segment:
    """The one that made `iteration`; the first one for an iteration before all of them."""
    made = [segment for segment in found if segment.first <= iteration]
    return made[-1] if made else found[0]


def facts_recipe(
    resumes: Sequence[Resumed], run_folder: Path, iteration: int, upto: int | None = None
) -> Path:
    """The recipe under which the facts of `iteration` were sealed: of the start that generated
    them, where a later one went on from them."""
    count = len(resumes) if upto is None else upto
    made = segment_of(segments(resumes, run_folder, count), iteration)
    while made.start is not None and made.start.reused == iteration == made.first:
        count = resumes.index(made.start)
        made = segment_of(segments(resumes, run_folder, count), iteration)
    return made.recipe


def segments_of(run_folder: Path) -> list[Segment]:
    """The starts whose iterations lie in a run's folder now."""
    return segments(read_resumes(run_folder)[0], run_folder)
