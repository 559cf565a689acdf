"""Samples to a profile: when a window ends, what counts, what its numbers are."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fakes_profile import profile_of, sample

from profiler.samples import Outcome, StepSample
from profiler.window import FEATURES, Window, profile_diff, profile_from_json, profile_to_json


def step(load: list[list[int]] | None) -> StepSample:
    counts = None if load is None else np.array(load, dtype=np.int64)
    return StepSample(1, 0, 8, 0.5, counts)


def test_the_sample_that_fills_a_window_gives_its_profile() -> None:
    window = Window(num_requests=3)
    given = [window.add(sample(float(at))) for at in range(1, 7)]
    assert [p.num_requests if p else None for p in given] == [None, None, 3, None, None, 3]


def test_a_sample_after_the_windows_time_belongs_to_the_next_one() -> None:
    window = Window(num_requests=100, max_s=10.0)
    given = [window.add(sample(at)) for at in (0.5, 3.0, 10.0, 12.0)]
    assert [p.num_requests if p else None for p in given] == [None, None, 2, None]
    assert given[2] is not None
    assert (given[2].start_s, given[2].end_s) == (0.0, 10.0)


def test_only_requests_that_ended_well_count() -> None:
    window = Window(num_requests=3)
    for outcome in Outcome:
        assert window.add(sample(1.0, outcome=outcome)) is None
    profile = window.flush()
    assert profile is not None
    assert profile.num_requests == 1


def test_a_tenants_window_holds_only_its_own_requests() -> None:
    window = Window(num_requests=10, tenant="a")
    for tenant in ("a", "b", "", "a"):
        window.add(sample(1.0, tenant=tenant))
    profile = window.flush()
    assert profile is not None
    assert (profile.tenant, profile.num_requests) == ("a", 2)


def test_percentiles_are_exact() -> None:
    profile = profile_of(sample(float(n), num_prompt_tokens=n) for n in range(1, 102))
    p = profile
    assert (p.prompt_tokens_p50, p.prompt_tokens_p90, p.prompt_tokens_p99) == (51, 91, 100)


def test_the_rate_is_requests_over_the_windows_time() -> None:
    profile = profile_of(sample(0.5 + n / 4, e2e_s=0.5) for n in range(1, 9))
    assert (profile.start_s, profile.end_s) == (0.25, 2.5)
    assert profile.requests_per_s == pytest.approx(8 / 2.25)


def test_the_hit_rate_weighs_by_prompt_tokens() -> None:
    long = sample(1.0, num_prompt_tokens=900, num_cached_tokens=900)
    short = sample(2.0, num_prompt_tokens=100, num_cached_tokens=0)
    assert profile_of([long, short]).cache_hit_rate == 0.9


def test_what_nobody_said_is_not_known_and_never_zero() -> None:
    unknown = sample(1.0, num_prompt_tokens=None, num_cached_tokens=None, tpot_s=None)
    profile = profile_of([unknown, sample(2.0, num_cached_tokens=None)])
    assert profile.prompt_tokens_p50 == 100
    assert math.isnan(profile.cache_hit_rate)
    assert profile.tpot_s_p50 == 0.02


def test_a_profile_of_unknown_lengths_has_no_lengths() -> None:
    profile = profile_of([sample(1.0, num_prompt_tokens=None, num_in_flight=0)])
    assert math.isnan(profile.prompt_tokens_p50)
    assert math.isnan(profile.concurrency_p50)


def test_features_are_in_order_of_arrival_in_known_units() -> None:
    late, early = sample(9.0, e2e_s=1.0), sample(10.0, e2e_s=6.0, num_output_tokens=1)
    profile = profile_of([late, early])
    row = dict(zip(FEATURES, profile.features[1], strict=True))
    assert profile.arrivals_s is not None
    assert profile.arrivals_s.tolist() == [4.0, 8.0]
    assert profile.features[0, FEATURES.index("log_output_tokens")] == 0.0
    assert row == {
        "log_prompt_tokens": pytest.approx(math.log(100)),
        "log_output_tokens": pytest.approx(math.log(10)),
        "cached_share": 0.25,
        "log_gap_s": pytest.approx(math.log(4.0)),
        "num_in_flight": 2.0,
    }


def test_a_windows_first_gap_is_counted_from_the_window_before() -> None:
    window = Window(num_requests=2)
    profiles = [window.add(sample(float(at))) for at in (1, 2, 5, 6)]
    gaps = [p.features[0, FEATURES.index("log_gap_s")] for p in profiles if p]
    assert math.isnan(gaps[0])
    assert gaps[1] == pytest.approx(math.log(3.0))


def test_the_expert_load_is_the_sum_of_the_windows_steps() -> None:
    window = Window(num_requests=2)
    window.add_steps([step([[1, 3], [2, 2]]), step(None), step([[0, 4], [2, 2]])])
    window.add(sample(1.0))
    profile = window.add(sample(2.0))
    assert profile is not None
    assert profile.expert_load is not None
    assert profile.expert_load.tolist() == [[1, 7], [4, 4]]
    assert profile.expert_imbalance == (7 / 4 + 1) / 2


def test_the_next_window_starts_with_no_expert_load() -> None:
    window = Window(num_requests=2)
    window.add_steps([step([[1, 3]])])
    profiles = [window.add(sample(float(at))) for at in (1, 2, 3, 4)]
    assert profiles[3] is not None
    assert profiles[3].expert_load is None


def test_a_steps_counts_are_not_changed_by_the_window() -> None:
    window, first = Window(), step([[1, 3]])
    window.add_steps([first, step([[5, 5]])])
    assert first.expert_load is not None
    assert first.expert_load.tolist() == [[1, 3]]


def test_an_empty_window_gives_no_profile() -> None:
    assert Window().flush() is None


@pytest.mark.parametrize(("num_requests", "max_s"), [(1, 60.0), (10, 0.0)])
def test_a_window_that_can_hold_nothing_is_refused(num_requests: int, max_s: float) -> None:
    with pytest.raises(ValueError, match="write at least 2 requests"):
        Window(num_requests, max_s)


def test_a_profile_comes_back_from_its_document() -> None:
    window = Window(num_requests=2, tenant="a")
    window.add_steps([step([[1, 3]])])
    window.add(sample(1.0, tenant="a"))
    profile = window.add(sample(2.0, tenant="a"))
    assert profile is not None
    back = profile_from_json(profile_to_json(profile))
    assert back == profile
    assert back.expert_load is not None
    assert back.expert_load.tolist() == [[1, 3]]


def test_a_document_says_null_where_nothing_is_known() -> None:
    document = json.loads(profile_to_json(profile_of([sample(1.0, num_cached_tokens=None)])))
    assert document["cache_hit_rate"] is None
    assert math.isnan(profile_from_json(json.dumps(document)).cache_hit_rate)


def test_a_document_holds_no_single_request() -> None:
    document = json.loads(profile_to_json(profile_of([sample(1.0)])))
    assert not {"features", "arrivals_s"} & set(document)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no profile"):
        profile_from_json(text)


def test_a_diff_says_in_words_what_moved() -> None:
    before = profile_of(sample(float(n), num_prompt_tokens=128) for n in range(1, 9))
    after = profile_of(sample(float(n), num_prompt_tokens=246, ttft_s=0.31) for n in range(1, 9))
    assert profile_diff(before, after) == [
        "prompt tokens p50 128 → 246",
        "prompt tokens p90 128 → 246",
        "prompt tokens p99 128 → 246",
        "cache hit rate 0.2 → 0.1",
        "ttft p50 0.1 s → 0.31 s",
    ]
