"""The recipe's keys as a table, made from the schema."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key: dotted name, what it takes, its default ("required" when there is none), meaning."""

    key: str
    takes: str
    default: str
    meaning: str


def key_table(model: type[BaseModel] = Recipe, prefix: str = "") -> list[KeyRow]:
    """Every key of the schema in declared order, sections flattened."""
    rows: list[KeyRow] = []
    for field, info in model.model_fields.items():
        name = info.alias or field
        if _is_section(info.annotation):
            rows += key_table(info.annotation, f"{prefix}{name}.")
        else:
            rows.append(KeyRow(prefix + name, _takes(info), _default(info), info.description or ""))
    return rows


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key most like `key`: in its own section, else by its last part anywhere."""
    section, _, leaf = key.rpartition(".")
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    if match := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return siblings[match[0]]
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    if match := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return leaves[match[0]]
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _takes(info: FieldInfo) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true | false"}

    def name(kind: Any) -> str:
        if hasattr(kind, "__metadata__"):
            return name(get_args(kind)[0])
        if get_origin(kind) is Literal:
            return " | ".join(get_args(kind))
        if get_origin(kind) in (Union, UnionType):
            return " or ".join(
                "empty" if part is type(None) else name(part) for part in get_args(kind)
            )
        if get_origin(kind) is dict:
            return f"mapping to {name(get_args(kind)[1])}"
        if get_origin(kind) is tuple:
            parts = get_args(kind)
            if parts[-1] is Ellipsis:
                entry = parts[0]
                listed = f"{entry.__name__.removesuffix('Section').lower()}s"
                return f"list of {listed if _is_section(entry) else name(entry)}"
            return f"list of {len(parts)} {name(parts[0])}s"
        return names[kind]

    return name(info.annotation)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if value is None:
        return "empty"
    if isinstance(value, str):
        return value
    return json.dumps(value)
