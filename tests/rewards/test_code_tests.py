"""What the scorer `code` reads and how it compares, without sandboxes.

Not covered: verdicts on programs (test_code.py).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.code import last_block
from megarl.rewards.code_tests import read_tests, same_text, same_value

CALL = {"style": "call", "function": "f", "cases": [{"args": [1], "output": 1}]}


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nso\n```text\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("``` python\na\n```", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("```bash\nx\n```\n", None),
        ("  ```py\n  if a:\n    b\n  ```", "if a:\n  b\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python title=x\r\na\r\n```\r\n", "a\n"),
        ("```python a = 1```", None),
        ("```python\n```", "\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("~~~py\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("~~~~\n```py\na\n~~~\n```\n", "a\n~~~\n"),
        ("```py\n    ```\na\n\t```\n   ```\nb", "    ```\na\n\t```\n"),
        ("    ```py\n    a\n   ```", "a\n"),
    ],
)
def test_the_last_block_is_the_program(text: str, block: str | None) -> None:
    assert last_block(text) == block


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (None, "no tests: the row has neither tests nor an answer"),
        ("{", "the row's tests is no JSON"),
        ([], "the row's tests is a list, not an object"),
        ({"style": "stdin"}, "the row's tests has no cases"),
        ({"style": "shell", "cases": [{}]}, "style is 'shell', not stdin or call"),
        ({"style": "stdin", "cases": []}, "cases is no list of at least one case"),
        ({"style": "stdin", "cases": [3]}, r"cases\[0\] is a int, not an object"),
        ({"style": "stdin", "cases": [{"input": ""}]}, r"cases\[0\] has no output"),
        ({"style": "stdin", "cases": [{"input": "", "output": 3}]}, r"\[0\]: output is a int, not"),
        ({"style": "call", "cases": [{"output": 3}]}, "needs the name of a function, not None"),
        (CALL | {"function": "f()"}, r"needs the name of a function, not 'f\(\)'"),
        (CALL | {"fn": "f"}, "the row's tests has fn, which is not in"),
        ({"style": "call", "function": "f", "cases": [{"args": []}]}, r"\[0\] has no output"),
        ({"style": "call", "function": "f", "cases": [{"args": 1, "output": 1}]}, "args is a int"),
        (
            {"style": "call", "function": "f", "cases": [{"kwargs": [], "output": 1}]},
            "kwargs is no",
        ),
    ],
)
def test_bad_tests_are_named(tests: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_tests("", {} if tests is None else {"tests": tests}, "tests")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \r\n2\n\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", False),
        ("1 2", "1  2", False),
        ("", "\n", True),
        ("\n1", "1", False),
    ],
)
def test_texts_are_compared_by_lines(found: str, wanted: str, same: bool) -> None:
    assert same_text(found, wanted) is same


@pytest.mark.parametrize(
    ("found", "wanted", "tolerance", "same"),
    [
        (1, 1.0, 0.0, True),
        (True, 1, 0.0, False),
        (0, False, 0.0, False),
        ([True], [True], 0.0, True),
        (None, False, 0.0, False),
        ("1", 1, 0.0, False),
        ([1, 2], [2, 1], 0.0, False),
        ([1], [1, 1], 0.0, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 0.0, True),
        ({"a": 1}, {"a": 1, "b": None}, 0.0, False),
        ({}, [], 0.0, False),
        (0.1 + 0.2, 0.3, 0.0, False),
        (0.1 + 0.2, 0.3, 1e-9, True),
        ({"a": [1000.5]}, {"a": [1000]}, 1e-3, True),
        (1001, 1000, 1e-2, False),
        (math.nan, math.nan, 0.0, True),
        (math.inf, -math.inf, 1.0, False),
        (10**400, 1.5, 0.1, False),
    ],
)
def test_values_are_compared_as_json(found: Any, wanted: Any, tolerance: float, same: bool) -> None:
    assert same_value(found, wanted, tolerance) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@settings(max_examples=50)
@given(JSON, JSON)
def test_comparison_agrees_with_canonical_text(first: Any, second: Any) -> None:
    """Oracle: JSON text with sorted keys. It tells 1 from 1.0, so it says only what is the same."""
    assert same_value(json.loads(json.dumps(first)), first, 0.0)
    if json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True):
        assert same_value(first, second, 0.0)
    assert same_value(first, second, 0.0) == same_value(second, first, 0.0)


@settings(max_examples=50)
@given(JSON)
def test_tests_of_any_shape_are_refused_in_one_line(value: Any) -> None:
    with pytest.raises(ValueError, match="^[^\n]*$"):
        read_tests("", {"tests": value}, "tests")
