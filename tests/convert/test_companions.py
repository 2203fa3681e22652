"""The files beside the weights are read before they are copied.

Not covered: tokenizers of real models (test_smollm2.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.convert.models import convert, make, nothing_left

NO_MODEL = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}}}'
FAULTS = {
    "config of the tokenizer": ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
    "generation": ("generation_config.json", "", "generation_config.json: not JSON"),
    "tokenizer": ("tokenizer.json", NO_MODEL, "tokenizer.json: does not load"),
    "no object": ("tokenizer.json", "[1]", "tokenizer.json: no tokenizer"),
    "sentencepiece": ("tokenizer.model", "garbage", "tokenizer.model: does not load"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_companion(model, tmp_path, capsys, fault: str) -> None:
    name, text, part = FAULTS[fault]
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    (source / name).write_text(text)
    capsys.readouterr()
    assert convert("hf-to-megatron", source, tmp_path / "m") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and part in told and "repair it" in told, told
    assert nothing_left(tmp_path / "m")


def test_pieces_of_another_model(model, tmp_path, capsys) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(f"word{n} and{n * 7}" for n in range(2000)))
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    for count, code in ((100, 0), (1000, 2)):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(source / "tokenizer"),
            vocab_size=count,
            model_type="bpe",
            minloglevel=2,
        )
        assert convert("inspect", source) == code
    assert "has 1000 pieces, config.json has vocab_size" in capsys.readouterr().err


def test_ranks_of_bytes_are_no_sentencepiece(model, tmp_path) -> None:
    """tiktoken's files have the same name."""
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    (source / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert convert("inspect", source) == 0


def test_a_folder_without_a_tokenizer_is_told(model, tmp_path, capsys) -> None:
    assert convert("hf-to-megatron", model, tmp_path / "a") == 0
    assert "tokenizer" not in capsys.readouterr().out
    source = Path(shutil.copytree(model, tmp_path / "hf"))
    (source / "tokenizer.json").unlink()
    assert convert("hf-to-megatron", source, tmp_path / "m") == 0
    assert "; without a tokenizer" in capsys.readouterr().out
