"""A model folder's own tokenizer against the one in use, on real folders.

Not covered: that the note reaches the terminal (`tests/launch/test_evaluate.py` has folders that
need none), and tokenizers that differ on other texts than the probes alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.contracts.tokens import Tokens
from megarl.evaluation.own_tokens import own_tokens
from megarl.evaluation.targets import EvaluationError
from tests.contracts.tokenizer_folders import character_folder

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def used(tmp_path: Path) -> Tokens:
    return Tokens.load(_room(character_folder(tmp_path / "used", TEMPLATE)))


def _room(folder: Path) -> Path:
    """With ids behind the tokenizer's, as models have them."""
    _change(folder / "config.json", vocab_size=128)
    return folder


def _change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_one_that_is_alike_needs_no_note(tmp_path: Path, used: Tokens) -> None:
    own = own_tokens(_room(character_folder(tmp_path / "own", TEMPLATE)), used, "model")
    assert own.hash == used.hash and own.note is None


def test_one_that_cannot_be_read_is_told(tmp_path: Path, used: Tokens) -> None:
    folder = _room(character_folder(tmp_path / "own", TEMPLATE))
    _change(folder / "tokenizer.json", model={"type": "Nope"})
    own = own_tokens(folder, used, "model")
    assert own.hash is None
    assert own.note.startswith(f"transformers cannot read the tokenizer in {folder}: ")
    assert own.note.endswith(f"; model.path {used.folder}'s tokenizer is used")


def test_another_template_is_told_where_the_models_is_used(tmp_path: Path, used: Tokens) -> None:
    folder = _room(character_folder(tmp_path / "own", "Q: " + TEMPLATE))
    own = own_tokens(folder, used, "model")
    assert own.hash == Tokens.load(folder).hash != used.hash
    assert own.note == (
        f"{folder} has another chat template than model.path {used.folder}, whose own are used; "
        f"to use the folder's: model.path={folder}, without --checkpoint"
    )
    assert "chat template" not in own_tokens(folder, used, "none").note


def test_other_special_tokens_are_told(tmp_path: Path, used: Tokens) -> None:
    folder = _room(character_folder(tmp_path / "own", TEMPLATE))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    tokenizer.save_pretrained(folder)
    _change(folder / "config.json", eos_token_id=[1, 5])
    told = own_tokens(folder, used, "model").note
    assert "other ids that end a response ([1, 5] against [1])" in told
    assert "other special ids" in told and "chat template" not in told


def test_no_tokenizer_is_told(tmp_path: Path, used: Tokens) -> None:
    own = own_tokens(tmp_path, used, "model")
    assert own.hash is None
    assert own.note == f"{tmp_path} has no tokenizer; model.path {used.folder}'s tokenizer is used"


def test_other_ids_of_the_same_text_are_refused(tmp_path: Path, used: Tokens) -> None:
    folder = _room(character_folder(tmp_path / "own", TEMPLATE))
    _change(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    with pytest.raises(EvaluationError, match=r"other ids than .*'What is 23 \+ 45\?' is \["):
        own_tokens(folder, used, "model")


def test_a_plain_token_of_one_alone_is_refused(tmp_path: Path, used: Tokens) -> None:
    folder = _room(character_folder(tmp_path / "own", TEMPLATE))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(EvaluationError, match=r"id \d+ \('<think>'\) is in .*own alone; evaluate"):
        own_tokens(folder, used, "model")
