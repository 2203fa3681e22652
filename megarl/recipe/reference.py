"""The recipe's keys as text, made from the schema: the table of `--help` and docs/recipe.md."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.recipe.learning import ScorerSection
from megarl.recipe.schema import Recipe

COMMAND = "python -m megarl.recipe --reference > docs/recipe.md"


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
    for name, info in model.model_fields.items():
        if _is_section(info.annotation):
            rows += key_table(info.annotation, f"{prefix}{name}.")
        else:
            rows.append(KeyRow(prefix + name, _takes(info), _default(info), info.description or ""))
    return rows


def help_text(width: int = 100) -> str:
    """The key table for a terminal, one line per key where it fits."""
    rows = key_table()
    margin = max(len(row.key) for row in rows) + 2
    lines = ["Keys of a recipe, with their defaults (* = must be set):", ""]
    section, plain = "", ("true | false",)
    for row in rows:
        if (head := row.key.partition(".")[0]) != section:
            section = head
            lines += ["", *textwrap.wrap(f"{head}: {_section_doc(head)}", width)] * ("." in row.key)
        default = "*" if row.default == "required" else f"[{row.default}]"
        text = f"{default} {row.meaning}" + (
            f" ({row.takes})" if row.takes not in plain and " | " in row.takes else ""
        )
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"  {row.key:<{margin}}",
            subsequent_indent=" " * (margin + 2),
            break_on_hyphens=False,
        )
    return "\n".join([*lines, ""])


def recipe_reference_markdown() -> str:
    """docs/recipe.md."""
    lines = [
        "# Recipe reference",
        "",
        f"Made from the schema by `{COMMAND}`; do not edit.",
        "",
        "A recipe is a YAML file of the sections below. Every key that is not *required* may be",
        "left out. An unknown key is an error that names the nearest one.",
        "",
        "- `base: other.yaml` inherits another recipe, by a path relative to this file; keys set",
        "  here win, sections merge key by key, lists are replaced whole.",
        "- `key=value` on the command line wins over files: `rollout.tp=2`,",
        "  `reward.scorers=[{name: exact_match}]`. Values are YAML.",
        "- `{seed}` in `run.name`, `run.folder`, `model.path`, `data.train` and `data.eval` is the",
        "  seed. Paths are relative to the folder the command is started in.",
        "- `python -m megarl.recipe RECIPE [key=value …]` checks a recipe and prints it resolved.",
    ]
    section = None
    for row in key_table():
        head = row.key.partition(".")[0] if "." in row.key else ""
        if head != section:
            section = head
            title = [f"## {head}", "", _section_doc(head), ""] if head else ["## Top level", ""]
            lines += [
                "",
                *title,
                "| key | takes | default | meaning |",
                "| --- | --- | --- | --- |",
            ]
        cells = (f"`{row.key}`", row.takes.replace("|", "\\|"), row.default, row.meaning)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_notes()])


def _notes() -> list[str]:
    scorer = [
        f"- `{row.key}` ({row.takes}, {row.default}): {row.meaning}"
        for row in key_table(ScorerSection)
    ]
    return [
        "## Notes",
        "",
        "A scorer of `reward.scorers` has these keys; any other is passed to it as an option:",
        "",
        *scorer,
        "",
        "Truncated or penalised sampling (`top_p`, `top_k`, `min_p`, the penalties) is refused: it",
        "draws from another distribution than the one the trainer scores, and every importance",
        "ratio would carry the difference.",
        "",
    ]


def _section_doc(name: str) -> str:
    return (Recipe.model_fields[name].annotation.__doc__ or "").partition("\n")[0]


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
                return f"list of {'scorers' if _is_section(parts[0]) else name(parts[0])}"
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
