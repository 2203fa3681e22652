"""What each family handles, as in docs/families.md: `python -m megarl.reshard.families`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megarl.reshard.families.family import NUMBERS, ONLY, Family, no_experts


def tables(families: Mapping[str, Family]) -> str:
    """Markdown: one row a family, then the keys that all of them read alike."""
    rows = [
        (
            f"`{name}`",
            f"`{family.prefix}…`",
            "query, key, value" if family.qkv_bias else "none",
            "yes" if family.qk_norm else "no",
            "no" if family.experts is no_experts else "yes",
            ", ".join(family.rope_kinds) or "none",
            _keys(family.required | ({"rope_theta"} if family.rope_theta is None else set())),
            _values(family.only),
        )
        for name, family in families.items()
    ]
    head = (
        "`model_type`",
        "classes",
        "biases",
        "q/k norm",
        "experts",
        "stretched RoPE",
        "must be told",
        "only with",
    )
    lines = [_row(head), _row("---" for _ in head), *map(_row, rows)]
    return "\n".join(
        [
            *lines,
            "",
            f"All must tell {_keys(NUMBERS)}. All take these only with: {_values(ONLY)}.",
        ]
    )


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


def _values(only: Mapping[str, tuple[Any, ...]]) -> str:
    told = []
    for key, values in sorted(only.items()):
        # 1 and 1.0 are one number.
        plain = [value for value in values if not isinstance(value, (list, dict))]
        texts = {value: f"`{json.dumps(value)}`" for value in reversed(plain)}
        texts |= {"[]": "`[]`"} if [] in values else {}
        texts = dict(reversed(texts.items()))
        if any(isinstance(value, dict) for value in values):
            texts["{}"] = "as published"
        told.append(f"`{key}`: {' or '.join(texts.values())}")
    return "; ".join(told)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from megarl.reshard.families import FAMILIES

    print(tables(FAMILIES))
