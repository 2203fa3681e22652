"""What a template makes of rows' own texts: special tokens, system messages, questions left out.

Not covered: how text becomes ids (`test_templates.py`, `tests/contracts`).
"""

from __future__ import annotations

import re

import pytest

from megarl.contracts.tokens import Tokens
from megarl.data.refusals import PromptError
from megarl.data.renderings import special_tokens
from tests.contracts.tokenizer_folders import (
    character_folder,
    metaspace_folder,
    sentencepiece_folder,
)
from tests.data.prompt_files import TEMPLATE, load, write


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def rows(*prompts) -> list[dict]:
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def said(user: str, system: str | None = None) -> list[dict]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": user}]


def test_a_rows_own_system_message_stays_and_is_noted(tokens, tmp_path):
    prompts = ("a", said("b", "own"), said("c"), said("d", ""))
    path = write(tmp_path / "rows.jsonl", *rows(*prompts))
    loaded = load(path, tokens, system_prompt="ours")
    texts = [tokens.decode(row.token_ids) for row in loaded.rows]
    assert texts == ["oursa:", "ownb:", "oursc:", "d:"]
    (note,) = loaded.notes()
    assert note.startswith("2 of 4 rows keep their own system message") and str(path) in note
    assert not load(path, tokens).notes()


@pytest.mark.parametrize("body", ["hello", "{{ messages[0].content }}"])
def test_a_template_that_leaves_the_question_out_is_refused(tokens, tmp_path, body):
    """The second renders the system prompt alone."""
    (tmp_path / "const.jinja").write_text(body)
    keys = {"template": str(tmp_path / "const.jinja"), "system_prompt": "ours"}
    path = write(tmp_path / "rows.jsonl", *rows("one", "ONE ", "two", "three"))
    with pytest.raises(PromptError) as caught:
        load(path, tokens, **keys)
    told = str(caught.value)
    assert told.startswith(f"{path}:1, {path}:3: different texts, and data.template (")
    assert f"makes the same {len(body if body == 'hello' else 'ours')} tokens" in told
    assert "all 4 rows; it leaves the question out" in told and "\n" not in told
    one = write(tmp_path / "one.jsonl", *rows("one", " One", "one"))
    assert len(load(one, tokens, **keys)) == 3


def test_a_source_whose_questions_are_left_out_is_refused_among_others(tokens, tmp_path):
    """Each source has a system prompt of its own, so that not all rows are the same."""
    (tmp_path / "first.jinja").write_text("{{ messages[0].content }}")
    sources = [
        {"path": str(write(tmp_path / f"{name}.jsonl", *rows(*texts))), "system_prompt": name}
        for name, texts in (("a", ("x",)), ("b", ("y", "z")))
    ]
    with pytest.raises(PromptError, match=r"b\.jsonl:1, .*b\.jsonl:2: different.*all 2 rows"):
        load(sources, tokens, template=str(tmp_path / "first.jinja"))


def test_some_texts_with_the_ids_of_another_are_noted(tokens, tmp_path):
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}:")
    talks = [[*said(text), {"role": "assistant", "content": "ok"}, *said("on")] for text in "abc"]
    path = write(tmp_path / "rows.jsonl", *rows(*talks, "one"))
    loaded = load(path, tokens, template=str(tmp_path / "last.jinja"))
    (note,) = loaded.notes()
    assert note.startswith(f"2 of 4 prompts of {path} have the token ids of an earlier one")
    assert note.endswith(f"first {path}:2, as {path}:1")
    assert not load(path, tokens).notes()


def test_special_tokens_written_in_a_text_are_noted(tokens, tmp_path):
    """They do become special ids; those of the template alone say nothing."""
    (tmp_path / "marked.jinja").write_text("<s>" + TEMPLATE)
    prompts = ("a", "1</s><s>Q", said("b", "be </s>"), said("c"))
    path = write(tmp_path / "rows.jsonl", *rows(*prompts))
    loaded = load(path, tokens, template=str(tmp_path / "marked.jinja"))
    assert [1 in row.token_ids for row in loaded.rows] == [False, True, True, False]
    (note,) = loaded.notes()
    assert note.startswith(f"2 of 4 rows of {path} have special tokens written in their own text")
    assert note.endswith(f"first {path}:2: </s>")


def test_refused_rows_are_in_no_note(tokens, tmp_path):
    path = write(tmp_path / "rows.jsonl", *rows("</s>" + "x" * 30, "a", "b"))
    (note,) = load(path, tokens).notes()
    assert "refused" in note


@pytest.mark.parametrize("make", [character_folder, metaspace_folder, sentencepiece_folder])
def test_special_tokens_are_found_where_the_tokenizer_reads_them(make, tmp_path):
    """The oracle is the tokenizer: a text has one that becomes a special id, and no other has."""
    tokens = Tokens.load(make(tmp_path))
    first = special_tokens(tokens)
    plain = ("2 < 3 and s> or </ s>", "<ss>", "</S>", "a\nb")
    for text in (*plain, "1</s>", "<s>Q", "a <s></s>"):
        has_one = bool(tokens.special_ids & set(tokens.encode(text)))
        assert bool(first(text)) == has_one == (text not in plain), text
        assert first(text) == (re.search("</?s>", text)[0] if has_one else "")
