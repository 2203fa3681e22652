"""Prompt rows and the cursor.

The refusal table and the resume order of the fault catalogue are in
`tests/known_faults/test_data.py`. Not covered: files too large for memory.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.contracts.records import Prompt
from megarl.contracts.tokens import Tokens, TokensError
from megarl.data.prompts import PromptCursor, PromptError, PromptSet
from megarl.recipe_sections import DataSection
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


def prompt_set(count: int) -> PromptSet:
    rows = tuple(Prompt(str(i), "s", "x", (1,), "1") for i in range(count))
    return PromptSet(rows, (), {}, "blake3:x")


@given(
    rows=st.integers(1, 40),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63),
    epochs=st.integers(1, 4),
)
def test_each_row_once_an_epoch_and_at_most_once_a_draw(rows, share, seed, epochs):
    size = max(1, int(rows * share))
    cursor = PromptCursor(prompt_set(rows), seed, size)
    draws = [cursor.draw(i) for i in range(-(-rows * epochs // size))]
    assert all(len({row.prompt_id for row in draw}) == size for draw in draws)
    stream = [row.prompt_id for draw in draws for row in draw]
    for epoch in range(epochs):
        assert len(set(stream[epoch * rows : (epoch + 1) * rows])) == rows
    # Pure: in any order, and from a cursor that has drawn nothing.
    fresh = PromptCursor(prompt_set(rows), seed, size)
    assert [fresh.draw(i) for i in reversed(range(len(draws)))] == draws[::-1]


def test_epochs_and_seeds_shuffle_differently():
    def stream(seed: int) -> list[str]:
        cursor = PromptCursor(prompt_set(50), seed, 50)
        return [[row.prompt_id for row in cursor.draw(i)] for i in range(2)]

    orders = [*stream(1), *stream(2), [str(i) for i in range(50)]]
    assert len({tuple(order) for order in orders}) == 5


def test_a_known_order_stays_what_it_is():
    """A frozen example: the order of a run must survive upgrades of Python and numpy."""
    cursor = PromptCursor(prompt_set(10), 1, 5)
    order = [int(row.prompt_id) for i in range(2) for row in cursor.draw(i)]
    assert order == [9, 8, 7, 4, 2, 0, 3, 6, 5, 1]


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(PromptError, match="prompts_per_iteration is 4, but there are only 3"):
        PromptCursor(prompt_set(3), 1, 4)
