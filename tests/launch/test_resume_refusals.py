"""What a resume refuses, by name and with old and new value, and what `resume.allow` lets through.

Most cases ask the decision itself, in this process, with what the run's assembly compares; two go
all the way through the launch script, one through a run. Whatever is refused leaves the run's
folder as it was, but for its logs. Not covered: a folder that cannot be written to; other ranks'
disagreement.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.assemble_data import Inputs, contracts_of, load_inputs
from megarl.checkpoint.commit import NoCheckpoint
from megarl.checkpoint.resume import ResumeRefused, contents, decide
from megarl.contracts.errors import InputError
from megarl.recipe import Recipe, RecipeError, load_recipe
from megarl.reshard.families import read_spec
from megarl.rewards.score import ScoringPool
from tests.launch.changed_inputs import (
    edit_json,
    other_code,
    other_row,
    other_tokenizer,
    shorter_records,
)
from tests.launch.resumes import BASE, Runs, tree
from tests.launch.runs import ROOT, make_model, settings

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

SCORER = '''"""A scorer of the run's own."""


def digits(response, *, factor=1.0):
    return factor * sum(c.isdigit() for c in response.text) / max(1, len(response.text))
'''
VALUES = {
    "run.iterations": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "reward.scorers": "[{name: 'own_scorer:digits', factor: 1.0}]",
}
LONGER = {"run.iterations": 3}
"""Only so that something is left to do."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, model, an own scorer, and beside them `run`: a run of two iterations."""
    folder = make_model(tmp_path_factory.mktemp("made"))
    (folder / "own_scorer.py").write_text(SCORER)
    Runs(folder, folder, VALUES, folder, warm=True).finish("run")
    return folder


@dataclass
class Place:
    """A copy of all that, for one test."""

    folder: Path
    patch: pytest.MonkeyPatch

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def recipe(self, **values: object) -> Recipe:
        chosen = {"run.name": "run"} | BASE | VALUES | LONGER | values
        return load_recipe(
            ROOT / "recipes/quickstart.yaml", settings(self.folder, self.folder, **chosen)
        )

    def ask(self, **values: object) -> None:
        """Everything that rank 0 compares; raises what it refuses."""
        recipe = self.recipe(**values)
        resume = decide(recipe, recipe.run_folder)
        assert resume is not None
        inputs = load_inputs(recipe)
        contents(recipe, resume, self.contracts(recipe, inputs), recipe.run_folder, inputs.facts)

    def contracts(self, recipe: Recipe, inputs: Inputs) -> dict[str, str]:
        self.patch.syspath_prepend(self.folder)
        pool = ScoringPool(recipe.reward, inputs.tokens)
        try:
            spec = read_spec(Path(recipe.model.path))
            return contracts_of(recipe, spec, inputs, pool)
        finally:
            pool.close()

    def refused(self, error: type[InputError], says: str, **values: object) -> str:
        """The one line; the run's folder is what it was."""
        before = tree(self.run)
        with pytest.raises(error) as caught:
            self.ask(**values)
        told = str(caught.value)
        assert "\n" not in told and re.search(says, told), told
        assert tree(self.run) == before
        return told


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    folder = shutil.copytree(made, tmp_path / "place")
    # Paths in the stored recipe are the original's; what lies there is compared, not where.
    return Place(folder, monkeypatch)


CONTENTS = {
    "tokenizer": other_tokenizer,
    "model": edit_json("model/config.json", rms_norm_eps=1e-6),
    "data": other_row("train"),
    "eval_data": other_row("eval"),
    "scorer": other_code,
    "records": shorter_records,
}


MOVED = {"data.train": "moved", "data.eval": "held"}


def test_what_has_not_changed_is_gone_on_with_wherever_it_lies(place: Place) -> None:
    place.ask()


@pytest.mark.parametrize("name", CONTENTS)
def test_other_contents_are_refused_by_name(name: str, place: Place) -> None:
    CONTENTS[name](place)
    told = place.refused(ResumeRefused, rf"iter_000002 does not fit: .*\b{name} was \S+.*, is \S+")
    named = set(re.findall(r"(\w+) was ", told))
    # Other words may follow from another chat template: prompts are compared as token ids.
    assert named - ({"data", "eval_data"} if name == "tokenizer" else set()) == {name}
    assert f"resume.allow=[{name}" in told or name == "tokenizer"


def test_a_renamed_file_is_told_from_other_rows(place: Place) -> None:
    for name, file in (("train", "moved"), ("eval", "held")):
        (place.folder / f"{name}.jsonl").rename(place.folder / f"{file}.jsonl")
    moved = {key: str(place.folder / f"{file}.jsonl") for key, file in MOVED.items()}
    says = r"data was source train, is source moved \(of as many rows: give it `name: train`\); "
    told = place.refused(ResumeRefused, says, **moved)
    assert "eval_data was source eval, is source held (of" in told
    names = {"data.train": "train", "data.eval": "eval"}
    named = {key: f"[{{path: {moved[key]}, name: {name}}}]" for key, name in names.items()}
    place.ask(**named)
    other_row("moved")(place)
    says = r"data was [0-9a-f]{12}, is [0-9a-f]{12} \(other contents; sources and their counts"
    place.refused(ResumeRefused, says, **named)


@pytest.mark.parametrize("name", [name for name in CONTENTS if name not in ("tokenizer",)])
def test_other_contents_that_are_allowed_are_let_through(name: str, place: Place) -> None:
    CONTENTS[name](place)
    place.ask(**{"resume.allow": f"[{name}]"})


@pytest.mark.parametrize("allow", ["[]", "[model,tokenizer]"])
def test_a_model_of_another_vocabulary_is_refused_whatever_is_allowed(
    place: Place, allow: str
) -> None:
    """Its tensors have other shapes: permission would only lead to a worse line later."""
    vocab = json.loads((place.folder / "model/config.json").read_text())["vocab_size"]
    edit_json("model/config.json", vocab_size=vocab + 8)(place)
    says = rf"model was vocab_size {vocab}, is vocab_size {vocab + 8} \(.*model\)"
    told = place.refused(ResumeRefused, says, **{"resume.allow": allow})
    assert "set model.path to a model of the checkpoint's shape, or run.name=…" in told
    assert "resume.allow" not in told


def test_numbers_of_the_model_that_change_no_shape_are_told_and_may_be_allowed(
    place: Place,
) -> None:
    edit_json("model/config.json", rms_norm_eps=1e-6)(place)
    place.refused(ResumeRefused, "model was rms_norm_eps 1e-05, is rms_norm_eps 1e-06; change it")
    place.ask(**{"resume.allow": "[model]"})


KEYS = {
    "actor.lr": (1e-3, "0.0002", "0.001"),
    "algorithm.clip_high": (0.3, "0.28", "0.3"),
    "seed": (2, "1", "2"),
    "rollout.temperature": (0.9, "1.0", "0.9"),
    "reward.scorers": ("[{name: 'own_scorer:digits', factor: 2.0}]", "1.0", "2.0"),
}


@pytest.mark.parametrize("key", KEYS)
def test_recipe_keys_that_change_the_maths_are_refused_by_name(key: str, place: Place) -> None:
    value, old, new = KEYS[key]
    says = rf"does not fit: {re.escape(key)} was .*{re.escape(old)}.*, is .*{re.escape(new)}"
    told = place.refused(ResumeRefused, says, **{key: value})
    assert f"resume.allow=[{key}]" in told
    place.ask(**{key: value, "resume.allow": f"[{key}]"})


def test_two_keys_are_both_named_and_one_that_is_allowed_is_not(place: Place) -> None:
    both = {"actor.lr": 1e-3, "algorithm.clip_high": 0.3}
    told = place.refused(ResumeRefused, "does not fit", **both)
    assert "actor.lr was 0.0002, is 0.001; algorithm.clip_high was 0.28, is 0.3" in told
    told = place.refused(
        ResumeRefused, "algorithm.clip_high was", **both, **{"resume.allow": "[actor.lr]"}
    )
    assert "actor.lr was" not in told
    assert "resume.allow=[actor.lr,algorithm.clip_high]" in told
    place.ask(**both, **{"resume.allow": "[actor.lr,algorithm.clip_high]"})


def test_an_allowed_key_lets_no_other_content_through(place: Place) -> None:
    """Neither one it has nothing to do with, nor one of its own section that does not read it."""
    other_row("train")(place)
    other_code(place)
    allowed = {"reward.quarantine_after": 3, "data.max_refused_share": 0.5}
    allowed |= {"resume.allow": "[reward.quarantine_after,data.max_refused_share,records]"}
    told = place.refused(ResumeRefused, "data was", **allowed)
    assert "scorer was" in told and "eval_data" not in told


def test_a_decay_may_not_become_longer(place: Place) -> None:
    says = r"actor.lr_schedule was constant, is linear; run.iterations was 2, is 3"
    place.refused(ResumeRefused, says, **{"actor.lr_schedule": "linear"})


def test_a_name_that_nothing_has_cannot_be_allowed(place: Place) -> None:
    place.refused(RecipeError, r"resume\.allow", **{"resume.allow": "[scorers]"})


def test_a_run_is_not_gone_on_with_where_it_may_not_or_is_over(place: Place) -> None:
    never = {"resume.from": "never"}
    place.refused(RecipeError, r"run holds a finished run; .*run\.overwrite=true", **never)
    place.refused(
        RecipeError, r"a finished run; raise run\.iterations above 2", **{"run.iterations": 2}
    )
    (place.run / "finished.json").unlink()
    place.refused(RecipeError, r"run holds an unfinished run", **never)
    place.ask(**{"run.iterations": 2})  # killed before its last write: that is left to do


def _fork(place: Place, source: Path, **values: object) -> dict[str, object]:
    return {"run.name": "fork", "resume.from": source} | values


def test_what_is_named_must_hold_a_checkpoint(place: Place) -> None:
    empty = place.folder / "nothing"
    empty.mkdir()
    for source, says in (
        (empty, r"resume\.from: .*nothing holds no whole checkpoint"),
        (place.folder / "gone", r"resume\.from: there is no folder .*gone"),
        (place.run / "checkpoints/iter_000009", r"resume\.from: .*iter_000009: no such folder"),
    ):
        place.refused(NoCheckpoint, says, **_fork(place, source))
    (place.run / "checkpoints/iter_000001/COMMIT.json").unlink()
    place.refused(
        NoCheckpoint,
        r"iter_000001: half-written",
        **_fork(place, place.run / "checkpoints/iter_000001"),
    )


def test_another_run_needs_something_left_to_do(place: Place) -> None:
    place.refused(
        RecipeError,
        r"resume\.from: .*iter_000002 is of 2 iterations, run\.iterations is 2; raise it",
        **{"run.name": "fork", "run.iterations": 2, "resume.from": place.run},
    )


def test_a_damaged_checkpoint_is_left_out_and_stays(place: Place) -> None:
    """The one before it is in charge; named, it is refused."""
    damaged = place.run / "checkpoints/iter_000002"
    (damaged / "position.json").write_text((damaged / "position.json").read_text() + " ")
    recipe = place.recipe()
    resume = decide(recipe, place.run)
    assert resume.iteration == 1 and any("iter_000002" in note for note in resume.notes)
    assert damaged.exists()
    place.refused(NoCheckpoint, r"resume\.from: .*iter_000002", **{"resume.from": damaged})


def _launch(
    made: Path,
    tmp_path: Path,
    change: Callable[[Place], None],
    warm: bool = False,
    **values: object,
):
    """A launch on a copy: what it says, its code, and whether the run is as it was."""
    folder = shutil.copytree(made, tmp_path / "place")
    with pytest.MonkeyPatch.context() as patch:
        place = Place(folder, patch)
        change(place)
    before = tree(place.run)
    ended = Runs(folder, folder, VALUES | LONGER, folder, warm).launch("run", **values)
    return ended, tree(place.run) == before


def test_the_launch_script_refuses_another_recipe(made: Path, tmp_path: Path) -> None:
    ended, same = _launch(made, tmp_path, lambda place: None, **{"actor.lr": 1e-3})
    assert (ended.code, len(ended.lines), same) == (2, 1, True), ended.output
    assert "actor.lr was 0.0002, is 0.001" in ended.lines[0]


def test_the_launch_script_refuses_other_contents(made: Path, tmp_path: Path) -> None:
    def change(place: Place) -> None:
        other_code(place)
        other_row("eval")(place)

    ended, same = _launch(made, tmp_path, change)
    assert (ended.code, len(ended.lines), same) == (2, 1, True), ended.output
    pair = "was [0-9a-f]{12}, is [0-9a-f]{12}"
    says = rf"eval_data {pair} \(other contents[^)]*\); scorer {pair}; change "
    line = rf"megarl: error: \S+iter_000002 does not fit: {says}"
    assert re.match(line, ended.lines[0]) and ended.lines[0].endswith("] if it is meant")


def test_a_run_refuses_damaged_tensors(made: Path, tmp_path: Path) -> None:
    """Of the right size, so only their digests tell. Found after the folder was cut back."""

    def change(place: Place) -> None:
        path = max(
            (place.run / "checkpoints/iter_000002/actor").glob("*.distcp"),
            key=lambda path: path.stat().st_size,
        )
        body = bytearray(path.read_bytes())
        body[len(body) // 2] ^= 0x10
        path.write_bytes(body)

    ended, _ = _launch(made, tmp_path, change, warm=True)
    assert ended.code in (1, 2) and len(ended.lines) == 1, ended.output
    assert re.search(
        r"iter_000002/actor: .*(weights|exp_avg|exp_avg_sq|master)\S*/", ended.lines[0]
    )
    assert "resume.from another checkpoint" in ended.lines[0]
