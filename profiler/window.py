"""Samples to a profile: windows closed by count or by time.

NaN in a profile says not known; in its JSON document that is null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler.samples import Outcome, RequestSample, StepSample
from profiler.sketches import imbalance, percentiles

PROFILE_VERSION = 1

# Columns of `features`. Natural logarithms; a gap is the time since the arrival before. The last
# one says as much of the engine as of the traffic: a slower engine has more in flight.
FEATURES = ("log_prompt_tokens", "log_output_tokens", "cached_share", "log_gap_s", "num_in_flight")

MIN_GAP_S = 1e-3  # two requests closer than this arrived together


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """One window of one tenant ("" is all): requests that ended well, on whichever arm.

    `features` is float64[num_requests, len(FEATURES)] in order of arrival, the rows a learned
    detector trains on; neither it nor `arrivals_s` is exported.
    """

    start_s: float
    end_s: float
    tenant: str
    num_requests: int
    requests_per_s: float
    prompt_tokens_p50: float
    prompt_tokens_p90: float
    prompt_tokens_p99: float
    output_tokens_p50: float
    output_tokens_p90: float
    output_tokens_p99: float
    cache_hit_rate: float  # cached over prompt tokens
    ttft_s_p50: float
    tpot_s_p50: float
    concurrency_p50: float
    expert_imbalance: float  # max over mean, >= 1; 1 when there are no experts
    features: npt.NDArray[np.float64] = field(repr=False, compare=False)
    expert_load: npt.NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    arrivals_s: npt.NDArray[np.float64] | None = field(default=None, repr=False, compare=False)


class Window:
    """Collects the requests of one tenant ("" is all) until it is full, in bounded memory.

    A window begins where the last one ended, or with its first request when that is later. It ends
    with its last request, or `max_s` after it began.
    """

    def __init__(self, num_requests: int = 200, max_s: float = 60.0, tenant: str = "") -> None:
        if num_requests < 2 or max_s <= 0:
            raise ValueError(
                f"a window of {num_requests} requests and {max_s} s holds none; "
                "write at least 2 requests and some seconds"
            )
        self._max_requests, self._max_s, self._tenant = num_requests, max_s, tenant
        self._samples: list[RequestSample] = []
        self._load: npt.NDArray[np.int64] | None = None
        self._start_s = self._end_s = -math.inf
        self._last_arrival_s = math.nan  # of the window before

    def add(self, sample: RequestSample) -> TrafficProfile | None:
        """Take one sample in O(1); the one that ends a window gives its profile. A sample that
        comes after `max_s` belongs to the next window. Failed requests do not count."""
        if sample.outcome is not Outcome.OK or self._tenant not in ("", sample.tenant):
            return None
        profile = None
        if self._samples and sample.finished_s >= self._start_s + self._max_s:
            profile = self._close(self._start_s + self._max_s)
        if not self._samples:
            self._start_s = max(self._end_s, _arrival_s(sample))
        self._samples.append(sample)
        return self.flush() if len(self._samples) >= self._max_requests else profile

    def add_steps(self, steps: Sequence[StepSample]) -> None:
        """Engine steps that ran during this window. Another model's shape starts the load anew."""
        for load in (step.expert_load for step in steps if step.expert_load is not None):
            fits = self._load is not None and self._load.shape == load.shape
            self._load = self._load + load if fits and self._load is not None else load.copy()

    def flush(self) -> TrafficProfile | None:
        """End the window here, with the requests it has. None when it has none."""
        if not self._samples:
            return None
        return self._close(max(s.finished_s for s in self._samples))

    def _close(self, end_s: float) -> TrafficProfile:
        samples = sorted(self._samples, key=_arrival_s)
        profile = _profile(
            samples, self._start_s, end_s, self._tenant, self._load, self._last_arrival_s
        )
        self._samples, self._load, self._end_s = [], None, end_s
        self._last_arrival_s = _arrival_s(samples[-1])
        return profile


def _arrival_s(sample: RequestSample) -> float:
    return sample.finished_s - sample.e2e_s


