"""Parquet files of prompts: values, columns, damage. pyarrow itself writes them.

Not covered: other writers' files (Spark, DuckDB), whose types are the same.
"""

from __future__ import annotations

import datetime
import gzip
import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptSet
from megarl.data.readers import read_rows
from megarl.data.refusals import PromptError, Refused
from megarl.recipe.data import DataSection
from tests.contracts.tokenizer_folders import character_folder
from tests.data.test_readers import LIMIT, read, says, source

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '!' if 'name' in m }}{% endfor %}:"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens.load(character_folder(tmp_path_factory.mktemp("characters"), TEMPLATE))


def load(path: Path, tokens: Tokens, **keys: Any) -> PromptSet:
    chosen = {"train": [{"path": str(path), "name": "s"}], "max_prompt_tokens": 99}
    data = DataSection(**chosen | {"max_refused_share": 1.0} | keys)
    return PromptSet.load(data.training, tokens, data)


def table(folder: Path, **columns: Any) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pa.table(columns), path)
    return path


MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "two"}]
NESTED = {"style": "rule", "ground_truth": "2", "parts": [1, 2, None], "deep": {"a": [{"b": 1}]}}
SAME = [
    {
        "id": f"r{n}",
        "prompt": MESSAGES,
        "reward_model": NESTED,
        "kind": "maths",
        "level": n,
        "tags": ["x", "y"],
    }
    for n in range(300)
]


def test_the_same_rows_have_one_fingerprint_in_every_format(tokens, tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in SAME).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b").write_bytes(gzip.compress(lines))
    (tmp_path / "c").write_bytes(zstandard.compress(lines))
    parquet.write_table(pa.Table.from_pylist(SAME), tmp_path / "d", row_group_size=100)
    keys = {"answer_key": "reward_model.ground_truth", "source_key": "kind"}
    sets = [load(tmp_path / name, tokens, **keys) for name in ("a.jsonl", "b", "c", "d")]
    assert len({loaded.fingerprint for loaded in sets}) == 1
    assert all(loaded.rows == sets[0].rows for loaded in sets)
    row = sets[3].rows[5]
    assert row.answer == "2" and row.text == "two" and row.source == "maths"
    rest = {key: value for key, value in NESTED.items() if key != "ground_truth"}
    assert row.metadata == {"reward_model": rest, "level": 5, "tags": ["x", "y"]}
    assert sets[3].place(5) == f"{tmp_path}/d:6"


def test_columns_are_read_whatever_form_of_text_they_have(tmp_path):
    path = table(
        tmp_path,
        prompt=pa.array(["a", "b", "a"]).dictionary_encode(),
        answer=pa.array(["1", "2", None], pa.large_string()),
        view=pa.array(["x", "y", "z"], pa.string_view()),
    )
    rows = [{"prompt": p, "answer": a, "view": v} for p, a, v in ("a1x", "b2y", "axz")]
    rows[2]["answer"] = None
    assert read(path) == list(enumerate(rows, start=1))


def test_values_that_json_lacks_become_exact_text(tmp_path):
    noon = datetime.datetime(2024, 5, 6, 12, 30, 1, 250)
    path = table(
        tmp_path,
        prompt=["a"],
        answer=["1"],
        day=[noon.date()],
        moment=pa.array([noon], pa.timestamp("us")),
        nanos=pa.array([noon], pa.timestamp("ns")),
        clock=[noon.time()],
        price=[Decimal("7.50")],
        counts=pa.array([[("x", 1), ("y", 2)]], pa.map_(pa.string(), pa.int64())),
        big=pa.array([2**64 - 1], pa.uint64()),
        half=pa.array([0.5], pa.float16()),
        flags=pa.array([[True, None]], pa.list_(pa.bool_(), 2)),
    )
    ((_, row),) = read(path)
    assert json.loads(json.dumps(row)) == row
    assert row["day"] == "2024-05-06" and row["clock"] == "12:30:01.000250"
    assert row["moment"] == row["nanos"] == "2024-05-06T12:30:01.000250"
    assert row["price"] == "7.50" and row["counts"] == {"x": 1, "y": 2}
    assert row["big"] == 2**64 - 1 and row["half"] == 0.5 and row["flags"] == [True, None]


