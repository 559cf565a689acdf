"""Copies of live requests to the shadow, compared with what the primary said.

A copy is made from the client's own request after the primary has answered, on connections of its
own, and is bounded in count, bytes and concurrency; when there is no room the newest is shed. Every
eligible request gets exactly one label, and none of it counts as traffic. What a copy finds goes to
`report`; prompts and answers stay in here and die with the copy.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import ClientError, ClientResponse

from profiler.samples import Outcome
from sidecar.comparison import (
    Gap,
    MirrorOutcome,
    MirrorResult,
    copied,
    forced,
    is_greedy,
    largest_gap,
    length,
    skipped,
    why_not,
)
from sidecar.relay import Engines, Exchange, Headers, NoResponse, engine_url
from sidecar.tap import Reading, Tap

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 8 << 20  # of a forced replay: prompt_logprobs are long
NOT_COPIED = frozenset(("content-length", "accept-encoding", "expect", "x-trimtab-mirror"))
CREDENTIALS = frozenset(("authorization", "x-api-key", "cookie"))


@dataclass(frozen=True, slots=True)
class MirrorSettings:
    """Bounds of the mirror, and what counts as the same answer."""

    max_waiting: int = 64
    max_waiting_bytes: int = 16 << 20
    max_concurrency: int = 2
    timeout_s: float = 120.0  # of a whole copy, its replays included
    max_logprob_gap: float = 0.05  # nats; beyond it the shadow says something else
    max_forced_tokens: int = 8192  # prompt and answer; longer ones are not replayed
    forward_credentials: bool = True


class Shadow(Exception):
    """The shadow did not answer as an engine should. The message holds no user text."""


class Mirror:
    """Takes exchanges and reports one result for each. `running` runs it."""

    def __init__(
        self,
        report: Callable[[MirrorResult], None],
        settings: MirrorSettings,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._report = report
        self._settings = settings
        self._connect_timeout_s = connect_timeout_s
        self._waiting: asyncio.Queue[Exchange] = asyncio.Queue(settings.max_waiting)
        self._num_bytes = 0
        self._open = False

    def offer(self, exchange: Exchange) -> None:
        """Take a copy's place in the queue, or label the request at once. Never raises."""
        why = self._why_not(exchange)
        if why is not None:
            self._report(MirrorResult(why, exchange.shadow_digest))
            return
        self._num_bytes += _num_bytes(exchange)
        self._waiting.put_nowait(exchange)

    def _why_not(self, exchange: Exchange) -> str | None:
        if exchange.outcome is not Outcome.OK:
            return skipped(_PRIMARY[exchange.outcome])
        if exchange.body is None:
            return skipped("size")
        full = self._num_bytes + _num_bytes(exchange) > self._settings.max_waiting_bytes
        return MirrorOutcome.SHED if full or self._waiting.full() or not self._open else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work until left. What still waits or comes then is labelled shed."""
        engines = Engines(self._connect_timeout_s, keepalive_s=4.0)
        try:
            async with asyncio.TaskGroup() as tasks:
                workers = [
                    tasks.create_task(self._work(engines))
                    for _ in range(self._settings.max_concurrency)
                ]
                self._open = True
                try:
                    yield
                finally:
                    self._open = False
                    for worker in workers:
                        worker.cancel()
        finally:
            await engines.close()
            while not self._waiting.empty():
                left = self._waiting.get_nowait()
                self._report(MirrorResult(MirrorOutcome.SHED, left.shadow_digest))

    async def _work(self, engines: Engines) -> None:
        while True:
            exchange = await self._waiting.get()
            result = MirrorResult(MirrorOutcome.SHED, exchange.shadow_digest)
            try:
                result = await self._copy(engines, exchange)
            finally:
                self._num_bytes -= _num_bytes(exchange)
                self._report(result)

    async def _copy(self, engines: Engines, exchange: Exchange) -> MirrorResult:
        """One label, whatever happens."""
        failed = MirrorResult(
            MirrorOutcome.ERROR,
            exchange.shadow_digest,
            primary_ttft_s=exchange.ttft_s or 0.0,
            primary_e2e_s=exchange.e2e_s,
        )
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._compare(engines, exchange, failed)
        except TimeoutError:
            return replace(failed, note="timeout")
        except Shadow as e:
            return replace(failed, note=str(e))
        except (NoResponse, ClientError, OSError) as e:
            return replace(failed, note=type(e).__name__)
        except Exception:
            log.error("mirrored copy failed", exc_info=False)  # a traceback may quote user text
            return replace(failed, note="internal")

    async def _compare(
        self, engines: Engines, exchange: Exchange, known: MirrorResult
    ) -> MirrorResult:
        assert exchange.body is not None
        body, path = await _parsed(exchange.body), exchange.target.partition("?")[0]
        why = why_not(path, body)
        if why is not None:
            return MirrorResult(skipped(why), exchange.shadow_digest)
        copy = _Copy(engines, exchange, path, body, self._settings)
        primary, answer = exchange.reading, await copy.ask()
        known = replace(known, shadow_ttft_s=answer.ttft_s, shadow_e2e_s=answer.e2e_s)
        if answer.reading.finish_reason is None and primary.finish_reason is not None:
            return replace(known, note="unfinished")
        known = replace(known, note=_note(primary, answer.reading))
        if not is_greedy(body) or exchange.shadow_serves:
            return replace(known, outcome=MirrorOutcome.OK)
        same_text = primary.text is not None and primary.text == answer.reading.text
        return self._judge(known, await copy.gap(answer.reading), same_text)

    def _judge(self, known: MirrorResult, gap: Gap | None, same_text: bool) -> MirrorResult:
        if gap is None and not same_text:
            return MirrorResult(skipped("not_comparable"), known.digest)
        if gap is None:
            return replace(known, outcome=MirrorOutcome.OK)
        same = same_text or gap.max_logprob_gap < self._settings.max_logprob_gap
        return replace(
            known,
            outcome=MirrorOutcome.OK if same else MirrorOutcome.DIFF,
            max_logprob_gap=gap.max_logprob_gap,
            num_compared_tokens=gap.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Copy:
    """One request on the shadow. All of it raises `Shadow`, or what `Engines` raises."""

    engines: Engines
    exchange: Exchange
    path: str
    body: dict[str, Any]
    settings: MirrorSettings

    async def ask(self) -> _Answer:
        """Have the shadow answer as it would answer the client."""
        copy = copied(self.body)
        sent = orjson.dumps(copy) if copy is not None else self.exchange.body or b""
        began_s = time.monotonic()
        response = await self._post(self.exchange.target, sent)
        try:
            kind, coding = (response.headers.get(f"Content-{k}", "") for k in ("Type", "Encoding"))
            tap = Tap(kind, coding)
            while chunk := await response.content.readany():
                tap.feed(chunk)
        finally:
            response.close()
        reading = tap.read(len(sent))
        first_s = reading.first_token_s
        ttft_s = 0.0 if first_s is None else first_s - began_s
        return _Answer(reading, ttft_s, time.monotonic() - began_s)

    async def gap(self, answer: Reading) -> Gap | None:
        """The worst of the primary's answer and, where the shadow's is another, of that one."""
        said, num_prompt = self.exchange.reading, answer.usage.num_prompt_tokens
        if not num_prompt or answer.estimated:
            return None
        if answer.text == said.text:
            return await self._replay(answer, num_prompt)
        primary = await self._replay(said, num_prompt)
        shadow = None if primary is None else await self._replay(answer, num_prompt)
        if primary is None or shadow is None:
            return primary
        worst = max(primary.max_logprob_gap, shadow.max_logprob_gap)
        return Gap(worst, primary.num_tokens + shadow.num_tokens)

    async def _replay(self, said: Reading, num_prompt: int) -> Gap | None:
        """Force what was said through the shadow. None where it cannot be forced."""
        output = said.usage.num_output_tokens
        request = forced(self.path, self.body, said.text) if said.text else None
        if request is None or num_prompt + (output or 0) > self.settings.max_forced_tokens:
            return None
        reply = await self._reply(await self._post(self.path, orjson.dumps(request)))
        try:
            return largest_gap(reply, num_prompt, output)
        except ValueError as e:
            raise Shadow(str(e)) from None

    async def _post(self, target: str, body: bytes) -> ClientResponse:
        url = engine_url(self.exchange.shadow_url, target)
        response = await self.engines.send("POST", url, self._headers(), body)
        if response.status // 100 != 2:
            response.close()
            raise Shadow(f"status {response.status}")
        return response

    async def _reply(self, response: ClientResponse) -> dict[str, Any]:
        reply = bytearray()
        try:
            while chunk := await response.content.readany():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    raise Shadow("the replay's reply is too long")
        finally:
            response.close()
        parsed = await _parsed(bytes(reply))
        if not isinstance(parsed, dict):
            raise Shadow("the replay's reply is not a JSON object")
        return parsed

    def _headers(self) -> Headers:
        dropped = NOT_COPIED if self.settings.forward_credentials else NOT_COPIED | CREDENTIALS
        kept = [(k, v) for k, v in self.exchange.headers if k.lower() not in dropped]
        return [*kept, ("Accept-Encoding", "identity"), ("x-trimtab-mirror", "1")]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the shadow said. `ttft_s` is 0 where it did not stream."""

    reading: Reading
    ttft_s: float
    e2e_s: float


