"""Known faults of data and tokenisation: what is right, with the catalogue's numbers.

Not covered here: that the engine is given `Prompt.token_ids` (`tests/known_faults/test_rollout.py`)
and that a checkpoint stores the cursor's state.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from megarl.contracts.tokens import Tokens
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import PromptError, PromptSet
from megarl.recipe.data import DataSection
from tests.contracts.tokenizer_folders import character_folder, metaspace_folder

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}A:{% endif %}"
LIMIT = 12


def test_ids_and_text_are_no_round_trip_so_prompts_are_encoded_once_and_whole(tmp_path):
    """Two responses with one text are two id lists; a text encoded in parts is another one."""
    tokens = Tokens.load(character_folder(tmp_path / "merge"))
    apart, merged = (*tokens.encode("a"), *tokens.encode("b")), tokens.encode("ab")
    assert tokens.decode(apart) == tokens.decode(merged) == "ab" and len(apart) == 2
    assert len(merged) == 1
    spaced = Tokens.load(metaspace_folder(tmp_path / "metaspace"))
    in_parts = spaced.encode("The answer is:") + spaced.encode("42")
    assert spaced.decode(in_parts) == "The answer is: 42"
    assert spaced.render("The answer is:42") == spaced.encode("The answer is:42") != in_parts


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstandard.compress])
def test_rows_that_cannot_be_trained_on_are_refused_at_start_by_reason(tmp_path, packed):
    """Every reason named and counted, the limit measured after the template, order kept."""
    tokens = Tokens.load(character_folder(tmp_path / "model", TEMPLATE))
    fits, too_long = "x" * (LIMIT - 4), "x" * (LIMIT - 3)
    assert len(tokens.render(fits)) == LIMIT and len(tokens.render(too_long)) == LIMIT + 1
    rows = [
        ({"prompt": "first", "answer": "1", "id": "a"}, None),
        ({"prompt": too_long, "answer": "1"}, "too_long"),
        ({"prompt": fits, "answer": "1"}, None),
        ({"prompt": "x", "answer": ""}, "empty_answer"),
        ({"prompt": "x", "answer": None}, "null_answer"),
        ({"prompt": "x", "answer": 7}, "answer_not_text"),
        ({"prompt": "x"}, "missing_answer"),
        ({"prompt": "again", "answer": "1", "id": "a"}, "duplicate_id"),
        ({"prompt": "", "answer": "1"}, "empty_prompt"),
        ({"answer": "1"}, "missing_prompt"),
        ({"prompt": "\ud800", "answer": "1"}, "lone_surrogate"),
        ({"prompt": "last", "answer": "1"}, None),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(packed("".join(json.dumps(row) + "\n" for row, _ in rows).encode()))
    section = DataSection(train=str(path), max_prompt_tokens=LIMIT, max_refused_share=0.75)
    loaded = PromptSet.load(section.training, tokens, section)
    assert [row.text for row in loaded.rows] == ["first", fits, "last"]
    assert [row.prompt_id for row in loaded.rows] == ["a", "rows:3", "rows:12"]
    assert len(loaded.rows[1].token_ids) == LIMIT
    refused = [(number, kind) for number, (_, kind) in enumerate(rows, start=1) if kind]
    assert loaded.refused == {kind: 1 for _, kind in refused}
    assert [where for where, _ in loaded.refusals] == [f"{path}:{n}" for n, _ in refused]
    assert all(why for _, why in loaded.refusals)


def test_table_rows_that_cannot_be_trained_on_are_refused_alike(tmp_path):
    """Parquet: a column that is missing or of numbers at once, the rest row by row."""
    tokens = Tokens.load(character_folder(tmp_path / "model", TEMPLATE))
    fits = "x" * (LIMIT - 4)
    columns = {
        "prompt": ["first", fits + "x", fits, "x", "x", "again", "", None, "last"],
        "answer": ["1", "1", "1", "", None, "1", "1", "1", "1"],
        "id": ["a", None, "b", None, None, "a", None, None, None],
    }
    kinds = {2: "too_long", 4: "empty_answer", 5: "null_answer", 6: "duplicate_id"}
    kinds |= {7: "empty_prompt", 8: "null_prompt"}
    path = tmp_path / "rows.parquet"
    section = DataSection(train=str(path), max_prompt_tokens=LIMIT, max_refused_share=0.75)

    def load(**changed: list | None) -> PromptSet:
        kept = {name: values for name, values in (columns | changed).items() if values}
        parquet.write_table(pa.table(kept), path)
        return PromptSet.load(section.training, tokens, section)

    loaded = load()
    assert [row.prompt_id for row in loaded.rows] == ["a", "b", "rows:9"]
    assert loaded.refused == {kind: 1 for kind in kinds.values()}
    assert [where for where, _ in loaded.refusals] == [f"{path}:{n}" for n in kinds]
    with pytest.raises(PromptError, match=r'no column "answer"'):
        load(answer=None)
    with pytest.raises(PromptError, match=r'column "answer" \(answer_key\) is int64'):
        load(answer=[7] * 9)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("by_tokenizer", [True, False])
def test_exactly_one_beginning_of_sequence(tmp_path, in_template, by_tokenizer, in_file):
    """One BOS when template or tokenizer has one, none otherwise; the assistant's header ends
    the prompt; plain text follows the tokenizer's own rule. So with a template of the recipe's."""
    template = "{{ bos_token }}" * in_template + TEMPLATE
    own = "{{ bos_token }}another" if in_file else template
    tokens = Tokens.load(character_folder(tmp_path, own, adds_bos=by_tokenizer))
    (tmp_path / "chat.jinja").write_text(template)
    ids = tokens.render("hi", str(tmp_path / "chat.jinja") if in_file else "model")
    assert ids.count(0) == int(in_template or by_tokenizer)
    assert ids[: ids.count(0)] == (0,) * ids.count(0)
    assert tokens.decode(ids) == "<hi>A:"
    plain = tokens.render("hi", "none")
    assert plain == ((0,) if by_tokenizer else ()) + tokens.encode("hi")


def test_a_tokenizer_without_a_beginning_of_sequence_gets_none(tmp_path):
    """Nothing is invented."""
    tokens = Tokens.load(character_folder(tmp_path, TEMPLATE, bos=False))
    assert tokens.render("hi") == tokens.encode("<hi>A:")


def _ten_prompts(folder: Path, answer: str = "1") -> PromptSet:
    folder.mkdir(exist_ok=True)
    path = folder / "ten.jsonl"
    rows = [{"prompt": f"q{number}", "answer": answer, "id": number} for number in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = Tokens.load(character_folder(folder / "model", TEMPLATE))
    section = DataSection(train=str(path), max_prompt_tokens=LIMIT)
    return PromptSet.load(section.training, tokens, section)


def _steps(cursor: PromptCursor, count: int) -> list[list[str]]:
    """Two prompts each."""
    drawn = []
    for _ in range(count):
        cursor.begin()
        drawn.append([row.prompt_id for row in cursor.draw(2)])
    return drawn


def test_a_resumed_run_draws_what_an_uninterrupted_one_would(tmp_path):
    """10 prompts, 2 a step, stopped after step 2: union 0…9 once each, same order, and the
    second epoch's shuffle too; other data or another seed is refused."""
    prompts = _ten_prompts(tmp_path / "a")
    uninterrupted = _steps(PromptCursor(prompts, seed=3, per_iteration=2), 10)
    first = PromptCursor(prompts, seed=3, per_iteration=2)
    drawn = _steps(first, 2)
    resumed = PromptCursor(_ten_prompts(tmp_path / "b"), seed=3, per_iteration=2)
    resumed.restore(json.loads(json.dumps(first.state)))
    drawn += _steps(resumed, 8)
    assert drawn == uninterrupted
    epochs = np.array(drawn).reshape(2, 10).astype(int)
    assert (np.sort(epochs, axis=1) == np.arange(10)).all()
    assert not (epochs[0] == epochs[1]).all()
    others = {
        "fingerprint": PromptCursor(_ten_prompts(tmp_path / "c", answer="2"), 3, 2),
        "seed": PromptCursor(prompts, 4, 2),
    }
    for key, other in others.items():
        with pytest.raises(PromptError, match=f"with {key} .*resume with the same data"):
            other.restore(first.state)


def test_ids_the_tokenizer_does_not_know_are_known_as_such(tmp_path):
    """A model may have more rows than the tokenizer has pieces; such ids can be sampled."""
    folder = character_folder(tmp_path)
    size = Tokens.load(folder).vocab_size
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size + 2}))
    known = Tokens.load(folder).known_ids
    assert known[:size].all() and known.tolist()[size:] == [False, False]
