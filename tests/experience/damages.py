"""Ways to damage iteration 1 of a written run: bytes alone, or forged with hashes that fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megarl.contracts.hashes import contract_hash
from megarl.experience.columns import Part, read_columns, write_columns, write_lines
from megarl.experience.load import read_manifest
from megarl.experience.manifest import (
    DERIVED_FILE,
    MANIFEST_FILE,
    facts_of,
    iteration_folder,
    write_json,
)


def writable(run: Path, name: str) -> Path:
    path = iteration_folder(run, 1) / name
    path.chmod(0o644)
    return path


def flip(name: str, at: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = writable(run, name)
        body = bytearray(path.read_bytes())
        body[int(at * len(body))] ^= 0x10
        path.write_bytes(body)

    return change


def truncate(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(writable(run, name), writable(run, name).stat().st_size - 1)


def delete(name: str) -> Callable[[Path], None]:
    return lambda run: writable(run, name).unlink()


def swap_parts(run: Path) -> None:
    one, other = writable(run, "scored_0.safetensors"), writable(run, "scored_1.safetensors")
    body = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(body)


def from_another_iteration(name: str) -> Callable[[Path], None]:
    return lambda run: (
        writable(run, name).write_bytes((iteration_folder(run, 0) / name).read_bytes()) and None
    )


def edited(**change: object) -> Callable[[Path], None]:
    """Words of the manifest changed, no hash with them."""

    def edit(run: Path) -> None:
        path = writable(run, MANIFEST_FILE)
        told = json.loads(path.read_text()) | change
        path.write_text(json.dumps({k: v for k, v in told.items() if v is not ...}))

    return edit


def forged(name: str, change: Callable[[dict, dict], None]) -> Callable[[Path], None]:
    """A part rewritten, and every hash over it made to fit: only its columns can tell."""

    def forge(run: Path) -> None:
        folder = iteration_folder(run, 1)
        listing = DERIVED_FILE if name.startswith(("derived", "selection")) else MANIFEST_FILE
        told = json.loads((folder / listing).read_text())
        part = next(Part(**one) for one in told["parts"] if one["file"] == name)
        columns, metadata = read_columns(folder, part)
        columns = {key: value.copy() for key, value in columns.items()}
        change(columns, metadata)
        kind, index = metadata.pop("kind"), metadata.pop("index")
        new = write_columns(folder / name, kind, index, columns, metadata)
        told["parts"] = [asdict(new) if one["file"] == name else one for one in told["parts"]]
        relist(folder / listing, told)

    return forge


def relist(path: Path, told: dict, **header: object) -> None:
    """Write a manifest anew with hashes that fit what it lists."""
    if path.name == MANIFEST_FILE:
        old = read_manifest(path.parent).header
        facts = facts_of(replace(old, **header), [Part(**one) for one in told["parts"]])
        told |= facts | {"experience_hash": contract_hash(facts)}
    write_json(path, told)


def reheaded(**header: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = iteration_folder(run, 1) / MANIFEST_FILE
        relist(path, json.loads(path.read_text()), **header)

    return change


def relisted(change: Callable[[list[dict]], list[dict]]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = iteration_folder(run, 1) / MANIFEST_FILE
        told = json.loads(path.read_text())
        relist(path, told | {"parts": change(told["parts"])})

    return edit


def relined(file: str, kind: str, change: Callable[[list[dict]], list]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        folder = iteration_folder(run, 1)
        told = json.loads((folder / MANIFEST_FILE).read_text())
        lines = [json.loads(x) for x in (folder / file).read_text().split("\n") if x]
        new = asdict(write_lines(folder / file, kind, 0, change(lines)))
        told["parts"] = [new if one["kind"] == kind else one for one in told["parts"]]
        relist(folder / MANIFEST_FILE, told)

    return edit


def reprompted(change: Callable[[list[dict]], list]) -> Callable[[Path], None]:
    return relined("prompts.jsonl", "prompts", change)


def redrawn(**change: object) -> Callable[[Path], None]:
    """Words of `drawn.json` changed (`...`: left out; `cursor__seed`: the cursor's), all hashes
    made to fit."""

    def edit(lines: list[dict]) -> list[dict]:
        for name, value in change.items():
            *outer, key = name.split("__")
            told = lines[0]
            for word in outer:
                told = told[word]
            told[key] = value
            if value is ...:
                del told[key]
        return lines

    return relined("drawn.json", "drawn", edit)


def put(column: str, value: object, row: int = 0) -> Callable[[dict, dict], None]:
    def change(columns: dict, metadata: dict) -> None:
        columns[column][row] = value

    return change


def replaced(**change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict, dict], None]:
    def edit(columns: dict, metadata: dict) -> None:
        for name, make in change.items():
            columns[name] = make(columns[name])

    return edit


def without(column: str) -> Callable[[dict, dict], None]:
    return lambda columns, metadata: columns.pop(column) is None or None


def saying(**words: object) -> Callable[[dict, dict], None]:
    return lambda columns, metadata: metadata.update(words)


def first_twice(columns: dict, metadata: dict) -> None:
    columns["draw_index"][1] = columns["draw_index"][0]
    columns["candidate"][1] = columns["candidate"][0]


def without_row_0(columns: dict, metadata: dict) -> None:
    """The first row of a selection is left out."""
    for name in list(columns):
        columns[name] = columns[name][1:]


def longer_first(columns: dict, metadata: dict) -> None:
    columns["response_offsets"][1:] += 1
    for name in ("old_log_probs", "ref_log_probs", "values"):
        columns[name] = np.append(columns[name], columns[name][:1])
