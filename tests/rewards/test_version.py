"""What a scorer version is over: code, libraries, options, and the files and folders they name.

Not covered: modules that a scorer imports only while it scores, which are in no version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.rewards.score import ScoringPool
from megarl.rewards.scorer import ScorerError
from megarl.rewards.sources import loaded_since, named_files
from tests.rewards.make_pool import GRADERS, Characters, child_processes, left_of, scoring, section


def test_the_version_follows_files_that_options_name(tmp_path):
    file = tmp_path / "answer.json"

    def version(schema: str) -> str:
        file.write_text(schema)
        with scoring({"name": "json_schema", "schema": str(file)}) as pool:
            return pool.version

    first = version('{"type": "object"}')
    assert version('{"type": "array"}') != first == version('{"type": "object"}')


def test_the_version_follows_code_options_weights_rules_and_libraries(tmp_path, monkeypatch):
    module = tmp_path / "own_scorer.py"
    (tmp_path / "own_helper.py").write_text("ONE = 1.0\n")
    module.write_text("from own_helper import ONE\ndef score(response, bonus=0.0): return ONE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"name": "own_scorer:score"}

    def version(scorer: dict, **keys) -> str:
        with scoring(scorer, **keys) as pool:
            return pool.version

    same = [version(own), version(own), version(own, workers=2)]
    others = [
        version(own | {"bonus": 1.0}),
        version(own | {"weight": 2.0}),
        version(own, on_status={"timeout": "stop"}),
    ]
    (tmp_path / "own_helper.py").write_text("ONE = 1.5\n")
    others.append(version(own))
    module.write_text(module.read_text() + "import yaml\n")
    others.append(version(own))
    assert len(set(same)) == 1 and len({same[0], *others}) == 6


def test_the_version_is_over_every_file_that_built_ins_bring_in():
    """As a worker loads them: from a process that has none of the scorers' modules."""
    code = (
        "import sys; from megarl.rewards.judge import load; from megarl.rewards.frames import *\n"
        "items = tuple(ScorerSetup(name, name, {}) for name in ('math', 'code'))\n"
        "print(*load(Setup(tuple(sys.path), items, 1.0))[1].files)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    helpers = {"math_answer", "math_compare", "math_text", "answer_text", "code", "code_tests"}
    helpers |= {"code_runner", "sandbox", "sandbox_filter"}
    assert found >= {f"megarl.rewards.{name}" for name in helpers}
    assert all(name.startswith("megarl.") for name in found)


def test_one_byte_in_a_helper_is_another_code(tmp_path, monkeypatch):
    import megarl.rewards.math_compare as helper
    from megarl.rewards import math_answer

    changed = tmp_path / "math_compare.py"
    changed.write_bytes(Path(helper.__file__).read_bytes() + b"#")
    before = set(sys.modules) - {helper.__name__}
    first = loaded_since(before, [math_answer.__name__])
    monkeypatch.setattr(helper, "__file__", str(changed))
    second = loaded_since(before, [math_answer.__name__])
    differ = {name for name in first.files if first.files[name] != second.files[name]}
    assert differ == {helper.__name__}


def test_a_folder_that_an_option_names_counts_with_all_its_files(tmp_path):
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    (model / "part").mkdir(parents=True)
    elsewhere.mkdir()
    (model / "config.json").write_text("{}")
    (model / "part" / "weights").write_bytes(bytes(1 << 20))
    (model / "link").symlink_to(elsewhere)
    (elsewhere / "around").symlink_to(model)  # a folder within itself
    os.mkfifo(model / "pipe")  # reading it would wait for ever
    options = [{"judge": {"model": str(model)}, "words": "no file"}]

    def hash_() -> str:
        (name, found), *others = named_files(options).items()
        assert name == str(model) and not others
        return found

    told = [hash_(), hash_()]
    (model / "part" / "weights").write_bytes(bytes((1 << 20) - 1) + b"1")
    told.append(hash_())
    (model / "part" / "weights").rename(model / "part" / "other")
    told.append(hash_())
    (elsewhere / "tokens").write_text("")
    told.append(hash_())
    assert told[0] == told[1] and len(set(told)) == 4


def test_a_file_that_cannot_be_read_is_told_before_anything_starts():
    before = child_processes()
    scorers = section({"name": f"{GRADERS}:flaky", "marks": "/proc/self/mem"})  # even by root
    with pytest.raises(ScorerError, match="cannot read .* that an option names: Input/output"):
        ScoringPool(scorers, Characters())
    assert child_processes() <= before


def test_a_pool_whose_version_cannot_be_had_is_closed(tmp_path):
    before = child_processes()
    scorers = section({"name": f"{GRADERS}:flaky", "marks": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        ScoringPool(scorers, Characters())
    assert left_of(before) == []
