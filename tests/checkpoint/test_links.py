"""Which checkpoint a start goes on from, and what goes aside, where a run's folders are links.

The decision and the cut-back are the real ones, on a run's folder made of stand-ins for tensors.
The oracle is the run without any link. Not covered: loading tensors through a link (a launched
run, `tests/launch/test_resume.py`); a disk that goes away after the decision; two runs that share
one folder of checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.checkpoint.begin import begin, write_recipe
from megarl.checkpoint.commit import COMMIT_FILE, CheckpointError, commit_folder
from megarl.checkpoint.cut_back import cut_back
from megarl.checkpoint.position import Position, RolePosition
from megarl.checkpoint.records import RecordPositions, present_files
from megarl.checkpoint.resume import Resume, decide, resumes
from megarl.contracts.errors import InputError
from megarl.contracts.version import PolicyVersion, WeightManifest
from megarl.recipe import Recipe, load_recipe
from tests.checkpoint.cut_runs import in_memory, iterations, put
from tests.checkpoint.folders import names, numbers
from tests.launch.runs import ROOT

LAYOUT = {"ranks": 2, "tp": 2, "pp": 1, "dp": 1, "rollout_tp": 1}
SAVED = (2, 4)
LAST = 6
"""Iterations that the run was asked for; it was killed in the one after position 4."""
Files = dict[str, bytes]


def recipe_of(folder: Path, **values: object) -> Recipe:
    chosen = {"run.name": folder.name, "run.folder": folder.parent, "run.iterations": LAST} | values
    settings = [f"{key}={value}" for key, value in chosen.items()]
    return load_recipe(ROOT / "recipes/quickstart.yaml", settings)


def save(folder: Path, iteration: int) -> None:
    """A whole checkpoint of the run as it stands."""
    place = folder / "checkpoints" / f"iter_{iteration:06d}"
    put(place / "actor" / "__0_0.distcp", f"weights {iteration}")
    recipe, present = recipe_of(folder), present_files(folder)
    manifest = WeightManifest(())
    Position(
        run_id=folder.name,
        iteration=iteration,
        actor=RolePosition(PolicyVersion("r", iteration, 0, manifest.hash, "t", "m"), manifest),
        reference=None,
        reference_refreshed_at=0,
        attempt=0,
        trainer={},
        tensor_digests={},
        cursor={},
        quarantine={},
        best=None,
        contracts={},
        recipe=recipe.model_dump(mode="json"),
        recipe_hash=recipe.hash,
        layout=LAYOUT,
        records=RecordPositions(folder).take(),
        eval_files=present["eval_files"],
        exports=present["export_names"],
        seconds=0.0,
        packages={},
    ).write(place)
    commit_folder(place, folder.name, iteration, f"v{iteration}")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody writes into it."""
    folder = tmp_path_factory.mktemp("killed") / "s1"
    put(folder / "experience" / ".writer.lock")
    write_recipe(recipe_of(folder), folder)
    for first, position in zip((0, *SAVED), (*SAVED, 5), strict=True):
        iterations(folder, first, position)
        if position in SAVED:
            save(folder, position)
    return folder


@dataclass
class Place:
    """A copy of the killed run, with links in it; `run` is as it is named in the recipe."""

    run: Path
    disk: Path
    """Where links lead to."""

    def decide(self, asked: object = "auto") -> Resume:
        resume = decide(recipe_of(self.run, **{"resume.from": asked}), self.run)
        assert resume is not None
        return resume

    def go_on(self, asked: object = "auto") -> Resume:
        resume = self.decide(asked)
        begin(recipe_of(self.run, **{"resume.from": asked}), resume, self.run, LAYOUT, {})
        return resume

    def move(self, path: Path, name: str | None = None) -> None:
        """To the disk, and a link in its place."""
        target = self.disk / (name or path.name)
        shutil.move(path, target)
        path.symlink_to(target)


def no_link(place: Place) -> None:
    pass


def link_of_all(place: Place) -> None:
    place.move(place.run / "checkpoints")


def link_of_another_name(place: Place) -> None:
    place.move(place.run / "checkpoints", "of-s1")


