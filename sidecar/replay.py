"""Sends planned requests at their times, as any client would, and times every answer.

Open loop: a slow engine does not slow the plan down, until `max_concurrency` answers are awaited
at once; how late a request left is in its record. No text is kept or logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import orjson

from profiler.samples import Outcome, RequestSample
from sidecar.tap import Reading, Tap
from sidecar.traffic import Domain, PlannedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was sent, and how it ended. Times are `time.monotonic` seconds."""

    domain: Domain
    sent_s: float
    late_s: float  # after its planned time, for want of a free place
    sample: RequestSample

    @property
    def is_ok(self) -> bool:
        return self.sample.outcome is Outcome.OK

    @property
    def is_cut(self) -> bool:
        """It began and did not end: the stream has no finish reason, or no [DONE]."""
        return self.sample.outcome is Outcome.UPSTREAM_RESET


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Every answer, in the order in which they ended. What was sent is ok, failed or cut."""

    answers: tuple[Answer, ...]
    duration_s: float

    @property
    def num_sent(self) -> int:
        return len(self.answers)

    @property
    def num_ok(self) -> int:
        return sum(a.is_ok for a in self.answers)

    @property
    def num_cut(self) -> int:
        return sum(a.is_cut for a in self.answers)

    @property
    def num_failed(self) -> int:
        """Refused, answered with an error, or never answered."""
        return self.num_sent - self.num_ok - self.num_cut

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of the good answers, as the engine counted them."""
        ok = (a.sample for a in self.answers if a.is_ok)
        return sum((s.num_prompt_tokens or 0) + (s.num_output_tokens or 0) for s in ok)

    def ttft_s(self) -> list[float]:
        """Of the good answers, to the first token; so are the next two."""
        return [a.sample.ttft_s for a in self.answers if a.is_ok and a.sample.ttft_s is not None]

    def tpot_s(self) -> list[float]:
        return [a.sample.tpot_s for a in self.answers if a.is_ok and a.sample.tpot_s is not None]

    def e2e_s(self) -> list[float]:
        return [a.sample.e2e_s for a in self.answers if a.is_ok]

    def __str__(self) -> str:
        times = ((self.ttft_s(), "TTFT"), (self.tpot_s(), "TPOT"), (self.e2e_s(), "end to end"))
        said = [f"{name} p50 {_ms(values, 50)} p99 {_ms(values, 99)}" for values, name in times]
        counts = f"{self.num_sent} sent, {self.num_ok} ok, {self.num_failed} failed"
        return ", ".join([f"{counts}, {self.num_cut} cut", *said])


def _ms(values: Sequence[float], at: float) -> str:
    return f"{np.percentile(values, at) * 1e3:.1f} ms" if values else "not known"


async def replay(
    requests: Iterable[PlannedRequest], url: str, max_concurrency: int = 64
) -> ReplayReport:
    """Send all of them and wait for every answer. See `Replayer`."""
    return await Replayer(url, max_concurrency).run(requests)


class Replayer:
    """Replays one plan to one server, `http://HOST:PORT`."""

    def __init__(
        self,
        url: str,
        max_concurrency: int = 64,
        idle_timeout_s: float = 60.0,  # between two chunks of one answer, its first included
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._places = asyncio.Semaphore(max_concurrency)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=5.0, sock_read=idle_timeout_s
        )
        self._clock = clock
        self._stopped = asyncio.Event()
        self._answers: list[Answer] = []

    @property
    def answers(self) -> tuple[Answer, ...]:
        """So far."""
        return tuple(self._answers)

    def stop(self) -> None:
        """Send no more. Requests in flight are waited for; cancel `run` to cut them off."""
        self._stopped.set()

    async def run(self, requests: Iterable[PlannedRequest]) -> ReplayReport:
        """Once. `requests` come in order of arrival and are taken one by one in a thread, as
        planning them may block."""
        start_s, source = self._clock(), iter(requests)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            while (planned := await asyncio.to_thread(_next, source)) is not None:
                due_s = start_s + planned.arrival_s
                await self._places.acquire()
                if not await self._wait_until(due_s):
                    break
                group.create_task(self._send(session, planned, due_s))
        return ReplayReport(self.answers, self._clock() - start_s)

    async def _wait_until(self, due_s: float) -> bool:
        """False: it was stopped first."""
        wait_s = due_s - self._clock()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), wait_s)
        return not self._stopped.is_set()

    async def _send(
        self, session: aiohttp.ClientSession, planned: PlannedRequest, due_s: float
    ) -> None:
        try:
            sent_s = self._clock()
            sample = await self._ask(session, planned, sent_s)
            late_s = max(0.0, sent_s - due_s)
            self._answers.append(Answer(planned.domain, sent_s, late_s, sample))
        finally:
            self._places.release()

    async def _ask(
        self, session: aiohttp.ClientSession, planned: PlannedRequest, sent_s: float
    ) -> RequestSample:
        tap, status, is_whole = None, None, False
        headers = {"content-type": "application/json"}
        body = orjson.dumps(planned.body)
        try:
            post = session.post(self._url + planned.path, data=body, headers=headers)
            async with post as response:
                status = response.status
                tap = Tap(response.headers.get("content-type", ""), clock=self._clock)
                is_whole = await _read(response, tap)
        except (aiohttp.ClientError, OSError) as e:
            log.debug("request broke off", extra={"why": type(e).__name__})
        reading = tap.read() if tap is not None else Reading()
        outcome = _outcome(status, is_whole and reading.finish_reason is not None)
        return _sample(reading, outcome, sent_s, self._clock())


def _next(source: Iterator[PlannedRequest]) -> PlannedRequest | None:
    return next(source, None)


async def _read(response: aiohttp.ClientResponse, tap: Tap) -> bool:
    """Feed the tap to the end. True when what came is whole: a stream says [DONE] last."""
    tail = b""
    async for chunk in response.content.iter_any():
        tap.feed(chunk)
        tail = (tail + chunk)[-32:]
    return response.content_type != "text/event-stream" or tail.rstrip().endswith(b"data: [DONE]")


def _outcome(status: int | None, is_whole: bool) -> Outcome:
    if status is None:
        return Outcome.UPSTREAM_UNREACHABLE
    if status >= 300:
        return Outcome.SERVER_ERROR if status >= 500 else Outcome.CLIENT_ERROR
    return Outcome.OK if is_whole else Outcome.UPSTREAM_RESET


def _sample(reading: Reading, outcome: Outcome, sent_s: float, now_s: float) -> RequestSample:
    first_s, usage = reading.first_token_s, reading.usage
    return RequestSample(
        finished_s=now_s,
        outcome=outcome,
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        ttft_s=None if first_s is None else first_s - sent_s,
        tpot_s=reading.tpot_s,
        e2e_s=now_s - sent_s,
        model=reading.model,
        estimated=reading.estimated,
    )
