"""Token weights: hand numbers, totals, holes. Their invariance under cuts is test_partition.py."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.reduction import Totals, count, token_weights

MASK = torch.tensor([True, False, True, True, False])
SEQUENCE = torch.tensor([0, 0, 0, 2, 3])


def test_counts_are_action_tokens_and_sequences_that_have_some() -> None:
    assert count(MASK, SEQUENCE) == Totals(tokens=3, sequences=2)
    none = torch.zeros(0, dtype=torch.int64)
    assert count(none.bool(), none) == Totals(0, 0)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("token_mean", [0.1, 0, 0.1, 0.1, 0]),
        ("sequence_mean", [0.125, 0, 0.125, 0.25, 0]),
        ("sequence_sum_constant", [1 / 32, 0, 1 / 32, 1 / 32, 0]),
    ],
)
def test_denominators_are_the_given_totals(kind, expected) -> None:
    weights = token_weights(kind, MASK, SEQUENCE, Totals(tokens=10, sequences=4), 8)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum_constant"])
def test_nothing_to_weigh(kind) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert token_weights(kind, none.bool(), none, Totals(0, 0), 8).shape == (0,)
    masked = token_weights(
        kind, torch.zeros(2, dtype=torch.bool), none.new_zeros(2), Totals(0, 0), 8
    )
    assert masked.tolist() == [0.0, 0.0]


def test_totals_below_the_packs_own_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the whole minibatch"):
        token_weights("token_mean", MASK, SEQUENCE, Totals(tokens=2, sequences=2), 8)
    with pytest.raises(ValueError, match="more than the whole minibatch"):
        token_weights("sequence_mean", MASK, SEQUENCE, Totals(tokens=3, sequences=1), 8)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'token-mean'; use token_mean"):
        token_weights("token-mean", MASK, SEQUENCE, Totals(3, 2), 8)
