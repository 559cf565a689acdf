"""A stream of windows, watched: what is before, what is now, and since when they differ.

How different two sets of requests are is asked of a `Test`; how different is too different is
learned from this stream's own past, so that the false-alarm rate is a setting. The reference stays
what it is until `rebase`: it is the traffic that the running forward pass was made for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import ks_2samp  # type: ignore[import-untyped]

from drift.detector import DriftKind, DriftVerdict, Shift
from profiler.sketches import percentiles
from profiler.window import FEATURES, TrafficProfile

Floats = npt.NDArray[np.float64]

# How full an engine is depends on the engine: a retuned one would look like new traffic.
TRAFFIC_FEATURES = ("log_prompt_tokens", "log_output_tokens", "cached_share", "log_gap_s")
MAX_THRESHOLD = 0.9  # a stream that was never calm still alarms when everything changes


@dataclass(frozen=True, slots=True)
class Comparison:
    """How well now can be told from before."""

    score: float  # 1 is always, 0 is chance; below 0 by bad luck
    chance: float  # standard deviation of `score` when nothing changed
    evidence: Callable[[Floats], Floats]  # log-odds of "now" for each row; below 0 is "before"


class Test(Protocol):
    """Two sets of requests, float64[num_requests, num_features] each; NaN is not known."""

    def compare(self, before: Floats, now: Floats) -> Comparison: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests in order of arrival."""

    features: Floats  # [num_requests, len(FEATURES)]
    arrivals_s: Floats

    def __len__(self) -> int:
        return len(self.arrivals_s)

    def since(self, onset_s: float) -> Rows:
        late = self.arrivals_s >= onset_s
        return Rows(self.features[late], self.arrivals_s[late])


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """When to speak up."""

    false_alarm_rate: float = 0.01  # of calm windows, once the past is known
    floor: float = 0.35  # skill below this is not worth a word, however sure
    num_reference: int = 2  # windows before the first judgement
    max_reference: int = 8  # windows of the reference at most; it grows while all is calm
    min_requests: int = 20  # smaller windows are judged together


class Watch:
    """Keeps the `DriftDetector` protocol around a `Test`, in bounded memory. One tenant each."""

    def __init__(self, test: Test, sensitivity: Sensitivity, features: Sequence[str]) -> None:
        self._test, self._sensitivity = test, sensitivity
        self._columns = [FEATURES.index(name) for name in features]
        self._reference: list[Rows] = []
        self._calm_scores: deque[float] = deque(maxlen=64)
        self._run: list[Rows] = []  # windows of the drift that goes on now
        self._last: Rows | None = None  # calm, not yet in the reference: a drift may begin in it
        self._partial: list[Rows] = []
        self._onset_s: float | None = None

    def update(self, profile: TrafficProfile) -> DriftVerdict:
        """Score 0 while there is nothing to judge by yet. Raises `ValueError` for a profile without
        rows (one read from JSON)."""
        self._partial.append(_rows(profile))
        if sum(map(len, self._partial)) < self._sensitivity.min_requests:
            return self._calm(profile, 0.0)
        now, self._partial = _joined(self._partial), []
        if not self._reference:
            self._reference.append(now)
            return self._calm(profile, 0.0)
        before = _joined(self._reference)
        found = self._test.compare(self._used(before), self._used(now))
        threshold = self._threshold(found.chance)
        if len(self._reference) < self._sensitivity.num_reference:
            self._calm_scores.append(found.score)
            self._reference.append(now)
            return self._calm(profile, 0.0)
        if found.score > threshold:
            return self._drifted(profile, before, now, found, threshold)
        self._calm_scores.append(found.score)
        self._keep(now)
        return self._calm(profile, found.score, threshold)

    def rebase(self) -> None:
        """Forget what was before: the reference is the drift so far, or else the last window."""
        present = self._run[-self._sensitivity.max_reference :] or self._last_windows()
        self._reference, self._run, self._last, self._onset_s = present, [], None, None
        self._calm_scores.clear()

    def _last_windows(self) -> list[Rows]:
        return [self._last] if self._last is not None else self._reference[-1:]

    def _keep(self, now: Rows) -> None:
        if self._last is not None and len(self._reference) < self._sensitivity.max_reference:
            self._reference.append(self._last)
        self._last, self._run, self._onset_s = now, [], None

    def _threshold(self, chance: float) -> float:
        """So far above the stream's own calm past that it happens at the false-alarm rate."""
        past = np.array(self._calm_scores or [0.0])
        spread = max(chance, float(past.std(ddof=1)) if past.size > 2 else 0.0)
        z = NormalDist().inv_cdf(1 - self._sensitivity.false_alarm_rate)
        above = max(0.0, float(past.mean())) + z * spread
        return min(max(above, self._sensitivity.floor), MAX_THRESHOLD)

    def _drifted(
        self, profile: TrafficProfile, before: Rows, now: Rows, found: Comparison, threshold: float
    ) -> DriftVerdict:
        if self._onset_s is None:
            recent = _joined([self._last, now] if self._last is not None else [now])
            self._onset_s = _onset_s(recent.arrivals_s, found.evidence(self._used(recent)))
        after = now.since(self._onset_s)
        self._run.append(after if len(after) else now)
        return DriftVerdict(
            drifted=True,
            score=min(found.score, 1.0),
            threshold=threshold,
            tenant=profile.tenant,
            onset_s=self._onset_s,
            kind=DriftKind.BURST if len(self._run) == 1 else DriftKind.SHIFT,
            shifts=_shifts(before, self._run[-1], self._columns),
            at_s=profile.end_s,
        )

    def _calm(
        self, profile: TrafficProfile, score: float, threshold: float | None = None
    ) -> DriftVerdict:
        threshold = self._sensitivity.floor if threshold is None else threshold
        score = min(max(score, 0.0), 1.0)
        return DriftVerdict(
            False, score, threshold, profile.tenant, None, None, (), at_s=profile.end_s
        )

    def _used(self, rows: Rows) -> Floats:
        return rows.features[:, self._columns]


