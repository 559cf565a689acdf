"""Detectors on seeded streams: what they say, when, and in which words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from drift.checks import NUM_REQUESTS, check_detector, samples, windows
from drift.detector import DriftDetector, DriftKind, DriftVerdict, Shift
from drift.learned import LearnedDetector
from drift.statistical import KsDetector
from drift.watch import Sensitivity
from profiler.samples import RequestSample
from profiler.window import profile_from_json, profile_to_json

Make = Callable[[], DriftDetector]
each_detector = pytest.mark.parametrize("make", [LearnedDetector, KsDetector])


def later(stream: Sequence[RequestSample], offset_s: float) -> list[RequestSample]:
    return [replace(s, finished_s=s.finished_s + offset_s) for s in stream]


def switch(num_calm: int, num_new: int, **new: float) -> list[RequestSample]:
    """Windows of one kind of traffic, then of another that starts at 1,000 s."""
    calm = samples(num_calm * NUM_REQUESTS, seed=1)
    return [*calm, *later(samples(num_new * NUM_REQUESTS, seed=2, **new), 1000.0)]


def verdicts(detector: DriftDetector, stream: Sequence[RequestSample]) -> list[DriftVerdict]:
    return [detector.update(profile) for profile in windows(stream)]


@each_detector
def test_a_detector_keeps_the_protocols_promises(make: Make) -> None:
    check_detector(make)


@each_detector
def test_a_switch_is_seen_in_its_first_window(make: Make) -> None:
    found = verdicts(make(), switch(5, 2, prompt=246, output=6))
    assert [n for n, v in enumerate(found) if v.drifted] == [5, 6]


@each_detector
def test_a_drift_is_a_burst_until_it_lasts(make: Make) -> None:
    found = verdicts(make(), switch(5, 3, output=6))
    kinds = [v.kind for v in found if v.drifted]
    assert kinds == [DriftKind.BURST, DriftKind.SHIFT, DriftKind.SHIFT]


@each_detector
def test_a_drift_is_over_when_the_traffic_is_as_before(make: Make) -> None:
    burst = switch(5, 1, output=4)
    back = later(samples(2 * NUM_REQUESTS, seed=3), 2000.0)
    assert [v.drifted for v in verdicts(make(), [*burst, *back])][5:] == [True, False, False]


@each_detector
def test_the_onset_is_found_inside_the_window(make: Make) -> None:
    calm = samples(4 * NUM_REQUESTS + 20, seed=1)
    switched_s = calm[-1].finished_s
    new = later(samples(2 * NUM_REQUESTS, seed=2, prompt=500, output=3), switched_s)
    first = next(v for v in verdicts(make(), [*calm, *new]) if v.drifted)
    assert first.onset_s is not None
    assert abs(first.onset_s - (switched_s - 0.5)) < 1.0  # four requests; each took 0.5 s


@each_detector
def test_what_moved_is_named_strongest_first(make: Make) -> None:
    last = verdicts(make(), switch(5, 1, output=3))[-1]
    assert [s.feature for s in last.shifts] == ["output_tokens_p50"]
    assert last.shifts[0].before == pytest.approx(28, abs=2)
    assert last.shifts[0].after == pytest.approx(4, abs=1)


@each_detector
def test_a_change_of_rate_alone_is_seen(make: Make) -> None:
    last = verdicts(make(), switch(5, 2, requests_per_s=40.0))[-1]
    assert [s.feature for s in last.shifts] == ["requests_per_s"]
    assert last.shifts[0].after == pytest.approx(40, rel=0.2)


def test_a_change_of_spread_alone_is_seen() -> None:
    calm, wide = samples(7 * NUM_REQUESTS, seed=1), samples(2 * NUM_REQUESTS, seed=2)
    mixed = [
        replace(s, num_output_tokens=200 if n % 2 else 3, finished_s=s.finished_s + 1000)
        for n, s in enumerate(wide)
    ]
    found = verdicts(LearnedDetector(), [*calm, *mixed])
    assert [n for n, v in enumerate(found) if v.drifted] == [7, 8]


@each_detector
def test_how_full_the_engine_is_is_not_the_traffics_doing(make: Make) -> None:
    stream = switch(5, 2)
    fuller = [replace(s, num_in_flight=2 if s.finished_s < 1000 else 60) for s in stream]
    assert not any(v.drifted for v in verdicts(make(), fuller))


@each_detector
def test_unknown_counts_are_no_drift(make: Make) -> None:
    stream = [replace(s, num_cached_tokens=None) for s in switch(6, 2)]
    assert not any(v.drifted for v in verdicts(make(), stream))


@each_detector
def test_small_windows_are_judged_together(make: Make) -> None:
    small = [list(windows(switch(5, 1, output=3)))[n] for n in range(6)]
    detector = make()
    for profile in small[:5]:
        detector.update(profile)
    assert small[5].arrivals_s is not None
    parts = [
        replace(
            small[5],
            features=small[5].features[n : n + 8],
            arrivals_s=small[5].arrivals_s[n : n + 8],
        )
        for n in range(0, 24, 8)
    ]
    assert [detector.update(part).drifted for part in parts] == [False, False, True]


def test_a_lower_false_alarm_rate_asks_for_a_higher_score() -> None:
    strict, lax = (
        LearnedDetector(Sensitivity(false_alarm_rate=rate, floor=0.0)) for rate in (1e-6, 0.1)
    )
    stream = switch(8, 0)
    assert verdicts(strict, stream)[-1].threshold > verdicts(lax, stream)[-1].threshold


def test_a_restless_past_raises_the_threshold() -> None:
    rng = np.random.default_rng(0)
    restless = [
        replace(s, num_output_tokens=int((s.num_output_tokens or 1) * level) + 1)
        for level, n in zip(rng.uniform(0.4, 2.5, 10), range(10), strict=True)
        for s in samples(10 * NUM_REQUESTS, seed=1)[n * NUM_REQUESTS : (n + 1) * NUM_REQUESTS]
    ]
    detector = LearnedDetector(Sensitivity(num_reference=8))
    calm = LearnedDetector(Sensitivity(num_reference=8))
    restless_last, calm_last = verdicts(detector, restless)[-1], verdicts(calm, switch(10, 0))[-1]
    assert restless_last.threshold > calm_last.threshold


@each_detector
def test_the_verdict_is_the_tenants(make: Make) -> None:
    stream = [replace(s, tenant="acme") for s in switch(5, 1, output=3)]
    detector = make()
    found = [detector.update(p) for p in windows(stream, tenant="acme")]
    assert found[-1].tenant == "acme"
    assert str(found[-1]).startswith("traffic of acme drifted")


@each_detector
def test_a_profile_from_a_document_cannot_be_judged(make: Make) -> None:
    profile = next(windows(switch(1, 0)))
    with pytest.raises(ValueError, match="has no rows to compare"):
        make().update(profile_from_json(profile_to_json(profile)))


def test_a_verdict_says_what_moved_from_what_to_what_since_when() -> None:
    verdict = DriftVerdict(
        drifted=True,
        score=0.861,
        threshold=0.35,
        tenant="",
        onset_s=100.0,
        kind=DriftKind.SHIFT,
        shifts=(
            Shift("prompt_tokens_p50", 128.0, 246.0),
            Shift("output_tokens_p50", 27.0, 4.0),
            Shift("gap_s_p50", 0.118, 0.064),
            Shift("requests_per_s", 5.5, 2.7),
            Shift("cache_hit_rate", 0.62, 0.31),
        ),
        at_s=141.2,
    )
    assert str(verdict) == (
        "traffic drifted 41 s ago (shift, score 0.86 > 0.35): prompt tokens p50 128 → 246, "
        "output tokens p50 27 → 4, gap p50 0.12 s → 0.064 s, requests per s 5.5 → 2.7, "
        "cache hit rate 0.62 → 0.31"
    )


def test_a_calm_verdict_says_how_calm() -> None:
    verdict = DriftVerdict(False, 0.12, 0.35, "acme", None, None, ())
    assert str(verdict) == "traffic of acme is as before (score 0.12 ≤ 0.35)"
