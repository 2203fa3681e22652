"""Known faults of the rollout boundary: what is right, with the catalogue's numbers.

Engines are those of `tests/rollout/engines.py`. Not covered here: re-tokenising outside the
generator (it has no tokenizer), the trainer's side of temperature and padding (`tests/models`).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.contracts.samples import End, EndReason
from tests.rollout import engines, tiny
from tests.rollout.engines import on_one_rank, on_two_ranks
from tests.rollout.oracle import BOUND


def _sampler_log_probs(logits: list[float], temperature: float) -> np.ndarray:
    """fp32 log-prob that the sampler reports for the id it draws, for every id of `logits`."""
    from megarl.platforms import prepare_sglang

    prepare_sglang()
    from megarl.platforms.sglang_patches import SeededSampler

    sampler = SeededSampler.__new__(SeededSampler)
    torch.nn.Module.__init__(sampler)
    draws = 512
    info = SimpleNamespace(
        is_all_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        has_custom_logit_processor=False,
        grammars=None,
        temperatures=torch.full((draws, 1), temperature),
        sampling_seed=torch.arange(draws),
    )
    output = SimpleNamespace(next_token_logits=torch.tensor(logits).repeat(draws, 1))
    ids = sampler.forward(output, info, True, [], [], torch.zeros(draws, dtype=torch.int64))
    told = np.full(len(logits), np.nan)
    told[ids.numpy()] = output.next_token_logprobs.numpy()
    return told


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_a_response_cut_at_the_limit_keeps_its_ids(ranks, layout: str) -> None:
    found = on_one_rank(ranks, layout)
    cut = [s for s in found["stops"] if s.end_reason is EndReason.MAX_TOKENS]
    assert cut
    for sample in cut:
        assert sample.end is End.TRUNCATED
        assert not {tiny.EOS, tiny.STOP} & set(sample.response_ids.tolist())
    # A shorter limit gives a beginning of the same response: nothing is put at its end.
    for short, long in zip(found[1.0]["batch"], found["stops"], strict=True):
        shared = min(len(short.response_ids), len(long.response_ids))
        assert (short.response_ids[:shared] == long.response_ids[:shared]).all()


@pytest.mark.dist
def test_tensor_parallel_ranks_draw_one_history(ranks) -> None:
    """Although each rank's own random generator was seeded differently."""
    first, second = on_two_ranks(ranks, "qwen2", 2)
    for temperature in (1.0, 0.7):
        for a, b in zip(first[temperature], second[temperature], strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist()
            assert a.rollout_log_probs.tolist() == b.rollout_log_probs.tolist()


@pytest.mark.dist
@pytest.mark.parametrize(
    "temperature, expected",
    [(1.0, [-0.12693, -2.12693]), (0.7, [-0.05584, -2.91299]), (0.5, [-0.01815, -4.01815])],
)
def test_log_probs_are_at_the_sampling_temperature(ranks, temperature: float, expected) -> None:
    told = ranks.run(1, _sampler_log_probs, [2.0, 0.0], temperature)[0]
    np.testing.assert_allclose(told, expected, atol=5e-6)


@pytest.mark.dist
def test_log_probs_are_over_the_full_distribution(ranks) -> None:
    expected = np.log([0.6, 0.3, 0.1])
    told = ranks.run(1, _sampler_log_probs, expected.tolist(), 1.0)[0]
    np.testing.assert_allclose(told, expected, atol=1e-6)


@pytest.mark.dist
def test_truncated_sampling_is_refused(ranks) -> None:
    assert "cannot be trained on" in on_one_rank(ranks, "llama")["refusals"]["top_p"]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_ids_are_those_asked_and_those_drawn(ranks, layout: str) -> None:
    """The checkpoint folder has no tokenizer at all: nothing can be turned to text and back."""
    for sample, request in zip(on_one_rank(ranks, layout)["stops"], engines.grid(), strict=True):
        assert tuple(sample.prompt_ids) == request.prompt_ids
        assert len(sample.response_ids) == len(sample.rollout_log_probs) > 0


@pytest.mark.dist
def test_log_probs_are_of_the_token_itself(ranks) -> None:
    """On its own ids the gap to HF is rounding; shifted by one token it is nats."""
    found = on_one_rank(ranks, "llama")[1.0]
    assert found["gap"] <= BOUND
    for sample in found["batch"]:
        shifted = np.abs(sample.rollout_log_probs[1:] - sample.rollout_log_probs[:-1])
        assert shifted.max() > 0.1


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_padding_rows_have_no_probability(ranks, layout: str) -> None:
    """The rows are set to 1000, which would take every draw and all mass."""
    found = on_one_rank(ranks, layout)["padding"]
    assert found["padding"]
    for before, after in zip(found["before"], found["after"], strict=True):
        assert after.response_ids.max() < tiny.VOCABULARY
        assert before.response_ids.tolist() == after.response_ids.tolist()
        np.testing.assert_allclose(
            before.rollout_log_probs, after.rollout_log_probs, rtol=0, atol=BOUND
        )


@pytest.mark.dist
def test_the_best_of_four_ids_has_its_log_prob_without_padding(ranks) -> None:
    told = ranks.run(1, _sampler_log_probs, [1.0, 2.0, 3.0, 4.0], 1.0)[0]
    np.testing.assert_allclose(told[3], -0.44019, atol=5e-6)


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_generation_is_refused_for_weights_the_generator_does_not_hold(ranks, layout) -> None:
    found = on_one_rank(ranks, layout)
    told = found["refusals"]
    for case in (found["before activation"], told["wrong version"], told["deactivated"]):
        assert case.startswith("WrongVersion")
    assert str(tiny.version(0)) in told["wrong version"]
    assert str(tiny.version(1)) in told["wrong version"]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_sleeping_neither_keeps_the_version_nor_restores_older_weights(ranks, layout) -> None:
    live = on_one_rank(ranks, layout)["live"]
    assert live["active after sleep"] is None
    assert live["weights kept over sleep"]


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_the_prefix_cache_serves_one_version_only(ranks, layout: str) -> None:
    found = on_one_rank(ranks, layout)
    stale, fresh, cold = found["live"]["stale"], found["live"]["fresh"], found["cold"]
    for a, b in zip(fresh, cold, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.rollout_log_probs, b.rollout_log_probs, rtol=0, atol=BOUND)
    # Without the flush, keys and values of the older weights show: the check above can fail.
    gaps = [
        abs(a.rollout_log_probs[0] - b.rollout_log_probs[0])
        for a, b in zip(stale, cold, strict=True)
        if a.response_ids[0] == b.response_ids[0]
    ]
    assert len(gaps) < len(cold) or max(gaps) > 0.01


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["llama", "qwen2"])
def test_a_flush_that_fails_stops_the_run(ranks, layout: str) -> None:
    told, active = on_one_rank(ranks, layout)["not flushed"]
    assert told.startswith("NotFlushed") and active is None
