"""environment.json. Not covered: machines without /proc, and packages that come with a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megarl.observe.environment import PACKAGES, environment, git_state, write_environment


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_of_the_checkout_that_tracks_the_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    assert git_state(package) is None  # no checkout
    git(tmp_path, "init", "-q")
    assert git_state(package) is None  # a checkout that does not track it: a venv inside, say
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-q", "-m", "x")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(package) == {"revision": revision, "dirty": False}
    (package / "more.py").write_text("x = 2\n")
    assert git_state(package) == {"revision": revision, "dirty": True}


def test_no_git_program_means_no_git_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" not in environment(["a"])


def test_secrets_never_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden-1")
    monkeypatch.setenv("MY_PASSWORD", "hidden-2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ["tracker.api_key=hidden-3", "tracker.token=hidden-4", "data.prompt_key=question"]
    monkeypatch.setattr(sys, "argv", ["train.py", "recipes/x.yaml", *settings])
    path = tmp_path / "run" / "environment.json"
    write_environment(path, ["host-a", "host-b"])
    assert "hidden" not in path.read_text()
    facts = json.loads(path.read_text())
    assert facts["argv"][-3:] == [
        "tracker.api_key=***",
        "tracker.token=***",
        "data.prompt_key=question",
    ]
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["hosts"] == ["host-a", "host-b"]
    assert facts["packages"]["torch"] == version("torch")
    assert facts["cores"] == os.cpu_count()
    assert sorted(os.listdir(path.parent)) == ["environment.json"]


def test_every_package_that_is_imported_is_told_once() -> None:
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text(encoding="utf-8")
    direct = re.findall(r'"([\w.-]+)>=', setup.partition("DIRECT = [")[2].partition("]")[0])
    assert len(direct) > 10 and set(direct) <= set(PACKAGES)
    assert len(set(PACKAGES)) == len(PACKAGES)
