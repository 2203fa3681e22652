"""The own functions that docs/algorithms.md shows are fit to be named in a recipe, as written.

Not covered: that they teach anything.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.algorithms.own import load_own
from megarl.algorithms.registry import check_functions
from megarl.recipe.algorithm import AlgorithmSection

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def test_the_pages_own_functions_pass_the_check_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "shown_in_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"advantage": "shown_in_docs.mine", "objective": "shown_in_docs:theirs"}
    check_functions(AlgorithmSection(minibatches=1, **names))
    load_own.cache_clear()
