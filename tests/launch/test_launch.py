"""The launch script: both languages, dry runs and one-line errors.

Not covered here: whole runs, signals, Slurm. torchrun itself is started only with a bad recipe.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "grpo.sh"
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def bash(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=cwd,
        env=os.environ | {"MEGARL_PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_dry_run_prints_the_command() -> None:
    done = bash("recipes/quickstart.yaml", "--dry-run", "seed=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    command = done.stdout.split()
    assert command[0] == "OMP_NUM_THREADS=1"
    start = command.index(sys.executable)
    assert " ".join(command[start + 1 :]) == (
        "-m megarl.launcher 2 megarl.train recipes/quickstart.yaml seed=3"
    )


def test_modes_reach_the_ranks_behind_the_settings() -> None:
    done = bash("recipes/quickstart.yaml", "--replay", "old@3", "--dry-run", "actor.tp=1")
    assert done.stdout.rstrip().endswith("recipes/quickstart.yaml actor.tp=1 --replay=old@3")
    parts = ["--only=train", "--from", "a@0-1", "--from", "b", "--dry-run"]
    done = bash("recipes/quickstart.yaml", *parts)
    assert done.stdout.rstrip().endswith("--only=train --from=a@0-1 --from=b")
    done = bash("recipes/quickstart.yaml", "--replay")
    assert done.returncode == 2 and "--replay needs a value" in done.stderr


def test_rank_count_follows_overrides_and_threads_the_environment() -> None:
    done = bash("recipes/quickstart.yaml", "world.ranks=4", "--dry-run", OMP_NUM_THREADS="3")
    assert "-m megarl.launcher 4 megarl.train " in done.stdout
    assert done.stdout.startswith("OMP_NUM_THREADS=3 ")


def test_it_runs_from_any_folder_and_quotes_what_it_prints(tmp_path: Path) -> None:
    (tmp_path / "my recipe.yaml").write_text(f"base: {QUICKSTART}\n")
    scorers = "reward.scorers=[{name: exact_match}]"
    done = bash("my recipe.yaml", scorers, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run(
        ["bash", "-c", f"set -- {done.stdout.strip()}; printf '%s\\n' \"${{@: -2}}\""],
        capture_output=True,
        text=True,
    )
    assert printed.stdout.splitlines() == ["my recipe.yaml", scorers]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no.yaml"], "no.yaml: there is no such recipe file"),
        (
            ["recipes/quickstart.yaml", "rollout.grup_size=4"],
            "override rollout.grup_size=4: rollout.grup_size: unknown key; "
            "did you mean rollout.group_size?",
        ),
        (
            ["recipes/quickstart.yaml", "--dryrun"],
            "megarl: unknown option --dryrun; options are --dry-run, --help, --replay, --only "
            "and --from",
        ),
        (
            ["recipes/quickstart.yaml", "other.yaml"],
            "megarl: one recipe at a time: recipes/quickstart.yaml or other.yaml",
        ),
    ],
)
def test_errors_are_one_line(arguments: list[str], says: str) -> None:
    done = bash(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says + "\n")


def test_without_a_recipe_it_teaches() -> None:
    done = bash()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: bash launch/grpo.sh RECIPE")
    assert bash("--help").stdout == done.stderr


def test_a_python_without_the_packages_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    done = bash("recipes/quickstart.yaml", MEGARL_PYTHON=str(bare))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{bare} has no torch, " in done.stderr
    assert "run `make venv`" in done.stderr


def test_a_python_that_does_not_run_is_named() -> None:
    done = bash("recipes/quickstart.yaml", MEGARL_PYTHON="/no/python")
    assert done.returncode == 2
    assert "megarl: /no/python does not run" in done.stderr


@pytest.mark.launch
def test_torchrun_takes_the_script_as_python() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "1", str(SCRIPT), "no.yaml"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "no.yaml: there is no such recipe file" in done.stderr


@pytest.mark.parametrize("name", ["grpo.sh", "ppo.sh"])
def test_the_script_is_valid_in_both_languages_and_short(name: str) -> None:
    text = SCRIPT.with_name(name).read_text()
    compile(text, name, "exec")
    assert len(text.splitlines()) <= 15
    # sbatch wants an interpreter first and reads its own lines only above the first command.
    assert text.startswith("#!/bin/bash\n#SBATCH ")


def test_the_scripts_differ_in_their_names_alone() -> None:
    grpo, ppo = (SCRIPT.with_name(name).read_text() for name in ("grpo.sh", "ppo.sh"))
    assert grpo.replace("grpo.sh", "ppo.sh") == ppo
    done = subprocess.run(
        ["bash", "launch/ppo.sh", "recipes/quickstart-ppo.yaml", "--dry-run"],
        cwd=ROOT,
        env=os.environ | {"MEGARL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.stdout.rstrip().endswith(
        "-m megarl.launcher 2 megarl.train recipes/quickstart-ppo.yaml"
    )


@pytest.mark.parametrize("name", ["launch/grpo.sh", "launch/ppo.sh", "launch/env.sh", ".ci/run"])
def test_shell_parses(name: str) -> None:
    done = subprocess.run(["bash", "-n", name], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["launch/env.sh", ".ci/run"])
def test_shellcheck_finds_nothing(name: str) -> None:
    done = subprocess.run(
        ["shellcheck", "-s", "bash", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_setup_pins_what_is_installed_and_names_no_host() -> None:
    text = (ROOT / "setup.py").read_text()
    assert "://" not in text and "index-url" not in text
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", text, flags=re.MULTILINE))
    assert len(pins) > 80
    installed = {name: version(name).partition("+")[0] for name in pins}
    assert installed == pins
    assert "sglang" not in pins
    sglang = f"sglang=={version('sglang')}"
    assert f"SGLANG := {sglang}\n" in (ROOT / "Makefile").read_text()
    assert f'"{sglang}"' in text


def test_make_lists_its_targets() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for target in ("demo", "test", "test-fast", "test-long", "clean", "venv", "docs"):
        assert f"make {target} " in done.stdout


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("PYTHON=/no/python3.11", "megarl needs Python 3.11 and '/no/python3.11' is none"),
        ("NEEDED_KB=99999999999999", "the environment needs 4 GB of disk"),
    ],
)
def test_make_says_what_the_machine_lacks(tmp_path: Path, setting: str, says: str) -> None:
    for name in ("Makefile", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    settings = [f"PYTHON={sys.executable}", setting]
    done = subprocess.run(["make", *settings, "venv"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1 and lines[0].startswith(says)
    assert not (tmp_path / ".venv").exists()
