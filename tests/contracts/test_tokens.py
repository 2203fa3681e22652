"""Tokens: rendering, decoding, hashing and what is refused at load.

The oracle is sentencepiece itself and hand-written id lists. Not covered: tokenizers with code of
their own (`trust_remote_code` is never set), images and tools in messages.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from megarl.contracts.tokens import Tokens, TokensError
from tests.contracts.tokenizer_folders import character_folder, sentencepiece_folder, write_config

USER = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Tokens:
    return Tokens.load(folder)


def _copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_a_question_becomes_sentencepieces_ids_of_the_rendered_text(folder, tokens):
    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    expected = (1, *pieces.encode("Q: What is 23 + 45?\nA:"))
    assert tokens.render("What is 23 + 45?") == expected
    assert tokens.render([{"role": "user", "content": "What is 23 + 45?"}]) == expected


def test_a_system_prompt_comes_first_and_gives_way_to_the_rows_own(tmp_path):
    tokens = Tokens.load(character_folder(tmp_path, USER))
    user = {"role": "user", "content": "hi"}
    assert tokens.decode(tokens.render("hi", system_prompt="be")) == "[system]be[user]hi"
    own = [{"role": "system", "content": "own"}, user]
    assert tokens.decode(tokens.render(own, system_prompt="be")) == "[system]own[user]hi"


@pytest.mark.parametrize("text", ["two  spaces , and .", " leads\nbreaks\n\n", "naïve ☃"])
def test_decoding_gives_the_text_back_unchanged(tokens, text):
    assert tokens.decode([1, *tokens.encode(text), 2]) == text


def test_decoding_an_unknown_id_names_it(folder, tmp_path):
    tokens = Tokens.load(_write_vocab(folder, tmp_path / "wide", 320))
    assert tokens.known_ids.sum() == 304 and tokens.known_ids.shape == (320,)
    assert not tokens.known_ids[304:].any() and not tokens.known_ids.flags.writeable
    for unknown in (304, 319, 5000, -1):
        with pytest.raises(TokensError, match=f"token id {unknown} is unknown"):
            tokens.decode([5, unknown])


def _write_vocab(folder: Path, target: Path, size: int) -> Path:
    return write_config(_copy(folder, target), vocab_size=size)


def test_the_hash_follows_content_not_place(folder, tokens, tmp_path):
    copy = _copy(folder, tmp_path / "copy")
    assert Tokens.load(copy).hash == tokens.hash
    (copy / "tokenizer_config.json").write_text(
        (copy / "tokenizer_config.json").read_text().replace("Q: ", "Question: ")
    )
    assert Tokens.load(copy).hash != tokens.hash
    ended = write_config(_copy(folder, tmp_path / "ended"), eos_token_id=[2, 3])
    assert Tokens.load(ended).eos_ids == (2, 3)
    assert Tokens.load(ended).hash != tokens.hash


def test_end_ids_are_the_union_of_all_that_declare_them(folder, tmp_path):
    copy = _copy(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert Tokens.load(copy).eos_ids == (2, 7, 9)


def test_a_layout_that_takes_another_tokenizer_class_is_refused(folder, tmp_path):
    trap = write_config(_copy(folder, tmp_path / "trap"), model_type="qwen2")
    config = json.loads((trap / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (trap / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokensError) as caught:
        Tokens.load(trap)
    message = str(caught.value)
    assert str(trap) in message and "Qwen2Tokenizer" in message and "model_type llama" in message


def test_a_tokenizer_model_that_is_none_is_refused(tmp_path):
    folder = character_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(TokensError, match="is not a sentencepiece model; remove it"):
        Tokens.load(folder)


def test_a_folder_without_its_parts_is_refused(folder, tmp_path):
    with pytest.raises(TokensError, match="config.json does not exist"):
        Tokens.load(tmp_path / "nowhere")
    with pytest.raises(TokensError, match="holds no tokenizer file"):
        Tokens.load(write_config(tmp_path / "bare"))
    torn = _copy(folder, tmp_path / "torn")
    (torn / "config.json").write_text('{"vocab_size": 3,\n "x"')
    with pytest.raises(TokensError, match="config.json:2: not JSON"):
        Tokens.load(torn)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": {"type": "Nope"}}, "data did not match any variant"),
        ({"decoder": {"type": "Nope"}}, "data did not match any variant"),
        (None, "KeyError: 'added_tokens'"),
    ],
)
def test_a_damaged_tokenizer_file_is_told_in_one_line(tmp_path, changes, why):
    file = character_folder(tmp_path) / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({} if changes is None else whole | changes))
    with pytest.raises(TokensError, match=f"cannot read the tokenizer in .*{why}") as caught:
        Tokens.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_config_is_told_in_one_line(tmp_path, name):
    file = character_folder(tmp_path) / name
    file.write_bytes(b'{"a": 1,\n "b": "\xff"}')
    with pytest.raises(TokensError, match=f"{name}:2: not UTF-8: invalid start byte"):
        Tokens.load(tmp_path)
    file.write_text("[1]")
    with pytest.raises(TokensError, match=f"{name} is a JSON list, not an object"):
        Tokens.load(tmp_path)


def test_what_no_template_can_render_is_refused(tmp_path):
    tokens = Tokens.load(character_folder(tmp_path / "a"))
    with pytest.raises(TokensError, match='no chat template.*data.template: "none"'):
        tokens.render("hi")
    assert tokens.decode(tokens.render("hi", "none")) == "hi"
    with pytest.raises(TokensError, match="chat messages cannot be rendered"):
        tokens.render([{"role": "user", "content": "hi"}], "none")
    with pytest.raises(TokensError, match="a system prompt cannot be rendered"):
        tokens.render("hi", "none", "be kind")
    strict = Tokens.load(character_folder(tmp_path / "b", "{{ raise_exception('no system') }}"))
    with pytest.raises(TokensError, match="the chat template refuses these messages: no system"):
        strict.render("hi")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "non-empty list"),
        ({"role": "user"}, "non-empty list"),
        (["hi"], "message 0 is not an object"),
        ([{"role": "user", "content": None}], "has no text content"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "nothing to"),
    ],
)
def test_malformed_messages_are_refused(tokens, messages, why):
    with pytest.raises(TokensError, match=why):
        tokens.render(messages)


def test_a_stop_text_is_exactly_one_token(tokens):
    assert tokens.ids_of(["\n"]) == (3,)
    with pytest.raises(TokensError, match="'What is' is . tokens"):
        tokens.ids_of(["What is"])
