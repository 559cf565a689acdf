"""What any detector must satisfy, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from drift.detector import DriftDetector, DriftKind, DriftVerdict
from profiler.samples import Outcome, RequestSample
from profiler.window import TrafficProfile, Window

NUM_REQUESTS = 60  # of each window
SHIFT_AT = 12  # first window of the new traffic


def check_detector(make: Callable[[], DriftDetector]) -> None:
    """Raises `AssertionError` with what a fresh detector of `make` got wrong. Seeded, no clock."""
    chat = samples(24 * NUM_REQUESTS, seed=1)
    code = samples(12 * NUM_REQUESTS, seed=2, prompt=246, output=6)
    switch = [*chat[: SHIFT_AT * NUM_REQUESTS], *code]
    _check_calm("stationary traffic", make(), chat)
    _check_calm("the switch with its order drawn at random", make(), _permuted(switch, seed=3))
    verdicts = [_told(v) for v in _verdicts(make(), switch)]
    _check_switch(verdicts)
    assert verdicts == [_told(v) for v in _verdicts(make(), switch)], "same traffic, other verdicts"
    _check_rebase(make(), switch, chat)


def samples(
    num: int, seed: int, prompt: float = 128.0, output: float = 27.0, requests_per_s: float = 4.0
) -> list[RequestSample]:
    """Log-normal lengths around the given medians; each takes 0.5 s; finish times from 0 s."""
    rng = np.random.default_rng(seed)
    prompts = np.rint(prompt * np.exp(rng.normal(0, 0.6, num))).astype(int) + 1
    outputs = np.rint(output * np.exp(rng.normal(0, 0.6, num))).astype(int) + 1
    finished = np.cumsum(rng.exponential(1 / requests_per_s, num))
    return [
        RequestSample(float(at), Outcome.OK, int(p), int(p) // 4, int(o), 0.1, 0.01, 0.5)
        for at, p, o in zip(finished, prompts, outputs, strict=True)
    ]


def windows(stream: Sequence[RequestSample], tenant: str = "") -> Iterator[TrafficProfile]:
    """Full windows of a stream, one sample after the other."""
    window = Window(num_requests=NUM_REQUESTS, max_s=1e9, tenant=tenant)
    for sample in stream:
        if (profile := window.add(sample)) is not None:
            yield profile


def _verdicts(detector: DriftDetector, stream: Sequence[RequestSample]) -> list[DriftVerdict]:
    return [detector.update(profile) for profile in windows(_in_time(stream))]


def _in_time(stream: Sequence[RequestSample]) -> list[RequestSample]:
    """The same requests in this order, a quarter of a second after each other on average."""
    rng = np.random.default_rng(4)
    finished = np.cumsum(rng.exponential(0.25, len(stream))).tolist()
    return [_at(sample, at) for sample, at in zip(stream, finished, strict=True)]


def _at(s: RequestSample, finished_s: float) -> RequestSample:
    counts = s.num_prompt_tokens, s.num_cached_tokens, s.num_output_tokens
    return RequestSample(finished_s, s.outcome, *counts, s.ttft_s, s.tpot_s, s.e2e_s)


def _permuted(stream: Sequence[RequestSample], seed: int) -> list[RequestSample]:
    order = np.random.default_rng(seed).permutation(len(stream))
    return [stream[place] for place in order]


def _told(verdict: DriftVerdict) -> tuple[object, ...]:
    v = verdict
    return v.drifted, v.score, v.threshold, v.onset_s, v.kind, v.shifts


def _check_calm(what: str, detector: DriftDetector, stream: Sequence[RequestSample]) -> None:
    alarms = [n for n, v in enumerate(_verdicts(detector, stream)) if v.drifted]
    assert not alarms, f"{what}: alarms at windows {alarms}"


def _check_switch(verdicts: Sequence[tuple[object, ...]]) -> None:
    alarms = [n for n, v in enumerate(verdicts) if v[0]]
    expected = list(range(SHIFT_AT, len(verdicts)))
    assert alarms == expected, f"a clear switch at window {SHIFT_AT}: alarms at {alarms}"
    assert verdicts[-1][4] is DriftKind.SHIFT, f"it lasts, and its kind is {verdicts[-1][4]}"


def _check_rebase(
    detector: DriftDetector, switch: Sequence[RequestSample], chat: Sequence[RequestSample]
) -> None:
    profiles = list(windows(_in_time([*switch, *chat[: 2 * NUM_REQUESTS]])))
    for profile in profiles[: SHIFT_AT + 2]:
        detector.update(profile)
    detector.rebase()
    after = [detector.update(profile).drifted for profile in profiles[SHIFT_AT + 2 :]]
    assert not any(after[:-2]), "after a rebase the new traffic still counts as drifted"
    assert all(after[-2:]), "after a rebase the old traffic does not count as drifted"
