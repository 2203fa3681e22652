"""`audit diff RUN_A RUN_B`: the first place where two runs part.

Stages of an iteration are compared in the order in which they ran, so the first difference is a
cause and what follows it may be its effects. Rows join by id: layouts, replicas and the order of
files do not matter. Who ran, when, and the version ids (which name the run) are set aside.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.audit import stages
from megarl.audit.compare import FieldDifference
from megarl.audit.findings import Progress
from megarl.audit.view import RunView, open_run

SHOWN = 120
"""Letters of a value that are told."""
ASIDE = ("run.name", "run.folder", "run.overwrite", "resume.from", "resume.use", "resume.allow")
"""Recipe keys in which two runs of one recipe differ, interrupted or not."""

LINE = "the first place where two runs part, by iteration, stage, sample and field"
HELP = f"""{LINE}

Stages in their order: start (weights), prompts, generation, scoring, log_probs, selection,
advantages, update (steps, then weights). Recipe differences come first. Run ids, version ids,
attempts, interruptions and times are set aside; layouts may differ, samples join by id.

examples:
  python tools/audit.py diff runs/a runs/b
  python tools/audit.py diff runs/tp1 runs/tp2 --tolerance 1e-5

With a tolerance, floats within it (absolute) count as equal, and weights are not compared.

