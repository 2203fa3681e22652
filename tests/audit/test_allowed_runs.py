"""Runs that went on with another tokenizer, other data or another scorer, as `resume.allow` says:
they come to their end, nothing is found in them, and what was not allowed is.

Each is a launched run of two iterations, copied and resumed to four. Not covered: another model;
`reuse_sealed` across such a change, which refuses (`tests/launch/test_reuse.py`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.audit.rollouts import main as show_rollouts
from megarl.experience.manifest import sealed_iterations
from tests.audit.faults_in_allowed import OTHER
from tests.audit.forge import Forger
from tests.audit.test_resumed import told
from tests.launch.resumes import Runs
from tests.launch.runs import make_model
from tests.launch.test_resume_refusals import CONTENTS, SCORER, VALUES, Place
from tools.audit import main as audit

pytestmark = [pytest.mark.launch, pytest.mark.long, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Change:
    allow: str
    content: str | None = None
    """What changes where the recipe's paths lead."""
    key: str | None = None
    value: str = ""
    contracts: frozenset[str] = frozenset()
    """All that must differ across the resume."""
    untold: frozenset[str] = frozenset({"contracts"})
    """The checks that find the change where the resume does not tell of it."""


CHANGES = {
    "tokenizer": Change(
        "[tokenizer,data,eval_data]",  # prompts are compared as ids, which the template makes
        content="tokenizer",
        contracts=frozenset({"tokenizer", "data", "eval_data"}),
        untold=frozenset({"contracts", "positions"}),
    ),
    "data": Change("[data]", content="data", contracts=frozenset({"data"})),
    "scorer": Change(
        "[scorer]",
        content="scorer",
        contracts=frozenset({"scorer"}),
        untold=frozenset({"scorer"}),
    ),
    "scorer_by_its_key": Change(
        "[reward.scorers]",
        key="reward.scorers",
        value="[{name: 'own_scorer:digits', factor: 2.0}]",
        contracts=frozenset({"scorer"}),
        untold=frozenset({"scorer"}),
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, model and an own scorer, and beside them `run`: a finished one of two iterations."""
    folder = make_model(tmp_path_factory.mktemp("made"))
    (folder / "own_scorer.py").write_text(SCORER)
    Runs(folder, folder, VALUES, folder).finish("run")
    return folder


@pytest.fixture(scope="module", params=CHANGES)
def went_on(
    request: pytest.FixtureRequest, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Change, Path]:
    """The change, and the folder of the run that went on over it."""
    change = CHANGES[request.param]
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("went_on") / "place"))
    with pytest.MonkeyPatch.context() as patch:
        if change.content is not None:
            CONTENTS[change.content](Place(folder, patch))
    values: dict[str, object] = {"run.iterations": 4, "resume.allow": change.allow}
    if change.key is not None:
        values[change.key] = change.value
    ended = Runs(folder, folder, VALUES, folder).launch("run", **values)
    assert ended.code == 0, ended.output
    told = change.content or change.key
    says = rf"allowed to differ: .*\b{re.escape(told)} .+ → "
    assert re.search(says, ended.output), ended.output
    return change, folder / "run"


@pytest.fixture
def forger(went_on: tuple[Change, Path], tmp_path: Path) -> Forger:
    return Forger(Path(shutil.copytree(went_on[1], tmp_path / "copy", symlinks=True)))


def _resume(forger: Forger, edit: Callable[[dict], None]) -> None:
    forger.json(forger.run / "resumes/001/resume.json", edit, indent=1)


def checks(forger: Forger) -> set[str]:
    return {line.partition(":")[0] for line in told(forger.run)}


def test_it_comes_to_its_end_and_nothing_is_found(
    went_on: tuple[Change, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    change, run = went_on
    assert list(sealed_iterations(run)) == [0, 1, 2, 3] and (run / "finished.json").exists()
    resume = json.loads((run / "resumes/001/resume.json").read_text())
    assert resume["contents"].keys() == change.contracts and resume["records"] == {}
    positions = [
        json.loads((run / f"checkpoints/iter_{number:06d}/position.json").read_text())["contracts"]
        for number in (2, 3, 4)
    ]
    before, after, last = positions
    assert after == last
    differ = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    assert resume["contents"] == differ
    assert audit(["verify", str(run)]) == 0, capsys.readouterr().out


def test_a_change_that_the_resume_does_not_tell_is_found(
    went_on: tuple[Change, Path], forger: Forger
) -> None:
    _resume(forger, lambda told: told.update(contents={}))
    assert went_on[0].untold <= checks(forger)


def test_a_change_that_was_not_named_is_found(forger: Forger) -> None:
    """Neither in the recipe, nor by the resume."""
    path = forger.run / "recipe.yaml"
    head, _, tail = path.read_text().partition("allow:")
    tail = tail[tail.index("observe:") :]
    forger.write(path, f"{head}allow: []\n{tail}")
    _resume(forger, lambda told: told.update(allowed=[], meant=[]))
    assert checks(forger) == {"contracts"}


def test_the_same_change_one_iteration_later_is_found(
    went_on: tuple[Change, Path], forger: Forger
) -> None:
    """What is allowed at the resume is not allowed after it."""
    field = "scorer_version" if "scorer" in went_on[0].contracts else "tokenizer_hash"
    forger.manifest(3, lambda told: told.update({field: OTHER}))
    forger.all_hashes(3)
    assert ("scorer" if field == "scorer_version" else "tokenizer") in checks(forger)


def test_ids_are_read_with_the_tokenizer_they_were_made_with(
    went_on: tuple[Change, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moved, so that the run's own copies are all there is."""
    run = Path(shutil.move(shutil.copytree(went_on[1], tmp_path / "copy"), tmp_path / "moved"))
    for place in (run / "recipe.yaml", *run.glob("resumes/*/recipe.yaml")):
        place.write_text(place.read_text().replace("/model\n", "/gone\n"))
    assert show_rollouts([str(run), "--last", "4"]) == 0
    assert "token ids only" not in capsys.readouterr().err
