"""Options that cannot be meant, and places that cannot be written to, are refused in one line.

Not covered: layouts that a model does not take (test_refusals.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.convert.options import size
from tests.convert.models import convert, make

WRONG = {
    "no number": (("hf-to-megatron", "a", "b", "--tp", "x"), "'x' is no whole number above 0"),
    "zero": (("hf-to-megatron", "a", "b", "--pp", "0"), "'0' is no whole number above 0"),
    "bound": (("verify", "a", "b", "--logits", "--bound", "nan"), "'nan' is no positive number"),
    "negative": (("verify", "a", "b", "--logits", "--bound=-1"), "'-1' is no positive number"),
    "size": (
        ("megatron-to-hf", "a", "b", "--max-file-bytes", "1e6"),
        "'1e6' is no size; give bytes, or 500MB, 5GB, …",
    ),
    "no path": (("inspect", ""), "an empty path"),
    "no second path": (("verify", "a", ""), "an empty path"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.mark.parametrize("wrong", WRONG)
def test_an_option_that_cannot_be_meant(capsys, wrong: str) -> None:
    words, part = WRONG[wrong]
    with pytest.raises(SystemExit) as ended:
        convert(*words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(part)


def test_sizes() -> None:
    told = ("40000", "5GB", "500MB", "1.5 gb", "2kB", "7B")
    assert [size(text) for text in told] == [40000, 5 * 10**9, 5 * 10**8, 15 * 10**8, 2000, 7]


def test_prompts_are_read_first(model, tmp_path, capsys) -> None:
    for text in (None, " \n"):
        prompts = tmp_path / "prompts.txt"
        if text is not None:
            prompts.write_text(text)
        capsys.readouterr()
        assert convert("verify", model, model, "--logits", "--prompts", prompts) == 2
        told = capsys.readouterr()
        assert told.out == "" and "--prompts" in told.err and "prompts.txt: " in told.err


def test_a_place_that_cannot_be_written_to(model, tmp_path, capsys) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert convert("hf-to-megatron", model, file / "deep" / "m") == 2
    assert f"{file} is no folder" in capsys.readouterr().err
    in_the_way = tmp_path / ".m.partial"
    in_the_way.symlink_to(file)
    assert convert("hf-to-megatron", model, tmp_path / "m") == 2
    assert ".m.partial: is in the way" in capsys.readouterr().err
    assert in_the_way.is_symlink() and file.read_text() == "mine"