def test_keys_that_only_other_messages_have_are_not_there(tokens, tmp_path):
    """Parquet gives every message all keys; a template asks which are there."""
    first = [{"role": "user", "content": "a", "name": "me"}]
    rows = [{"prompt": first, "answer": "1"}, {"prompt": MESSAGES, "answer": "2"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load(tmp_path / "rows.parquet", tokens)
    assert [tokens.decode(row.token_ids) for row in loaded.rows] == ["a!:", "betwo:"]


def columns(**changed: Any) -> dict[str, Any]:
    return {"prompt": ["a"], "answer": ["1"]} | changed


MISSING = r'no column "answer" \(answer_key\); columns are prompt, solution'
TYPES: dict[str, tuple[dict, dict, str]] = {
    "missing": ({"prompt": ["a"], "solution": ["1"]}, {}, MISSING),
    "missing in a text": (
        columns(),
        {"answer_key": "answer.b"},
        r'no column "answer.b" \(answer_key\); "answer" is string, which has no fields',
    ),
    "missing inside": (
        columns(inner=[{"a": "1"}]),
        {"answer_key": "inner.b"},
        r'no column "inner.b" \(answer_key\); fields of inner are a$',
    ),
    "int answer": (
        columns(answer=[1]),
        {},
        r'column "answer" \(answer_key\) is int64, .*; write the numbers as text, as the scorer',
    ),
    "float answer": (columns(answer=[1.0]), {}, r"is double, .*; write the numbers as text"),
    "int inside": (
        columns(inner=[{"a": 1}]),
        {"answer_key": "inner.a"},
        r'column "inner.a" \(answer_key\) is int64',
    ),
    "null answer": (columns(answer=pa.nulls(1)), {}, r'"answer" \(answer_key\) is null, which is'),
    "binary prompt": (columns(prompt=[b"a"]), {}, "is binary, .*; write the column as UTF-8 text"),
    "list prompt": (columns(prompt=[["a"]]), {}, r"\(prompt_key\) is list<.*string>, which is not"),
    "parts": (
        columns(prompt=[[{"role": "user", "content": [{"type": "text", "text": "a"}]}]]),
        {},
        r"which is not a prompt: text, or a list of messages \{role, content\}",
    ),
    "bool source": (columns(k=[True]), {"source_key": "k"}, r'"k" \(source_key\) is bool'),
    "int reward": (columns(k=[3]), {"reward_key": "k"}, r'"k" \(reward_key\) is int64'),
    "image": (
        columns(image=[{"bytes": b"x", "path": "y"}]),
        {},
        'column "image" is struct<.*>, and binary has no form in JSON.*; write the file without it',
    ),
    "duration": (
        columns(took=pa.array([1], pa.duration("s"))),
        {},
        r'"took" is duration\[s\], and duration',
    ),
    "map": (
        columns(m=pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64()))),
        {},
        "a map whose keys are int64 has no form",
    ),
    "zone": (
        columns(t=pa.array([1], pa.timestamp("us", "Mars/Olympus"))),
        {},
        r'"t" is timestamp.*, and this machine knows no time zone .Mars/Olympus.; write .* in UTC',
    ),
    "zone inside": (
        columns(t=pa.array([[{"a": 1}]], pa.list_(pa.struct([("a", pa.timestamp("ms", "X/Y"))])))),
        {},
        "knows no time zone 'X/Y'",
    ),
    "nanoseconds": (
        columns(t=pa.array([[1]], pa.list_(pa.timestamp("ns")))),
        {},
        r"timestamp\[ns\] \(nanoseconds\) has no form",
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_column_that_cannot_be_what_it_is_named_for_is_told_at_once(tmp_path, name):
    made, keys, expected = TYPES[name]
    with pytest.raises(PromptError, match=expected) as caught:
        read(table(tmp_path, **made), **keys)
    assert "\n" not in str(caught.value)


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    arrays = [pa.array(["a"]), pa.array(["1"]), pa.array(["2"])]
    parquet.write_table(pa.Table.from_arrays(arrays, ["prompt", "answer", "answer"]), path)
    assert 'two columns are called "answer"; rename one' in says(path)


def test_a_file_without_rows_is_told(tokens, tmp_path):
    path = table(tmp_path, prompt=pa.array([], pa.string()), answer=pa.array([], pa.string()))
    with pytest.raises(PromptError, match="holds no rows"):
        load(path, tokens)


def test_bad_rows_are_refused_one_by_one(tokens, tmp_path):
    ends = np.array([0, 1, 2, 3], np.int32)
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(ends), pa.py_buffer(b"a\xffc")]
    )
    path = table(
        tmp_path,
        prompt=["x", "y", "z", "z"],
        answer=pa.concat_arrays([broken, pa.array(["d"])]),
        score=[1.0, 2.0, float("nan"), 0.0],
    )
    loaded = load(path, tokens)
    assert loaded.refused == {"not_utf8": 1, "malformed_json": 1}
    assert loaded.refusals == (
        (f"{path}:2", '"answer" holds bytes that are not UTF-8'),
        (f"{path}:3", "'score' holds a number beyond floats"),
    )
    assert [row.answer for row in loaded.rows] == ["a", "d"]


