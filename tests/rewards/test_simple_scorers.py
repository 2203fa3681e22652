"""`exact_match`'s options, `format`, `json_schema`, `length`, `repetition` against hand numbers.

Without processes. Not covered: that a regular expression which takes too long ends at the worker's
deadline (`test_score.py` holds deadlines for any scorer).
"""

from __future__ import annotations

import json
import time

import pytest

from megarl.rewards import exact, format, length, repetition, schema
from megarl.rewards.scorer import Response, RewardParts, parts_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"type": "array", "items": {"$ref": "#"}}
ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/a"}}}


def response(text: str, answer: str = "", tokens: int = 0) -> Response:
    return Response(text, answer, "", True, "eos", tuple(range(tokens)))


@pytest.mark.parametrize(
    ("text", "answer", "total"),
    [
        ("so Paris", "Paris|Lyon", 1.0),
        ("so Lyon", "Paris|Lyon", 1.0),
        ("so Paris or Lyon", "Paris|Lyon", 0.0),
        ("so paris", "Paris|Lyon", 0.0),
        ("so 12 km", r"12(?:\.0*)? ?km", 1.0),
        ("so 12.5 km", r"12(?:\.0*)? ?km", 0.0),
        ("Paris", "Paris|Lyon", 0.0),
    ],
)
def test_a_prompts_answer_may_be_a_pattern_for_the_whole_found_answer(text, answer, total):
    scorer = exact.make(pattern="^so (.*)$", answer_is="pattern")
    assert parts_of(scorer(response(text, answer)), 0).total == total


@pytest.mark.parametrize("answer", [".*", "a?", "(", "", "  ", "|b"])
def test_an_answer_that_is_no_pattern_or_matches_nothing_said_cannot_be_scored(answer):
    scorer = exact.make(answer_is="pattern")
    for text in ("anything", ""):
        with pytest.raises(ValueError, match="the prompt"):
            scorer(response(text, answer))


def test_case_counts_unless_told():
    assert exact.make()(response("STRASSE", "straße")).total == 0.0
    assert exact.make(ignore_case=True)(response("STRASSE", "straße")).total == 1.0
    assert exact.make(ignore_case=True)(response("paris", "Lyon")).total == 0.0
    either = exact.make(ignore_case=True, answer_is="pattern")
    assert either(response("PARIS", "paris|lyon")).total == 1.0


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("<think>3 + 4</think>\n<answer>7</answer>", None),
        ("  <think>a < b, <b>bold</b></think><answer>7</answer>\n", None),
        ("<answer>7</answer>", "<think> stands 0 times"),
        ("<think>a</think><answer>7", "</answer> stands 0 times"),
        ("<think>a</think><think>b</think><answer>7</answer>", "<think> stands 2 times"),
        ("<think>a</think><answer>7</answer><answer>8</answer>", "<answer> stands 2 times"),
        (
            "<answer>7</answer><think>a</think>",
            "order: <answer> </answer> <think> </think>",
        ),
        (
            "<think>a<answer>7</answer></think>",
            "order: <think> <answer> </answer> </think>",
        ),
        ("</think>a<think><answer>7</answer>", "order: </think> <think> <answer> </answer>"),
        ("So: <think>a</think><answer>7</answer>", "text outside the tags"),
        ("<think>a</think> so <answer>7</answer>", "text outside the tags"),
        ("<think>a</think><answer>7</answer>.", "text outside the tags"),
        ("<think> </think><answer>7</answer>", "<think> is empty"),
        ("<think>a</think><answer></answer>", "<answer> is empty"),
        ("", "<think> stands 0 times"),
    ],
)
def test_tags_stand_once_each_in_order_with_nothing_outside(text, detail):
    scored = format.make(tags=["think", "answer"])(response(text))
    assert scored == RewardParts(float(detail is None), detail or "")


