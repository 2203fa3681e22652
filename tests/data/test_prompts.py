"""Sets of prompts: order, ids, sources, shares of refused rows, fingerprints.

The refusal table of the fault catalogue is in `tests/known_faults/test_data.py`, formats in
`test_readers.py` and `test_parquet.py`, single rows in `test_rows.py`. Not covered: what a
run draws from several sources (`test_cursor.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.contracts.hashes import bytes_hash, canonical_json
from megarl.contracts.tokens import Tokens, TokensError
from megarl.data import prompts as prompts_module
from megarl.data import refusals
from megarl.data import rows as rows_module
from megarl.data.prompts import PromptError, PromptSet
from tests.contracts.tokenizer_folders import (
    character_folder,
    metaspace_folder,
    sentencepiece_folder,
)
from tests.data.prompt_files import TEMPLATE, load, section, two_files, write


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def test_rows_keep_order_ids_sources_and_other_keys(tokens, tmp_path):
    path = write(
        tmp_path / "sums.jsonl",
        {"q": "one", "a": " 1", "id": "first", "kind": "easy", "level": 3},
        "",
        {"q": [{"role": "user", "content": "two"}], "a": "2", "kind": "hard"},
        {"q": "three", "a": "3", "id": 7, "kind": "hard"},
    )
    loaded = load(path, tokens, prompt_key="q", answer_key="a", source_key="kind")
    assert [row.prompt_id for row in loaded.rows] == ["first", "sums:3", "7"]
    assert [row.text for row in loaded.rows] == ["one", "two", "three"]
    assert [row.source for row in loaded.rows] == ["easy", "hard", "hard"]
    assert loaded.rows[0].answer == " 1"
    assert loaded.rows[0].metadata == {"level": 3}
    assert [tokens.decode(row.token_ids) for row in loaded.rows] == ["one:", "two:", "three:"]
    assert not loaded.refusals and not loaded.refused


def test_the_source_is_the_files_name_unless_a_key_says_otherwise(tokens, tmp_path):
    path = write(tmp_path / "sums.jsonl", {"prompt": "one", "answer": "1"})
    assert load(path, tokens).rows[0].source == "sums"


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        ('{"prompt": "x", ', "malformed_json", "not JSON"),
        ('{"prompt": "x", "answer": "2", "answer": "3"}', "malformed_json", "'answer' twice"),
        ('{"prompt": "x", "answer": "2", "m": [{"k": 1, "k": 1}]}', "malformed_json", "'k' twice"),
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
    loaded = load(path, tokens)
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
    loaded = load(path, tokens)
    assert len(loaded) == 1 and loaded.refused == {"not_utf8": 1}


def test_a_separator_inside_a_string_ends_no_line(tokens, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b", "answer": "1"}, ensure_ascii=False))
    assert load(path, tokens).rows[0].text == "a\u2028b"


def test_ids_outside_the_models_vocabulary_are_refused(tokens, tmp_path):
    narrow = replace(tokens, vocab_size=90)
    path = write(
        tmp_path / "rows.jsonl", {"prompt": "!!", "answer": "1"}, {"prompt": "~", "answer": "1"}
    )
    loaded = load(path, narrow)
    assert len(loaded) == 1 and loaded.refused == {"outside_vocabulary": 1}
    assert "outside the model's vocabulary of 90" in loaded.refusals[0].why


def test_too_large_a_refused_share_stops_and_names_the_first_rows(tokens, tmp_path):
    good = [{"prompt": "x", "answer": "1"}] * 13
    bad = [{"prompt": "x", "answer": ""}] * 6 + [{"prompt": "", "answer": "1"}]
    path = write(tmp_path / "rows.jsonl", *bad, *good)
    assert len(load(path, tokens, max_refused_share=0.35)) == 13
    with pytest.raises(PromptError) as caught:
        load(path, tokens, max_refused_share=0.34)
    message = str(caught.value)
    assert "7 of 20 rows refused (empty_answer 6, empty_prompt 1)" in message
    assert message.endswith(
        f'{path}:1, 2, 3, 4, 5 and 1 more: "answer" is empty; {path}:7: "prompt" is empty'
    )
    assert "data.max_refused_share is 0.34" in message and "\n" not in message


def test_a_file_without_usable_rows_stops(tokens, tmp_path):
    with pytest.raises(PromptError, match="holds no rows"):
        load(write(tmp_path / "empty.jsonl", ""), tokens)
    with pytest.raises(PromptError, match="1 of 1 rows refused") as caught:
        load(write(tmp_path / "bad.jsonl", "{}"), tokens, max_refused_share=1.0)
    assert "(missing_prompt 1): no usable row is left: " in str(caught.value)
    assert 'bad.jsonl:1: no "prompt"; keys are none' in str(caught.value)
    assert "max_refused_share" not in str(caught.value)
    with pytest.raises(PromptError, match="does not exist; set data.train"):
        load(tmp_path / "nowhere.jsonl", tokens)


def test_of_many_reasons_the_first_are_told_each_once(tokens, tmp_path):
    rows = [{"prompt": "y" * n, "answer": "1"} for n in (30, 31, 32, 33, 34, 35, 36, 30)]
    with pytest.raises(PromptError) as caught:
        load(write(tmp_path / "rows.jsonl", *rows), tokens)
    told = str(caught.value)
    assert "rows.jsonl:1, 8: prompt of 31 tokens" in told and told.count("31 tokens") == 1
    assert "rows.jsonl:5: prompt of 35" in told and told.endswith("; and 2 more")


def test_a_folder_without_a_template_is_no_fault_of_the_rows(tmp_path):
    bare = Tokens.load(character_folder(tmp_path / "model"))
    path = write(tmp_path / "rows.jsonl", {"prompt": "x", "answer": "1"})
    with pytest.raises(TokensError, match="no chat template"):
        load(path, bare)
    assert load(path, bare, template="none").rows[0].text == "x"


def test_the_fingerprint_follows_content_and_order(tokens, tmp_path):
    a, b = {"prompt": "a", "answer": "1", "id": "a"}, {"prompt": "b", "answer": "2", "id": "b"}

    def fingerprint(*rows: dict) -> str:
        return load(write(tmp_path / "x.jsonl", *rows), tokens).fingerprint

    assert fingerprint(a, b) == fingerprint(a, b)
    others = [(b, a), (a,), (a, b | {"answer": "3"}), (a, b | {"prompt": "c"}), (a, b | {"k": 1})]
    assert len({fingerprint(a, b), *(fingerprint(*rows) for rows in others)}) == 6


def test_the_fingerprint_of_one_file_is_a_hash_of_its_rows(tokens, tmp_path):
    """Runs are resumed by it: it stays what it is while the format of a line stays."""
    row = {"prompt": "a", "answer": "1", "id": "x", "level": 2}
    loaded = load(write(tmp_path / "sums.jsonl", row), tokens)
    ids = list(loaded.rows[0].token_ids)
    line = canonical_json(["x", ids, "1", "sums", {"level": 2}]).encode() + b"\n"
    assert loaded.fingerprint == bytes_hash([line])


def test_several_sources_are_one_set_in_their_order(tokens, tmp_path):
    loaded = load(two_files(tmp_path), tokens)
    assert [row.prompt_id for row in loaded.rows] == ["a:1", "a:2", "a:3", "other:1"]
    assert [row.source for row in loaded.rows] == ["a", "a", "a", "other"]
    assert [row.reward for row in loaded.rows] == ["a", "a", "a", "maths"]
    assert loaded.sources == ("a", "other") and loaded.weights is None
    assert loaded.source_of_row.tolist() == [0, 0, 0, 1]
    assert loaded.source_of_row.dtype == np.int32
    assert loaded.counts == {"a": 3, "other": 1}
    assert loaded.place(3) == f"{tmp_path}/b.jsonl:1"
    facts = loaded.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["files"] == [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert facts["rows"] == 4 and facts["fingerprint"] == loaded.fingerprint
    assert facts["sources"] == {
        "a": {"rows": 3, "refused": 0},
        "other": {"rows": 1, "refused": 1},
    }
    assert facts["refused"] == [f'{tmp_path}/b.jsonl:2: "q" is empty']
    assert facts["refused_by_kind"] == {"empty_prompt": 1}
    (note,) = loaded.notes()
    assert "1 rows of" in note and "see data.json" in note and "b.jsonl:2" in note


def test_the_share_of_refused_rows_is_each_sources_own(tokens, tmp_path):
    """One bad row of five in all, but of two in its file."""
    sources = two_files(tmp_path)
    assert len(load(sources, tokens, max_refused_share=0.5)) == 4
    with pytest.raises(PromptError, match=r"b\.jsonl: 1 of 2 rows refused \(empty_prompt 1\)"):
        load(sources, tokens, max_refused_share=0.4)


def test_weights_and_reward_names_are_in_the_fingerprint(tokens, tmp_path):
    def fingerprint(change: dict[str, Any], weights: tuple[float, float] | None = None) -> str:
        sources = two_files(tmp_path)
        sources[1] |= change
        for source, weight in zip(sources, weights or (), strict=False):
            source["weight"] = weight
        return load(sources, tokens).fingerprint

    same = [fingerprint({}), fingerprint({}), fingerprint({"reward": "maths"})]
    assert len(set(same)) == 1
    others = [
        fingerprint({"reward": "other"}),
        fingerprint({"reward": "code"}),
        fingerprint({"name": "third"}),
        fingerprint({}, (1.0, 1.0)),
        fingerprint({}, (1.0, 3.0)),
    ]
    assert len({*same, *others}) == 6
    sources = two_files(tmp_path)
    sources[0]["weight"], sources[1]["weight"] = 1.0, 3.0
    weighted = load(sources, tokens)
    assert weighted.weights == (1.0, 3.0)
    assert weighted.facts()["sources"]["other"] == {"rows": 1, "refused": 1, "weight": 3.0}


def test_sources_that_do_not_go_together_are_refused(tokens, tmp_path):
    sources = two_files(tmp_path)
    data = section([sources[0] | {"name": "one"}, sources[1]])
    twice = [source.model_copy(update={"name": "one"}) for source in data.training]
    with pytest.raises(PromptError, match=r"two sources are called 'one': .*a\.jsonl and .*set"):
        PromptSet.load(twice, tokens, data)
    half = [data.training[0].model_copy(update={"weight": 1.0}), data.training[1]]
    with pytest.raises(PromptError, match="source 'other' has no weight, others have"):
        PromptSet.load(half, tokens, data)
    with pytest.raises(PromptError, match="system prompt needs a chat template"):
        load(sources, tokens, template="none", system_prompt="be kind")


def test_an_id_is_taken_once_over_all_sources(tokens, tmp_path):
    row = {"prompt": "x", "answer": "1", "id": "same"}
    paths = [write(tmp_path / name, row, {**row, "id": name}) for name in ("a.jsonl", "b.jsonl")]
    loaded = load([{"path": str(path)} for path in paths], tokens)
    assert [row.prompt_id for row in loaded.rows] == ["same", "a.jsonl", "b.jsonl"]
    assert loaded.refusals == ((f"{paths[1]}:1", f"id 'same' is taken by {paths[0]}:1"),)


def test_a_row_that_is_refused_takes_no_id_from_a_good_one(tokens, tmp_path):
    """Refused before its tokens are made, and for their number."""
    row = {"prompt": "x", "answer": "1"}
    rows = [row | {"answer": 7, "id": "a"}, row | {"prompt": "y" * 30, "id": "b"}]
    rows += [row | {"id": "a"}, row | {"id": "b"}, row | {"id": "a"}]
    path = write(tmp_path / "rows.jsonl", *rows)
    loaded = load(path, tokens)
    assert [row.prompt_id for row in loaded.rows] == ["a", "b"]
    assert loaded.refused == {"answer_not_text": 1, "too_long": 1, "duplicate_id": 1}
    assert loaded.refusals[2].why == f"id 'a' is taken by {path}:3"


def test_as_many_sources_as_rows_are_told_and_then_refused(tokens, tmp_path, monkeypatch):
    rows = [{"prompt": "x", "answer": "1", "key": f"k{n}"} for n in range(102)]
    path = write(tmp_path / "rows.jsonl", *rows[:100], rows[0])
    assert not any("source_key" in note for note in load(path, tokens, source_key="key").notes())
    path = write(tmp_path / "rows.jsonl", *rows)
    (note,) = (n for n in load(path, tokens, source_key="key").notes() if "source_key" in n)
    assert "from 102 sources (data.source_key); each kind of metric by source has 102 names" in note
    monkeypatch.setattr(rows_module, "MOST_NAMES", 101)
    with pytest.raises(PromptError, match="rows.jsonl:102: source 'k101' is number 102") as caught:
        load(path, tokens, source_key="key")
    assert "(key) a column that differs in every row" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_of_one_text_are_counted_and_noted(tokens, tmp_path):
    rows = [{"prompt": text, "answer": "1"} for text in ("x", "y", "x", "x ")]
    loaded = load(write(tmp_path / "rows.jsonl", *rows), tokens)
    assert loaded.duplicates == 1 and len(loaded) == 4
    (note,) = loaded.notes()
    assert "1 of 4 prompts" in note


def test_refusals_are_kept_up_to_a_number_and_counted_beyond(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts_module, "KEPT", 3)
    assert refusals.KEPT == 10_000
    bad = [{"prompt": "", "answer": "1"}] * 7
    path = write(tmp_path / "rows.jsonl", {"prompt": "x", "answer": "1"}, *bad)
    loaded = load(path, tokens)
    assert loaded.refused == {"empty_prompt": 7} and len(loaded.refusals) == 3
    assert "7 rows of" in loaded.notes()[0]


def test_files_of_mixed_rows_are_told_by_their_commonest_keys(tokens, tmp_path):
    ours = [{"prompt": "x", "answer": "1"}] * 2
    theirs = [{"solution": "1", "question": "x"}, {"question": "y", "solution": "2"}] * 3
    path = write(tmp_path / "rows.jsonl", *ours, *theirs, {"text": "x"})
    with pytest.raises(PromptError) as caught:
        load(path, tokens, max_refused_share=0.0)
    told = str(caught.value)
    assert "7 of 9 rows refused (missing_prompt 7)" in told
    assert "6 rows have question, solution; 2 rows have answer, prompt; 1 rows have text" in told


@pytest.mark.parametrize("make", [character_folder, metaspace_folder, sentencepiece_folder])
def test_texts_become_the_same_ids_alone_and_together(make, tmp_path):
    tokens = Tokens.load(make(tmp_path))
    texts = ["What is 23 + 45?", "", " leads", "a", "ab" * 50, "two  spaces", "q\n\nr", "</s>x"]
    together = tokens.executed(texts)
    assert together == [tokens.executed([text])[0] for text in texts]
    assert together == [tokens.render(text, "none") for text in texts]


def test_progress_is_told_now_and_then(tokens, tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", *[{"prompt": "x", "answer": "1"}] * 600)
    told: list[tuple[int, str]] = []
    data = section(str(path))

    def load_with(seconds: float) -> list[tuple[int, str]]:
        told.clear()
        monkeypatch.setattr(prompts_module, "_SECONDS", seconds)
        PromptSet.load(data.training, tokens, data, progress=lambda *word: told.append(word))
        return list(told)

    assert load_with(3600.0) == []
    assert load_with(0.0) == [(256, str(path)), (512, str(path)), (600, str(path))]
