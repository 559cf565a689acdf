"""Percentiles and expert counts, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from profiler.sketches import distance, entropy, imbalance, percentiles


def load(*layers: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(layers, dtype=np.int64)


def test_percentiles_leave_out_what_is_not_known() -> None:
    assert percentiles(np.array([1.0, math.nan, 3.0]), (0, 50, 100)) == (1.0, 2.0, 3.0)


def test_percentiles_of_nothing_are_not_known() -> None:
    assert all(math.isnan(p) for p in percentiles(np.array([math.nan]), (50, 99)))


def test_even_experts_have_an_imbalance_of_one() -> None:
    assert imbalance(load([5, 5, 5, 5])) == 1.0


def test_imbalance_is_the_layers_mean_of_max_over_mean() -> None:
    assert imbalance(load([8, 0, 0, 0], [2, 2, 2, 2])) == 2.5


@pytest.mark.parametrize("counts", [None, load([0, 0])])
def test_without_expert_tokens_the_imbalance_is_one(
    counts: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None,
) -> None:
    assert imbalance(counts) == 1.0


def test_a_layer_without_tokens_does_not_count_into_the_imbalance() -> None:
    assert imbalance(load([3, 1], [0, 0])) == 1.5


def test_entropy_is_in_bits_a_layer() -> None:
    assert entropy(load([1, 1, 1, 1], [7, 0, 0, 0], [1, 1, 0, 0])).tolist() == [2.0, 0.0, 1.0]


def test_the_same_shares_are_at_distance_zero_whatever_the_counts() -> None:
    assert distance(load([1, 3]), load([10, 30])).tolist() == [0.0]


def test_disjoint_experts_are_at_distance_one() -> None:
    assert distance(load([4, 0]), load([0, 9])).tolist() == [1.0]


def test_the_distance_is_the_root_of_the_divergence_in_bits() -> None:
    # H(3/4, 1/4) - (H(1, 0) + H(1/2, 1/2)) / 2
    expected = -0.75 * math.log2(0.75) - 0.25 * math.log2(0.25) - 0.5
    assert distance(load([8, 0]), load([4, 4]))[0] == pytest.approx(math.sqrt(expected))


def test_loads_of_two_models_have_no_distance() -> None:
    with pytest.raises(ValueError, match="not the same model"):
        distance(load([1, 1]), load([1, 1, 1]))
