"""A replay against a server of our own: what is sent, when, and how its end is called."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from profiler.samples import Outcome
from sidecar.replay import Replayer, replay
from sidecar.traffic import Domain, PlannedRequest

Answering = Callable[["Server", web.StreamResponse], Awaitable[None]]
USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def event(text: str = "", finish: str | None = None, usage: object = None) -> bytes:
    choices = [] if usage else [{"index": 0, "text": text, "finish_reason": finish}]
    data = {"model": "tiny", "choices": choices} | ({"usage": usage} if usage else {})
    return f"data: {json.dumps(data)}\n\n".encode()


WHOLE = (event("a"), event("b"), event("c", "length"), event(usage=USAGE), b"data: [DONE]\n\n")


def says(*chunks: bytes) -> Answering:
    async def answer(server: Server, response: web.StreamResponse) -> None:
        for chunk in chunks:
            await response.write(chunk)

    return answer


async def breaks_off(server: Server, response: web.StreamResponse) -> None:
    await response.write(WHOLE[0])
    assert server.transport is not None
    server.transport.abort()


async def waits(server: Server, response: web.StreamResponse) -> None:
    server.num_open += 1
    server.max_open = max(server.max_open, server.num_open)
    server.arrived.set()
    await server.release.wait()
    server.num_open -= 1
    await says(*WHOLE)(server, response)


@dataclass(slots=True)
class Server:
    """Answers every POST in the way of `answering`; keeps what it was sent."""

    answering: Answering = says(*WHOLE)  # noqa: RUF009
    status: int = 200
    url: str = ""
    seen: list[tuple[str, object]] = field(default_factory=list)
    transport: asyncio.Transport | None = None
    num_open: int = 0
    max_open: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, await request.json()))
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        headers = {"content-type": "text/event-stream"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        self.transport = request.transport
        await self.answering(self, response)
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.handle)
    async with TestServer(app) as running:
        made.url = str(running.make_url("/"))
        yield made


def planned(num: int = 1, gap_s: float = 0.0) -> list[PlannedRequest]:
    body = {"model": "tiny", "prompt": "a secret", "max_tokens": 3, "stream": True}
    return [PlannedRequest(n * gap_s, "/v1/completions", body, Domain.CODE, 40) for n in range(num)]


async def test_the_planned_body_arrives_at_the_planned_path(server: Server) -> None:
    await replay(planned(), server.url)
    assert server.seen == [("/v1/completions", planned()[0].body)]


async def test_a_whole_stream_is_ok_and_its_facts_are_the_engines(server: Server) -> None:
    report = await replay(planned(3), server.url)
    assert (report.num_sent, report.num_ok, report.num_failed, report.num_cut) == (3, 3, 0, 0)
    s = report.answers[0].sample
    assert (s.num_prompt_tokens, s.num_cached_tokens, s.num_output_tokens) == (40, 8, 3)
    assert (s.model, s.estimated) == ("tiny", False)
    assert report.num_tokens == 3 * 43


async def test_the_first_token_comes_before_the_end(server: Server) -> None:
    report = await replay(planned(), server.url)
    sample = report.answers[0].sample
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    assert 0 < sample.ttft_s <= sample.ttft_s + 2 * sample.tpot_s <= sample.e2e_s
    assert (report.ttft_s(), report.e2e_s()) == ([sample.ttft_s], [sample.e2e_s])


@pytest.mark.parametrize(
    "answering",
    [
        says(*WHOLE[:-1]),  # no [DONE]
        says(WHOLE[0], WHOLE[1], WHOLE[3], WHOLE[4]),  # no finish reason
        says(),
        breaks_off,
    ],
)
async def test_a_stream_that_does_not_end_well_is_cut(server: Server, answering: Answering) -> None:
    server.answering = answering
    report = await replay(planned(2), server.url)
    assert (report.num_sent, report.num_ok, report.num_failed, report.num_cut) == (2, 0, 0, 2)


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, Outcome.CLIENT_ERROR), (503, Outcome.SERVER_ERROR)]
)
async def test_an_error_status_is_failed(server: Server, status: int, outcome: Outcome) -> None:
    server.status = status
    report = await replay(planned(), server.url)
    assert report.answers[0].sample.outcome is outcome
    assert (report.num_failed, report.num_cut) == (1, 0)


async def test_a_server_that_is_not_there_is_failed() -> None:
    report = await replay(planned(), f"http://127.0.0.1:{unused_port()}")
    assert report.answers[0].sample.outcome is Outcome.UPSTREAM_UNREACHABLE
    assert report.num_failed == 1


async def test_a_silent_server_is_given_up_after_the_idle_time(server: Server) -> None:
    server.answering = waits
    report = await Replayer(server.url, idle_timeout_s=0.1).run(planned())
    server.release.set()
    assert report.num_cut == 1


async def test_no_more_requests_are_in_flight_than_allowed(server: Server) -> None:
    server.answering = waits
    async with asyncio.TaskGroup() as group:
        run = group.create_task(replay(planned(12), server.url, max_concurrency=3))
        while server.num_open < 3:
            await server.arrived.wait()
            await asyncio.sleep(0.01)
        server.release.set()
    assert (server.max_open, run.result().num_ok) == (3, 12)


async def test_a_stopped_replay_sends_no_more_and_waits_for_what_it_sent(server: Server) -> None:
    server.answering = waits
    replayer = Replayer(server.url)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(replayer.run(planned(2, gap_s=3600.0)))
        await server.arrived.wait()
        replayer.stop()
        server.release.set()
    assert (len(server.seen), run.result().num_ok) == (1, 1)


async def test_an_endless_plan_is_taken_as_it_goes(server: Server) -> None:
    replayer = Replayer(server.url)

    def endless() -> Iterator[PlannedRequest]:
        for n in range(1_000_000):
            if n == 5:
                replayer.stop()
            yield planned()[0]

    report = await replayer.run(endless())
    assert report.num_ok == 5


async def test_no_request_is_sent_before_its_time(server: Server) -> None:
    report = await replay(planned(3, gap_s=0.05), server.url)
    sent = sorted(a.sent_s for a in report.answers)
    assert sent[2] - sent[0] >= 0.08
    assert all(a.late_s >= 0 for a in report.answers)


async def test_a_json_answer_needs_no_done(server: Server) -> None:
    async def answer(request: web.Request) -> web.Response:
        choice = {"index": 0, "text": "abc", "finish_reason": "length"}
        return web.json_response({"model": "tiny", "choices": [choice], "usage": USAGE})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as running:
        report = await replay(planned(), str(running.make_url("/")))
    assert report.num_ok == 1
    assert report.answers[0].sample.num_output_tokens == 3


async def test_the_report_in_words_counts_and_times(server: Server) -> None:
    words = str(await replay(planned(2), server.url))
    assert words.startswith("2 sent, 2 ok, 0 failed, 0 cut, TTFT p50 ")


async def test_what_was_asked_and_answered_is_in_no_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.answering = breaks_off
    with caplog.at_level(logging.DEBUG):
        report = await replay(planned(), server.url)
    assert "broke off" in caplog.text
    assert "secret" not in caplog.text + repr(report)