def _profile(
    samples: Sequence[RequestSample],
    start_s: float,
    end_s: float,
    tenant: str,
    load: npt.NDArray[np.int64] | None,
    last_arrival_s: float,
) -> TrafficProfile:
    prompt, cached, output, ttft, tpot, in_flight, arrival = _columns(samples)
    prompt_p50, prompt_p90, prompt_p99 = percentiles(prompt, (50, 90, 99))
    output_p50, output_p90, output_p99 = percentiles(output, (50, 90, 99))
    known = ~np.isnan(prompt) & ~np.isnan(cached)
    num_known = float(prompt[known].sum())
    gap = np.diff(arrival, prepend=last_arrival_s)
    gap[gap < 0] = np.nan  # the window before ended with a later arrival
    return TrafficProfile(
        start_s=start_s,
        end_s=end_s,
        tenant=tenant,
        num_requests=len(samples),
        requests_per_s=len(samples) / (end_s - start_s) if end_s > start_s else math.nan,
        prompt_tokens_p50=prompt_p50,
        prompt_tokens_p90=prompt_p90,
        prompt_tokens_p99=prompt_p99,
        output_tokens_p50=output_p50,
        output_tokens_p90=output_p90,
        output_tokens_p99=output_p99,
        cache_hit_rate=float(cached[known].sum()) / num_known if num_known else math.nan,
        ttft_s_p50=percentiles(ttft, (50,))[0],
        tpot_s_p50=percentiles(tpot, (50,))[0],
        concurrency_p50=percentiles(in_flight, (50,))[0],
        expert_imbalance=imbalance(load),
        features=np.column_stack(
            (
                np.log(np.maximum(prompt, 1.0)),
                np.log(np.maximum(output, 1.0)),
                cached / np.maximum(prompt, 1.0),
                np.log(np.maximum(gap, MIN_GAP_S)),
                in_flight,
            )
        ),
        expert_load=load,
        arrivals_s=arrival,
    )


def _columns(samples: Sequence[RequestSample]) -> npt.NDArray[np.float64]:
    """float64[7, num_requests]; None becomes NaN."""
    rows = [
        (
            s.num_prompt_tokens,
            s.num_cached_tokens,
            s.num_output_tokens,
            s.ttft_s,
            s.tpot_s,
            s.num_in_flight or None,
            _arrival_s(s),
        )
        for s in samples
    ]
    return np.array(rows, dtype=np.float64).T


# ---- the document ------------------------------------------------------------------------------


def _facts(profile: TrafficProfile) -> dict[str, float]:
    """Every exported number by name, NaN included."""
    others = ("tenant", "features", "expert_load", "arrivals_s")
    names = [f.name for f in fields(profile) if f.name not in others]
    return {name: getattr(profile, name) for name in names}


def profile_to_json(profile: TrafficProfile) -> str:
    """One versioned JSON document."""
    facts = {k: None if math.isnan(v) else v for k, v in _facts(profile).items()}
    load = None if profile.expert_load is None else profile.expert_load.tolist()
    document = {"version": PROFILE_VERSION, "tenant": profile.tenant, **facts, "expert_load": load}
    return json.dumps(document)


def profile_from_json(text: str) -> TrafficProfile:
    """Read a document back, without `features`. Raises `ValueError` when it is none of ours."""
    try:
        document = json.loads(text)
        version = document.pop("version")
        if version != PROFILE_VERSION:
            raise ValueError(f"it has version {version}, and this is {PROFILE_VERSION}")
        load = document.pop("expert_load")
        facts: dict[str, Any] = {k: math.nan if v is None else v for k, v in document.items()}
        return TrafficProfile(
            **facts,
            features=np.empty((0, len(FEATURES))),
            expert_load=None if load is None else np.array(load, dtype=np.int64),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"this is no profile: {e}; write one with `trimtab profile`") from e


# ---- in words ----------------------------------------------------------------------------------


def in_words(feature: str, before: float, after: float) -> str:
    """`prompt tokens p50 128 → 246`, `gap p50 0.12 s → 0.31 s`: what moved, with its unit."""
    seconds = re.search(r"(?<!per)_s(?=_|$)", feature) is not None
    name = re.sub(r"(?<!per)_s(?=_|$)", "", feature).replace("_", " ")
    unit = " s" if seconds else ""
    return f"{name} {_number(before)}{unit} → {_number(after)}{unit}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "not known"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 2 else f"{value:.2g}"


def profile_diff(before: TrafficProfile, after: TrafficProfile, at_least: float = 0.1) -> list[str]:
    """In words, each number that moved by the share `at_least` of what it was, or got (un)known."""
    old, new = _facts(before), _facts(after)
    names = [n for n in old if n not in ("start_s", "end_s", "num_requests")]
    return [in_words(n, old[n], new[n]) for n in names if _moved(old[n], new[n], at_least)]


def _moved(old: float, new: float, at_least: float) -> bool:
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) != math.isnan(new)
    return abs(new - old) > at_least * abs(old)
