"""Seeds and the spread of requests over replicas. Pure; what seeds draw is in test_generator."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.rollout.requests import Request, assign_replicas, request_seed


def test_a_seed_is_a_function_of_the_four_and_of_nothing_else() -> None:
    # printf '1\x1f2\x1frow-3\x1f4' | sha256sum, its first 63 bits
    assert request_seed(1, 2, "row-3", 4) == 0x0982294A6C1717B1 >> 1
    seeds = {
        request_seed(run, iteration, prompt, candidate)
        for run in (1, 2)
        for iteration in (0, 1)
        for prompt in ("p1", "p11", "p")
        for candidate in range(20)
    }
    assert len(seeds) == 2 * 2 * 3 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**60  # all bits are used


def _requests(lengths: list[int], group: int) -> list[Request]:
    return [
        Request(draw, candidate, (1,) * length, 0)
        for draw, length in enumerate(lengths)
        for candidate in range(group)
    ]


def test_groups_stay_together_when_they_balance() -> None:
    requests = _requests([10] * 6, group=4)
    for rows in assign_replicas(requests, 3, max_response_tokens=8):
        assert len(rows) == 8
        assert len({requests[row].draw_index for row in rows}) == 2


def test_one_group_is_spread_over_replicas() -> None:
    rows = assign_replicas(_requests([10], group=8), 4, max_response_tokens=8)
    assert [len(part) for part in rows] == [2, 2, 2, 2]


def test_long_prompts_weigh_more() -> None:
    requests = _requests([90, 10, 10, 10], group=1)
    assert assign_replicas(requests, 2, max_response_tokens=10) == [[0], [1, 2, 3]]


def test_no_replica_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="0 replicas"):
        assign_replicas([], 0, 8)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=0, max_size=12),
    group=st.integers(1, 9),
    replicas=st.integers(1, 6),
    response=st.integers(1, 200),
)
@example(lengths=[1, 5], group=2, replicas=4, response=1)
def test_every_request_is_assigned_once_and_the_load_is_even(
    lengths: list[int], group: int, replicas: int, response: int
) -> None:
    requests = _requests(lengths, group)
    assigned = assign_replicas(requests, replicas, response)
    assert sorted(row for rows in assigned for row in rows) == list(range(len(requests)))
    assert all(rows == sorted(rows) for rows in assigned)
    if len(requests) >= replicas:
        assert all(assigned)  # no replica idles
    loads = [sum(len(requests[r].prompt_ids) + response for r in rows) for rows in assigned]
    largest = max((len(r.prompt_ids) + response for r in requests), default=0)
    assert max(loads) <= sum(loads) / replicas + largest
    assert assigned == assign_replicas(requests, replicas, response)
