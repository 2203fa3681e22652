"""Memory and disk: what a conversion takes at its peak, and what it leaves where it cannot write.

Each in a process of its own, by the kernel's numbers (VmHWM) and limits (RLIMIT_FSIZE). Not
covered: a disk that is full in fact (the limit gives the same error at the same calls), GGUF files,
which are decoded in memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.convert.models import convert, make, nothing_left

ROOT = Path(__file__).parents[2]
SLACK = 40 * 2**20
"""Of the allocator and the libraries, whatever is converted."""

MEASURE = """
import gc, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from megarl.convert import cli
def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
warm, words = json.loads(sys.argv[1])
for each in warm:
    assert cli.main(each) == 0
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = field("VmHWM")
code = cli.main(words)
print(json.dumps([code, field("VmHWM") - before]))
"""

LIMITED = """
import json, resource, sys
sys.path.insert(0, {root!r})
from megarl.convert.cli import main
most, words = json.loads(sys.argv[1])
# The limit is of every file: what importing writes must be written by now.
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
sys.exit(main(words))
"""


def _python(code: str, told: object, timeout: float = 200) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code.replace("{root!r}", repr(str(ROOT))), json.dumps(told)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )


def _peak(warm: list, *words: object) -> int:
    """Bytes at the peak beyond those after the imports and a small conversion."""
    done = _python(MEASURE, [warm, [str(word) for word in words]])
    assert done.returncode == 0, done.stderr
    code, peak = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return peak


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """(a small one, one of 310 MB whose largest tensor has 66 MB)."""
    place = tmp_path_factory.mktemp("models")
    large = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 4096, "head_dim": 64}
    small = make(place / "small", "llama")
    return small, make(place / "large", "llama", **large | {"num_hidden_layers": 6})


def test_each_direction_holds_far_less_than_the_model(models, tmp_path) -> None:
    small, large = models
    largest = 32000 * 512 * 4
    shard = (large / "model.safetensors").stat().st_size
    warm = [["hf-to-megatron", str(small), str(tmp_path / "warm")]]
    peak = _peak(warm, "hf-to-megatron", large, tmp_path / "m", "--tp", 1)
    assert peak < 1.3 * shard
    # Two chunks, of which the largest is the embedding with its padding.
    assert peak < 2.1 * largest + SLACK
    warm = [["megatron-to-hf", str(tmp_path / "warm"), str(tmp_path / "warmer")]]
    assert _peak(warm, "megatron-to-hf", tmp_path / "m", tmp_path / "b") < SLACK < 2 * largest
    cut = ("hf-to-megatron", large, tmp_path / "m2", "--tp", 2)
    assert _peak([["inspect", str(small)]], *cut) < 1.3 * shard / 2
    warm = [["inspect", str(tmp_path / "m2")]]
    assert _peak(warm, "megatron-to-hf", tmp_path / "m2", tmp_path / "b2") < SLACK
    assert (tmp_path / "b2/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf", "reshard"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_full_disk_leaves_nothing(tmp_path, command: str, share: float) -> None:
    source = make(tmp_path / "hf", "qwen2", num_hidden_layers=4)
    if command != "hf-to-megatron":
        assert convert("hf-to-megatron", source, tmp_path / "m") == 0
        source = tmp_path / "m"
    size = max(path.stat().st_size for path in source.iterdir())
    words = [command, str(source), str(tmp_path / "out")]
    done = _python(LIMITED, [int(size * share), words])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr, done.stderr
    assert "out" in done.stderr
    assert nothing_left(tmp_path / "out")
    assert convert(*words) == 0


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path, monkeypatch, capsys
) -> None:
    source = make(tmp_path / "hf", "qwen2")
    monkeypatch.setattr("megarl.convert.output.shutil.disk_usage", lambda _: _Usage)
    assert convert("hf-to-megatron", source, tmp_path / "m") == 2
    assert "has 1.0 kB free" in capsys.readouterr().err
    assert nothing_left(tmp_path / "m")


class _Usage:
    free = 1000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_conversion_that_is_ended_leaves_no_output(tmp_path, models, number: int) -> None:
    """SIGKILL leaves the partial folder, which the next one replaces."""
    _, large = models
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = ["tools/convert_ckpt.py", "hf-to-megatron", str(large), str(tmp_path / "m")]
    running = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    partial = tmp_path / ".m.partial"
    until = time.monotonic() + 100
    while not any(partial.glob("*.distcp")) and time.monotonic() < until:
        time.sleep(0.005)
    running.send_signal(number)
    told = running.communicate(timeout=60)[1]
    code = running.returncode
    if code == 0:
        pytest.skip("the conversion was through before the signal")
    assert not (tmp_path / "m").exists()
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 128 + number
        assert told == "convert hf-to-megatron: interrupted; nothing was left\n"
        assert nothing_left(tmp_path / "m")
    assert convert("hf-to-megatron", large, tmp_path / "m") == 0
    assert not partial.exists()
