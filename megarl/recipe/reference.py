"""The recipe's keys as text: the table of `--help` and docs/recipe.md."""

from __future__ import annotations

import textwrap

from megarl.recipe.differences import FREE_ON_RESUME
from megarl.recipe.keys import key_table
from megarl.recipe.learning import ScorerSection
from megarl.recipe.schema import Recipe
from megarl.recipe.sections import RESUME_CONTENTS

COMMAND = "python -m megarl.recipe --reference > docs/recipe.md"


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
        "- A section given as nothing (`critic=`, `algorithm.gae:`) has its defaults again.",
        "- `{seed}` in `run.name`, `run.folder`, `model.path`, `data.train`, `data.eval`,",
        "  `critic.path`, `reference.path` and `resume.from` is the seed.",
        "  Paths are relative to the folder the command is started in.",
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
        *_resume_note(),
    ]


def _resume_note() -> list[str]:
    free = ", ".join(f"`{name}`" for name in FREE_ON_RESUME)
    paragraphs = (
        "A run that is resumed may change these keys, and all keys of these sections: "
        f"{free}; but `run.iterations` only while `actor.lr_schedule` is constant.",
        "Where any other key differs, the run is refused with old and new value, unless "
        "`resume.allow` names that key. What the run was made with is compared too, by content; "
        f"there `resume.allow` knows the names {', '.join(RESUME_CONTENTS)}.",
    )
    return [
        line
        for text in paragraphs
        for line in (
            *textwrap.wrap(text, 96, break_on_hyphens=False, break_long_words=False),
            "",
        )
    ]


def _section_doc(name: str) -> str:
    return (Recipe.model_fields[name].annotation.__doc__ or "").partition("\n")[0]
