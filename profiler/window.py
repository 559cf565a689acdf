"""Samples to a profile: windows closed by count or by time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


PROFILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TrafficProfile:
    """One window of one tenant ("" is all). Percentiles are over finished
    requests of the stable arm.

    `features` is float64[num_requests, len(FEATURES)], the rows a learned detector trains on; it is
    not exported.
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
