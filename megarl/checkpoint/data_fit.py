"""In what a set of prompts is another than the one a position was made with. Plain Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.contracts.hashes import short_id
from megarl.observe.runfolder import DATA_FILE

Facts = Mapping[str, Any]
"""As `PromptSet.facts` gives them and `data.json` has them, `held_out` beside."""
NAMES = {"data": None, "eval_data": "held_out"}
"""Contract → the key of `data.json` under which its set is told of; None: on its own."""


def stored_facts(run_folder: Path, contract: str, fingerprint: str) -> Facts | None:
    """What the run in `run_folder` told of its set with this fingerprint, in its `data.json` or one
    that a resume set aside; None where none tells of it."""
    for path in (run_folder / DATA_FILE, *run_folder.glob(f"resumes/*/{DATA_FILE}")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it only serves to say more than the hashes do
            continue
        facts = set_of(told, contract)
        if facts is not None and facts.get("fingerprint") == fingerprint:
            return facts
    return None


def set_of(told: Any, contract: str) -> Facts | None:
    """The facts of the set that `contract` is about."""
    key = NAMES[contract]
    facts = told if key is None or not isinstance(told, dict) else told.get(key)
    return facts if isinstance(facts, dict) and isinstance(facts.get("sources"), dict) else None


def as_words(old: Facts, new: Facts) -> tuple[str, str] | None:
    """What was and what is, of two sets with different fingerprints; None where `old`, from a file
    that anybody may have edited, has not the form of facts."""
    try:
        return _words(old, new)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _words(old: Facts, new: Facts) -> tuple[str, str]:
    pairs = [*_sources(old["sources"], new["sources"]), *_weights(old["sources"], new["sources"])]
    if old.get("template") != new.get("template"):
        pairs.append(
            tuple(f"template {short_id(str(each.get('template')))}" for each in (old, new))
        )
    if not pairs:
        before, after = (short_id(str(each["fingerprint"])) for each in (old, new))
        return before, f"{after} (other contents; sources and their counts of rows are the same)"
    return ", ".join(was for was, _ in pairs), ", ".join(now for _, now in pairs)


def _sources(old: Facts, new: Facts) -> list[tuple[str, str]]:
    """Names in their order, and counts of rows."""
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    if [old[name]["rows"] for name in gone] != [new[name]["rows"] for name in come]:
        return [(_counted(old, list(old)), _counted(new, list(new)))]
    pairs = []
    if gone:
        names = ", ".join(f"`name: {name}`" for name in gone)
        pairs.append((_called(gone), f"{_called(come)} (of as many rows: give it {names})"))
    elif list(old) != list(new):
        pairs.append((_called(list(old)), f"{_called(list(new))} in this order"))
    other = [name for name in old if name in new and old[name]["rows"] != new[name]["rows"]]
    if other:
        pairs.append((_counted(old, other), _counted(new, other)))
    return pairs


def _called(names: list[str]) -> str:
    return f"source{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _counted(sources: Facts, names: list[str]) -> str:
    return " + ".join(f"{sources[name]['rows']} rows of {name}" for name in names)


def _weights(old: Facts, new: Facts) -> list[tuple[str, str]]:
    """Of sources as they are declared: only their shares count, but the numbers are what is set."""
    told = [[each.get("weight") for each in sources.values()] for sources in (old, new)]
    words = ["none" if None in each else ":".join(f"{w:g}" for w in each) for each in told]
    if words[0] == words[1]:
        return []
    return [(f"weights {words[0]}", f"weights {words[1]}")]