def test_tags_may_have_text_outside_be_empty_or_begin_in_the_chat_template():
    spoken = "Well. <think>a</think> So <answer>7</answer>."
    assert format.make(tags=["think", "answer"], outside=True)(response(spoken)).total == 1.0
    silent = response("<think>\n\n</think>\n\n<answer>7</answer>")
    assert format.make(tags=["think", "answer"], filled=False)(silent).total == 1.0
    begun = format.make(tags=["think", "answer"], prefix="<think>\n")
    assert begun(response("a</think><answer>7</answer>")).total == 1.0
    assert begun(response("<think>a</think><answer>7</answer>")).total == 0.0
    assert format.make(pattern=r"<a>\d+</a>", prefix="<a>")(response("7</a>")).total == 1.0


@pytest.mark.parametrize(
    ("text", "total", "detail"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, ""),
        ('\n {"name": "Ada"} \n', 1.0, ""),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1.0, ""),
        ('```json\n{"nam": 1}\n```\nBetter:\n```JSON\n{"name": "Ada"}\n```', 1.0, ""),
        ('```json\n{"name": "Ada"}\n```\nor\n```json\n[]\n```', 0.0, "$: [] is not of type 'obj"),
        ('```json\n{"name": "Ada"}', 1.0, ""),
        ('```python\n1\n```\n```json\n{"name": "Ada"}\n```\n```text\nno\n```', 1.0, ""),
        ('{"age": 36}', 0.0, "$: 'name' is a required property"),
        ('{"name": "Ada", "age": -1}', 0.0, "$.age: -1 is less than the minimum of 0"),
        ('{"name": "Ada", "age": "36"}', 0.0, "$.age: '36' is not of type 'integer'"),
        ('{"name": "Ada", "job": "x"}', 0.0, "$: Additional properties are not allowed"),
        ('{"name": "Ada", "age": NaN}', 0.0, "no_answer"),
        ('{"name": "Ada", "name": "Bob"}', 0.0, "no_answer"),
        ('{"name": "Ada"', 0.0, "no_answer"),
        ("{'name': 'Ada'}", 0.0, "no_answer"),
        ('So {"name": "Ada"}', 0.0, "no_answer"),
        ('```\n{"name": "Ada"}\n```', 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
        ("[" * 100_000, 0.0, "no_answer"),
        ('{"name": "Ada", "age": ' + "9" * 5000 + "}", 0.0, "no_answer"),
    ],
)
def test_json_is_read_from_the_last_block_and_checked(text, total, detail):
    scored = schema.make(schema=PERSON)(response(text))
    assert scored.total == total and scored.detail.startswith(detail)
    assert bool(scored.detail) == bool(detail) and len(scored.detail) <= 300


def test_a_schema_may_be_a_file_and_may_refer_to_itself(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(TREE))
    scorer = schema.make(schema=str(path))
    assert scorer(response("[[], [[]]]")).total == 1.0
    assert scorer(response("[[], [3]]")) == RewardParts(0.0, "$[1][0]: 3 is not of type 'array'")
    assert (
        scorer(response("[" * 400 + "]" * 400)).total == 0.0
    )  # deep, but JSON: scored, not failed


def test_a_schema_without_an_end_that_a_response_finds_is_no_0():
    scorer = schema.make(schema={"properties": {"name": {"$ref": "#/$defs/a"}}} | ENDLESS)
    assert scorer(response('{"age": 3}')).total == 1.0
    with pytest.raises(ValueError, match="leads back to itself"):
        scorer(response('{"name": "Ada"}'))