def test_too_large_a_row_is_refused(tokens, tmp_path):
    path = table(tmp_path, prompt=["a", "b"], answer=["1", "2"], more=["x" * 5000, "y"])
    loaded = load(path, tokens, max_row_bytes=1000)
    assert loaded.refused == {"too_large": 1} and len(loaded) == 1
    assert "data.max_row_bytes is 1000" in loaded.refusals[0].why


def test_a_map_with_one_key_twice_is_the_rows_refusal(tmp_path):
    twice = pa.array([[("x", 1)], [("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int64()))
    rows = read(table(tmp_path, prompt=["a", "b"], answer=["1", "2"], m=twice))
    assert rows[0][1]["m"] == {"x": 1} and isinstance(rows[1][1], Refused)
    assert rows[1][1].why == '"m" is a map with one key twice'


def test_a_date_that_python_has_none_for_is_the_rows_refusal(tmp_path):
    columns = {
        "day": pa.array([1, 2**30, 3, None], pa.int32()).cast(pa.date32()),
        "at": pa.array([1, 2, -(2**61), None]).cast(pa.timestamp("us", "+01:00")),
    }
    rows = read(table(tmp_path, prompt=["p"] * 4, answer=["1"] * 4, **columns))
    assert rows[0][1]["day"] == "1970-01-02" and rows[0][1]["at"].endswith("+01:00")
    assert rows[3][1]["day"] is None
    for (_, refused), name in zip(rows[1:3], ("day", "at"), strict=True):
        assert isinstance(refused, Refused) and refused.kind == "malformed_json"
        assert f'"{name}" holds a date or time beyond the years 1 to 9999' in refused.why


def test_broken_parquet_is_told_with_the_row_before_it(tmp_path):
    path = tmp_path / "rows.parquet"
    texts = [f"{n:06}" * 20 for n in range(4000)]
    whole = pa.table({"prompt": texts, "answer": texts})
    parquet.write_table(whole, path, row_group_size=1000, use_dictionary=False, compression="zstd")
    body = path.read_bytes()
    path.write_bytes(body[: len(body) // 2])
    assert "broken Parquet, its footer or first rows cannot be read" in says(path)
    group = parquet.ParquetFile(pa.BufferReader(body)).metadata.row_group(2).column(0)
    at = group.data_page_offset + 60
    path.write_bytes(body[:at] + bytes(200) + body[at + 200 :])
    assert "broken Parquet, after row 1792: " in says(path)
    path.write_bytes(b"PAR1 and no more")
    assert "broken Parquet" in says(path)


def test_rows_are_streamed(tmp_path):
    """Two columns of 20 MB: never more than some MiB of them are Python's, or Arrow's."""
    path = tmp_path / "rows.parquet"
    texts = [f"{n:08}" * 500 for n in range(5000)]
    parquet.write_table(pa.table({"prompt": texts, "answer": texts}), path, row_group_size=500)
    del texts
    before, most = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    try:
        for number, _ in read_rows(source(path), LIMIT):
            if number % 250 == 0:
                most = max(most, pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert number == 5000
    assert peak < 6 << 20 and most < 16 << 20
