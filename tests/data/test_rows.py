"""One row: where its values are looked for, what is kept of the rest, why it is refused.

The oracles are written out by hand. Not covered here: token counts (`test_prompts.py`) and types of
Parquet columns (`test_parquet.py`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.contracts.tokens import Tokens
from megarl.data.refusals import Refused
from megarl.data.rows import RowChecks, checked_row, look_up, required, said_by_user, without
from megarl.recipe.data import DataSection
from tests.contracts.tokenizer_folders import character_folder

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def check(row: dict | bytes, tokens: Tokens, limit: int = 10_000, **keys: Any) -> Any:
    data = DataSection(**{"train": "x.jsonl", "max_prompt_tokens": 20, "template": "none"} | keys)
    checks = RowChecks(data.training[0], tokens, tokens.template(data.template), data, {}, set())
    return checks.check(7, checked_row(row, limit))


ROW = {"a": {"b": {"c": 1}}, "a.b": {"c": 2}, "x.y": 3, "x": {"y": 4}, "t": "text"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("t", "text"),
        ("x.y", 3),  # a key with a dot in it comes first
        ("a.b", {"c": 2}),
        ("a.b.c", 1),
        ("a.c", None),
        ("t.b", None),
        ("", None),
        ("a.", None),
        (".b", None),
    ],
)
def test_a_dotted_key_leads_into_objects(key, value):
    assert look_up(ROW, key) == value


def test_what_is_used_is_no_metadata_and_the_row_stays_as_it_is():
    row = {"a": {"b": 1, "c": 2}, "d": {"e": 1}, "f": 3, "g": {}, "h.i": 1, "h": {"i": 2}}
    before = json.dumps(row)
    left = without(row, ["a.b", "d.e", "f", "g.x", "h.i", "nothing", "no.thing"])
    assert left == {"a": {"c": 2}, "g": {}, "h": {"i": 2}}
    assert json.dumps(row) == before


def test_a_row_of_nested_keys(tokens):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "hi"}],
        "reward_model": {"style": "rule", "ground_truth": "18"},
        "extra_info": {"index": 3},
    }
    found = check(
        row,
        tokens,
        template="model",
        answer_key="reward_model.ground_truth",
        source_key="data_source",
        reward_key="reward_model.style",
    )
    assert (found.prompt_id, found.source, found.reward) == ("x:7", "gsm8k", "rule")
    assert (found.answer, found.text, found.rendered) == ("18", "hi", "hi:")
    assert found.metadata == {"extra_info": {"index": 3}}


@pytest.mark.parametrize(
    ("keys", "row", "expected"),
    [
        ({}, {}, "x"),
        ({"source_key": "k"}, {"k": "of"}, "of"),
        ({"train": [{"path": "x", "reward": "given"}]}, {}, "given"),
        ({"train": [{"path": "x", "reward": "given"}], "reward_key": "r"}, {"r": "own"}, "own"),
        ({"source_key": "k", "reward_key": "r"}, {"k": "of", "r": "own"}, "own"),
    ],
)
def test_the_reward_name_is_the_rows_the_sources_or_the_name_of_its_source(
    tokens, keys, row, expected
):
    assert check({"prompt": "p", "answer": "1"} | row, tokens, **keys).reward == expected


GOOD = {"prompt": "p", "answer": "1"}


def nested(levels: int) -> Any:
    return json.loads('{"x":[' * (levels // 2) + "1" + "]}" * (levels // 2))


@pytest.mark.parametrize(
    ("row", "keys", "kind", "why"),
    [
        ({"answer": "1"}, {}, "missing_prompt", 'no "prompt"; keys are answer'),
        ({}, {}, "missing_prompt", "keys are none"),
        ({"prompt": "p"}, {}, "missing_answer", 'no "answer"; keys are prompt'),
        (GOOD | {"answer": 7}, {}, "answer_not_text", "must be a string, not int 7"),
        (GOOD, {"source_key": "k"}, "missing_source", 'no "k"; keys are answer, prompt'),
        (GOOD | {"k": None}, {"source_key": "k"}, "null_source", '"k" is null'),
        (GOOD | {"k": 3}, {"source_key": "k"}, "bad_source", "must be a text"),
        (GOOD | {"k": " "}, {"source_key": "k"}, "bad_source", "not empty"),
        (GOOD | {"k": "a\nb"}, {"source_key": "k"}, "bad_source", r"'a\nb': metrics are named"),
        (GOOD | {"k": "a\x00b"}, {"reward_key": "k"}, "bad_reward", "may have no line break"),
        (GOOD, {"reward_key": "k"}, "missing_reward", 'no "k"'),
        (GOOD | {"k": None}, {"reward_key": "k"}, "null_reward", '"k" is null'),
        (GOOD | {"k": ["a"]}, {"reward_key": "k"}, "bad_reward", "must be a text"),
        (GOOD | {"k": ""}, {"reward_key": "k"}, "bad_reward", "not ''"),
        (GOOD | {"id": 1.5}, {}, "bad_id", "string or an integer, not 1.5"),
        (GOOD | {"id": True}, {}, "bad_id", "not True"),
        (GOOD | {"prompt": []}, {}, "bad_messages", "non-empty list"),
        (GOOD | {"prompt": {"role": "user"}}, {}, "bad_messages", '"prompt": a prompt must be'),
        (
            GOOD | {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant"}]},
            {},
            "bad_messages",
            "message 1 (assistant) has no text content",
        ),
        (GOOD | {"prompt": [{"role": "user", "content": " "}]}, {}, "empty_prompt", "is empty"),
        (GOOD | {"prompt": [{"role": "user", "content": "a"}]}, {}, "template", "chat messages"),
        (GOOD | {"n": {"m": [float("inf")]}}, {}, "malformed_json", "'n' holds a number beyond"),
        (GOOD | {"n": {"m": "\ud83d"}}, {}, "lone_surrogate", "'n' holds half a surrogate"),
        (GOOD | {"\udc00": 1}, {}, "lone_surrogate", "holds half a surrogate pair"),
        (GOOD | {"n": nested(100)}, {}, "malformed_json", "nested too deeply"),
        (b"[" * 100_000, {}, "malformed_json", "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", {}, "malformed_json", "4300 digits"),
        (b'{"n": 1e999, "prompt": "p"}', {}, "malformed_json", "'n' holds a number beyond"),
        (b'{"n": -Infinity}', {}, "malformed_json", "-Infinity is no JSON number"),
        (b'"text"', {}, "malformed_json", "must be a JSON object, not str"),
        (b'{"prompt": "\xe9"}', {}, "not_utf8", "byte 12 is not UTF-8"),
        (GOOD | {"n": "x" * 20_000}, {}, "too_large", "data.max_row_bytes is 10000"),
    ],
)
def test_a_row_is_refused_by_name(tokens, row, keys, kind, why):
    with pytest.raises(Refused) as caught:
        check(row, tokens, **keys)
    assert caught.value.kind == kind and why in caught.value.why
    assert "\n" not in caught.value.why


def test_a_row_of_a_hundred_levels_passes(tokens):
    assert check(GOOD | {"n": nested(98), "m": [[]] * 200}, tokens).metadata["n"] == nested(98)


def test_what_the_user_said_is_in_all_the_users_messages():
    said = ["sys", "one", "answer", "two"]
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    assert said_by_user(messages) == ("two", "one\ntwo")
    assert said_by_user("text") == ("text", "text")
    tool = [*messages[:3], {"role": "tool", "content": "7"}]
    assert said_by_user(tool) == ("7", "one\n7")


def test_of_a_wrong_key_inside_the_keys_there_are_told():
    row = {"a": {"b": {"c": "1"}, "d": 2}, "answer": "1"}
    for key, there in (
        ("a.b.x", "keys of a.b are c"),
        ("a.x.y", "keys of a are b, d"),
        ("a.d.x", "keys of a are b, d"),
        ("x.b", "keys are a, answer"),
        ("answer.x", "keys are a, answer"),
    ):
        with pytest.raises(Refused) as caught:
            required(row, key, "answer")
        assert caught.value.why == f'no "{key}"; {there}'
