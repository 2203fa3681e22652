"""Plants faults in a copy of a run: bytes alone, or with hashes made right as a forger would.

    forger.columns(1, "rollout_0", edit)    change a part, and nothing that vouches for it
    forger.reseal(1)                        its manifest and derived.json fit the files again
    forger.rechain()                        chain, journal, ledger and updates fit the manifests

What is left to find after `rechain` does not follow from the rest any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from megarl.contracts.hashes import canonical_json, contract_hash, file_hash
from megarl.experience.columns import encode_columns, encode_lines
from megarl.experience.manifest import experience_hash_of

Columns = dict[str, np.ndarray]
FIELDS = ("experience_hash", "derived_hash")
"""Of journal, ledger and updates: what they hold of sealed files."""


class Forger:
    def __init__(self, run: Path) -> None:
        self.run = run

    def folder(self, iteration: int) -> Path:
        return self.run / "experience" / f"iter_{iteration:06d}"

    def write(self, path: Path, body: bytes | str) -> None:
        path.unlink(missing_ok=True)  # sealed files are read-only
        path.write_bytes(body if isinstance(body, bytes) else body.encode())

    def read_columns(self, iteration: int, part: str) -> tuple[Columns, dict[str, Any]]:
        body = (self.folder(iteration) / f"{part}.safetensors").read_bytes()
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        columns = {name: np.array(column) for name, column in load(body).items()}
        return columns, json.loads(header["__metadata__"]["megarl"])

    def columns(
        self, iteration: int, part: str, edit: Callable[[Columns, dict[str, Any]], None]
    ) -> None:
        columns, metadata = self.read_columns(iteration, part)
        edit(columns, metadata)
        self.write_columns(iteration, part, columns, metadata)

    def write_columns(self, iteration: int, part: str, columns: Columns, told: dict) -> None:
        path = self.folder(iteration) / f"{part}.safetensors"
        encoded = encode_columns(path.name, told["kind"], told["index"], columns, told)
        self.write(path, b"".join(bytes(chunk) for chunk in encoded.chunks))

    def flip(self, iteration: int, part: str, column: str, bit: int = 0) -> None:
        """One bit of the first element of a column, in the file's own bytes."""
        path = self.folder(iteration) / f"{part}.safetensors"
        body = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:start])
        body[start + header[column]["data_offsets"][0]] ^= 1 << bit
        self.write(path, bytes(body))

    def json(self, path: Path, edit: Callable[[dict[str, Any]], None], indent: Any = None) -> None:
        told = json.loads(path.read_text())
        edit(told)
        self.write(path, json.dumps(told) if indent else canonical_json(told) + "\n")

    def manifest(self, iteration: int, edit: Callable[[dict[str, Any]], None]) -> None:
        self.json(self.folder(iteration) / "manifest.json", edit)

    def lines(self, file: str, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
        """`edit` changes the list in place, or returns another one."""
        path = self.run / file
        told = [json.loads(line) for line in path.read_text().splitlines()]
        edited = edit(told)
        told = edited if isinstance(edited, list) else told
        self.write(path, "".join(json.dumps(line) + "\n" for line in told))

    def prompts(self, iteration: int, edit: Callable[[list[dict[str, Any]]], None]) -> None:
        path = self.folder(iteration) / "prompts.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()]
        edit(told)
        self.write(path, "".join(canonical_json(line) + "\n" for line in told))

    def drawn(self, iteration: int, edit: Callable[[dict[str, Any]], None]) -> None:
        self.json(self.folder(iteration) / "drawn.json", edit)

    def reseal(self, iteration: int) -> None:
        folder = self.folder(iteration)

        def manifest(told: dict[str, Any]) -> None:
            told["parts"] = [self._part(iteration, part) for part in told["parts"]]
            told["contents"] = {part["file"]: part["content"] for part in told["parts"]}
            told["samples"] = sum(p["rows"] for p in told["parts"] if p["kind"] == "rollout")
            told["sampling_hash"] = contract_hash(told["sampling"])
            told["experience_hash"] = experience_hash_of(told)

        self.manifest(iteration, manifest)
        sealed = json.loads((folder / "manifest.json").read_text())["experience_hash"]

        def derived(told: dict[str, Any]) -> None:
            told["experience_hash"] = sealed
            for part in told["parts"]:
                name = part["file"].removesuffix(".safetensors")
                self.columns(iteration, name, lambda _, m: m.update(experience_hash=sealed))
            told["parts"] = [self._part(iteration, part) for part in told["parts"]]

        self.json(folder / "derived.json", derived)

    def _part(self, iteration: int, part: dict[str, Any]) -> dict[str, Any]:
        path, kind, index = self.folder(iteration) / part["file"], part["kind"], part["index"]
        if kind in ("prompts", "drawn"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            return asdict(encode_lines(path.name, kind, index, lines).part)
        columns, metadata = self.read_columns(iteration, path.stem)
        return asdict(encode_columns(path.name, kind, index, columns, metadata).part)

    def rechain(self) -> None:
        hashes: dict[int, tuple[str, str]] = {}
        previous = None
        for folder in sorted((self.run / "experience").glob("iter_*")):
            self.json(folder / "manifest.json", lambda told, p=previous: told.update(previous=p))
            previous = file_hash(folder / "manifest.json")
            told = json.loads((folder / "manifest.json").read_text())
            sealed = told["experience_hash"], file_hash(folder / "derived.json")
            hashes[int(folder.name.removeprefix("iter_"))] = sealed

        def fit(lines: list[dict[str, Any]]) -> None:
            for line in lines:
                if line["iteration"] in hashes:
                    told = zip(FIELDS, hashes[line["iteration"]], strict=True)
                    line.update((field, hash_) for field, hash_ in told if field in line)

        for file in ("journal.jsonl", "ledger.jsonl", "updates.jsonl"):
            self.lines(file, fit)

    def all_hashes(self, iteration: int) -> None:
        """As thorough a forger as there is, short of knowing what follows from what."""
        self.reseal(iteration)
        self.rechain()


def swap_rows(columns: Columns, names: tuple[str, ...], a: int, b: int) -> None:
    """Swap what rows `a` and `b` (of equal lengths) have in the named columns."""
    for name in names:
        column = columns[name]
        if len(column) == len(columns["draw_index"]):
            column[[a, b]] = column[[b, a]]
            continue
        offsets = columns["response_offsets"]
        one, other = slice(offsets[a], offsets[a + 1]), slice(offsets[b], offsets[b + 1])
        column[one], column[other] = column[other].copy(), column[one].copy()


def without_row(columns: Columns, row: int) -> Columns:
    """The columns without one row."""
    rows = len(columns["draw_index"])
    owners = {"prompt_ids": "prompt_offsets"}
    owners |= dict.fromkeys(("reward.step_token", "reward.step_value"), "reward.step_offsets")
    result: Columns = {}
    for name, column in columns.items():
        if name.endswith("_offsets"):
            lengths = np.delete(np.diff(column), row)
            result[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(column.dtype)
        elif len(column) == rows and name not in owners:
            result[name] = np.delete(column, row)
        else:
            offsets = columns[owners.get(name, "response_offsets")]
            result[name] = np.delete(column, slice(offsets[row], offsets[row + 1]))
    return result
