"""What is left out of SGLang's host work changes nothing: the same engine with and without it.

Not covered: CUDA, beams, grammars and speculation, which no request of megarl's asks for.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.rollout import engines, tiny
from tests.rollout.oracle import BOUND, assert_same_draws, gap

pytestmark = pytest.mark.dist


def _with_and_without(folder: str) -> dict[str, Any]:
    generator = engines.build(folder, chunked_prefill_tokens=2048)
    from megarl.platforms.sglang_results import PlainResults  # SGLang can be imported by now

    scheduler, version = generator._scheduler, tiny.version()
    sampling = tiny.sampling(stop_token_ids=(tiny.EOS, tiny.STOP), max_response_tokens=40)
    requests = engines.grid()
    paths: list[bool] = []
    plain, fits = PlainResults._is_plain, scheduler._fit_one_prefill

    def counting(self: Any, batch: Any, result: Any) -> bool:
        paths.append(plain(self, batch, result))
        return paths[-1]

    found: dict[str, Any] = {"one prefill": []}

    def fits_counting(asked: Any) -> bool:
        found["one prefill"].append(fits(asked))
        return found["one prefill"][-1]

    scheduler._fit_one_prefill = fits_counting
    PlainResults._is_plain = counting
    found["ours"] = generator.generate(requests, sampling, version)
    found["steps ours"] = [sum(paths), len(paths)]
    found["hits ours"] = engines._counted(generator, requests, sampling, "cached_tokens")[0]
    PlainResults._is_plain = lambda *_: False
    found["stock steps"] = generator.generate(requests, sampling, version)
    PlainResults._is_plain = plain
    scheduler._fit_one_prefill = lambda asked: False
    found["cached"] = generator.generate(requests, sampling, version)
    found["hits"], found["hit"] = engines._counted(generator, requests, sampling, "cached_tokens")
    found["gap"] = gap(folder, [*found["ours"], *found["hit"]], 1.0)
    generator.close()
    return found


@functools.cache
def _found(ranks: Any) -> dict[str, Any]:
    return ranks.run(1, _with_and_without, engines.folder("llama"))[0]


def test_plain_bookkeeping_of_a_token_is_sglangs_bit_for_bit(ranks) -> None:
    found = _found(ranks)
    plain, steps = found["steps ours"]
    assert plain == steps > 10
    assert len({str(sample.end_reason) for sample in found["ours"]}) > 1
    for ours, theirs in zip(found["ours"], found["stock steps"], strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.rollout_log_probs.tobytes() == theirs.rollout_log_probs.tobytes()
        assert (ours.end, ours.end_reason) == (theirs.end, theirs.end_reason)


def test_prompts_read_in_one_step_are_not_put_into_the_prefix_cache(ranks) -> None:
    found = _found(ranks)
    assert all(found["one prefill"]) and found["hits ours"] == 0
    assert found["hits"] > 0  # told otherwise, the same engine does
    folder = engines.folder("llama")
    assert_same_draws(folder, found["ours"], found["cached"])
    assert_same_draws(folder, found["ours"], found["hit"])
    assert found["gap"] <= BOUND


@pytest.mark.parametrize(
    "requests, tokens, response, fits",
    [
        (4, 10, 10, True),
        (5, 10, 10, False),  # more than run together
        (4, 17, 10, False),  # more prompt tokens than one step reads
        (4, 16, 40, False),  # the pool may run out: some would be read again
    ],
)
def test_when_all_prompts_are_read_in_one_step(ranks, requests, tokens, response, fits) -> None:
    assert ranks.run(1, _fits, requests, tokens, response)[0] is fits


def _fits(requests: int, tokens: int, response: int) -> bool:
    from types import SimpleNamespace

    from megarl.rollout.scheduler import InProcessScheduler

    limits = SimpleNamespace(
        max_running_requests=4, chunked_prefill_size=64, max_total_num_tokens=128
    )
    asked = SimpleNamespace(
        input_ids=[7] * tokens, sampling_params=SimpleNamespace(max_new_tokens=response)
    )
    return InProcessScheduler._fit_one_prefill(limits, [asked] * requests)
