"""Checks of a sealed iteration's samples, row by row, on the columns as they lie in the files.

Rows are named by their sample id. Columns of a part: N rows, R response tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from megarl.audit.check_contracts import tokenizer_folder
from megarl.audit.check_run import CLOCK_TOLERANCE_SECONDS
from megarl.audit.findings import Found
from megarl.audit.view import IterationView, RawPart
from megarl.contracts.samples import EndReason
from megarl.experience.manifest import MANIFEST_FILE
from megarl.experience.part_columns import check_columns
from megarl.rollout.requests import request_seed


def columns(view: IterationView) -> Iterator[Found]:
    """Every column is there, of its dtype and length; offsets rise from 0; rows lie in canonical
    order; a total is a number exactly where the status is ok."""
    for raw in view.rollouts + view.scored:
        try:
            check_columns(raw.part.kind, raw.columns)
        except ValueError as error:
            yield Found(view.file(raw.part.file), str(error))


def ids(view: IterationView) -> Iterator[Found]:
    """No two records have one id; every id is of a drawn prompt and a candidate that was asked
    for; no prompt is drawn twice; trainer's rows are rows that were sampled."""
    group_size = view.facts_recipe.rollout.group_size
    names = Counter(prompt.get("prompt_id") for prompt in view.prompts)
    for name, count in names.items():
        if count > 1:
            yield Found(view.file("prompts.jsonl"), f"prompt {name} drawn {count} times")
    for raw in view.rollouts + view.scored:
        if not {"draw_index", "candidate"} <= raw.columns.keys():
            yield Found(view.file(raw.part.file), "is missing", field="draw_index, candidate")
            return
    first: dict[tuple[int, int], str] = {}
    for raw in view.rollouts:
        for pair in _pairs(raw):
            sample = view.sample_id(*pair)
            if pair in first:
                what = f"two records with this id, the other is in {first[pair]}"
                yield Found(view.file(raw.part.file), what, sample, "candidate")
            first.setdefault(pair, raw.part.file)
            if not 0 <= pair[0] < len(view.prompts):
                what = f"draw index beyond the {len(view.prompts)} prompts"
                yield Found(view.file(raw.part.file), what, sample, "draw_index")
            if not 0 <= pair[1] < group_size:
                what = f"candidate beyond the group size of {group_size}"
                yield Found(view.file(raw.part.file), what, sample, "candidate")
    scored: set[tuple[int, int]] = set()
    for raw in view.scored:
        for pair in _pairs(raw):
            if pair in scored or pair not in first:
                what = "scored twice" if pair in scored else "scored, but never sampled"
                yield Found(view.file(raw.part.file), what, view.sample_id(*pair), "candidate")
            scored.add(pair)


def groups(view: IterationView) -> Iterator[Found]:
    """Every drawn prompt has its whole group, but for what the ledger calls lost; all of a group
    answer the very same prompt ids."""
    group_size = view.facts_recipe.rollout.group_size
    prompts: dict[int, tuple[bytes, str]] = {}
    present: Counter[int] = Counter()
    for raw in view.rollouts:
        held = raw.columns
        for row, (draw, candidate) in enumerate(_pairs(raw)):
            present[draw] += 1
            at = slice(held["prompt_offsets"][row], held["prompt_offsets"][row + 1])
            told = held["prompt_ids"][at].tobytes(), view.sample_id(draw, candidate)
            first = prompts.setdefault(draw, told)
            if first[0] != told[0]:
                what = f"other prompt ids than {first[1]} of its group"
                yield Found(view.file(raw.part.file), what, told[1], "prompt_ids")
    lost = sum(line["lost"] for line in view.run.ledger.of(view.number))
    missing = {
        draw: group_size - present[draw]
        for draw in range(len(view.prompts))
        if present[draw] < group_size
    }
    if sum(missing.values()) != lost:
        draw = min(missing, default=None)
        group = "" if draw is None else view.sample_id(draw, 0).rpartition("/")[0]
        what = f"{sum(missing.values())} samples of groups are missing, the ledger lost {lost}"
        yield Found(view.file(MANIFEST_FILE), what + (f"; first in group {group}" * bool(group)))


def tokens(view: IterationView) -> Iterator[Found]:
    """Ids lie in the vocabulary, lengths within the recipe's, masks let something train."""
    vocabulary = view.run.tokens_in(tokenizer_folder(view.run, view.number)).vocab_size
    recipe = view.facts_recipe
    limits = (
        ("prompt", recipe.data.max_prompt_tokens),
        ("response", recipe.rollout.max_response_tokens),
    )
    for raw in view.rollouts:
        held = raw.columns
        for name, longest in limits:
            offsets, flat = held[f"{name}_offsets"], held[f"{name}_ids"]
            for row in np.flatnonzero(np.diff(offsets) > longest).tolist():
                what = f"{offsets[row + 1] - offsets[row]} tokens, the recipe allows {longest}"
                yield _row(view, raw, row, what, f"{name}_ids")
            outside = (flat < 0) | (flat >= vocabulary)
            for row, token in _per_row(outside, offsets):
                what = f"token {token} is id {flat[offsets[row] + token]}, the vocabulary has"
                yield _row(view, raw, row, f"{what} {vocabulary}", f"{name}_ids")
        offsets, mask = held["response_offsets"], held["action_mask"]
        # The first sampled token is an action; single-turn responses have no observations at all.
        for row, token in _per_row(~mask, offsets):
            yield _row(view, raw, row, f"token {token} is no action", "action_mask")