def relative_link(place: Place) -> None:
    shutil.move(place.run / "checkpoints", place.disk / "checkpoints")
    (place.run / "checkpoints").symlink_to(os.path.relpath(place.disk / "checkpoints", place.run))


def link_of_each(place: Place) -> None:
    for iteration in SAVED:
        place.move(place.run / "checkpoints" / f"iter_{iteration:06d}", f"position-{iteration}")


def link_of_the_runs(place: Place) -> None:
    place.move(place.run.parent)


def link_of_the_run(place: Place) -> None:
    place.move(place.run, "elsewhere")


LINKS = (
    *(no_link, link_of_all, link_of_another_name, relative_link),
    *(link_of_each, link_of_the_runs, link_of_the_run),
)


def cases() -> Iterator[object]:
    """Each on one disk; what a person links to another disk on two as well."""
    for link in LINKS:
        yield pytest.param((link, False), id=link.__name__)
        if link in (link_of_all, link_of_each):
            yield pytest.param((link, True), id=f"{link.__name__}, two disks")


@pytest.fixture(params=cases())
def place(request: pytest.FixtureRequest, killed: Path, tmp_path: Path) -> Iterator[Place]:
    link, two = request.param
    if not two:
        (tmp_path / "disk").mkdir()
        yield made(link, killed, tmp_path, tmp_path / "disk")
        return
    with in_memory() as folder:
        if folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip(f"{folder} is on the same file system")
        yield made(link, killed, tmp_path, folder)


def made(link: Callable[[Place], None], killed: Path, tmp_path: Path, disk: Path) -> Place:
    found = Place(tmp_path / "runs" / killed.name, disk)
    shutil.copytree(killed, found.run)
    link(found)
    return found


