"""Whatever was changed in a sealed iteration is refused by file and field.

Damages of two sorts: bytes that no longer fit their hashes, and forged ones, where every hash was
made to fit and only what is in the columns can tell. Not covered: a forger who also makes the
columns fit each other, which only the run's other files can tell (the audit).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.experience.columns import SealError
from megarl.experience.load import load_iteration
from megarl.experience.manifest import DERIVED_FILE, MANIFEST_FILE
from tests.experience.damages import (
    delete,
    edited,
    first_twice,
    flip,
    forged,
    from_another_iteration,
    longer_first,
    put,
    redrawn,
    reheaded,
    relined,
    relisted,
    replaced,
    reprompted,
    saying,
    swap_parts,
    truncate,
    without,
    without_row_0,
    writable,
)
from tests.experience.make_facts import RECIPE, SCORER

STREAM = {"source": "a", "position": 3, "back": [1], "taken": 2, "stood_in": 0}
ROLLOUT, SCORED = "rollout_0.safetensors", "scored_1.safetensors"
SELECTION, DERIVED = "selection.safetensors", "derived_1.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped in a part": (flip(ROLLOUT, 0.9), f"{ROLLOUT}: its bytes are not those that"),
    "flipped in log-probs": (flip(SCORED, 0.95), f"{SCORED}: its bytes are not those that"),
    "flipped in what was derived": (flip(DERIVED, 0.9), f"{DERIVED}: its bytes are not those"),
    "flipped in the prompts": (flip("prompts.jsonl", 0.5), "prompts.jsonl: its bytes are not"),
    "truncated": (truncate(SCORED), rf"{SCORED}: \d+ bytes, \d+ were sealed"),
    "missing part": (delete(SCORED), f"{SCORED}: No such file or directory; the manifest lists"),
    "missing derived part": (delete(SELECTION), f"{SELECTION}: No such file"),
    "missing manifest": (delete(MANIFEST_FILE), "manifest.json: No such file.* never sealed"),
    "swapped parts": (swap_parts, "scored_0.safetensors: "),
    "another iteration's part": (from_another_iteration(ROLLOUT), f"{ROLLOUT}: "),
    "another iteration's manifest": (
        from_another_iteration(MANIFEST_FILE),
        "manifest.json: iteration is 0",
    ),
    "another iteration's derived.json": (
        from_another_iteration(DERIVED_FILE),
        "derived.json: experience_hash sha256:.* is another's",
    ),
    "cut manifest": (
        lambda run: os.truncate(writable(run, MANIFEST_FILE), 90),
        "manifest.json: not",
    ),
    "another format": (
        edited(format=1),
        "manifest.json: format 1, not format 2 of sealed experience; read it with the megarl that",
    ),
    "no format": (edited(format=...), "manifest.json: no format, not format 2 of sealed"),
    "a key is gone": (edited(previous=...), "manifest.json: not a manifest .*'previous'"),
    "parts are no parts": (edited(parts=[1]), "manifest.json: not a manifest of sealed"),
    "edited run": (edited(run_id="other"), "manifest.json: its experience_hash is not that"),
    "edited content": (edited(contents={}), "manifest.json: its contents are not those of"),
    "edited sampling hash": (
        edited(sampling_hash="sha256:0"),
        "manifest.json: its experience_hash is not that",
    ),
    "edited sampling": (edited(sampling={"n": 3}), "manifest.json: not a manifest of sealed"),
    "edited count": (edited(samples=1), "manifest.json: its experience_hash is not that"),
    "a part outside": (
        relisted(lambda parts: [one | {"file": "../" + one["file"]} for one in parts]),
        "the manifest lists '../.*', which is no file of it",
    ),
    "a part twice": (relisted(lambda parts: [*parts, parts[0]]), "manifest.json: lists a part"),
    "unlisted owner": (
        relisted(lambda parts: [one for one in parts if one["file"] != "scored_0.safetensors"]),
        r"the scored parts listed are \[1\], not 0",
    ),
    "unlisted prompts": (
        relisted(lambda parts: [one for one in parts if one["kind"] != "prompts"]),
        "0 prompts parts, one is sealed",
    ),
    "unlisted drawn": (
        relisted(lambda parts: [one for one in parts if one["kind"] != "drawn"]),
        "0 drawn parts, one is sealed",
    ),
    "other rows listed": (
        relisted(lambda parts: [one | {"rows": one["rows"] + 1} for one in parts]),
        r"prompts.jsonl: 8 lines, 9 were sealed",
    ),
    "other tokens listed": (
        relisted(lambda parts: [one | {"tokens": one["tokens"] + 1} for one in parts]),
        rf"{ROLLOUT}: its tokens is \d+, the manifest says \d+",
    ),
    "listed as another kind": (
        relisted(
            lambda parts: [
                one | {"kind": "rollout", "index": 2} if one["file"] == SCORED else one
                for one in parts
            ]
        ),
        f"{SCORED}: its kind is scored, the manifest says rollout",
    ),
    "other count": (reheaded(samples=3), r"\d+ samples, 3 were sealed"),
    "other scorer": (reheaded(scorer_version="s9"), f"{ROLLOUT}: scorer_version {SCORER}, the"),
    "other version": (
        reheaded(producers={"rollout": "v9", "old": "v9", "ref": "r0", "critic": "c0"}),
        f"{ROLLOUT}: version_id v0, the iteration's is v9",
    ),
    "no producer of ref": (
        reheaded(producers={"rollout": "v0", "old": "v0"}),
        "scored_0.safetensors: producers",
    ),
    "prompt without an id": (
        reprompted(lambda lines: [{"text": "a"}, *lines[1:]]),
        "prompts.jsonl: line 1 is no prompt",
    ),
    "prompt twice": (
        reprompted(lambda lines: [lines[0], lines[0], *lines[2:]]),
        "prompts.jsonl: a prompt_id is drawn twice",
    ),
    "flipped in drawn": (flip("drawn.json", 0.5), "drawn.json: its bytes are not those that"),
    "missing drawn": (delete("drawn.json"), "drawn.json: No such file or directory; the manifest"),
    "another iteration's drawn": (from_another_iteration("drawn.json"), "drawn.json: "),
    "drawn twice over": (
        relined("drawn.json", "drawn", lambda lines: lines * 2),
        "drawn.json: not how samples were drawn: ",
    ),
    "drawn is no object": (
        relined("drawn.json", "drawn", lambda lines: [7]),
        "drawn.json: not how samples were drawn: it is 7, not an object of cursor, joined, lost, r",
    ),
    "drawn lacks rounds": (
        redrawn(rounds=...),
        "drawn.json: not how .* not an object of cursor, j",
    ),
    "drawn says more": (redrawn(more=1), "drawn.json: not how .* not an object of cursor, joined"),
    "no round": (redrawn(rounds=0), "drawn.json: .*rounds is 0, not a whole number from 1"),
    "half a round": (redrawn(rounds=1.5), "drawn.json: .*rounds is 1.5, not a whole number from 1"),
    "a true round": (redrawn(rounds=True), "drawn.json: .*rounds is True, not a whole number"),
    "losses without reasons": (redrawn(lost=[1]), r"drawn.json: .*lost is \[1\], not counts by"),
    "a loss of none": (
        redrawn(lost={"aborted": 0}),
        "drawn.json: .*lost.aborted is 0, not a whole",
    ),
    "other losses": (
        redrawn(lost={"aborted": 9}),
        r"drawn.json: lost are {'aborted': 9}, but \d responses of 8 groups are missing",
    ),
    "late by a word": (redrawn(joined__late="1"), "drawn.json: .*joined.late is '1', not a whole"),
    "no duplicates": (redrawn(joined__duplicates=...), "drawn.json: .*joined is .* not an object"),
    "a cursor of words": (redrawn(cursor="end"), "drawn.json: .*cursor is 'end', not an object of"),
    "a cursor before 0": (redrawn(cursor__position=-1), "drawn.json: .*cursor.position is -1, not"),
    "a cursor of no data": (
        redrawn(cursor__fingerprint=None),
        "drawn.json: .*cursor.fingerprint is None, not of type str",
    ),
    "a cursor of no source": (
        redrawn(cursor={"fingerprint": "f", "seed": 7, "streams": [{}]}),
        r"drawn.json: .*cursor.streams\[0\] is {}, not an object of back, position, source",
    ),
    "a cursor of a source before 0": (
        redrawn(cursor={"fingerprint": "f", "seed": 7, "streams": [STREAM | {"taken": -1}]}),
        r"drawn.json: .*cursor.streams\[0\].taken is -1, not a whole number from 0",
    ),
    "a cursor of a source with words": (
        redrawn(cursor={"fingerprint": "f", "seed": 7, "streams": [STREAM | {"back": ["a"]}]}),
        r"drawn.json: .*cursor.streams\[0\].back is \['a'\], not numbers of rows",
    ),
    "a cursor of no seed": (
        redrawn(cursor__seed=1.0),
        "drawn.json: .*cursor.seed is 1.0, not of ty",
    ),
    "rows that step back to nowhere": (
        redrawn(cursor__back=["a"]),
        r"drawn.json: .*cursor.back is \['a'\], not numbers of rows",
    ),
    "too few prompts": (reprompted(lambda lines: lines[:3]), "draw_index beyond the 3 prompts"),
    "column gone": (forged(ROLLOUT, without("seed")), f"{ROLLOUT}: seed is missing"),
    "column unknown": (
        forged(SCORED, lambda columns, _: columns.update(other=np.zeros(1))),
        f"{SCORED}: other is no column of a scored part",
    ),
    "column of another dtype": (
        forged(SCORED, replaced(old_log_probs=lambda x: x.astype(np.float64))),
        rf"{SCORED}: old_log_probs is float64\(\d+,\), not float32",
    ),
    "column too short": (
        forged(ROLLOUT, replaced(**{"reward.total": lambda x: x[1:]})),
        f"{ROLLOUT}: reward.total is float64",
    ),
    "offsets fall": (
        forged(ROLLOUT, put("response_offsets", 10**6, 1)),
        f"{ROLLOUT}: response_offsets must rise from 0",
    ),
    "sample twice": (forged(ROLLOUT, first_twice), f"{ROLLOUT}: draw_index, candidate: sample"),
    "status unknown": (
        forged(ROLLOUT, put("reward.status", 9)),
        f"{ROLLOUT}: reward.status has values",
    ),
    "reward without a number": (
        forged(ROLLOUT, replaced(**{"reward.total": lambda x: np.full_like(x, np.nan)})),
        f"{ROLLOUT}: reward.total must be a finite number exactly where",
    ),
    "detail unknown": (forged(ROLLOUT, saying(details=[])), f"{ROLLOUT}: no samples with rewards"),
    "positive log-prob": (
        forged(ROLLOUT, put("rollout_log_probs", 1.0)),
        f"{ROLLOUT}: no samples with rewards: rollout log-probs must be finite numbers ≤ 0",
    ),
    "a sample of two replicas": (
        forged(
            "rollout_1.safetensors",
            lambda columns, _: columns.update(
                draw_index=np.zeros_like(columns["draw_index"]),
                candidate=np.arange(len(columns["candidate"]), dtype=np.int32),
            ),
        ),
        f"rollout_1.safetensors: samples .* are in {ROLLOUT} too",
    ),
    "an owner of an unknown sample": (
        forged(SCORED, put("draw_index", 99, -1)),
        f"{SCORED}: samples 99/. that nobody generated",
    ),
    "other lengths": (
        forged(SCORED, longer_first),
        f"{SCORED}: response_offsets of samples ./. are not those of their responses",
    ),
    "ref of one owner only": (
        forged(SCORED, without("ref_log_probs")),
        f"{SCORED}: ref_log_probs is missing, other owners have it",
    ),
    "values of one owner only": (
        forged(SCORED, lambda columns, _: [columns.pop(n) for n in ("values", "last_values")]),
        f"{SCORED}: values is missing, other owners have it",
    ),
    "no values after the last token": (
        forged(SCORED, without("last_values")),
        f"{SCORED}: values and last_values are not both there",
    ),
    "values of another length": (
        forged(SCORED, replaced(last_values=lambda x: x[1:])),
        rf"{SCORED}: last_values is float32\(\d+,\), not float32",
    ),
    "flipped in values": (flip(SCORED, 0.999), f"{SCORED}: its bytes are not those that"),
    "another weight of the KL term": (
        forged(DERIVED, saying(kl_beta=0.5)),
        f"{DERIVED}: kl_beta 0.5, the iteration's is 0",
    ),
    "a selection of fewer samples": (
        forged(SELECTION, without_row_0),
        f"{SELECTION}: draw_index, candidate are of other samples",
    ),
    "a verdict unknown": (forged(SELECTION, put("verdict", 99)), f"{SELECTION}: verdict has"),
    "trained without an owner": (
        forged(SELECTION, replaced(minibatch=np.zeros_like)),
        f"{SELECTION}: samples .* trained and have no owner",
    ),
    "derived under another recipe": (
        forged(DERIVED, saying(recipe_hash="sha256:x")),
        f"{DERIVED}: recipe_hash sha256:x, the iteration's is {RECIPE}",
    ),
    "no advantages": (forged(DERIVED, without("advantages")), f"{DERIVED}: advantages is missing"),
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
