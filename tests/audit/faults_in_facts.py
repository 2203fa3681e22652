"""Faults in sealed facts and in what was derived, with every hash above them made right."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

import numpy as np

from megarl.audit.view import open_run
from megarl.rollout.selection import VERDICTS, Verdict
from tests.audit.fault import fault
from tests.audit.forge import Forger, swap_rows, without_row


@fault("parity", "old_log_probs")
def responses_swapped_between_two_samples(forger: Forger) -> None:
    names = ("response_ids", "rollout_log_probs", "end_reason")
    _swapped(forger, names)


@fault("seeds", "seed")
def seeds_swapped_between_two_samples(forger: Forger) -> None:
    _swapped(forger, ("seed",))


@fault("columns", "out of order")
def samples_out_of_order(forger: Forger) -> None:
    _swapped(forger, ("draw_index", "candidate"))


def _swapped(forger: Forger, names: tuple[str, ...]) -> None:
    """Between two trained samples of one length and other log-probs, of one replica."""
    scored, _ = forger.read_columns(1, "scored_0")
    trained = set(zip(scored["draw_index"].tolist(), scored["candidate"].tolist(), strict=True))
    for part in ("rollout_0", "rollout_1"):
        columns, metadata = forger.read_columns(1, part)
        lengths = np.diff(columns["response_offsets"])
        pairs = zip(columns["draw_index"].tolist(), columns["candidate"].tolist(), strict=True)
        rows = [row for row, pair in enumerate(pairs) if pair in trained]
        for a, b in combinations(rows, 2):
            if lengths[a] == lengths[b] and _log_prob_gap(columns, a, b) > 0.01:
                swap_rows(columns, names, a, b)
                forger.write_columns(1, part, columns, metadata)
                forger.all_hashes(1)
                return
    raise AssertionError("no two trained samples of one length that differ")


def _log_prob_gap(columns: dict, a: int, b: int) -> float:
    at, flat = columns["response_offsets"], columns["rollout_log_probs"]
    return float(np.abs(flat[at[a] : at[a + 1]] - flat[at[b] : at[b + 1]]).max())


@fault("ids", "two records with this id")
def two_records_with_one_id(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["candidate"].__setitem__(1, 0))
    forger.all_hashes(1)


@fault("ids", "two records with this id")
def a_sample_that_two_replicas_made(forger: Forger) -> None:
    other, _ = forger.read_columns(1, "rollout_1")
    pair = other["draw_index"][0], other["candidate"][0]

    def edit(columns: dict, _: dict) -> None:
        columns["draw_index"][0], columns["candidate"][0] = pair

    forger.columns(1, "rollout_0", edit)
    forger.all_hashes(1)


@fault("ids", "beyond the group size")
def a_candidate_that_nobody_asked_for(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["candidate"].__setitem__(-1, 99))
    forger.all_hashes(1)


@fault("groups ledger", "missing")
def a_sample_taken_out_of_a_group_that_did_not_train(forger: Forger) -> None:
    _without_a_sample(forger, Verdict.INCOMPLETE_GROUP)


@fault("groups ledger selection denominators advantages", "missing")
def a_sample_taken_out_of_a_group_that_trained(forger: Forger) -> None:
    _without_a_sample(forger, Verdict.TRAINED)


@fault("groups", "missing")
def a_sample_taken_out_that_was_not_lost(forger: Forger) -> None:
    _without_a_sample(forger, Verdict.TRAINED, lost={})


def _without_a_sample(
    forger: Forger, verdict: Verdict, lost: Mapping[str, int] = MappingProxyType({"aborted": 1})
) -> None:
    """The first one of a verdict, out of every part that has it; sealed as `lost`."""
    forger.drawn(1, lambda told: told.update(lost=dict(lost)))
    chosen, _ = forger.read_columns(1, "selection")
    row = int(np.flatnonzero(chosen["verdict"] == VERDICTS.index(verdict))[0])
    pair = chosen["draw_index"][row], chosen["candidate"][row]
    for part in ("rollout_0", "rollout_1", "scored_0", "derived_0", "selection"):
        columns, metadata = forger.read_columns(1, part)
        same = (columns["draw_index"] == pair[0]) & (columns["candidate"] == pair[1])
        for at in np.flatnonzero(same).tolist():
            forger.write_columns(1, part, without_row(columns, at), metadata)
    forger.all_hashes(1)


@fault("groups", "other prompt ids")
def one_sample_of_a_group_that_answers_another_prompt(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["prompt_ids"].__setitem__(2, 5))
    forger.all_hashes(1)


@fault("tokens", "vocabulary")
def a_token_beyond_the_vocabulary(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["response_ids"].__setitem__(0, 10**6))
    forger.all_hashes(1)


@fault("ends", "goes on after stop")
def a_response_that_goes_on_after_its_end(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        long = int(np.flatnonzero(np.diff(columns["response_offsets"]) > 2)[0])
        columns["response_ids"][columns["response_offsets"][long]] = 2

    forger.columns(1, "rollout_0", edit)
    forger.all_hashes(1)


@fault("ends", "its last id is no stop")
def a_cut_off_response_that_says_it_ended(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: _relabel(c, old=3, new=0))
    forger.all_hashes(1)


def _relabel(columns: dict, old: int, new: int) -> None:
    row = int(np.flatnonzero(columns["end_reason"] == old)[0])
    columns["end_reason"][row] = new


@fault("log_probs", "old_log_probs")
def a_log_prob_that_is_no_number(forger: Forger) -> None:
    forger.columns(1, "scored_0", lambda c, _: c["old_log_probs"].__setitem__(3, np.nan))
    forger.all_hashes(1)


@fault("log_probs", "rollout_log_probs")
def a_probability_above_one(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["rollout_log_probs"].__setitem__(3, 0.5))
    forger.all_hashes(1)


@fault("parity", "over the bound")
def trainer_log_probs_of_other_weights(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        columns["old_log_probs"] -= np.float32(1e-3)

    forger.columns(1, "scored_0", edit)
    forger.all_hashes(1)


@fault("tokens denominators advantages", "no action")
def a_mask_with_holes(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        columns["action_mask"][:] = False

    for part in ("rollout_0", "rollout_1"):
        forger.columns(1, part, edit)
    forger.all_hashes(1)


@fault("scores selection ledger denominators advantages", "its components give")
def an_edited_total(forger: Forger) -> None:
    _edit_rewards(forger, {"reward.total": 0.25})


@fault("selection ledger denominators advantages", "the facts give")
def an_edited_total_with_its_component(forger: Forger) -> None:
    scorers = open_run(forger.run).recipe.reward.scorers
    counted = next(item for item in scorers if item.weight)
    component = f"reward.component.{counted.title}"
    _edit_rewards(forger, {component: 0.25, "reward.total": 0.25 * counted.weight})


def _edit_rewards(forger: Forger, values: dict[str, float]) -> None:
    """All of one group that trained get the same reward: it has no variance any more."""
    selection, _ = forger.read_columns(1, "selection")
    trained = selection["draw_index"][selection["minibatch"] >= 0]

    for part in ("rollout_0", "rollout_1"):

        def edit(columns: dict, _: dict) -> None:
            for name, value in values.items():
                columns[name][columns["draw_index"] == trained[0]] = value

        forger.columns(1, part, edit)
    forger.all_hashes(1)


@fault("scorer", "scorer_version")
def rewards_of_another_scorer(forger: Forger) -> None:
    other = "sha256:" + "0" * 64
    for part in ("rollout_0", "rollout_1"):
        forger.columns(1, part, lambda _, told: told.update(scorer_version=other))
    forger.manifest(1, lambda told: told.update(scorer_version=other))
    forger.all_hashes(1)


@fault("clocks", "before it started")
def a_sample_that_finished_before_it_started(forger: Forger) -> None:
    forger.columns(1, "rollout_0", lambda c, _: c["finished"].__setitem__(0, c["started"][0] - 9))
    forger.all_hashes(1)


@fault("clocks", "before GENERATING")
def a_clock_that_jumps_among_samples(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        for name in ("started", "finished"):
            columns[name][1:] -= 3600

    forger.columns(1, "rollout_0", edit)
    forger.all_hashes(1)


@fault("clocks", "EXPERIENCE_SEALED")
def a_seal_of_another_hour(forger: Forger) -> None:
    forger.manifest(1, lambda told: told.update(sealed_at=told["sealed_at"] + 3600))
    forger.all_hashes(1)


@fault("seeds", "expected")
def a_prompt_under_another_name(forger: Forger) -> None:
    forger.prompts(1, lambda lines: lines[0].update(prompt_id="another"))
    forger.all_hashes(1)


@fault("advantages", "the facts give")
def an_edited_advantage(forger: Forger) -> None:
    forger.columns(1, "derived_0", lambda c, _: c["advantages"].__setitem__(0, 3.0))
    forger.all_hashes(1)


@fault("selection", "verdict")
def an_edited_verdict(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        row = int(np.flatnonzero(columns["verdict"] == 0)[0])
        columns["verdict"][row] = 7

    forger.columns(1, "selection", edit)
    forger.all_hashes(1)


@fault("selection", "minibatch")
def a_sample_in_another_minibatch(forger: Forger) -> None:
    def edit(columns: dict, _: dict) -> None:
        row = int(np.flatnonzero(columns["minibatch"] >= 0)[0])
        columns["minibatch"][row] ^= 1

    forger.columns(1, "selection", edit)
    forger.all_hashes(1)
