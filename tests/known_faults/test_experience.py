"""Known faults of groups, masks and what enters an experience, with the catalogue's numbers.

Not covered here: rewards per token and values (there is no critic); the model's side of a fully
masked minibatch (`test_models.py`); statistics (`test_algorithms.py`).
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.algorithms.credit import credit
from megarl.algorithms.reduction import Totals, token_weights
from megarl.contracts.records import Experience, Identities, RewardStatus, Scores
from megarl.contracts.samples import End, EndReason, Sample, Samples
from megarl.contracts.tokens import Tokens
from megarl.data.cursor import PromptCursor
from megarl.data.everyone import alone
from megarl.data.guard_samples import Findings, check_masks
from megarl.data.minibatch import micro_batches
from megarl.data.packing import build_pack, pad_pack
from megarl.data.prompts import PromptSet
from megarl.data.table import SampleTable
from megarl.recipe.data import DataSection
from megarl.rollout.groups import plan_iteration
from tests.algorithms.toy import Settings
from tests.contracts.tokenizer_folders import character_folder
from tests.data.make_rules import make_rules
from tests.data.make_samples import make_record, make_samples


def _sample(ids: list[int], mask: list[int] | None = None, candidate: int = 0) -> Sample:
    return Sample(
        draw_index=0,
        candidate=candidate,
        prompt_ids=np.array([7, 8]),
        response_ids=np.array(ids),
        action_mask=np.ones(len(ids), bool) if mask is None else np.array(mask, bool),
        rollout_log_probs=-np.ones(len(ids), np.float32),
        end=End.TERMINATED,
        end_reason=EndReason.EOS,
        seed=0,
        started=0.0,
        finished=1.0,
    )


def _table(samples: Samples, scores: Scores) -> SampleTable:
    starts = samples.response_offsets[:-1]
    return SampleTable(
        draw_index=samples.draw_index,
        candidate=samples.candidate,
        prompt_length=samples.prompt_lengths,
        response_length=samples.response_lengths,
        actions=np.add.reduceat(samples.action_mask, starts, dtype=np.int64),
        end_reason=samples.end_reason,
        replica=np.zeros(len(samples)),
        started=samples.started,
        finished=samples.finished,
        scores=scores,
        version_id="v",
    )


def _experience(samples: Samples, scores: Scores) -> Experience:
    old = np.full(len(samples.response_ids), -1.0, dtype=np.float32)
    return Experience(samples, scores, old, None, None, {"rollout": "v", "old": "v"}, "h")


def _recipe(group_size: int, partial: str, minibatches: int = 1) -> SimpleNamespace:
    return make_rules(
        group_size=group_size, prompts=1, minibatches=minibatches, partial_groups=partial
    )


@pytest.mark.parametrize(
    "partial, trained, totals",
    [
        ("keep_scored", [True, True, False, True], Totals(10, 3)),
        ("drop", [False] * 4, Totals(0, 0)),
    ],
)
def test_an_unscorable_sample_is_in_no_denominator(partial, trained, totals) -> None:
    """Rewards [1, 0, not scorable, 0]: the loss counts the tokens of the three, or none."""
    # Responses of 2, 3, 4 and 5 tokens.
    samples = make_samples([(0, candidate, 2, 2 + candidate) for candidate in range(4)], "v")
    records = [
        make_record(0, candidate, total) for candidate, total in ((0, 1.0), (1, 0.0), (3, 0.0))
    ]
    records.append(make_record(0, 2, None, RewardStatus.ERROR))
    scores = Scores.from_records(records)
    table = _table(samples, scores)
    rules = _recipe(4, partial)
    plan = plan_iteration(table, rules, 1)
    assert plan.trained.tolist() == trained and plan.totals == (totals,)
    everyone = alone(table, samples)
    experience = _experience(samples, scores)
    advantages = credit(experience, "r", table, plan, rules.algorithm, everyone, 0.0).advantages
    right = [1.1547, -0.5773, np.nan, -0.5773] if any(trained) else [np.nan] * 4
    np.testing.assert_allclose(advantages, right, atol=1e-4)


def test_a_minibatch_without_an_action_has_no_weight_and_no_division_by_0() -> None:
    """Mask all zeros: as many packs as ever, each weight exactly 0, all numbers finite."""
    samples = Samples.from_rows([_sample([4, 5], [0, 0])], "v")
    experience = _experience(samples, Scores.from_records([make_record(0, 0, 1.0)]))
    derived = SimpleNamespace(experience_hash="h", advantages=np.zeros(2, np.float32))
    packs = [build_pack(samples, [0]), build_pack(samples, [])]
    for kind in ("token_mean", "sequence_mean", "sequence_sum_constant"):
        settings = Settings(reduction=kind)
        batches = micro_batches(experience, derived, packs, Totals(0, 0), settings, 8)
        assert [batch.weights_A.tolist() for batch in batches] == [[0.0, 0.0], []]


def test_padding_is_told_by_length_and_the_sampled_stop_token_is_trained_on() -> None:
    """ids [5, 6, 0] and pads [0, 0] with eos = pad = 0: mask 1 1 1 0 0."""
    pack = pad_pack(build_pack(Samples.from_rows([_sample([5, 6, 0])], "v"), [0]), 7)
    assert pack.token_ids_T.tolist() == [7, 8, 5, 6, 0, 0, 0]
    scored = torch.zeros(7, dtype=torch.int64)
    scored[pack.predictor_A + 1] = pack.action_mask_A.long()
    assert scored[2:].tolist() == [1, 1, 1, 0, 0] and pack.target_A.tolist() == [5, 6, 0]


def test_tokens_that_the_policy_did_not_choose_have_no_credit_and_no_weight() -> None:
    """Mask [1, 1, 0, 0, 1]: credit, loss and KL run over three tokens, whatever lies between."""
    mask = [1, 1, 0, 0, 1]
    samples = Samples.from_rows([_sample([4, 5, 6, 7, 8], mask), _sample([4], candidate=1)], "v")
    scores = Scores.from_records([make_record(0, 0, 1.0), make_record(0, 1, 0.0)])
    table = _table(samples, scores)
    rules = _recipe(2, "drop")
    plan = plan_iteration(table, rules, 1)
    assert plan.totals == (Totals(4, 2),)
    experience, everyone = _experience(samples, scores), alone(table, samples)
    derived = credit(experience, "r", table, plan, rules.algorithm, everyone, 0.0).derived
    assert derived.advantages[:5] == pytest.approx([0.7071, 0.7071, 0, 0, 0.7071], abs=1e-4)
    pack = build_pack(samples, [0, 1])
    weights = token_weights("token_mean", pack.action_mask_A, pack.sequence_A, Totals(4, 2), 8)
    assert weights.tolist() == [0.25, 0.25, 0, 0, 0.25, 0.25]
    weights = token_weights("sequence_mean", pack.action_mask_A, pack.sequence_A, Totals(4, 2), 8)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 0, 1 / 6, 1 / 2])


def test_observation_tokens_are_refused_as_long_as_nothing_makes_them() -> None:
    """No environment is offered, so a hole in the mask is a fault: named, not trained on."""
    samples = Samples.from_rows([_sample([4, 5, 6, 7, 8], [1, 1, 0, 0, 1])], "v")
    found = Findings(Identities("run", 0, ("p",)))
    check_masks(found, samples)
    assert found.lines == [
        "action_mask of run/0/p/0 response token 2: a token that the engine sampled is no action"
    ]


def _draws(folder: Path) -> list[list[str]]:
    path = folder / "nine.jsonl"
    rows = [{"prompt": f"q{number}", "answer": "1", "id": number} for number in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = Tokens.load(character_folder(folder / "model", "{{ messages[0]['content'] }}"))
    section = DataSection(train=str(path), max_prompt_tokens=8)
    prompts = PromptSet.load(section.training, tokens, section)
    cursor = PromptCursor(prompts, seed=3, per_iteration=3)
    drawn = []
    for _ in range(6):
        cursor.begin()
        drawn.append([prompt.prompt_id for prompt in cursor.draw(3)])
    return drawn


def test_a_step_consumes_whole_groups_and_an_epoch_each_prompt_once(tmp_path) -> None:
    """9 prompts in groups of 2, 6 rows a step: a,a,b,b,c,c | d,d,… | g,g,…, then another order."""
    drawn = _draws(tmp_path)
    rows = [[name for name in step for _ in range(2)] for step in drawn]
    for step in rows:
        assert len(step) == 6 and step[::2] == step[1::2] and len(set(step)) == 3
    for epoch in (drawn[:3], drawn[3:]):
        assert sorted(name for step in epoch for name in step) == [str(n) for n in range(9)]
    assert drawn[:3] != drawn[3:]


def _without_ids() -> list[str]:
    """In a rank: requests that SGLang finished with no id, and with fewer log-probs than ids."""
    from megarl.platforms import prepare_sglang

    prepare_sglang()
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    from megarl.rollout.collected import Collected
    from megarl.rollout.requests import Request
    from tests.rollout import tiny

    requests = [Request(0, candidate, (7, 8), candidate) for candidate in range(2)]
    collected = Collected(requests, tiny.sampling(), frozenset(), None)
    for candidate, ids in enumerate(([], [4, 5])):
        done = Req(str(candidate), None, array("q", (7, 8)), SamplingParams(), return_logprob=True)
        done.output_ids.extend(ids)
        done.logprob.output_token_logprobs_val.extend([-1.0] * (len(ids) - 1))
        done.finished_reason = FINISH_LENGTH(length=len(ids))
        collected.accept(done)
    assert collected.samples() == []
    return [str(loss) for loss in collected.losses()]


@pytest.mark.dist
def test_a_response_that_comes_without_ids_or_log_probs_is_lost_and_not_made_up(ranks) -> None:
    empty, short = ranks.run(1, _without_ids)[0]
    assert "candidate 0" in empty and "0 ids came with 0 log-probs" in empty
    assert "candidate 1" in short and "2 ids came with 1 log-probs" in short
