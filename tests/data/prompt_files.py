"""Files of prompts and how tests load them, with a tokenizer of single characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.contracts.tokens import Tokens
from megarl.data.prompts import PromptSet
from megarl.recipe.data import DataSection

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"


def section(train: Any = "x", **keys: Any) -> DataSection:
    return DataSection(**{"train": train, "max_prompt_tokens": 20, "max_refused_share": 1.0} | keys)


def load(train: Path | Sequence[dict], tokens: Tokens, **keys: Any) -> PromptSet:
    """Of one path, or of sources as a recipe writes them."""
    data = section(str(train) if isinstance(train, Path) else list(train), **keys)
    return PromptSet.load(data.training, tokens, data)


def write(path: Path, *rows: dict | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def two_files(folder: Path) -> list[dict]:
    write(folder / "a.jsonl", *({"prompt": f"a{n}", "answer": "1"} for n in range(3)))
    write(folder / "b.jsonl", {"q": "b", "answer": "2"}, {"q": "", "answer": "2"})
    return [
        {"path": str(folder / "a.jsonl")},
        {"path": str(folder / "b.jsonl"), "name": "other", "prompt_key": "q", "reward": "maths"},
    ]
