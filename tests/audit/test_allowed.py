"""What `resume.allow` lets through: exactly what it names, told in `resume.json`, kept on both
sides, and no finding; the same change without the word for it is one.

Most cases take a run that was killed up to where its models would be built. What was let through
is trained on in `test_allowed_runs.py`. Not covered: another model, forks of other runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.audit.verify import verify
from megarl.audit.view import open_run
from megarl.checkpoint.begin import begin
from megarl.checkpoint.commit import whole_checkpoints
from megarl.checkpoint.position import read_position
from megarl.checkpoint.resume import Resume, ResumeRefused, contents, decide
from megarl.checkpoint.segments import resume_folders
from megarl.contracts.tokens import Tokens, TokensError
from megarl.experience.tokenizer import keep_tokenizer
from megarl.recipe import load_recipe
from tests.audit import faults_in_allowed
from tests.audit.conftest import Interrupted
from tests.audit.fault import Fault, faults_of
from tests.audit.faults_in_allowed import allow, another_scorer, tell
from tests.audit.forge import Forger
from tests.audit.test_resumed import ASIDE, LAYOUT, Killed, killing, told
from tests.launch.resumes import tree

pytestmark = pytest.mark.launch

CONTRACTS = ("tokenizer", "model", "data", "eval_data", "sampling", "scorer")
ASIDE_1 = "resumes/001"


@pytest.fixture
def run(interrupted: Interrupted, tmp_path: Path) -> Path:
    """A run of its own that was killed beyond position 2."""
    return Path(shutil.copytree(interrupted.killed, tmp_path / "interrupted", ignore=ASIDE))


@pytest.fixture
def forger(interrupted: Interrupted, tmp_path: Path) -> Forger:
    """Of a run that was resumed at position 2 and finished."""
    shutil.copytree(interrupted.resumed, tmp_path / "moved", ignore=ASIDE)
    return Forger(tmp_path / "moved")


def position_contracts(run: Path) -> dict[str, str]:
    """Of the newest position; none where there is none."""
    whole = whole_checkpoints(run)[0]
    return read_position(whole[-1]).contracts if whole else {}


def go_on(run: Path, *allowed: str, model: Path | None = None, **mine: str) -> Resume:
    """What a start does before it builds models, with `mine` as its contracts."""
    words = [f"run.folder={run.parent}", f"resume.allow=[{','.join(allowed)}]"]
    words += [f"model.path={model}"] if model else []
    recipe = load_recipe(run / "recipe.yaml", words)
    resume = decide(recipe, run)
    assert resume is not None
    differ = contents(recipe, resume, position_contracts(run) | mine, run)
    begin(recipe, resume, run, LAYOUT, differ)
    return resume


def resume_json(run: Path, number: int = 1) -> dict[str, Any]:
    return json.loads((run / "resumes" / f"{number:03d}" / "resume.json").read_text())


@pytest.mark.parametrize("name", [name for name in CONTRACTS if name != "model"])
def test_one_contract_goes_through_where_it_is_named_and_only_there(name: str, run: Path) -> None:
    before, old = tree(run), position_contracts(run).get(name, "none")
    shown = old.rpartition(":")[2][:12]
    others = [other for other in (*CONTRACTS, "records") if other != name]
    with pytest.raises(ResumeRefused, match=rf"does not fit: {name} was {shown}, is 0; "):
        go_on(run, *others, **{name: "sha256:0"})
    assert tree(run) == before
    go_on(run, name, **{name: "sha256:0"})
    assert resume_json(run)["contents"] == {name: [old, "sha256:0"]}
    assert resume_json(run)["records"] == {}
    assert not told(run)


def other_tokenizer(run: Path, to: Path) -> Path:
    """A model folder whose chat template says more than the run's."""
    shutil.copytree(load_recipe(run / "recipe.yaml", []).model.path, to)
    path = to / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages }}"}))
    return to


def test_another_tokenizer_is_kept_and_so_is_the_one_before(run: Path, tmp_path: Path) -> None:
    model, files = other_tokenizer(run, tmp_path / "model"), tree(run / "tokenizer")
    tokens = Tokens.load(model)
    go_on(run, "tokenizer", model=model, tokenizer=tokens.hash)
    assert tree(run / ASIDE_1 / "tokenizer") == files and not (run / "tokenizer").exists()
    assert not told(run)
    keep_tokenizer(tokens, run)
    assert not told(run)
    assert Tokens.load(run / "tokenizer").hash == tokens.hash
    # And on with that one, killed before it came to a position of its own.
    go_on(run, "tokenizer", model=model, tokenizer=tokens.hash)
    assert not (run / "resumes/002/tokenizer").exists() and (run / "tokenizer").exists()
    assert not told(run)


