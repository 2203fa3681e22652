"""Several processes write one folder, and stop alike.

With torchrun. Not covered: several machines; a process that dies without a word (the others wait
for it until the time-out).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.models import convert, make, nothing_left

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.launch


def _torchrun(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["tools/convert_ckpt.py", *map(str, words)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_processes_share_the_ranks_files(tmp_path) -> None:
    source = make(tmp_path / "hf", "qwen2", num_hidden_layers=4)
    layout = ("--tp", 2, "--pp", 2)
    done = _torchrun("hf-to-megatron", source, tmp_path / "a", *layout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights sha256:") == 1
    assert convert("hf-to-megatron", source, tmp_path / "b", *layout) == 0
    for path in (tmp_path / "b").glob("*.distcp"):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()
    assert convert("verify", source, tmp_path / "a") == 0
    done = _torchrun("reshard", tmp_path / "a", tmp_path / "c", "--pp", 2)
    assert done.returncode == 0, done.stderr
    assert convert("verify", source, tmp_path / "c") == 0


@pytest.mark.parametrize("fault", ["truncated", "existing", "misfit"])
def test_all_processes_stop_with_one_line(tmp_path, fault: str) -> None:
    source = make(tmp_path / "hf", "qwen2")
    out = tmp_path / "m"
    words = ["hf-to-megatron", source, out]
    if fault == "truncated":
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
    elif fault == "existing":
        out.mkdir()
    else:
        words += ["--tp", 4]
    done = _torchrun(*words)
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if line.startswith("convert ")]
    assert len(own) == 1, done.stderr
    parts = {"truncated": "truncated", "existing": "m: exists", "misfit": "--tp=4"}
    assert parts[fault] in own[0]
    assert "Traceback" not in done.stderr.split("convert hf-to-megatron")[0]
    assert "exitcode  : 2" in done.stderr
    assert fault == "existing" or nothing_left(out)
