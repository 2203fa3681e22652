"""TRL's own environment: a venv under the benchmarks' cache, made once, with exact pins."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tools.bench.harness import CACHE, BenchError, say
from tools.bench.runs import run_command

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RUNNER = Path(__file__).with_name("trl_run.py")


def pins() -> list[str]:
    """The requirements, torch at the version that megarl runs on here."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    torch = metadata.version("torch").partition("+")[0]
    return [
        f"torch=={torch}" if line.startswith("torch==") else line
        for line in lines
        if line and not line.startswith("#")
    ]


def trl_python(folder: Path | None = None, torch_index: str | None = None) -> Path:
    """TRL's interpreter; its environment is made when it is missing or the pins changed.

    `torch_index` is where torch comes from on machines whose default is the CUDA build.
    """
    folder = folder or CACHE / "trl"
    wanted = pins()
    marker = folder / ("ready-" + hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12])
    python = folder / "bin/python"
    if marker.exists():
        return python
    say(f"making TRL's environment in {folder}: a minute or two")
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "-q"]
    log = folder.parent / "trl-install.log"
    try:
        if torch_index:
            torch = next(pin for pin in wanted if pin.startswith("torch=="))
            run_command([*install, "--no-deps", "--index-url", torch_index, torch], None, log)
        run_command([*install, *wanted], None, log)
    except BenchError as error:
        raise BenchError(f"TRL could not be installed: {error}") from error
    marker.touch()
    return python
