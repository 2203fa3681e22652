"""Options of the built-in scorers that are of a wrong type: refused when they are loaded.

Not covered: values of the right type (the scorers' own tests); the names of options
(`test_score.py`).
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from megarl.rewards.scorer import BUILT_IN

MAKES = {name: importlib.import_module(path).make for name, path in BUILT_IN.items()}
NEEDED = {
    "json_schema": {"schema": {"type": "object"}},
    "format": {"pattern": "a"},
    "length": {"max": 5, "buffer": 5},
}
INSTEAD = {("format", "tags"): {}, ("length", "target"): {"buffer": 5}}
"""What is given beside an option that excludes a needed one."""

KINDS = {
    "str": {str}, "bool": {bool}, "int": {int}, "float": {int, float}, "None": {type(None)},
    "Sequence[str]": {list}, "Mapping[str, Any]": {dict},
}  # fmt: skip
SAMPLES = [5, 2.5, True, "yes", [5], {"a": 5}, None]


@pytest.mark.parametrize(
    ("scorer", "option"),
    [
        (name, option)
        for name, make in MAKES.items()
        for option in inspect.signature(make).parameters
    ],
)
def test_an_option_of_a_wrong_type_is_refused_in_one_line_that_names_it(scorer, option):
    make = MAKES[scorer]
    annotation = inspect.signature(make).parameters[option].annotation
    right = set().union(*(KINDS[kind.strip()] for kind in annotation.split("|")))
    others = INSTEAD.get((scorer, option), NEEDED.get(scorer, {}))
    for value in SAMPLES:
        if type(value) not in right:
            with pytest.raises(ValueError, match=option) as refused:
                make(**others | {option: value})
            assert "\n" not in str(refused.value), value
