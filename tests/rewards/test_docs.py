"""docs/rewards.md: its options are those of the code, its own functions score as written.

Not covered: what the built-in scorers do (their own tests).
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.contracts.records import RewardStatus
from megarl.recipe.learning import RewardSection, ScorerSection
from megarl.rewards.scorer import BUILT_IN
from tests.rewards.make_pool import score, scoring

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
SHOWN = {None: "none", "": "empty", True: "`true`", False: "`false`", inspect.Parameter.empty: ""}


def told_options(name: str) -> dict[str, str]:
    """Option → default, as the page has them."""
    (part,) = re.findall(rf"^### `{name}`\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", part, re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or isinstance(default, bool) or default == "":
        return SHOWN[default]
    return f"`{default}`"


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_options_of_a_built_in_scorer_are_the_codes(name: str) -> None:
    make = importlib.import_module(BUILT_IN[name]).make
    coded = {key: shown(one.default) for key, one in inspect.signature(make).parameters.items()}
    assert told_options(name) == coded


def test_every_built_in_scorer_has_its_part_and_no_other_has_one() -> None:
    assert set(re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)) == BUILT_IN.keys()


def test_the_keys_that_are_named_exist() -> None:
    keys = set(re.findall(r"`reward\.(\w+)`", PAGE))
    assert keys <= RewardSection.model_fields.keys()
    own = {"name", "component", "weight", "at_least", "only", "batch"}
    assert own == set(ScorerSection.model_fields)
    assert all(f"`{key}`" in PAGE for key in own)


def test_the_pages_own_functions_score_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shown_in_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    scorers = [
        {"name": "shown_in_rewards:polite", "component": "manners", "word": "kindly"},
        {"name": "shown_in_rewards:brief", "batch": 64, "weight": 0.0},
        {"name": "shown_in_rewards:judged", "seconds": 0.001, "weight": 2.0},
    ]
    with scoring(*scorers) as pool:
        said = score(pool, ["Kindly take 46", "take 45"])
    assert [record.status for record in said] == [RewardStatus.OK] * 2
    assert said[0].components["manners"] == 1.0 and said[0].components["judged"] == 1.0
    assert said[1].components["manners"] == 0.0 and said[1].detail == "impolite"
    assert [record.total for record in said] == [3.0, 0.0]
    assert all(0 < record.components["brief"] <= 1 for record in said)
