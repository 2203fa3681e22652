"""docs/data.md: the keys and kinds that it names are the code's, its curriculum works as written.

Not covered: what loading and drawing do (their own tests).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.contracts.records import Prompt
from megarl.data.curriculum import Curriculum, Seen
from megarl.recipe.data import DataSection, SourceSection

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_key_is_named_and_exists() -> None:
    named = set(re.findall(r"`data\.(\w+)[`:]", PAGE)) - {"json"}
    assert named <= DataSection.model_fields.keys()
    assert DataSection.model_fields.keys() - named == {"train", "eval"}
    assert all(f"`{key}`" in PAGE for key in SourceSection.model_fields)


def test_every_kind_of_refusal_is_told() -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "megarl/data").glob("*.py")))
    kinds = set(re.findall(r'Refused\(\s*f?"([\w{}]+)"', code))
    names = {"missing": ("prompt", "answer", "source", "reward"), "bad": ("source", "reward")}
    names["null"] = names["missing"]
    for stem, roles in names.items():
        kinds.remove(f"{stem}_{{kind}}")
        kinds |= {f"{stem}_{role}" for role in roles}
    (table,) = re.findall(r"^\| kind \| why \|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
    firsts = [row.split(" | ")[0] for row in table.splitlines()[1:]]
    assert set(re.findall(r"`(\w+)`", " ".join(firsts))) == kinds


def test_the_pages_curriculum_keeps_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shown_in_data.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    curriculum = Curriculum("shown_in_data:keep")
    short, long = (
        Prompt(name, "s", "x" * size, (1,), "1") for name, size in (("a", 9), ("b", 500))
    )
    curriculum.check([short, long])
    curriculum.begin(0)
    assert curriculum.keeps(short) and not curriculum.keeps(long)
    curriculum.begin(50)
    assert curriculum.keeps(long)
    monkeypatch.setattr(curriculum.history, "seen", lambda prompt_id: Seen(1, 8, 1.0, 1.0))
    curriculum.begin(51)
    assert not curriculum.keeps(short)