def seeds(view: IterationView) -> Iterator[Found]:
    """Every sample was drawn with the seed that run seed, iteration, prompt and candidate give."""
    run_seed = view.manifest.header.sampling.seed
    for raw in view.rollouts:
        told = raw.columns["seed"].tolist()
        for row, (draw, candidate) in enumerate(_pairs(raw)):
            if not 0 <= draw < len(view.prompts):
                continue  # `ids` tells it
            name = view.prompts[draw]["prompt_id"]
            wanted = request_seed(run_seed, view.number, name, candidate)
            if told[row] != wanted:
                yield _row(view, raw, row, f"seed {told[row]}, expected {wanted}", "seed")


def ends(view: IterationView) -> Iterator[Found]:
    """How a response ended is what its tokens say: a stop id last and nowhere before, or as many
    tokens as were allowed."""
    sampling = view.manifest.header.sampling
    stops = np.array(sampling.stop_token_ids)
    for raw in view.rollouts:
        held, offsets = raw.columns, raw.columns["response_offsets"]
        is_stop = np.isin(held["response_ids"], stops)
        last = np.zeros(len(is_stop), dtype=bool)
        last[offsets[1:] - 1] = True
        for row, token in _per_row(is_stop & ~last, offsets):
            yield _row(view, raw, row, f"goes on after stop id at token {token}", "response_ids")
        for row, reason in enumerate(held["end_reason"].tolist()):
            length = int(offsets[row + 1] - offsets[row])
            ended = bool(is_stop[offsets[row + 1] - 1])
            if reason not in iter(EndReason):
                yield _row(view, raw, row, f"{reason} is no reason", "end_reason")
            elif reason in (EndReason.EOS, EndReason.STOP) and not ended:
                yield _row(view, raw, row, "ended by itself, its last id is no stop", "end_reason")
            elif reason == EndReason.MAX_TOKENS and length != sampling.max_response_tokens:
                what = f"cut off at {length} of {sampling.max_response_tokens} tokens"
                yield _row(view, raw, row, what, "end_reason")


def clocks(view: IterationView) -> Iterator[Found]:
    """Each sample started before it finished, after GENERATING and before the seal; the seal lies
    between the journal's PREPARING and EXPERIENCE_SEALED. Clocks may differ by a second."""
    slack, sealed_at = CLOCK_TOLERANCE_SECONDS, view.manifest.sealed_at
    generating = view.run.journal_line("GENERATING", view.number)
    for raw in view.rollouts:
        started, finished = raw.columns["started"], raw.columns["finished"]
        for row in np.flatnonzero(~(started <= finished)).tolist():
            what = f"finished {started[row] - finished[row]:.3f} s before it started"
            yield _row(view, raw, row, what, "finished")
        for row in np.flatnonzero(finished > sealed_at + slack).tolist():
            what = f"finished {finished[row] - sealed_at:.3f} s after it was sealed"
            yield _row(view, raw, row, what, "finished")
        if generating is not None:
            for row in np.flatnonzero(started < generating["time"] - slack).tolist():
                what = f"started {generating['time'] - started[row]:.3f} s before GENERATING"
                yield _row(view, raw, row, what, "started")
    for state, sign in (("PREPARING", 1), ("EXPERIENCE_SEALED", -1)):
        line = view.run.journal_line(state, view.number)
        if line is not None and (line["time"] - sealed_at) * sign > slack:
            word = "before" if sign > 0 else "after"
            what = f"{abs(line['time'] - sealed_at):.3f} s {word} {state} ({line.where})"
            yield Found(view.file(MANIFEST_FILE), f"sealed {what}", field="sealed_at")


def _pairs(raw: RawPart) -> list[tuple[int, int]]:
    draws, candidates = raw.columns["draw_index"].tolist(), raw.columns["candidate"].tolist()
    return list(zip(draws, candidates, strict=True))


def _row(view: IterationView, raw: RawPart, row: int, what: str, field: str) -> Found:
    draw, candidate = raw.columns["draw_index"][row], raw.columns["candidate"][row]
    sample = view.sample_id(int(draw), int(candidate))
    return Found(view.file(raw.part.file), what, sample, field)


def _per_row(wrong: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """(row, token within it) of the first wrong token of each row; `wrong` is bool [tokens]."""
    at = np.flatnonzero(wrong)
    rows = np.searchsorted(offsets, at, side="right") - 1
    for row, first in zip(*np.unique(rows, return_index=True), strict=True):
        yield int(row), int(at[first] - offsets[row])
