"""Samples, profiles and live requests with every fact but the interesting one filled in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from profiler.samples import Outcome, RequestSample
from profiler.window import TrafficProfile, Window

PLAIN = RequestSample(
    finished_s=1.0,
    outcome=Outcome.OK,
    num_prompt_tokens=100,
    num_cached_tokens=25,
    num_output_tokens=10,
    ttft_s=0.1,
    tpot_s=0.02,
    e2e_s=0.5,
    num_in_flight=2,
)


def sample(finished_s: float = 1.0, **facts: object) -> RequestSample:
    return replace(PLAIN, finished_s=finished_s, **facts)  # type: ignore[arg-type]


def profile_of(samples: Iterable[RequestSample]) -> TrafficProfile:
    window = Window(num_requests=10_000, max_s=1e9)
    for each in samples:
        assert window.add(each) is None
    profile = window.flush()
    assert profile is not None
    return profile


@dataclass(frozen=True, slots=True)
class Live:
    """A live request, as the reservoir sees it."""

    arrived_s: float
    body: bytes = b"{}"
    output_text: str = ""
    path: str = "/v1/completions"
