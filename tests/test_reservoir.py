"""Live requests kept in bounds, workloads rebuilt, split and written down."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fakes_profile import Live, profile_of, sample

from profiler.reservoir import (
    Reservoir,
    Workload,
    WorkloadKind,
    WorkloadRequest,
    rebuilt,
    split,
    workload_from_json,
    workload_to_json,
)
from profiler.window import TrafficProfile


def filled(num: int, capacity: int = 50, seed: int = 0) -> Reservoir:
    reservoir = Reservoir(capacity, max_bytes=1 << 20, seed=seed)
    for at in range(num):
        assert reservoir.add(Live(float(at)))
    return reservoir


def profile() -> TrafficProfile:
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 400, 200).tolist()
    return profile_of(
        sample(
            n / 4, num_prompt_tokens=num, num_cached_tokens=num // 2, num_output_tokens=num // 10
        )
        for n, num in enumerate(lengths)
    )


def workload(num: int) -> Workload:
    requests = [WorkloadRequest((n, n + 1), (n,), arrival_s=n * 0.5) for n in range(num)]
    return Workload(WorkloadKind.REAL, tuple(requests), max_concurrency=3)


# ---- reservoir ---------------------------------------------------------------------------------


def test_a_reservoir_never_holds_more_than_its_capacity() -> None:
    assert len(filled(500)) == 50


def test_a_reservoir_never_holds_more_than_its_bytes() -> None:
    reservoir = Reservoir(capacity=100, max_bytes=1000)
    for at in range(100):
        reservoir.add(Live(float(at), body=b"x" * 60, output_text="é" * 10))
    assert reservoir.num_bytes == 1000
    assert len(reservoir) == 10


def test_a_request_larger_than_the_reservoir_leaves_it_as_it_was() -> None:
    reservoir = Reservoir(capacity=2, max_bytes=100)
    reservoir.add(Live(1.0, body=b"small"))
    assert not reservoir.add(Live(2.0, body=b"x" * 101))
    assert [r.body for r in reservoir.snapshot()] == [b"small"]


def test_after_three_fills_the_old_traffic_is_nearly_gone() -> None:
    kept = filled(50 + 150).snapshot()
    assert sum(r.arrived_s < 50 for r in kept) <= 5


def test_the_newest_request_is_always_kept() -> None:
    assert filled(333).snapshot()[-1].arrived_s == 332


def test_a_snapshot_is_in_order_of_arrival_and_since_a_time() -> None:
    times = [r.arrived_s for r in filled(120).snapshot(since_s=100.0)]
    assert times == sorted(times)
    assert 0 < len(times) <= 20
    assert min(times) >= 100


def test_the_same_seed_keeps_the_same_requests() -> None:
    assert filled(300, seed=7).snapshot() == filled(300, seed=7).snapshot()
    assert filled(300, seed=7).snapshot() != filled(300, seed=8).snapshot()


def test_a_cleared_reservoir_holds_nothing() -> None:
    reservoir = filled(60)
    reservoir.clear()
    assert (len(reservoir), reservoir.num_bytes, reservoir.snapshot()) == (0, 0, ())


def test_a_reservoir_that_can_hold_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds none"):
        Reservoir(capacity=0)


# ---- rebuilt -----------------------------------------------------------------------------------


def test_a_rebuilt_workload_has_the_profiles_lengths() -> None:
    p, made = profile(), rebuilt(profile(), vocab_size=1000, seed=0, num_requests=400)
    lengths = [len(r.prompt_token_ids) for r in made.requests]
    assert np.percentile(lengths, 50) == pytest.approx(p.prompt_tokens_p50, rel=0.1)
    assert np.percentile(lengths, 90) == pytest.approx(p.prompt_tokens_p90, rel=0.1)
    assert max(lengths) <= p.prompt_tokens_p99 + 1


def test_a_rebuilt_workload_arrives_at_the_profiles_rate() -> None:
    made = rebuilt(profile(), vocab_size=1000, seed=0, num_requests=400)
    assert made.requests[0].arrival_s == 0
    assert 400 / made.requests[-1].arrival_s == pytest.approx(profile().requests_per_s, rel=0.1)


def test_a_rebuilt_workload_shares_the_profiles_cached_share() -> None:
    made = rebuilt(profile(), vocab_size=1 << 20, seed=0)
    longest = max(made.requests, key=lambda r: len(r.prompt_token_ids)).prompt_token_ids
    for request in made.requests:
        ids = request.prompt_token_ids
        num_shared = int(len(ids) * profile().cache_hit_rate)
        assert ids[:num_shared] == longest[:num_shared]


def test_a_rebuilt_workload_says_so_and_depends_on_its_seed_alone() -> None:
    made = rebuilt(profile(), vocab_size=1000, seed=1)
    assert made.kind is WorkloadKind.REBUILT
    assert made.max_concurrency == 2
    assert made == rebuilt(profile(), vocab_size=1000, seed=1)
    assert made.digest != rebuilt(profile(), vocab_size=1000, seed=2).digest


def test_a_rebuilt_workload_stays_within_the_vocabulary() -> None:
    made = rebuilt(profile(), vocab_size=10, seed=0)
    assert {i for r in made.requests for i in r.prompt_token_ids} == set(range(10))


def test_a_profile_without_lengths_cannot_be_rebuilt() -> None:
    unknown = profile_of([sample(1.0, num_prompt_tokens=None)])
    with pytest.raises(ValueError, match="no token counts"):
        rebuilt(unknown, vocab_size=10, seed=0)


# ---- split and the document --------------------------------------------------------------------


def test_slices_are_by_time_and_together_everything() -> None:
    slices = split(workload(10), (0.5, 0.3, 0.2))
    assert [len(s.requests) for s in slices] == [5, 3, 2]
    ids = [r.prompt_token_ids for s in slices for r in s.requests]
    assert ids == [r.prompt_token_ids for r in workload(10).requests]


def test_each_slice_starts_at_zero_and_keeps_its_gaps() -> None:
    _, later = split(workload(5), (0.4, 0.6))
    assert [r.arrival_s for r in later.requests] == [0.0, 0.5, 1.0]
    assert (later.kind, later.max_concurrency) == (WorkloadKind.REAL, 3)


@pytest.mark.parametrize("shares", [(0.98, 0.01, 0.01), (0.01, 0.01, 0.98)])
def test_no_slice_is_empty(shares: tuple[float, ...]) -> None:
    slices = split(workload(5), shares)
    assert sorted(len(s.requests) for s in slices) == [1, 1, 3]


def test_too_few_requests_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="2 requests cannot be split into 3"):
        split(workload(2))


def test_a_workload_comes_back_from_its_document() -> None:
    back = workload_from_json(workload_to_json(workload(4)))
    assert back == workload(4)
    assert back.digest == workload(4).digest


@pytest.mark.parametrize("change", [{"version": 9}, {"kind": "odd"}, {"requests": [[[], [1], 0]]}])
def test_what_is_no_workload_is_refused(change: dict[str, object]) -> None:
    document = json.loads(workload_to_json(workload(2))) | change
    with pytest.raises(ValueError, match="this is no workload"):
        workload_from_json(json.dumps(document))


def test_a_refused_workload_is_not_shown() -> None:
    with pytest.raises(ValueError, match="no workload") as caught:
        workload_from_json('{"version": 1, "requests": "a secret prompt"}')
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__