def _rows(profile: TrafficProfile) -> Rows:
    num = len(profile.features)
    if not num:
        raise ValueError("this profile has no rows to compare; take it from a live window")
    arrivals_s = profile.arrivals_s
    if arrivals_s is None:
        arrivals_s = np.linspace(profile.start_s, profile.end_s, num)
    return Rows(profile.features, arrivals_s)


def _joined(parts: Sequence[Rows]) -> Rows:
    features = np.concatenate([p.features for p in parts])
    return Rows(features, np.concatenate([p.arrivals_s for p in parts]))


def _onset_s(arrivals_s: Floats, evidence: Floats) -> float:
    """Arrival of the first request from which on the evidence adds up to the most."""
    suffix = np.cumsum(evidence[::-1])[::-1]
    return float(arrivals_s[int(np.argmax(suffix))])


# ---- what moved --------------------------------------------------------------------------------


def ks(before: Floats, now: Floats) -> float:
    """Largest distance of the two distributions, 0-1, unknown values left out; 0 without any."""
    before, now = before[~np.isnan(before)], now[~np.isnan(now)]
    if not before.size or not now.size:
        return 0.0
    return float(ks_2samp(before, now, method="asymp").statistic)


def ks_limit(num_before: int, num_now: int, alpha: float) -> float:
    """The distance that two samples of one distribution exceed with probability `alpha`."""
    return math.sqrt(-math.log(alpha / 2) / 2 * (num_before + num_now) / (num_before * num_now))


def _shifts(before: Rows, now: Rows, columns: Sequence[int]) -> tuple[Shift, ...]:
    """The features that moved beyond chance and by a tenth, strongest first; one in any case."""
    sizes = [(ks(before.features[:, c], now.features[:, c]), c) for c in columns]
    sizes.sort(key=lambda pair: (-pair[0], pair[1]))
    limit = ks_limit(len(before), len(now), alpha=0.01 / len(columns))
    found = [(size, _shift(FEATURES[c], before.features, now.features)) for size, c in sizes]
    return tuple(s for size, s in found if size > limit and _is_large(s)) or (found[0][1],)


def _shift(feature: str, before: Floats, now: Floats) -> Shift:
    """A feature's level in units that people use: the first reading that moved by a tenth."""
    readings = [Shift(name, read(before), read(now)) for name, read in _READINGS[feature]]
    return next((r for r in readings if _is_large(r)), readings[0])


def _is_large(shift: Shift) -> bool:
    return abs(shift.after - shift.before) > 0.1 * abs(shift.before)


def _level(feature: str, at: float) -> Callable[[Floats], float]:
    column = FEATURES.index(feature)
    if feature.startswith("log_"):
        return lambda rows: math.exp(percentiles(rows[:, column], (at,))[0])
    return lambda rows: percentiles(rows[:, column], (at,))[0]


def _hit_rate(rows: Floats) -> float:
    tokens = np.exp(rows[:, FEATURES.index("log_prompt_tokens")])
    share = rows[:, FEATURES.index("cached_share")]
    known = ~np.isnan(share)
    return float((share * tokens)[known].sum() / tokens[known].sum()) if known.any() else math.nan


def _rate(rows: Floats) -> float:
    gaps = np.exp(rows[:, FEATURES.index("log_gap_s")])
    return float(1 / np.nanmean(gaps)) if not np.isnan(gaps).all() else math.nan


_READINGS: dict[str, tuple[tuple[str, Callable[[Floats], float]], ...]] = {
    "log_prompt_tokens": (
        ("prompt_tokens_p50", _level("log_prompt_tokens", 50)),
        ("prompt_tokens_p90", _level("log_prompt_tokens", 90)),
    ),
    "log_output_tokens": (
        ("output_tokens_p50", _level("log_output_tokens", 50)),
        ("output_tokens_p90", _level("log_output_tokens", 90)),
    ),
    "cached_share": (("cache_hit_rate", _hit_rate),),
    "log_gap_s": (("requests_per_s", _rate), ("gap_s_p50", _level("log_gap_s", 50))),
    "num_in_flight": (("concurrency_p50", _level("num_in_flight", 50)),),
}
