"""Prompt rows: what is read, what is refused.

The refusal table of the fault catalogue is in `tests/known_faults/test_data.py`. Not covered: files
too large for memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.contracts.tokens import Tokens, TokensError
from megarl.data.prompts import PromptError, PromptSet
from megarl.recipe.sections import DataSection
from tests.contracts.tokenizer_folders import character_folder

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def section(**keys: Any) -> DataSection:
    return DataSection(**{"train": "x", "max_prompt_tokens": 20, "max_refused_share": 1.0} | keys)


def write(path: Path, *rows: dict | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_keep_order_ids_sources_and_other_keys(tokens, tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        {"q": "one", "a": " 1", "id": "first", "kind": "easy", "level": 3},
        "",
        {"q": [{"role": "user", "content": "two"}], "a": "2", "kind": "hard"},
        {"q": "three", "a": "3", "id": 7, "kind": "hard"},
    )
    loaded = PromptSet.load(
        path, tokens, section(prompt_key="q", answer_key="a", source_key="kind")
    )
    assert [row.prompt_id for row in loaded.rows] == ["first", "sums:3", "7"]
    assert [row.text for row in loaded.rows] == ["one", "two", "three"]
    assert [row.source for row in loaded.rows] == ["easy", "hard", "hard"]
    assert loaded.rows[0].answer == " 1"
    assert loaded.rows[0].metadata == {"level": 3}
    assert [tokens.decode(row.token_ids) for row in loaded.rows] == ["one:", "two:", "three:"]
    assert not loaded.refusals and not loaded.refused


def test_the_source_is_the_files_name_unless_a_key_says_otherwise(tokens, tmp_path):
    path = write(tmp_path / "sums.jsonl", {"prompt": "one", "answer": "1"})
    assert PromptSet.load(path, tokens, section()).rows[0].source == "sums"


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        ('{"prompt": "x", ', "malformed_json", "not JSON"),
        ("[1, 2]", "malformed_json", "must be a JSON object, not list"),
        ('{"prompt": "x", "answer": "1", "n": NaN}', "malformed_json", "NaN is no JSON number"),
        ('{"prompt": "x", "answer": "1", "n": 1e999}', "malformed_json", "beyond floats"),
        ('{"prompt": "x", "answer": "1", "id": [1]}', "bad_id", "string or an integer"),
        ('{"prompt": null, "answer": "1"}', "null_prompt", '"prompt" is null'),
        ('{"prompt": 5, "answer": "1"}', "bad_messages", "text or a non-empty list"),
        ('{"prompt": "x", "answer": true}', "answer_not_text", "not bool True"),
        ('{"prompt": "x", "answer": "  "}', "empty_answer", "is empty"),
        ('{"prompt": "x", "answer": "1", "n": "\\udc00"}', "lone_surrogate", "'n' holds half"),
        ('{"prompt": "x</s>☃", "answer": "1"}', None, None),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(tokens, tmp_path, line, kind, why):
    path = write(tmp_path / "rows.jsonl", {"prompt": "good", "answer": "1"}, line)
    loaded = PromptSet.load(path, tokens, section())
    if kind is None:
        assert len(loaded) == 2
        return
    assert len(loaded) == 1 and loaded.refused == {kind: 1}
    assert loaded.refusals[0].where == f"{path}:2"
    assert why in loaded.refusals[0].why


def test_bytes_that_are_no_text_are_refused_and_a_byte_order_mark_is_not(tokens, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": "x", "answer": "1"}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b'{"prompt": "\xff", "answer": "1"}\n')
    loaded = PromptSet.load(path, tokens, section())
    assert len(loaded) == 1 and loaded.refused == {"not_utf8": 1}


def test_a_separator_inside_a_string_ends_no_line(tokens, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b", "answer": "1"}, ensure_ascii=False))
    assert PromptSet.load(path, tokens, section()).rows[0].text == "a\u2028b"


def test_ids_outside_the_models_vocabulary_are_refused(tokens, tmp_path):
    narrow = replace(tokens, vocab_size=90)
    path = write(
        tmp_path / "rows.jsonl", {"prompt": "!!", "answer": "1"}, {"prompt": "~", "answer": "1"}
    )
    loaded = PromptSet.load(path, narrow, section())
    assert len(loaded) == 1 and loaded.refused == {"outside_vocabulary": 1}
    assert "outside the model's vocabulary of 90" in loaded.refusals[0].why


def test_too_large_a_refused_share_stops_and_names_the_first_rows(tokens, tmp_path):
    good = [{"prompt": "x", "answer": "1"}] * 13
    bad = [{"prompt": "x", "answer": ""}] * 6 + [{"prompt": "", "answer": "1"}]
    path = write(tmp_path / "rows.jsonl", *bad, *good)
    assert len(PromptSet.load(path, tokens, section(max_refused_share=0.35))) == 13
    with pytest.raises(PromptError) as caught:
        PromptSet.load(path, tokens, section(max_refused_share=0.34))
    message = str(caught.value)
    assert "7 of 20 rows refused (empty_answer 6, empty_prompt 1)" in message
    assert f"{path}:1" in message and f"{path}:5" in message and "and 2 more" in message
    assert f"{path}:6" not in message and "\n" not in message


def test_a_file_without_usable_rows_stops(tokens, tmp_path):
    with pytest.raises(PromptError, match="holds no rows"):
        PromptSet.load(write(tmp_path / "empty.jsonl", ""), tokens, section())
    with pytest.raises(PromptError, match="1 of 1 rows refused"):
        PromptSet.load(write(tmp_path / "bad.jsonl", "{}"), tokens, section())
    with pytest.raises(PromptError, match="does not exist; set data.train"):
        PromptSet.load(tmp_path / "nowhere.jsonl", tokens, section())


def test_a_folder_without_a_template_is_no_fault_of_the_rows(tmp_path):
    bare = Tokens.load(character_folder(tmp_path / "model"))
    path = write(tmp_path / "rows.jsonl", {"prompt": "x", "answer": "1"})
    with pytest.raises(TokensError, match="no chat template"):
        PromptSet.load(path, bare, section())
    assert PromptSet.load(path, bare, section(template="none")).rows[0].text == "x"


def test_the_fingerprint_follows_content_and_order(tokens, tmp_path):
    a, b = {"prompt": "a", "answer": "1", "id": "a"}, {"prompt": "b", "answer": "2", "id": "b"}

    def fingerprint(*rows: dict) -> str:
        return PromptSet.load(write(tmp_path / "x.jsonl", *rows), tokens, section()).fingerprint

    assert fingerprint(a, b) == fingerprint(a, b)
    others = [(b, a), (a,), (a, b | {"answer": "3"}), (a, b | {"prompt": "c"}), (a, b | {"k": 1})]
    assert len({fingerprint(a, b), *(fingerprint(*rows) for rows in others)}) == 6
