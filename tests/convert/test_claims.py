"""One conversion at a time writes an output, and an interrupted one removes what it wrote.

Two real processes and real signals, in the middle of writing. Not covered: several machines on one
disk; torchrun's processes (test_processes.py); large models (test_limits.py).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.convert import write_megatron
from megarl.convert.boxes import ConvertError
from megarl.convert.copying import Copier
from megarl.convert.output import only_writer
from tests.convert.models import convert, make, nothing_left, same_bytes, tensors_in


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.fixture(scope="module")
def megatron(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("megatron") / "m"
    assert convert("hf-to-megatron", model, out) == 0
    return out


def _half_way(monkeypatch, act) -> None:
    """`act` is called once, when a part of the weights has been read."""
    fill, calls = Copier.fill, []

    def and_act(self, *words) -> None:
        calls.append(None)
        if len(calls) == 5:
            act()
        fill(self, *words)

    monkeypatch.setattr(Copier, "fill", and_act)


def _in_a_process(words: list, pipe) -> None:
    """Exit code of a conversion."""
    pipe.send(convert(*words))


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf", "reshard"])
def test_of_two_conversions_one_is_refused(
    model, megatron, tmp_path, monkeypatch, capfd, command: str
) -> None:
    source = model if command == "hf-to-megatron" else megatron
    out, codes = tmp_path / "out", []

    def another() -> None:
        near, far = multiprocessing.get_context("fork").Pipe()
        words = [command, source, out]
        process = multiprocessing.get_context("fork").Process(
            target=_in_a_process, args=(words, far)
        )
        process.start()
        codes.append(near.recv() if near.poll(20) else None)
        process.kill()
        process.join()

    _half_way(monkeypatch, another)
    assert convert(command, source, out) == 0
    assert codes == [2]
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "another conversion is writing it" in told
    monkeypatch.undo()
    if command != "megatron-to-hf":
        assert convert("megatron-to-hf", out, tmp_path / "back") == 0
        out = tmp_path / "back"
    assert same_bytes(tensors_in(out), load_file(model / "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []


def test_the_lock_of_a_process_that_was_killed_holds_nobody_off(tmp_path) -> None:
    out = tmp_path / "out"
    ready, far = multiprocessing.get_context("fork").Pipe()

    def hold() -> None:
        with only_writer(out) as partial:
            partial.mkdir()
            far.send(None)
            signal.pause()

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    ready.recv()
    with pytest.raises(ConvertError, match="another conversion"), only_writer(out):
        pass
    process.kill()
    process.join()
    assert (tmp_path / ".out.lock").exists()
    with only_writer(out) as partial:
        assert not partial.exists()
    assert nothing_left(out)


@pytest.mark.parametrize("fault", ["shorter", "gone", "more"])
def test_files_that_changed_before_the_rename(
    model, tmp_path, monkeypatch, capsys, fault: str
) -> None:
    """As by somebody who writes in the partial folder."""
    copy = write_megatron.copy_companions

    def spoil(source: Path, folder: Path, names: tuple) -> None:
        copy(source, folder, names)
        path = folder / "__0_0.distcp"
        if fault == "shorter":
            os.truncate(path, path.stat().st_size - 1)
        elif fault == "gone":
            path.unlink()
        else:
            (folder / "__7_0.distcp").write_bytes(b"x")

    monkeypatch.setattr(write_megatron, "copy_companions", spoil)
    assert convert("hf-to-megatron", model, tmp_path / "m") == 2
    parts = {"shorter": "were written", "gone": "is gone", "more": "__7_0.distcp: was not written"}
    assert parts[fault] in capsys.readouterr().err
    assert nothing_left(tmp_path / "m")


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf", "reshard"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(
    model, megatron, tmp_path, monkeypatch, capsys, command: str, number: int
) -> None:
    source = model if command == "hf-to-megatron" else megatron
    before = signal.getsignal(number)
    _half_way(monkeypatch, lambda: os.kill(os.getpid(), number))
    assert convert(command, source, tmp_path / "out") == 128 + number
    told = capsys.readouterr().err
    assert told == f"convert {command}: interrupted; nothing was left\n"
    assert nothing_left(tmp_path / "out")
    assert signal.getsignal(number) == before


def test_a_signal_within_torchs_writing(model, tmp_path, monkeypatch, capsys) -> None:
    """torch turns the exception into one of its own, of a file it could not finish."""
    save = write_megatron.torch.save

    class Interrupting:
        def __init__(self, stream) -> None:
            self.stream, self.writes = stream, 0

        def write(self, data) -> int:
            self.writes += 1
            if self.writes == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return self.stream.write(data)

        def __getattr__(self, name: str):
            return getattr(self.stream, name)

    monkeypatch.setattr(
        write_megatron.torch, "save", lambda tensor, stream: save(tensor, Interrupting(stream))
    )
    assert convert("hf-to-megatron", model, tmp_path / "m") == 130
    assert capsys.readouterr().err == "convert hf-to-megatron: interrupted; nothing was left\n"
    assert nothing_left(tmp_path / "m")


def test_a_signal_to_a_command_that_writes_nothing(model, monkeypatch, capsys) -> None:
    from megarl.convert import inspect

    monkeypatch.setattr(inspect, "facts_of", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert convert("inspect", model) == 143
    assert capsys.readouterr().err == "convert inspect: interrupted\n"
    assert json.loads((model / "config.json").read_text())