def test_many_open_blocks_take_linear_time():
    text = "```json\n" * 50_000
    started = time.perf_counter()
    assert schema.make(schema=PERSON)(response(text)).detail == "no_answer"
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (5000, -1.0)],
)
def test_overlong_is_daposs_equation_13(tokens, penalty):
    assert length.make(max=100, buffer=20)(response("", tokens=tokens)) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0.0), (50, 0.0), (75, 0.5), (100, 1.0), (110, 0.8), (150, 0.0)]
)
def test_length_scores_by_distance_to_its_target(tokens, score):
    scorer = length.make(target=100, buffer=50)
    assert scorer(response("", tokens=tokens)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "n", "repeats"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b a b", 2, 3 / 5),  # ab ba ab ba ab
        ("A b a B", 2, 1 / 3),  # ab ba ab
        ("no no no no", 1, 3 / 4),
        ("no no no no", 4, 0.0),
        ("no no no", 4, 0.0),
        ("", 1, 0.0),
        ("x " * 1000, 4, 996 / 997),
    ],
)
def test_repeats_are_runs_that_were_there_before(text, n, repeats):
    penalty = repetition.make(n=n)(response(text))
    assert penalty == pytest.approx(-repeats) and str(penalty) != "-0.0"
    assert repetition.make(n=n, give="score")(response(text)) == pytest.approx(1 - repeats)


def test_repeats_are_counted_over_tokens_where_told():
    tokens = Response("one word", "", "", True, "eos", (5, 6, 5, 6, 5))
    assert repetition.make(n=2, of="tokens")(tokens) == pytest.approx(-0.5)  # 56 65 56 65
    assert repetition.make(n=2)(tokens) == 0.0


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (exact.make, {"answer_is": "number"}, "answer_is must be text or pattern, not 'number'"),
        (exact.make, {"take": "best"}, "take must be first or last"),
        (format.make, {}, "give pattern or tags"),
        (format.make, {"pattern": "a", "tags": ["b"]}, "give pattern or tags"),
        (format.make, {"pattern": "("}, "is no regular expression"),
        (format.make, {"tags": []}, "list of different names"),
        (format.make, {"tags": "think"}, "list of different names, not 'think'"),
        (format.make, {"tags": ["a", "a"]}, "list of different names"),
        (format.make, {"tags": ["<think>"]}, "'<think>' is no tag's name; leave out < and >"),
        (format.make, {"tags": [3]}, "3 is no tag's name"),
        (schema.make, {"schema": {"type": "text"}}, r"schema is no JSON schema: \$\.type: 'text'"),
        (schema.make, {"schema": {}}, "schema must be a mapping with something in it"),
        (schema.make, {"schema": "/nowhere.json"}, "schema /nowhere.json cannot be read as JSON"),
        (
            schema.make,
            {"schema": {"items": {"$ref": "#/$defs/gone"}}},
            "refers to /\\$defs/gone, which it does not hold",
        ),
        (
            schema.make,
            {"schema": {"$ref": "http://localhost:1/schema.json"}},
            "refers to http://localhost:1/schema.json, which it does not hold",
        ),
        (schema.make, {"schema": {"$ref": "#"}}, r"schema: a \$ref of the schema leads back"),
        (schema.make, {"schema": {"allOf": [{"$ref": "#"}]}}, "leads back to itself"),
        (schema.make, {"schema": {"items": {"$ref": "#/$defs/a"}} | ENDLESS}, "leads back to"),
        (length.make, {"buffer": 5}, "give max or target"),
        (length.make, {"max": 5, "target": 5, "buffer": 5}, "give max or target"),
        (length.make, {"max": 5, "buffer": 6}, r"buffer \(6\) is more than max \(5\)"),
        (length.make, {"max": 5, "buffer": 0}, "buffer must be a whole number of tokens from 1"),
        (length.make, {"max": 5, "buffer": None}, "buffer must be a whole number of tokens"),
        (length.make, {"target": -1, "buffer": 1}, "target must be a whole number of tokens"),
        (length.make, {"max": 5.0, "buffer": 1}, "max must be a whole number of tokens"),
        (repetition.make, {"n": 0}, "n must be a whole number from 1, not 0"),
        (repetition.make, {"of": "letters"}, "of must be words or tokens, not 'letters'"),
        (repetition.make, {"give": "share"}, "give must be penalty or score, not 'share'"),
    ],
)
def test_bad_options_are_refused_in_one_line(make, options, said):
    with pytest.raises(ValueError, match=said) as refused:
        make(**options)
    assert "\n" not in str(refused.value)