def test_killed_at_any_rename_both_tokenizers_are_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, files = other_tokenizer(run, tmp_path / "model"), tree(run / "tokenizer")
    tokens, renames, ended = Tokens.load(model), 0, False
    while not ended:
        mine = Path(shutil.copytree(run, tmp_path / str(renames) / "interrupted"))
        with monkeypatch.context() as patch:
            left = [renames]
            for name in ("rename", "replace"):
                patch.setattr(os, name, killing(getattr(os, name), left))
            with suppress(Killed):
                go_on(mine, "tokenizer", model=model, tokenizer=tokens.hash)
                ended = True
        assert not told(mine), f"after {renames} renames"
        go_on(mine, "tokenizer", model=model, tokenizer=tokens.hash)
        kept = [path for path in mine.glob("resumes/*/tokenizer")]
        assert [tree(path) for path in kept] == [files]
        assert not told(mine), f"gone on with after {renames} renames"
        renames += 1
    assert renames > 8


def test_back_to_the_first_tokenizer_nothing_needs_to_be_allowed(run: Path, tmp_path: Path) -> None:
    """The position is of it; the copy of the other one goes aside."""
    model, first = other_tokenizer(run, tmp_path / "model"), tree(run / "tokenizer")
    tokens = Tokens.load(model)
    go_on(run, "tokenizer", model=model, tokenizer=tokens.hash)
    keep_tokenizer(tokens, run)
    go_on(run, model=Path(load_recipe(run / ASIDE_1 / "recipe.yaml", []).model.path))
    assert Tokens.load(run / "resumes/002/tokenizer").hash == tokens.hash
    keep_tokenizer(Tokens.load(run / ASIDE_1 / "tokenizer"), run)
    assert tree(run / "tokenizer") == first
    assert not told(run)


def test_at_the_start_again_another_tokenizer_is_taken_where_it_is_named(
    run: Path, tmp_path: Path
) -> None:
    model = other_tokenizer(run, tmp_path / "model")
    shutil.rmtree(run / "checkpoints")
    go_on(run, model=model)
    with pytest.raises(TokensError, match="begun with another tokenizer"):
        keep_tokenizer(Tokens.load(model), run)
    go_on(run, "tokenizer", model=model)
    keep_tokenizer(Tokens.load(model), run)
    assert (run / "resumes/002/tokenizer").is_dir()
    assert not told(run)


def _first(line: str) -> Callable[[bytes], bytes]:
    """Instead of the first line."""
    return lambda body: line.encode() + body.split(b"\n", 1)[1]


def _longer(body: bytes) -> bytes:
    first, rest = body.split(b"\n", 1)
    return json.dumps(json.loads(first) | {"note": "x" * 3000}).encode() + b"\n" + rest


def _failed_between(body: bytes) -> bytes:
    """Longer, and with the last words of a run that failed right after the position."""
    lines = _longer(body).splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if json.loads(line)["iteration"] >= 2)
    failed = json.loads(lines[at - 1]) | {"state": "FAILED", "reason": "it did"}
    return b"".join([*lines[:at], json.dumps(failed).encode() + b"\n", *lines[at:]])


CHANGES: dict[str, tuple[str, Callable[[bytes], bytes | None], int]] = {
    # File, what became of it, lines that stay: two rows; states of two iterations.
    "a row that became longer": ("metrics.jsonl", _longer, 2),
    "a row that is gone": ("metrics.jsonl", _first(""), 1),
    "a row that is no JSON": ("metrics.jsonl", _first("{\n"), 2),
    "lines of no iteration before": ("ledger.jsonl", lambda body: b"{}\n[]\n" + body, 4),
    "a file that is gone": ("updates.jsonl", lambda body: None, 0),
    "a file that is empty": ("updates.jsonl", lambda body: b"", 0),
    "a file cut off in its second row": (
        "metrics.jsonl", lambda body: body[: body.index(b"\n") + 9], 1
    ),
    "a journal that became longer": ("journal.jsonl", _failed_between, 17),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_records_that_were_changed_by_hand_stay_up_to_the_position(
    change: str, run: Path, tmp_path: Path
) -> None:
    """Oracle: every line of an iteration before the position stays, all that follows lies aside,
    and other files are cut as in a copy that nobody changed."""
    like = Path(shutil.copytree(run, tmp_path / "like" / "interrupted"))
    go_on(like)
    file, edit, stays = CHANGES[change]
    size = len((run / file).read_bytes())
    body = edit((run / file).read_bytes())
    (run / file).unlink()
    if body is not None:
        (run / file).write_bytes(body)
    before = tree(run)
    with pytest.raises(ResumeRefused, match=rf"records was {re.escape(file)} of \d+ bytes"):
        go_on(run, *CONTRACTS)
    assert tree(run) == before

    go_on(run, "records")
    kept = (run / file).read_bytes() if (run / file).exists() else b""
    aside = run / ASIDE_1 / file
    assert kept + (aside.read_bytes() if aside.exists() else b"") == (body or b"")
    assert kept.count(b"\n") == stays and kept[-1:] in (b"", b"\n")
    (told_file,) = resume_json(run)["records"].items()
    position = read_position(whole_checkpoints(run)[0][-1]).records[file]["bytes"]
    assert told_file == (file, {"position": position, "kept": len(kept)}) and position < size
    mine, others = tree(run), tree(like)
    apart = {name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)}
    assert apart <= {file, f"{ASIDE_1}/{file}", f"{ASIDE_1}/resume.json", "recipe.yaml"}
    assert resume_json(like)["records"] == {}


