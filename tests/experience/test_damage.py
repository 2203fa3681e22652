"""Whatever was changed in a sealed iteration is refused by file and field.

Damages of two sorts: bytes that no longer fit their hashes, and forged ones, where every hash was
made to fit and only what is in the columns can tell. Not covered: a forger who also makes the
columns fit each other, which only the run's other files can tell (the audit).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.contracts.hashes import contract_hash
from megarl.experience.columns import Part, SealError, read_columns, write_columns, write_lines
from megarl.experience.load import load_iteration, read_manifest
from megarl.experience.manifest import (
    DERIVED_FILE,
    MANIFEST_FILE,
    facts_of,
    iteration_folder,
    write_json,
)
from tests.experience.make_facts import RECIPE, SCORER


def _file(run: Path, name: str) -> Path:
    path = iteration_folder(run, 1) / name
    path.chmod(0o644)
    return path


def _flip(name: str, at: float) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = _file(run, name)
        body = bytearray(path.read_bytes())
        body[int(at * len(body))] ^= 0x10
        path.write_bytes(body)

    return change


def _truncate(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(_file(run, name), _file(run, name).stat().st_size - 1)


def _delete(name: str) -> Callable[[Path], None]:
    return lambda run: _file(run, name).unlink()


def _swap(run: Path) -> None:
    one, other = _file(run, "scored_0.safetensors"), _file(run, "scored_1.safetensors")
    body = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(body)


def _from_another_iteration(name: str) -> Callable[[Path], None]:
    return lambda run: (
        _file(run, name).write_bytes((iteration_folder(run, 0) / name).read_bytes()) and None
    )


def _manifest(**change: object) -> Callable[[Path], None]:
    """Words of the manifest changed, no hash with them."""

    def edit(run: Path) -> None:
        path = _file(run, MANIFEST_FILE)
        told = json.loads(path.read_text()) | change
        path.write_text(json.dumps({k: v for k, v in told.items() if v is not ...}))

    return edit


def _forged(name: str, change: Callable[[dict, dict], None]) -> Callable[[Path], None]:
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
        _relist(folder / listing, told)

    return forge


def _relist(path: Path, told: dict, **header: object) -> None:
    """Write a manifest anew with hashes that fit what it lists."""
    if path.name == MANIFEST_FILE:
        old = read_manifest(path.parent).header
        facts = facts_of(replace(old, **header), [Part(**one) for one in told["parts"]])
        told |= facts | {"experience_hash": contract_hash(facts)}
    write_json(path, told)


def _reheaded(**header: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = iteration_folder(run, 1) / MANIFEST_FILE
        _relist(path, json.loads(path.read_text()), **header)

    return change


def _relisted(change: Callable[[list[dict]], list[dict]]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = iteration_folder(run, 1) / MANIFEST_FILE
        told = json.loads(path.read_text())
        _relist(path, told | {"parts": change(told["parts"])})

    return edit


def _prompts(change: Callable[[list[dict]], list]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        folder = iteration_folder(run, 1)
        told = json.loads((folder / MANIFEST_FILE).read_text())
        lines = [json.loads(x) for x in (folder / "prompts.jsonl").read_text().split("\n") if x]
        new = asdict(write_lines(folder / "prompts.jsonl", "prompts", 0, change(lines)))
        told["parts"] = [new if one["kind"] == "prompts" else one for one in told["parts"]]
        _relist(folder / MANIFEST_FILE, told)

    return edit


def _set(column: str, value: object, row: int = 0) -> Callable[[dict, dict], None]:
    def change(columns: dict, metadata: dict) -> None:
        columns[column][row] = value

    return change


def _replace(**change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict, dict], None]:
    def edit(columns: dict, metadata: dict) -> None:
        for name, make in change.items():
            columns[name] = make(columns[name])

    return edit


def _drop(column: str) -> Callable[[dict, dict], None]:
    return lambda columns, metadata: columns.pop(column) is None or None


def _say(**words: object) -> Callable[[dict, dict], None]:
    return lambda columns, metadata: metadata.update(words)


def _first_twice(columns: dict, metadata: dict) -> None:
    columns["draw_index"][1] = columns["draw_index"][0]
    columns["candidate"][1] = columns["candidate"][0]


def _without_row_0(columns: dict, metadata: dict) -> None:
    """The first row of a selection is left out."""
    for name in list(columns):
        columns[name] = columns[name][1:]


def _longer_first(columns: dict, metadata: dict) -> None:
    columns["response_offsets"][1:] += 1
    for name in ("old_log_probs", "ref_log_probs"):
        columns[name] = np.append(columns[name], columns[name][:1])


ROLLOUT, SCORED = "rollout_0.safetensors", "scored_1.safetensors"
SELECTION, DERIVED = "selection.safetensors", "derived_1.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped in a part": (_flip(ROLLOUT, 0.9), f"{ROLLOUT}: its bytes are not those that"),
    "flipped in log-probs": (_flip(SCORED, 0.95), f"{SCORED}: its bytes are not those that"),
    "flipped in what was derived": (_flip(DERIVED, 0.9), f"{DERIVED}: its bytes are not those"),
    "flipped in the prompts": (_flip("prompts.jsonl", 0.5), "prompts.jsonl: its bytes are not"),
    "truncated": (_truncate(SCORED), rf"{SCORED}: \d+ bytes, \d+ were sealed"),
    "missing part": (_delete(SCORED), f"{SCORED}: No such file or directory; the manifest lists"),
    "missing derived part": (_delete(SELECTION), f"{SELECTION}: No such file"),
    "missing manifest": (_delete(MANIFEST_FILE), "manifest.json: No such file.* never sealed"),
    "swapped parts": (_swap, "scored_0.safetensors: "),
    "another iteration's part": (_from_another_iteration(ROLLOUT), f"{ROLLOUT}: "),
    "another iteration's manifest": (
        _from_another_iteration(MANIFEST_FILE),
        "manifest.json: iteration is 0",
    ),
    "another iteration's derived.json": (
        _from_another_iteration(DERIVED_FILE),
        "derived.json: experience_hash sha256:.* is another's",
    ),
    "cut manifest": (lambda run: os.truncate(_file(run, MANIFEST_FILE), 90), "manifest.json: not"),
    "another format": (_manifest(format=99), "manifest.json: not format 1 of sealed experience"),
    "a key is gone": (_manifest(previous=...), "manifest.json: not a manifest .*'previous'"),
    "parts are no parts": (_manifest(parts=[1]), "manifest.json: not a manifest of sealed"),
    "edited run": (_manifest(run_id="other"), "manifest.json: its experience_hash is not that"),
    "edited content": (_manifest(contents={}), "manifest.json: its contents are not those of"),
    "edited sampling hash": (
        _manifest(sampling_hash="sha256:0"),
        "manifest.json: its experience_hash is not that",
    ),
    "edited sampling": (_manifest(sampling={"n": 3}), "manifest.json: not a manifest of sealed"),
    "edited count": (_manifest(samples=1), "manifest.json: its experience_hash is not that"),
    "a part outside": (
        _relisted(lambda parts: [one | {"file": "../" + one["file"]} for one in parts]),
        "the manifest lists '../.*', which is no file of it",
    ),
    "a part twice": (_relisted(lambda parts: [*parts, parts[0]]), "manifest.json: lists a part"),
    "unlisted owner": (
        _relisted(lambda parts: [one for one in parts if one["file"] != "scored_0.safetensors"]),
        r"the scored parts listed are \[1\], not 0",
    ),
    "unlisted prompts": (
        _relisted(lambda parts: [one for one in parts if one["kind"] != "prompts"]),
        "0 lists of prompts, one is sealed",
    ),
    "other rows listed": (
        _relisted(lambda parts: [one | {"rows": one["rows"] + 1} for one in parts]),
        r"prompts.jsonl: 8 lines, 9 were sealed",
    ),
    "other tokens listed": (
        _relisted(lambda parts: [one | {"tokens": one["tokens"] + 1} for one in parts]),
        rf"{ROLLOUT}: its tokens is \d+, the manifest says \d+",
    ),
    "listed as another kind": (
        _relisted(
            lambda parts: [
                one | {"kind": "rollout", "index": 2} if one["file"] == SCORED else one
                for one in parts
            ]
        ),
        f"{SCORED}: its kind is scored, the manifest says rollout",
    ),
    "other count": (_reheaded(samples=3), r"\d+ samples, 3 were sealed"),
    "other scorer": (_reheaded(scorer_version="s9"), f"{ROLLOUT}: scorer_version {SCORER}, the"),
    "other version": (
        _reheaded(producers={"rollout": "v9", "old": "v9", "ref": "r0"}),
        f"{ROLLOUT}: version_id v0, the iteration's is v9",
    ),
    "no producer of ref": (
        _reheaded(producers={"rollout": "v0", "old": "v0"}),
        "scored_0.safetensors: producers",
    ),
    "prompt without an id": (
        _prompts(lambda lines: [{"text": "a"}, *lines[1:]]),
        "prompts.jsonl: line 1 is no prompt",
    ),
    "prompt twice": (
        _prompts(lambda lines: [lines[0], lines[0], *lines[2:]]),
        "prompts.jsonl: a prompt_id is drawn twice",
    ),
    "too few prompts": (_prompts(lambda lines: lines[:3]), "draw_index beyond the 3 prompts"),
    "column gone": (_forged(ROLLOUT, _drop("seed")), f"{ROLLOUT}: seed is missing"),
    "column unknown": (
        _forged(SCORED, lambda columns, _: columns.update(other=np.zeros(1))),
        f"{SCORED}: other is no column of a scored part",
    ),
    "column of another dtype": (
        _forged(SCORED, _replace(old_log_probs=lambda x: x.astype(np.float64))),
        rf"{SCORED}: old_log_probs is float64\(\d+,\), not float32",
    ),
    "column too short": (
        _forged(ROLLOUT, _replace(**{"reward.total": lambda x: x[1:]})),
        f"{ROLLOUT}: reward.total is float64",
    ),
    "offsets fall": (
        _forged(ROLLOUT, _set("response_offsets", 10**6, 1)),
        f"{ROLLOUT}: response_offsets must rise from 0",
    ),
    "sample twice": (_forged(ROLLOUT, _first_twice), f"{ROLLOUT}: draw_index, candidate: sample"),
    "status unknown": (
        _forged(ROLLOUT, _set("reward.status", 9)),
        f"{ROLLOUT}: reward.status has values",
    ),
    "reward without a number": (
        _forged(ROLLOUT, _replace(**{"reward.total": lambda x: np.full_like(x, np.nan)})),
        f"{ROLLOUT}: reward.total must be a finite number exactly where",
    ),
    "detail unknown": (_forged(ROLLOUT, _say(details=[])), f"{ROLLOUT}: no samples with rewards"),
    "positive log-prob": (
        _forged(ROLLOUT, _set("rollout_log_probs", 1.0)),
        f"{ROLLOUT}: no samples with rewards: rollout log-probs must be finite numbers ≤ 0",
    ),
    "a sample of two replicas": (
        _forged(
            "rollout_1.safetensors",
            lambda columns, _: columns.update(
                draw_index=np.zeros_like(columns["draw_index"]),
                candidate=np.arange(len(columns["candidate"]), dtype=np.int32),
            ),
        ),
        f"rollout_1.safetensors: samples .* are in {ROLLOUT} too",
    ),
    "an owner of an unknown sample": (
        _forged(SCORED, _set("draw_index", 99, -1)),
        f"{SCORED}: samples 99/. that nobody generated",
    ),
    "other lengths": (
        _forged(SCORED, _longer_first),
        f"{SCORED}: response_offsets of samples ./. are not those of their responses",
    ),
    "ref of one owner only": (
        _forged(SCORED, _drop("ref_log_probs")),
        f"{SCORED}: ref_log_probs is missing, other owners have it",
    ),
    "a selection of fewer samples": (
        _forged(SELECTION, _without_row_0),
        f"{SELECTION}: draw_index, candidate are of other samples",
    ),
    "a verdict unknown": (_forged(SELECTION, _set("verdict", 99)), f"{SELECTION}: verdict has"),
    "trained without an owner": (
        _forged(SELECTION, _replace(minibatch=np.zeros_like)),
        f"{SELECTION}: samples .* trained and have no owner",
    ),
    "derived under another recipe": (
        _forged(DERIVED, _say(recipe_hash="sha256:x")),
        f"{DERIVED}: recipe_hash sha256:x, the iteration's is {RECIPE}",
    ),
    "no advantages": (_forged(DERIVED, _drop("advantages")), f"{DERIVED}: advantages is missing"),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_changed_is_refused_by_file_and_field(run: Path, name: str) -> None:
    change, expected = DAMAGES[name]
    load_iteration(run, 1)
    change(run)
    with pytest.raises(SealError, match=expected) as caught:
        load_iteration(run, 1)
    assert "\n" not in str(caught.value) and str(run) in str(caught.value)
    load_iteration(run, 0)
