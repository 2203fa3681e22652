"""Words for what differs between two sets of prompts, and where the earlier one is told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.data_fit import as_words, stored_facts


def _facts(template: str = "blake3:" + "7" * 64, /, **rows: Any) -> dict[str, Any]:
    """Sources and their rows; a pair has the weight behind."""
    sources = {}
    for name, told in rows.items():
        count, weight = told if isinstance(told, tuple) else (told, None)
        sources[name] = {"rows": count} | ({} if weight is None else {"weight": weight})
    return {"fingerprint": f"blake3:{'a' * 64}", "sources": sources, "template": template}


@pytest.mark.parametrize(
    "old, new, was, now",
    [
        (
            _facts(good=40),
            _facts(moved=40),
            "source good",
            "source moved (of as many rows: give it `name: good`)",
        ),
        (_facts(good=40), _facts(good=41), "40 rows of good", "41 rows of good"),
        (_facts(good=40), _facts(moved=41), "40 rows of good", "41 rows of moved"),
        (_facts(a=4), _facts(a=4, b=2), "4 rows of a", "4 rows of a + 2 rows of b"),
        (_facts(a=4, b=2), _facts(b=2, a=4), "sources a, b", "sources b, a in this order"),
        (_facts(a=4, b=2), _facts(a=(4, 3), b=(2, 1)), "weights none", "weights 3:1"),
        (
            _facts(a=(4, 0.5)),
            _facts(a=(5, 2)),
            "4 rows of a, weights 0.5",
            "5 rows of a, weights 2",
        ),
        (
            _facts(a=4),
            _facts("blake3:" + "8" * 64, a=4),
            f"template {'7' * 12}",
            f"template {'8' * 12}",
        ),
        (
            _facts(a=4),
            _facts(a=4) | {"fingerprint": f"blake3:{'b' * 64}"},
            "a" * 12,
            f"{'b' * 12} (other contents; sources and their counts of rows are the same)",
        ),
    ],
)
def test_what_differs_is_told(old: dict[str, Any], new: dict[str, Any], was: str, now: str) -> None:
    assert as_words(old, new) == (was, now)


def test_the_earlier_set_is_found_where_a_resume_put_it(tmp_path: Path) -> None:
    aside = tmp_path / "resumes" / "001"
    aside.mkdir(parents=True)
    earlier = _facts(a=4) | {"fingerprint": "blake3:earlier"}
    for folder, facts in ((tmp_path, _facts(a=5)), (aside, earlier)):
        (folder / "data.json").write_text(json.dumps(facts | {"held_out": _facts(h=3)}))
    assert stored_facts(tmp_path, "data", "blake3:earlier")["sources"] == {"a": {"rows": 4}}
    held_out = stored_facts(tmp_path, "eval_data", _facts()["fingerprint"])
    assert held_out["sources"] == {"h": {"rows": 3}}
    assert stored_facts(tmp_path, "data", "blake3:none") is None
    (tmp_path / "data.json").write_text("{")
    assert stored_facts(tmp_path, "data", "blake3:none") is None


def test_facts_of_another_form_say_nothing() -> None:
    assert as_words({"sources": {"a": 3}}, {"sources": {"a": {"rows": 1}}}) is None