def test_what_is_wrong_in_records_is_found_though_a_resume_let_them_through(run: Path) -> None:
    """That they are not what they were is none any more, that a row is missing is."""
    path = run / "metrics.jsonl"
    path.write_bytes(_first("")(path.read_bytes()))
    assert {line.partition(":")[0] for line in told(run)} == {"positions", "rows"}
    go_on(run, "records")
    assert {line.partition(":")[0] for line in told(run)} == {"rows"}
    with open(run / "updates.jsonl", "r+b") as other:  # which no resume was told of
        other.write(b" ")
    lines = [line for line in told(run) if line.startswith("positions")]
    assert len(lines) == 1 and "updates.jsonl are others now" in lines[0]


def test_a_longer_row_is_no_finding_once_it_was_let_through(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(_longer(path.read_bytes()))
    assert [line.partition(":")[0] for line in told(run)] == ["positions"]
    go_on(run, "records")
    assert not told(run)


def test_nothing_is_found_where_all_says_that_a_scorer_was_allowed(forger: Forger) -> None:
    """Iterations 2 and 3 by another one than 0 and 1."""
    another_scorer(forger, 2, 3)
    allow(forger, "scorer")
    assert not told(forger.run)


@pytest.mark.parametrize("fault", faults_of(faults_in_allowed), ids=lambda fault: fault.name)
def test_a_change_that_no_resume_was_allowed_is_found(fault: Fault, forger: Forger) -> None:
    fault(forger)
    lines = told(forger.run)
    assert {line.partition(":")[0] for line in lines} - fault.maybe == fault.checks, lines
    assert any(fault.word in line for line in lines), lines


def test_facts_that_were_rolled_back_are_of_the_scorer_before(forger: Forger) -> None:
    """The resume's scorer is not theirs, though their numbers are those of its iterations."""
    another_scorer(forger, 2, 3)
    allow(forger, "scorer")
    aside = Forger(forger.run / ASIDE_1)
    version = tell(forger)["contents"]["scorer"][1]
    aside.manifest(2, lambda told: told.update(scorer_version=version))
    aside.reseal(2)
    found = [str(item) for item in verify(open_run(forger.run)).findings]
    assert any(re.match(rf"scorer: {ASIDE_1}/experience/iter_000002", line) for line in found)


def test_resumes_are_in_the_order_of_their_numbers(run: Path) -> None:
    """By name, 1000 comes before 999."""
    for number in (998, 999, 1000, 1001):
        (run / "resumes" / f"{number:03d}").mkdir(parents=True)
        path = run / "resumes" / f"{number:03d}" / "resume.json"
        path.write_text(json.dumps(RESUME | {"number": number, "attempt": number - 900}))
    assert [int(path.name) for path in resume_folders(run)] == [998, 999, 1000, 1001]
    resume = go_on(run)
    assert (resume.number, resume.folder_name) == (1002, "resumes/1002")
    assert resume.attempt >= 101
    numbers = [resumed.number for resumed in open_run(run).resumes]
    assert numbers == [998, 999, 1000, 1001, 1002]


RESUME = {
    "asked": "auto", "iteration": 2, "own": True, "checkpoint": "checkpoints/iter_000002",
    "reused": None, "time": 1.0, "allowed": [], "meant": [], "changes": {}, "contents": {},
    "records": {},
}  # fmt: skip
