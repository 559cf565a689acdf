"""Requests to replay: the `Workload` noun, and a bounded reservoir of live requests.

Prompts live here in memory only; nothing in this module writes or logs them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from profiler.window import TrafficProfile

WORKLOAD_VERSION = 1


class WorkloadKind(StrEnum):
    REAL = "real"  # live requests, token for token
    REBUILT = "rebuilt"  # lengths and reuse from a profile, text made to fit


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to replay. Outputs are forced: every forward pass does the same work."""

    prompt_token_ids: tuple[int, ...]  # at least one
    output_token_ids: tuple[int, ...]  # at least one
    arrival_s: float = 0.0  # offset from the workload's start


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in arrival order and how many of them run at once."""

    kind: WorkloadKind
    requests: tuple[WorkloadRequest, ...]
    max_concurrency: int = 8

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(r.output_token_ids) for r in self.requests)

    @property
    def digest(self) -> str:
        """sha256 hex over token ids and concurrency: names the workload without showing it."""
        h = hashlib.sha256(f"{self.kind}/{self.max_concurrency}".encode())
        for r in self.requests:
            for ids in (r.prompt_token_ids, r.output_token_ids):
                h.update(len(ids).to_bytes(8, "little"))
                h.update(np.asarray(ids, dtype="<i8").tobytes())
        return h.hexdigest()


# ---- live requests -----------------------------------------------------------------------------


class LiveRequest(Protocol):
    """A finished request kept for replay. `arrived_s` is on the clock of whoever took it."""

    @property
    def path(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def output_text(self) -> str: ...
    @property
    def arrived_s(self) -> float: ...


class Reservoir:
    """Live requests in bounded memory, the recent ones favoured.

    Each new one takes the place of one drawn at random, so that the chance to stay falls by a
    factor e with every `capacity` newer ones: after a drift it soon holds the new traffic.
    """

    def __init__(self, capacity: int = 64, max_bytes: int = 16 << 20, seed: int = 0) -> None:
        if capacity < 1 or max_bytes < 1:
            raise ValueError(f"a reservoir of {capacity} requests and {max_bytes} bytes holds none")
        self._capacity, self._max_bytes = capacity, max_bytes
        self._random = random.Random(seed)
        self._kept: list[LiveRequest] = []
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Of bodies and outputs; an output counts four bytes a character."""
        return self._num_bytes

    def add(self, request: LiveRequest) -> bool:
        """False: it alone is larger than the reservoir, which stays as it was."""
        if _size(request) > self._max_bytes:
            return False
        while len(self) == self._capacity or self._num_bytes + _size(request) > self._max_bytes:
            self._evict()
        self._kept.append(request)
        self._num_bytes += _size(request)
        return True

    def snapshot(self, since_s: float = float("-inf")) -> tuple[LiveRequest, ...]:
        """Those that arrived at `since_s` or later, in order of arrival."""
        return tuple(
            sorted((r for r in self._kept if r.arrived_s >= since_s), key=lambda r: r.arrived_s)
        )

    def clear(self) -> None:
        self._kept.clear()
        self._num_bytes = 0

    def _evict(self) -> None:
        place = self._random.randrange(len(self._kept))
        self._kept[place], self._kept[-1] = self._kept[-1], self._kept[place]
        self._num_bytes -= _size(self._kept.pop())


def _size(request: LiveRequest) -> int:
    return len(request.body) + 4 * len(request.output_text)


# ---- workloads ---------------------------------------------------------------------------------


