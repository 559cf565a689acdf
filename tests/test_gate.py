"""The rules: exact numbers in, verdicts out."""

from __future__ import annotations

import numpy as np
import pytest
from fakes_engine import workload

from compiler import gate
from compiler.gate import Band, ErrorSpread, GatePolicy, Trial
from engines.engine import Array, Measurement, ModuleInfo, RequestOutput

POLICY = GatePolicy()
EPS = gate.EPS["float32"]
BAND = Band(kl_p50=1e-13, kl_p99=1e-12, gap_p50=1e-7, gap_p99=1e-6)


def _logprobs(
    seed: int = 0, noise: float = 0.0
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((20, 64)) * 3
    logits += noise * np.random.default_rng(9).standard_normal(logits.shape)
    table: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = (
        logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ).astype(np.float32)
    return table


def _trial(stock: list[float], candidate: list[float]) -> Trial:
    return Trial(
        stock=Measurement(tuple(stock), 100),
        candidate=Measurement(tuple(candidate), 100),
        aa_band=0.0,
        gain=0.0,
        held_out_gain=None,
        faster=False,
        reason="",
        num_orig_calls=0,
        num_candidate_calls=10,
    )


def test_kl_of_a_distribution_with_itself_is_zero() -> None:
    assert gate.kl(_logprobs(), _logprobs()).max() == 0.0


def test_kl_sees_a_millionth_in_float32() -> None:
    small, large = (
        gate.kl(_logprobs(), _logprobs(noise=1e-6)),
        gate.kl(_logprobs(), _logprobs(noise=1e-4)),
    )
    assert 0 < np.median(small) < 1e-11 < np.median(large)


def test_kl_is_the_textbook_sum() -> None:
    p, q = np.log(np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32))
    assert gate.kl(p, q)[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)


def test_an_error_like_stocks_own_passes() -> None:
    assert gate.error_failure(np.full(9, 3e-7), ErrorSpread(1e-7, 2e-7), EPS, POLICY) is None


def test_an_error_of_half_precision_fails_under_float32() -> None:
    found = gate.error_failure(np.full(9, 5e-4), ErrorSpread(1e-7, 2e-7), EPS, POLICY)
    assert found is not None


def test_a_few_wrong_elements_fail_by_the_worst() -> None:
    errors = np.full(9000, 1e-8)
    errors[17] = 1e-3
    found = gate.error_failure(errors, ErrorSpread(1e-7, 2e-7), EPS, POLICY)
    assert found is not None
    assert "worst" in found


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (np.full((2, 3), np.nan, np.float32), "NaN"),
        (np.zeros((2, 4), np.float32), "shape"),
        (np.zeros((2, 3), np.float64), "float64"),
    ],
)
def test_outputs_that_cannot_be_compared_say_why(got: Array, why: str) -> None:
    found = gate.shape_failure([got], [np.zeros((2, 3))], ["float32"])
    assert found is not None
    assert why in found


def test_a_row_where_an_expert_is_a_tie_is_not_steady() -> None:
    want, nudged = np.ones((3, 4)), np.ones((3, 4))
    nudged[1] = 1.5
    assert gate.steady_rows(want, nudged, 1e-6).tolist() == [True, False, True]


def test_a_moved_median_is_outside_the_band() -> None:
    found = Band(kl_p50=1e-8, kl_p99=1e-12, gap_p50=1e-7, gap_p99=1e-6)
    (why,) = gate.band_failures(found, BAND, EPS, POLICY)
    assert why.startswith("KL p50")


def _outputs(gap: float = 0.0, num_moved: int = 20) -> list[RequestOutput]:
    tops, lp = np.zeros(10, np.int64), np.full(10, -2.0, np.float32)
    return [RequestOutput(lp + np.float32(gap) * (i < num_moved), tops) for i in range(20)]


def test_one_request_in_twenty_moved_by_a_routers_tie_is_honest() -> None:
    assert gate.output_failure(_outputs(1e-3, 1), _outputs(), BAND, EPS, POLICY) is None


def test_a_small_gap_everywhere_is_not() -> None:
    assert gate.output_failure(_outputs(1e-3), _outputs(), BAND, EPS, POLICY) is not None


def test_one_request_that_is_far_off_is_not() -> None:
    assert gate.output_failure(_outputs(0.5, 1), _outputs(), BAND, EPS, POLICY) is not None


def test_a_missing_request_is_not() -> None:
    assert gate.output_failure([], _outputs(), BAND, EPS, POLICY) is not None


def test_a_steady_tenth_is_faster() -> None:
    found = gate.decide(_trial([1.1, 1.11, 1.09, 1.1, 1.1], [1.0, 1.01, 1.0, 0.99, 1.0]), POLICY)
    assert found.faster
    assert found.gain == pytest.approx(0.1, abs=0.01)


def test_a_gain_inside_the_noise_is_not_faster() -> None:
    found = gate.decide(_trial([1.1, 0.8, 1.3, 0.9, 1.1], [1.0, 0.9, 1.2, 0.9, 1.0]), POLICY)
    assert not found.faster
    assert found.gain < 0.05


def _race(seed: int, gain: float, noise: float) -> bool:
    """What the judge does: look at every pair, stop when it is over. A pair takes a tenth."""
    times = np.exp(noise * np.random.default_rng(seed).standard_normal((2, POLICY.max_pairs)))
    times[1] /= 1 + gain
    for n in range(2, POLICY.max_pairs + 1):
        found = gate.effect(list(times[0, :n]), list(times[1, :n]), POLICY)
        if gate.is_over(found, n, n * POLICY.screen_s / 10, POLICY.screen_s, POLICY):
            break
    return gate.is_faster(found, POLICY)


def test_stock_against_itself_is_called_faster_in_under_two_in_a_hundred() -> None:
    assert sum(_race(seed, gain=0.0, noise=0.05) for seed in range(500)) < 10


def test_a_fifth_more_is_found_through_noise() -> None:
    assert sum(_race(seed, gain=0.2, noise=0.05) for seed in range(100)) > 95


def test_a_slower_one_settles_at_once() -> None:
    found = gate.effect([1.0] * 5, [1.2] * 5, POLICY)
    assert gate.is_settled(found, 5, POLICY)
    assert not gate.is_faster(found, POLICY)


def test_a_candidate_that_lives_on_orig_has_no_effect() -> None:
    assert "ORIG" in (gate.no_effect(9, 10, POLICY) or "")


def test_a_candidate_that_no_batch_reached_has_no_effect() -> None:
    assert "reached" in (gate.no_effect(0, 0, POLICY) or "")


def test_experts_are_not_in_the_roofline() -> None:
    modules = (
        ModuleInfo("a", "Model", 0),
        ModuleInfo("a.b", "Linear", 100),
        ModuleInfo("a.c", "FusedMoE", 999),
    )
    floor = gate.roofline_floor_s(workload(num_outputs=8), modules, 0.5, POLICY)
    assert floor == 8 * 100 * 0.5 / POLICY.bytes_per_s