def files(folder: Path) -> Files:
    """As if there were no links."""
    found = (
        Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def without_claims(found: Files) -> Files:
    """Without what tells the time, the folder or what was asked for."""
    told = ("resume.json", "recipe.yaml", "position.json", COMMIT_FILE)
    return {name: body for name, body in found.items() if not name.endswith(told)}


def unlinked(killed: Path, tmp_path: Path, asked: str) -> Files:
    """What the same start leaves where nothing is linked."""
    plain = made(no_link, killed, tmp_path / "plain", tmp_path)
    plain.go_on(plain.run / asked if asked != "auto" else asked)
    return without_claims(files(plain.run))


def test_the_newest_is_gone_on_from_again_and_again(
    place: Place, killed: Path, tmp_path: Path
) -> None:
    wanted = unlinked(killed, tmp_path, "auto")
    for number in (1, 2):
        resume = place.go_on()
        assert (resume.own, resume.iteration, resume.number) == (True, 4, number)
        assert Path(resume.checkpoint) == place.run / "checkpoints" / "iter_000004"
        assert resume.position().iteration == 4
        assert numbers(place.run) == list(SAVED)
        told = resumes(place.run)[-1]
        assert (told["own"], told["checkpoint"]) == (True, "checkpoints/iter_000004")
        if number == 1:
            assert without_claims(files(place.run)) == wanted
    assert not list(place.run.glob("resumes/*/checkpoints"))


@pytest.mark.parametrize("spelling", ["as listed", "resolved", "the run"])
def test_what_is_named_is_gone_on_from(
    place: Place, spelling: str, killed: Path, tmp_path: Path
) -> None:
    listed = place.run / "checkpoints" / "iter_000002"
    asked = {"as listed": listed, "resolved": listed.resolve(), "the run": place.run}[spelling]
    iteration = 4 if spelling == "the run" else 2
    resume = place.go_on(asked)
    assert (resume.own, resume.iteration) == (True, iteration)
    assert resume.position().iteration == iteration
    assert numbers(place.run) == [n for n in SAVED if n <= iteration]
    plain = "auto" if spelling == "the run" else "checkpoints/iter_000002"
    wanted = unlinked(killed, tmp_path, plain)
    assert without_claims(files(place.run)).keys() == wanted.keys()
    if iteration == 4:
        return
    # Once only: what is saved since is gone on from by the same command.
    assert place.decide(asked).iteration == 2
    iterations(place.run, 2, 3)
    save(place.run, 3)
    assert place.decide(asked).iteration == 3


def test_a_relative_folder_of_runs(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place.run = place.run.relative_to(tmp_path)
    asked = place.run / "checkpoints" / "iter_000002"
    assert (place.decide().own, place.decide().iteration) == (True, 4)
    resume = place.go_on(asked)
    assert (resume.own, resume.iteration) == (True, 2)
    assert Path(resume.checkpoint).is_absolute() and numbers(place.run) == [2]


def test_another_run_goes_on_from_it(place: Place, tmp_path: Path) -> None:
    before = files(place.run)
    fork = Place(tmp_path / "runs" / "fork", place.disk)
    fork.run.mkdir()
    for asked in (place.run, place.run / "checkpoints" / "iter_000004"):
        resume = fork.go_on(asked)
        assert (resume.own, resume.iteration) == (False, 4)
        assert resume.position().iteration == 4
    assert files(place.run) == before


def test_a_cut_back_never_moves_what_is_gone_on_from(place: Place) -> None:
    before, aside = files(place.run), place.run / "resumes" / "001"
    aside.mkdir(parents=True)
    source = (place.run / "checkpoints" / "iter_000004").resolve()
    with pytest.raises(CheckpointError, match="goes on from it, and would set it aside"):
        cut_back(
            place.run, aside, None, 0, eval_files=(), export_names=(), reuse=None, source=source
        )
    assert files(place.run) == before


def refused(place: Place, asked: object = "auto") -> str:
    """The one line; nothing moved."""
    before = {path: os.lstat(path).st_mtime_ns for path in sorted(place.run.rglob("*"))}
    with pytest.raises(InputError) as caught:
        place.decide(asked)
    now = {path: os.lstat(path).st_mtime_ns for path in sorted(place.run.rglob("*"))}
    assert now == before and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("link", [link_of_all, link_of_each], ids=lambda link: link.__name__)
@pytest.mark.parametrize("asked", ["auto", "the run", "another run"])
def test_a_disk_that_is_not_there_is_no_run_without_checkpoints(
    killed: Path, tmp_path: Path, link: Callable[[Place], None], asked: str
) -> None:
    (tmp_path / "disk").mkdir()
    place = made(link, killed, tmp_path, tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "away")
    told = refused(place, {"auto": "auto", "the run": place.run, "another run": killed}[asked])
    what = place.run / "checkpoints"
    what = what if link is link_of_all else what / "iter_000002"
    assert told.startswith(f"{what} leads to {os.readlink(what)}, which is not there; mount")
    (tmp_path / "away").rename(tmp_path / "disk")
    assert place.decide().iteration == 4


def test_another_runs_disk_that_is_not_there_is_told(killed: Path, tmp_path: Path) -> None:
    place = made(link_of_all, killed, tmp_path, tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    fork = Place(tmp_path / "runs" / "fork", tmp_path)
    fork.run.mkdir()
    assert refused(fork, place.run).startswith(f"{place.run / 'checkpoints'} leads to ")


@pytest.mark.parametrize("asked", ["auto", "never"])
def test_a_new_run_is_told_too_before_it_has_anything_to_save(tmp_path: Path, asked: str) -> None:
    place = Place(tmp_path / "s2", tmp_path)
    place.run.mkdir()
    (place.run / "checkpoints").symlink_to(tmp_path / "nowhere")
    assert "which is not there; mount" in refused(place, asked)


def test_a_file_in_the_place_of_the_folder(killed: Path, tmp_path: Path) -> None:
    place = made(no_link, killed, tmp_path, tmp_path)
    (place.run / "checkpoints").rename(tmp_path / "away")
    (place.run / "checkpoints").write_text("")
    assert refused(place).startswith(f"{place.run / 'checkpoints'} is no folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read(killed: Path, tmp_path: Path) -> None:
    place = made(link_of_all, killed, tmp_path, tmp_path)
    (tmp_path / "checkpoints").chmod(0)
    try:
        told = refused(place)
    finally:
        (tmp_path / "checkpoints").chmod(0o700)
    assert "cannot be read (Permission denied); make it readable" in told
    assert names(place.run) == ["iter_000002", "iter_000004"]