def rebuilt(
    profile: TrafficProfile, vocab_size: int, seed: int, num_requests: int = 32
) -> Workload:
    """Requests as the profile has them: lengths, rate, concurrency, and the cached share as one
    prefix that all begin with. Token ids are random. May screen; see DESIGN for what it decides.

    Raises `ValueError` when the profile does not know its lengths.
    """
    rng = np.random.default_rng(seed)
    p, q = profile, rng.random((2, num_requests))
    prompts = _lengths(q[0], p.prompt_tokens_p50, p.prompt_tokens_p90, p.prompt_tokens_p99)
    outputs = _lengths(q[1], p.output_tokens_p50, p.output_tokens_p90, p.output_tokens_p99)
    shared = rng.integers(0, vocab_size, int(prompts.max()))
    hit_rate = 0.0 if math.isnan(p.cache_hit_rate) else p.cache_hit_rate
    gaps = rng.exponential(1.0, num_requests) / p.requests_per_s
    arrivals = np.nan_to_num(np.cumsum(gaps) - gaps[0])
    requests = []
    for num_prompt, num_output, arrival_s in zip(prompts, outputs, arrivals, strict=True):
        prompt = rng.integers(0, vocab_size, num_prompt)
        num_shared = min(int(num_prompt * hit_rate), num_prompt - 1)
        prompt[:num_shared] = shared[:num_shared]
        output = rng.integers(0, vocab_size, num_output)
        ids = tuple(prompt.tolist()), tuple(output.tolist())
        requests.append(WorkloadRequest(*ids, arrival_s=float(arrival_s)))
    concurrency = 8 if math.isnan(p.concurrency_p50) else max(1, round(p.concurrency_p50))
    return Workload(WorkloadKind.REBUILT, tuple(requests), concurrency)


def _lengths(
    q: npt.NDArray[np.float64], p50: float, p90: float, p99: float
) -> npt.NDArray[np.int64]:
    """Log-linear between the known percentiles, mirrored below the median, cut at p99."""
    if math.isnan(p50):
        raise ValueError(
            "the profile has no token counts; rebuild from one whose engine says usage"
        )
    levels = np.log(np.maximum([p50 * p50 / p90, p50, p90, p99, p99], 1.0))
    lengths = np.exp(np.interp(q, (0.1, 0.5, 0.9, 0.99, 1.0), levels))
    return np.maximum(np.rint(lengths), 1).astype(np.int64)


def split(workload: Workload, shares: Sequence[float] = (0.4, 0.3, 0.3)) -> tuple[Workload, ...]:
    """Slices by time, earlier ones first (to screen, to confirm, held out), each with requests and
    each starting at 0 s. Raises `ValueError` when there are fewer requests than slices."""
    num, parts = len(workload.requests), len(shares)
    if num < parts:
        raise ValueError(f"a workload of {num} requests cannot be split into {parts}; collect more")
    ends = np.rint(np.cumsum(shares) / sum(shares) * num).astype(int).tolist()
    slices, start = [], 0
    for index, end in enumerate(ends):
        end = min(max(end, start + 1), num - (parts - 1 - index))
        slices.append(replace(workload, requests=_from_zero(workload.requests[start:end])))
        start = end
    return tuple(slices)


def _from_zero(requests: tuple[WorkloadRequest, ...]) -> tuple[WorkloadRequest, ...]:
    return tuple(replace(r, arrival_s=r.arrival_s - requests[0].arrival_s) for r in requests)


def workload_to_json(workload: Workload) -> str:
    """One versioned JSON document. It holds the prompts: for a pipe, never for a log."""
    requests = [[r.prompt_token_ids, r.output_token_ids, r.arrival_s] for r in workload.requests]
    document = {
        "version": WORKLOAD_VERSION,
        "kind": workload.kind,
        "max_concurrency": workload.max_concurrency,
        "requests": requests,
    }
    return json.dumps(document)


def workload_from_json(text: str) -> Workload:
    """Raises `ValueError` when it is no workload; the message shows none of it."""
    try:
        document = json.loads(text)
        if document["version"] != WORKLOAD_VERSION:
            raise ValueError("version")
        requests = tuple(
            WorkloadRequest(tuple(map(int, prompt)), tuple(map(int, output)), float(arrival_s))
            for prompt, output, arrival_s in document["requests"]
        )
        if not all(r.prompt_token_ids and r.output_token_ids for r in requests):
            raise ValueError("empty")
        kind, concurrency = WorkloadKind(document["kind"]), int(document["max_concurrency"])
        return Workload(kind, requests, concurrency)
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"this is no workload of version {WORKLOAD_VERSION}, or a request in it is empty"
        ) from None