exit codes: 0 no difference in what both have; 1 they part, have nothing in common that could be
compared, or a sealed file is damaged;
2 not two runs
"""


@dataclass
class Parting:
    """What a comparison found."""

    a: str
    b: str
    recipe: dict[str, tuple[Any, Any]]
    compared: list[int] = field(default_factory=list)
    """Iterations whose sealed experience both runs have, as far as was compared."""
    updates: list[int] = field(default_factory=list)
    """Iterations whose update both have, likewise."""
    iteration: int | None = None
    stage: str | None = None
    """Where the runs part; None where they do not."""
    fields: list[FieldDifference] = field(default_factory=list)
    """Every field of that stage that differs, the first one first."""
    notes: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        """There was nothing to compare."""
        return self.stage is None and not (self.compared or self.updates)


def compare_runs(
    a: RunView, b: RunView, tolerance: float, progress: Callable[[str], None] = lambda told: None
) -> Parting:
    """Raises `SealError` for an iteration that cannot be read, `RecipeError` likewise."""
    parting = Parting(a.folder.name, b.folder.name, dict(_recipe_differences(a, b)))
    for run in (a, b):
        if run.is_replay:
            told = "its updates are compared, its experience is the other run's"
            parting.notes.append(f"{run.folder.name} is a replay: {told}")
        for segment in run.segments:
            if segment.start is not None:
                told = f"{run.folder.name} was resumed at iteration {segment.first}"
                changes = ", ".join(
                    key for key in segment.start.told["changes"] if key not in ASIDE
                )
                parting.notes.append(told + f" with another {changes}" * bool(changes))
        if not run.is_replay and not run.sealed:
            parting.notes.append(f"{run.folder.name} has no sealed iteration")
    if tolerance:
        parting.notes.append("weights are compared by digest, which knows no tolerance: left out")
    numbers = sorted(set(_numbers(a)) | set(_numbers(b)))
    shared = set(_numbers(a)) & set(_numbers(b))
    for number in numbers:
        progress(f"iteration {number}")
        if number not in shared:
            only = a if number in _numbers(a) else b
            parting.notes.append(f"iterations from {number} on are only in {only.folder.name}")
            break
        for stage, found in _stages(a, b, number, tolerance, parting):
            if found:
                parting.iteration, parting.stage = number, stage
                parting.fields = sorted(found, key=lambda item: item.rank)
                return parting
    return parting


def _numbers(run: RunView) -> list[int]:
    """Iterations that a run has something of."""
    return sorted({*run.sealed, *(line["iteration"] for line in run.updates)})


def _stages(
    a: RunView, b: RunView, number: int, tolerance: float, parting: Parting
) -> Iterator[tuple[str, list[FieldDifference]]]:
    """(stage, what differs in it), in the order of the iteration."""
    if number == 0 and not tolerance:
        yield "start", stages.weights(stages.first_weights(a), stages.first_weights(b))
    kept = [number in run.sealed for run in (a, b)]
    if all(kept):
        parting.compared.append(number)
        left, right = a.iteration(number).sealed, b.iteration(number).sealed
        yield "prompts", stages.prompts(left, right, tolerance)
        rows, missing = stages.joined(left, right)
        yield "generation", missing or stages.generation(left, right, rows, tolerance)
        scorers = [it.manifest.header.scorer_version for it in (left, right)]
        if scorers[0] != scorers[1] and (note := "other scorer versions") not in parting.notes:
            parting.notes.append(note)
        yield "scoring", stages.scoring(left, right, rows, tolerance)
        yield "log_probs", stages.log_probs(left, right, rows, tolerance)
        if left.derived is not None and right.derived is not None:
            yield "selection", stages.selection(left, right, rows, tolerance)
            yield "advantages", stages.advantages(left, right, rows, tolerance)
    elif any(kept):
        parting.notes.append(f"iteration {number}: experience is kept in one run only")
    if all(run.updates.of(number) for run in (a, b)):
        parting.updates.append(number)
    yield "update", stages.update(a, b, number, tolerance)


def _recipe_differences(a: RunView, b: RunView) -> Iterator[tuple[str, tuple[Any, Any]]]:
    one, other = (dict(_flat(run.recipe.model_dump(mode="json"))) for run in (a, b))
    for key in one | other:
        if key not in ASIDE and one.get(key) != other.get(key):
            yield key, (one.get(key), other.get(key))


def _flat(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*path, part))
        else:
            yield ".".join((*path, part)), value


def text(parting: Parting) -> Iterator[str]:
    """The comparison as lines for a person; A's value stands left."""
    yield f"A {parting.a}"
    yield f"B {parting.b}"
    if parting.recipe:
        yield "recipes differ:"
    for key, (one, other) in parting.recipe.items():
        yield f"  {key}: {json.dumps(one)} | {json.dumps(other)}"
    yield from (f"note: {note}" for note in parting.notes)
    if parting.nothing:
        yield "nothing to compare: no iteration is sealed, and no update recorded, in both runs"
        return
    if parting.stage is None:
        counts = f"{len(parting.compared)} iterations and {len(parting.updates)} updates"
        yield f"no difference in {counts}"
        return
    first = parting.fields[0]
    place = [f"iteration {parting.iteration}", parting.stage]
    place += [first.where] if first.where else []
    place += [first.field] if first.token is None else [f"{first.field}[{first.token}]"]
    size = "" if first.size is None else f" (differ by {first.size:.3g})"
    yield f"first divergence: {', '.join(place)}: {_shown(first.a)} | {_shown(first.b)}{size}"
    for item in parting.fields:
        largest = "" if item.largest is None else f", by up to {item.largest:.3g}"
        yield f"  {item.field}: {item.count} of {item.of} differ{largest}"


def _shown(value: Any) -> str:
    told = value if isinstance(value, str) else repr(value)
    return told if len(told) <= SHOWN else told[: SHOWN - 1] + "…"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="RUN_A", help="a run's folder")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="another one's")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=0.0, help="absolute, for floats (default: exact)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _tolerance(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{value!r} is no number of 0 or more")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Raises `NotARun`, `SealError` and `RecipeError`. Returns the exit code."""
    runs = (open_run(arguments.a), open_run(arguments.b))
    parting = compare_runs(*runs, arguments.tolerance, Progress())
    if arguments.json:
        print(json.dumps(_plain(asdict(parting) | {"nothing": parting.nothing})))
    else:
        for line in text(parting):
            print(line)
    return 0 if parting.stage is None and not parting.nothing else 1


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is none is told as text."""
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value
