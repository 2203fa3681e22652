"""What a person may get wrong: one clear line, soon, an exit code, and nothing left running.

    python -m pytest tests/launch/test_bad_input.py -s -m "long or not long"    prints the table

Ranks that are killed, raise or hang, and signals: test_faults.py. Single recipe keys and single
kinds of rows have tests of their own; here they go all the way through the launch script.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.recipe import load_recipe
from megarl.run_folder import claim_folder
from tests.launch.runs import ROOT, make_model, run_warm, settings
from tests.launch.stops import (
    LAUNCH,
    MOST_SECONDS,
    Ended,
    Table,
    end_of,
    is_not_finished,
    shown,
    torchrun,
)

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    with shown("Bad inputs") as rows:
        yield rows


@dataclass(frozen=True)
class Case:
    """A bad input: what it changes in a copy of the data, the settings, and what must be said."""

    name: str
    says: str
    """A pattern that the one line must match."""
    settings: dict[str, object]
    change: Callable[[Path], None] = lambda folder: None
    long: bool = False
    warm: bool = False
    """Met by ranks like others that are launched, and so by those of `tests/warm.py`."""


def _config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _without(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        gone = list((folder / "model").glob(pattern))
        assert gone
        for path in gone:
            path.unlink()

    return change


def _cut_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _bad_rows(folder: Path) -> None:
    path = folder / "train.jsonl"
    rows = path.read_text().splitlines()
    rows[2], rows[4] = '{"prompt": "What', '{"prompt": "What is 1 + 1?"}'
    path.write_text("\n".join(rows) + "\n")


def _long_prompt(folder: Path) -> None:
    path = folder / "train.jsonl"
    rows = path.read_text().splitlines()
    rows[6] = json.dumps({"prompt": "What is " + "1 + " * 40 + "1?", "answer": "41"})
    path.write_text("\n".join(rows) + "\n")


CASES = [
    Case("no recipe file", r"no\.yaml: there is no such recipe file", {"recipe": "no.yaml"}),
    Case(
        "mistyped recipe key",
        r"rollout\.grup_size: unknown key; did you mean rollout\.group_size\?",
        {"rollout.grup_size": 4},
    ),
    Case("value of a wrong type", r"rollout\.group_size: .*integer", {"rollout.group_size": "ten"}),
    Case("unknown stage", r"world\.stage_timeouts", {"world.stage_timeouts": "{generat: 5}"}),
    Case("ranks do not fit actor.tp", r"3 ranks do not divide by actor\.tp 2", {"world.ranks": 3}),
    Case(
        "heads do not fit actor.tp",
        r"kv heads 2 of the llama model does not divide by actor\.tp=3",
        {"world.ranks": 3, "actor.tp": 3, "rollout.tp": 1},
        warm=True,
    ),
    Case("no model folder", r"/none.*", {"model.path": "/none"}, warm=True),
    Case("no config.json", r"config\.json", {}, _without("config.json")),
    Case(
        "unsupported architecture",
        r"config\.json: model_type 'bert' is not handled; handled: deepseek_v3, llama, ",
        {},
        _config(model_type="bert"),
        warm=True,
    ),
    Case(
        "config value that changes the maths",
        r"config\.json: .*sliding_window",
        {},
        _config(sliding_window=64),
        warm=True,
    ),
    Case("no GPU", r"cuda.*GPU|GPU.*cuda", {"world.device": "cuda"}, warm=True),
    Case("no weights", r"no file holds|safetensors", {}, _without("*.safetensors"), long=True),
    Case("weights cut off", r"model\.safetensors", {}, _cut_weights, long=True),
    Case("no tokenizer", r"tokenizer", {}, _without("tokenizer*"), long=True),
    Case(
        "no data file",
        r"/none\.jsonl does not exist",
        {"data.train": "/none.jsonl"},
        long=True,
    ),
    Case(
        "malformed rows over the limit",
        r"train\.jsonl: 2 of 376 rows refused \(.*\), data\.max_refused_share is 0: "
        r".*train\.jsonl:3: not JSON.*train\.jsonl:5: no \"answer\"",
        {},
        _bad_rows,
        warm=True,
    ),
    Case(
        "a prompt too long",
        r"1 of 376 rows refused \(too_long 1\).*train\.jsonl:7: prompt of \d+ tokens, "
        r"data\.max_prompt_tokens is 32",
        {},
        _long_prompt,
        long=True,
    ),
]


def _check_refused(ended: Ended, says: str) -> None:
    assert ended.code == 2 and len(ended.lines) == 1, ended.output
    assert re.search(says, ended.lines[0]), ended.output


def _check(ended: Ended, folder: Path, code: int, says: str) -> None:
    (line,) = [line for line in ended.output.splitlines() if not line.endswith(" …")]
    assert re.search(says, line), line
    assert ended.code == code, ended.output
    assert ended.left == []
    assert is_not_finished(folder)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.long else [])
        for case in CASES
    ],
)
def test_a_bad_input_is_one_clear_line(
    case: Case, data: Path, tmp_path: Path, table: Table
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    case.change(folder)
    values = dict(case.settings)
    start = [*LAUNCH[:2], values.pop("recipe", LAUNCH[2]), "run.name=run"]
    chosen, began = settings(folder, tmp_path, **values), time.time()
    if case.warm:
        done = run_warm("run", chosen, tmp_path)
        ended = Ended(done.output, done.code, time.time() - began)
    else:
        ended = end_of([*start, *chosen])
    table.add(case.name, ended)
    _check(ended, tmp_path / "run", 2, case.says)


def test_a_mistyped_scorer_is_named_and_the_next_launch_may_have_its_name(
    data: Path, tmp_path: Path, table: Table
) -> None:
    """Ranks that lead no replica load no scorer: one of the two meets the error."""
    values = {"run.name": "run", "rollout.tp": 2, "run.iterations": 1, "data.eval": "null"}
    wrong = {"reward.scorers": "[{name: 'tests.launch.scorers:nosuch'}]"}
    ended = end_of([*LAUNCH, *settings(data, tmp_path, **values, **wrong)])
    table.add("mistyped scorer", ended)
    _check(ended, tmp_path / "run", 2, r"cannot import tests\.launch\.scorers:nosuch: Attribute")
    again = {name: value for name, value in values.items() if name != "run.name"}
    done = run_warm("run", settings(data, tmp_path, **again), tmp_path)
    assert done.code == 0, done.output
    assert (tmp_path / "run" / "finished.json").exists()
    ended = end_of([*LAUNCH, *settings(data, tmp_path, **values)])
    _check_refused(ended, r"run holds a finished run")


def test_a_bad_input_leaves_the_run_that_was_to_be_replaced(data: Path, tmp_path: Path) -> None:
    """One rank: of several another may fail first, and torchrun end rank 0 before it comes to it;
    then the next launch of the name does it (`tests/test_run_folder.py`)."""
    chosen = {"run.name": "run", "data.train": "/none.jsonl", "run.overwrite": "true"}
    chosen |= {"world.ranks": 1, "actor.tp": 1}
    run = tmp_path / "run"
    claim_folder(load_recipe(ROOT / LAUNCH[2], settings(data, tmp_path, **{"run.name": "run"})))
    (run / "journal.jsonl").write_text('{"state": "ACTOR_COMMITTED"}\n')
    (run / "hf").mkdir()
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.is_file()}
    done = run_warm("run", settings(data, tmp_path, **chosen), tmp_path)
    assert done.code == 2, done.output
    assert "/none.jsonl does not exist" in done.output
    after = {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.is_file()}
    assert after == before and {path.name for path in run.iterdir()} == {*before, "hf", "logs"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", ".run.lock"}


@pytest.mark.long
def test_bad_rows_within_the_limit_are_counted_and_left_out(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    _bad_rows(folder)
    one = {"world.ranks": 1, "actor.tp": 1, "run.iterations": 1, "data.eval": "null"}
    values = one | {"run.name": "run", "data.max_refused_share": 0.01}
    ended = end_of([*LAUNCH, *settings(folder, tmp_path, **values)])
    assert ended.code == 0, ended.output
    (line,) = [line for line in ended.output.splitlines() if "refused" in line]
    assert "2 rows of" in line and "train.jsonl:3: not JSON" in line
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert told["rows"] == 374 and len(told["refused"]) == 2


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_named(taken: int, data: Path, tmp_path: Path, table: Table) -> None:
    command = [*LAUNCH, *settings(data, tmp_path, **{"run.name": "run"})]
    ended = end_of(command, MASTER_PORT=str(taken))
    table.add("MASTER_PORT in use", ended)
    says = rf"MASTER_PORT={taken} cannot be listened on here \(Address already in use\)"
    _check(ended, tmp_path / "run", 2, says)


def test_another_machines_address_is_named(data: Path, tmp_path: Path, table: Table) -> None:
    command = [*LAUNCH, *settings(data, tmp_path, **{"run.name": "run"})]
    ended = end_of(command, MASTER_PORT="29555", MASTER_ADDR="192.0.2.1")
    table.add("MASTER_ADDR of another machine", ended)
    _check(ended, tmp_path / "run", 2, r"MASTER_ADDR=192\.0\.2\.1 .* cannot be listened on here")


@pytest.mark.long
def test_the_persons_own_torchrun_with_a_port_in_use_ends(
    taken: int, data: Path, tmp_path: Path, table: Table
) -> None:
    start = torchrun(2, "--master_addr", "127.0.0.1", "--master_port", str(taken))
    ended = end_of([*start, *settings(data, tmp_path, **{"run.name": "run"})])
    table.add("port in use, own torchrun", ended)
    assert ended.code != 0 and ended.left == [] and ended.seconds < 2 * MOST_SECONDS
    assert "EADDRINUSE" in ended.output


@pytest.mark.long
def test_an_explicit_port_is_where_the_ranks_meet(data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    values = {"run.name": "run", "run.iterations": 1, "data.eval": "null"}
    values |= {"reward.scorers": "[{name: 'tests.launch.scorers:meeting_point'}]"}
    ended = end_of([*LAUNCH, *settings(data, tmp_path, **values)], MASTER_PORT=str(port))
    assert ended.code == 0, ended.output
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["reward/mean"] == port


@pytest.mark.long
def test_too_few_ranks_of_the_persons_own_torchrun(
    data: Path, tmp_path: Path, table: Table
) -> None:
    """Both ranks meet the same error; one tells it, before torchrun's own summary."""
    ended = end_of([*torchrun(3, "--standalone"), *settings(data, tmp_path)])
    table.add("own torchrun with 3 ranks, recipe with 2", ended)
    assert ended.code != 0 and ended.left == []
    assert len(ended.lines) == 1 and "world.ranks is 2, but 3 rank(s) were started" in ended.output


def test_a_fault_is_refused_outside_of_tests(data: Path, tmp_path: Path, table: Table) -> None:
    command = [*LAUNCH, *settings(data, tmp_path, **{"run.name": "run"})]
    ended = end_of(command, MEGARL_FAULT="kill@generate")
    table.add("MEGARL_FAULT without permission", ended)
    _check(ended, tmp_path / "run", 2, r"MEGARL_FAULT is set")