_PRIMARY = {
    Outcome.CLIENT_CANCELLED: "cancelled",
    Outcome.UPSTREAM_RESET: "primary_failed",
    Outcome.UPSTREAM_UNREACHABLE: "primary_failed",
    Outcome.CLIENT_ERROR: "primary_failed",
    Outcome.SERVER_ERROR: "primary_failed",
}


def _note(primary: Reading, shadow: Reading) -> str:
    note: str = length(primary.usage.num_output_tokens, shadow.usage.num_output_tokens)
    if primary.finish_reason != shadow.finish_reason:
        note += f" finish {_word(primary.finish_reason)}>{_word(shadow.finish_reason)}"
    return note


def _word(reason: str | None) -> str:
    known = (
        *("stop", "length", "tool_calls", "content_filter", "abort"),
        *("end_turn", "max_tokens", "stop_sequence", "tool_use"),  # Messages
    )
    return reason if reason in known else "other"


def _num_bytes(exchange: Exchange) -> int:
    return len(exchange.body or b"") + len(exchange.reading.text or "")


async def _parsed(data: bytes) -> Any:
    """None when it is not JSON. What takes longer than a millisecond leaves the loop."""
    try:
        if len(data) < 128 << 10:
            return orjson.loads(data)
        return await asyncio.to_thread(orjson.loads, data)
    except orjson.JSONDecodeError:
        return None
