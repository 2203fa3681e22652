"""Real SGLang in the rank, on small random HF models, against the HF model in float64.

Not covered: CUDA, families besides Llama and Qwen2 layouts (`test_families` has them), sizes where
bf16 or long contexts change the arithmetic, a rank that dies while its replica generates.
"""

from __future__ import annotations

import numpy as np
import pytest

from megarl.contracts.samples import EndReason, Samples
from megarl.rollout.requests import LostReason
from tests.rollout import engines, tiny
from tests.rollout.engines import on_one_rank, on_two_ranks
from tests.rollout.oracle import BOUND, assert_same_draws, first_difference, seeded_margin

pytestmark = pytest.mark.dist
LAYOUTS = ["llama", "qwen2"]
FAIR = 6.0
"""Standard deviations that a chi-square statistic may lie above its mean."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_models_at_the_temperature(ranks, layout: str, temperature: float):
    found = on_one_rank(ranks, layout)
    assert found[temperature]["gap"] <= BOUND
    assert found["greedy gap"] <= BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_hold_with_prefix_hits_and_retracted_requests(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    assert found["prefix hits"] > 0 and found["prefix gap"] <= BOUND
    assert found["retractions"] > 0 and found["pressed gap"] <= BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_seed_draws_the_same_alone_and_in_any_batch(ranks, layout: str, temperature: float):
    found, folder = on_one_rank(ranks, layout)[temperature], engines.folder(layout)
    assert_same_draws(folder, found["batch"][::5], found["single"], temperature)
    assert_same_draws(folder, found["batch"], found["backwards"], temperature)
    texts = {tuple(sample.response_ids) for sample in found["batch"]}
    assert len(texts) == len(found["batch"])  # and other seeds draw otherwise


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_retracted_request_goes_on_with_its_draws(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    pressed = [s for s in found["pressed"] if s.candidate < 4]
    for sample, calm in zip(pressed, found["cold"], strict=True):
        where = first_difference(sample, calm)
        if where is not None:
            other = int(sample.response_ids[where])
            folder = engines.folder(layout, seed=1)
            assert seeded_margin(folder, calm, other, where) < BOUND


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_frequencies_are_softmax_at_the_temperature(ranks, layout, temperature):
    counts, expected = on_one_rank(ranks, layout)["frequencies"][temperature]
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert freedom > 20 and counts.sum() == 2048
    assert statistic < freedom + FAIR * np.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_temperature_zero_is_greedy(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    for sample, best in zip(found["greedy"], found["greedy hf"], strict=True):
        assert sample.response_ids.tolist() == best.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ends_are_told_apart_and_only_the_contract_stops(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    stops = {tiny.EOS, tiny.STOP}
    seen = set()
    for sample in found["stops"]:
        *inner, last = sample.response_ids.tolist()
        assert stops.isdisjoint(inner)
        expected = {tiny.EOS: EndReason.EOS, tiny.STOP: EndReason.STOP}
        assert sample.end_reason is expected.get(last, EndReason.MAX_TOKENS)
        assert (len(sample.response_ids) == 60) or last in stops
        seen.add(sample.end_reason)
    assert seen == {EndReason.EOS, EndReason.STOP, EndReason.MAX_TOKENS}
    # Without stop ids the checkpoint's own eos token does not stop either.
    assert all(len(s.response_ids) == 12 for s in found[1.0]["batch"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_keep_the_requests_order_and_arrive_as_they_finish(ranks, layout: str):
    found, asked = on_one_rank(ranks, layout), engines.grid()
    for sample, request in zip(found["stops"], asked, strict=True):
        assert (sample.draw_index, sample.candidate) == (request.draw_index, request.candidate)
        assert tuple(sample.prompt_ids) == request.prompt_ids and sample.seed == request.seed
        assert sample.started <= sample.finished
    arrived = found["completed"]
    assert len(arrived) == len(asked)
    assert [s.finished for s in arrived] == sorted(s.finished for s in arrived)
    lengths = [len(s.response_ids) for s in arrived]
    assert lengths == sorted(lengths)  # all started together: short ones first
    Samples.from_rows(found["stops"], tiny.version().id)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_building_and_generating_leave_the_trainers_generators_alone(ranks, layout: str):
    assert on_one_rank(ranks, layout)["rng kept"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_aborted_response_is_generated_again_with_its_seed(ranks, layout: str):
    lost = on_one_rank(ranks, layout)["lost"]
    assert lost["again"][1].response_ids.tolist() == lost["whole"][1].response_ids.tolist()
    assert lost["again"][1].end_reason is EndReason.MAX_TOKENS
    assert lost["told"].startswith("LostGeneration") and "draw 0 candidate 1" in lost["told"]
    assert "candidate 0" not in lost["told"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_response_lost_for_good_is_told_and_the_others_are_returned(ranks, layout: str):
    """The first time SGLang aborts it while it runs, the second time before, at both attempts."""
    lost = on_one_rank(ranks, layout)["lost"]
    running, waiting = lost["losses"]
    assert (running.draw_index, running.candidate, running.reason) == (0, 1, LostReason.ABORTED)
    assert (waiting.candidate, waiting.reason) == (0, LostReason.NOT_RETURNED)
    for samples, candidate in zip(lost["rest"], (0, 1), strict=True):
        (sample,) = samples
        assert sample.candidate == candidate
        assert sample.response_ids.tolist() == lost["again"][candidate].response_ids.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cannot_be_served_as_asked_is_refused_by_name(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    told = found["refusals"]
    assert "rollout.max_total_tokens" in told["too long"] and "501" in told["too long"]
    assert "vocabulary of 304" in told["foreign id"]
    assert "top_p=0.9" in told["top_p"]
    assert told["just fits"] == "12"  # the longest request that fits is served in full
    assert "rollout.max_running_requests=64" in found["pool too small"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_written_in_place_generate_like_an_engine_that_loaded_them(ranks, layout: str):
    found = on_one_rank(ranks, layout)
    live, cold = found["live"], found["cold"]
    assert not live["unwritten"]
    assert_same_draws(engines.folder(layout, seed=1), live["fresh"], cold)
    for fresh, loaded in zip(live["fresh"], cold, strict=True):
        np.testing.assert_allclose(fresh.rollout_log_probs, loaded.rollout_log_probs, atol=BOUND)
    assert any(
        a.response_ids.tolist() != b.response_ids.tolist()
        for a, b in zip(live["before"], live["fresh"], strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_follow_each_other_in_one_process(ranks, layout: str):
    """`cold` and `pressed` above are the second and third engine of their process."""
    assert on_one_rank(ranks, layout)["descriptors leaked"] <= 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_two_ranks_draw_what_one_rank_draws(ranks, tp: int, temperature: float):
    alone = on_one_rank(ranks, "qwen2")[temperature]["batch"]
    shown = on_two_ranks(ranks, "qwen2", tp)
    for found in shown:
        assert found[f"gap {temperature}"] <= BOUND
        mine = [alone[row] for row in found["rows"]]
        assert_same_draws(engines.folder("qwen2"), mine, found[temperature], temperature)
        assert found["groups left"] == 0 and found["ranks after close"] == 2
    rows = [found["rows"] for found in shown]
    if tp == 1:
        assert sorted(rows[0] + rows[1]) == list(range(len(alone))) and all(rows)
    else:
        assert rows[0] == rows[1] == list(range(len(alone)))


def test_padding_rows_are_declared_on_every_shard(ranks):
    name = "model.embed_tokens.weight"
    assert on_one_rank(ranks, "qwen2")["padding"]["padding"] == {name: (304, 320)}
    one, two = (found["padding"] for found in on_two_ranks(ranks, "qwen2", 2))
    assert one == {} and two == {name: (144, 160)}


def test_sizes_that_do_not_divide_are_refused(ranks):
    for found in on_two_ranks(ranks, "qwen2", 2):
        assert "intermediate_size 81 does not divide by 2 (rollout.tp=2" in found["unaligned"]


def test_bf16_stays_within_its_own_bound(ranks):
    """On bf16 weights against HF in float64: no more than HF's own bf16 rounding, doubled."""
    found = ranks.run(1, engines.bf16_rank, engines.folder("llama", dtype="bfloat16"))[0]
    assert len(found["samples"]) == len(engines.grid())
    assert found["gap"].max() <= 2 * found["hf gap"].max() <= 0.6
    assert found["gap"].mean() <= 2 * found["hf gap"].mean() <= 0.06


@pytest.mark.long
def test_two_replicas_of_two_ranks(ranks):
    alone = on_one_rank(ranks, "llama")[1.0]["batch"]
    shown = ranks.run(
        4, engines.two_ranks, engines.folder("llama"), 2, engines.folder("llama", ffn=81)
    )
    assert shown[0]["rows"] == shown[1]["rows"] != shown[2]["rows"] == shown[3]["rows"]
    for found in shown:
        assert found["gap 1.0"] <= BOUND
        assert_same_draws(
            engines.folder("llama"), [alone[row] for row in found["rows"]], found[1.0]
        )
