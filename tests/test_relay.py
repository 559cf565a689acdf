"""What a client and an engine see of each other through the relay: bytes, pace, endings."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from fakes_upstream import (
    CHAT,
    END,
    OK,
    SSE,
    FakeUpstream,
    Seen,
    ask,
    body_of,
    chunked,
    client,
    closing,
    post,
    proxy,
    say,
    token,
    until,
    upstream,
)

from profiler.samples import Outcome
from sidecar.relay import RelaySettings, Route, route
from sidecar.routing import Role, RoutingTable

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens


async def stall(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def two_then_stall(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
    out.write(SSE + chunked(token("a")) + chunked(token("b")))
    await asyncio.sleep(30)


def reset(out: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    out.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    out.transport.abort()


# ---- bytes


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/models/meta%2Fllama%3A7b", "/x%28y%29?a=%2F&b=+%20&c", "//v1//models"),
        *(
            "/v1/models?",
            "/a/../b/./c",
            "/flush_cache?timeout=2&mode=x",
            "/a;b=c?d#e",
            "/?api-version=1",
        ),
    ],
)
async def test_the_request_line_arrives_byte_for_byte(target: str) -> None:
    async with upstream() as engine, proxy(engine.url) as p:
        await ask(p.port, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert engine.seen[0].line == f"GET {target} HTTP/1.1".encode()


@pytest.mark.parametrize("size", [0, 1, 32_769, (1 << 20) + 1, 10 << 20, 64 << 20])
async def test_the_body_arrives_byte_for_byte(size: int) -> None:
    body = random.Random(size).randbytes(size)
    async with upstream() as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(post("/v1/chat/completions", body)))
    assert response.startswith(b"HTTP/1.1 200")
    assert engine.seen[0].body == body


@pytest.mark.parametrize("size", [3, 3 << 20])
async def test_a_chunked_body_with_extensions_and_trailers_arrives_whole(size: int) -> None:
    body = random.Random(size).randbytes(size)
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked"
    parts = [body[:1], body[1:2], body[2:]]
    framed = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts)
    async with upstream() as engine, proxy(engine.url) as p:
        await ask(p.port, head + b"\r\n\r\n" + framed + b"0\r\nX-T: 1\r\n\r\n")
    assert engine.seen[0].body == body


async def test_compressed_bytes_pass_with_their_header_both_ways() -> None:
    packed = gzip.compress(b"{}" * 500)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with upstream(say(head + packed)) as engine, proxy(engine.url) as p:
        sent = post("/v1/responses", packed, "Content-Encoding: gzip")
        response = await ask(p.port, closing(sent))
    assert engine.seen[0].body == body_of(response) == packed
    assert b"Content-Encoding: gzip" in response


async def test_request_headers_keep_duplicates_case_and_order() -> None:
    lines = ["X-Dup: 1", "b: 2", "x-dup: 3", "Authorization: Bearer k", "Cookie: a=1; b=2"]
    async with upstream() as engine, proxy(engine.url) as p:
        await ask(p.port, closing(post("/x", b"", *lines)))
    seen = [(k.lower(), v) for k, v in engine.seen[0].headers]
    assert seen == [
        ("host", "x"),
        ("content-length", "0"),
        *[(line.split(": ")[0].lower(), line.split(": ")[1]) for line in lines],
    ]


async def test_hop_by_hop_headers_and_those_named_by_connection_stop_here() -> None:
    gone = ["Connection: keep-alive, x-nominated", "x-nominated: secret", "TE: trailers"]
    gone += ["Keep-Alive: timeout=5", "Upgrade-Insecure-Requests: 1"]
    reply = OK.replace(b"\r\n\r\n", b"\r\nConnection: x-r\r\nx-r: 1\r\nKeep-Alive: 1\r\n\r\n")
    async with upstream(say(reply)) as engine, proxy(engine.url) as p, client(p.port) as c:
        c.send(post("/x", b"", *gone))
        response = (await c.until(b"ok")).lower()
    assert {k.lower() for k, _ in engine.seen[0].headers} == {
        *("host", "content-length", "upgrade-insecure-requests")
    }
    assert b"x-r" not in response
    assert b"keep-alive" not in response


async def test_response_headers_are_exactly_the_engines() -> None:
    head = (
        b"HTTP/1.1 429 Slow Down\r\nServer: e\r\nset-cookie: a=1\r\nSet-Cookie: b=2\r\n"
        b"Retry-After: 7\r\nx-ratelimit-limit: 1\r\nContent-Length: 0\r\n"
    )
    async with upstream(say(head + b"\r\n")) as engine, proxy(engine.url) as p, client(p.port) as c:
        c.send(CHAT)
        response = await c.until(b"\r\n\r\n")
    assert response == head + b"\r\n"


async def test_cookies_of_one_reply_are_not_sent_with_the_next_request() -> None:
    reply = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: tenant=1\r\n\r\n")
    async with upstream(say(reply)) as engine, proxy(f"http://localhost:{engine.port}") as p:
        for _ in range(2):
            await ask(p.port, closing(CHAT))
    assert len(engine.seen) == 2
    assert not [h for seen in engine.seen for h in seen.headers if h[0].lower() == "cookie"]


async def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)
    async with upstream() as engine, proxy(engine.url) as p:
        assert body_of(await ask(p.port, closing(CHAT))) == b"ok"


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "HEAD"])
async def test_every_method_goes_to_the_engine(method: str) -> None:
    reply = OK[:-2] if method == "HEAD" else OK
    async with upstream(say(reply)) as engine, proxy(engine.url) as p:
        head = f"{method} /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        response = await ask(p.port, head.encode())
    assert engine.seen[0].line == f"{method} /v1/models HTTP/1.1".encode()
    assert b"Content-Length: 2" in response
    assert body_of(response) == (b"" if method == "HEAD" else b"ok")


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_an_error_of_the_engine_is_passed_on_and_not_tried_again(status: int) -> None:
    reply = b"HTTP/1.1 %d Odd Reason\r\nContent-Type: text/html\r\n" % status
    reply += b"Content-Length: 3\r\n\r\n<b>"
    async with upstream(say(reply)) as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert response.startswith(b"HTTP/1.1 %d Odd Reason\r\n" % status)
    assert body_of(response) == b"<b>"
    assert len(engine.seen) == 1
    assert sample.outcome == (Outcome.SERVER_ERROR if status >= 500 else Outcome.CLIENT_ERROR)


async def test_a_client_that_expects_to_be_asked_for_its_body_is_asked() -> None:
    async with upstream() as engine, proxy(engine.url) as p, client(p.port) as c:
        head, _, body = post("/v1/files", b"abc", "Expect: 100-continue").partition(b"\r\n\r\n")
        c.send(head + b"\r\n\r\n")
        assert (await c.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        c.send(body)
        assert (await c.until(b"ok")).startswith(b"HTTP/1.1 200 ")
    assert engine.seen[0].body == b"abc"
    assert "expect" not in {k.lower() for k, _ in engine.seen[0].headers}


@pytest.mark.parametrize(
    "smuggled",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Content-Length: 4\r\nContent-Length: 5",
        "Transfer-Encoding : chunked",
        "X: a\r\n b",
        "X: a\x00b",
    ],
)
async def test_ambiguous_requests_reach_no_engine(
    smuggled: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = f"POST / HTTP/1.1\r\nHost: x\r\n{smuggled}\r\n\r\n1\r\na\r\n0\r\n\r\n"
    async with upstream() as engine, proxy(engine.url) as p:
        response = await ask(p.port, request.encode())
    assert response.startswith(b"HTTP/1.1 400") or response.startswith(b"HTTP/1.0 400")
    assert engine.seen == []


async def test_an_old_client_gets_a_body_without_chunks() -> None:
    async with upstream(say(SSE + chunked(b"abc") + END)) as engine, proxy(engine.url) as p:
        response = await ask(p.port, b"GET / HTTP/1.0\r\n\r\n")
    assert body_of(response) == b"abc"


# ---- pace


async def test_each_chunk_is_passed_on_before_the_next_one_comes() -> None:
    step = asyncio.Event()

    async def stepwise(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE)
        for text in ("a", "b"):
            out.write(chunked(token(text)))
            await step.wait()
            step.clear()
        out.write(END)

    async with upstream(stepwise) as engine, proxy(engine.url) as p, client(p.port) as c:
        c.send(CHAT)
        for text in (b'"a"', b'"b"'):
            await c.until(text)
            step.set()
        await c.until(END)


async def test_events_cut_anywhere_are_the_same_bytes_and_the_same_text() -> None:
    whole = token("北京🚀") + b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'

    async def cut(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE)
        for i in range(0, len(whole), 3):
            out.write(chunked(whole[i : i + 3]))
            await asyncio.sleep(0)
        out.write(END)

    async with upstream(cut) as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(CHAT))
        await p.finished()
    assert body_of(response) == whole
    assert p.notes.lives[0].output_text == "北京🚀"


async def test_a_line_of_two_megabytes_passes_and_later_tokens_are_still_seen() -> None:
    whole = b"data: " + b"x" * (2 << 20) + b"\n\n" + token("a")
    async with upstream(say(SSE + chunked(whole) + END)) as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert body_of(response) == whole
    assert sample.num_output_tokens == 1


async def test_a_client_that_does_not_read_stops_the_engine_from_writing() -> None:
    written = 0

    async def flood(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        nonlocal written
        out.write(SSE)
        while True:
            out.write(chunked(bytes(1 << 20)))
            await out.drain()
            written += 1

    async with upstream(flood) as engine, proxy(engine.url) as p:
        with socket.create_connection(("127.0.0.1", p.port)) as lazy:
            lazy.send(CHAT)
            await engine.asked.wait()
            before = -1
            while written != before:
                before = written
                await asyncio.sleep(0.3)
            assert written < 40
            assert body_of(await ask(p.port, closing(CHAT).replace(b"POST", b"HEAD"))) == b""


async def test_three_hundred_streams_run_at_once() -> None:
    everybody, num = asyncio.Event(), 0

    async def together(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        nonlocal num
        num += 1
        if num == 300:
            everybody.set()
        await everybody.wait()
        out.write(OK)

    async with upstream(together) as engine, proxy(engine.url) as p:
        answers = await asyncio.gather(*[ask(p.port, closing(CHAT)) for _ in range(300)])
        await p.finished(300)
    assert {body_of(a) for a in answers} == {b"ok"}
    assert max(s.num_in_flight for s in p.notes.samples) == 300


# ---- endings


async def test_an_engine_that_dies_in_a_stream_is_seen_to_die() -> None:
    async def die(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(token("a")))
        await out.drain()
        await asyncio.sleep(0.05)
        reset(out)

    async with upstream(die) as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert response.endswith(chunked(token("a")))
    assert sample.outcome is Outcome.UPSTREAM_RESET
    assert p.routing.num_in_flight() == 0


async def test_a_body_that_ends_with_the_connection_is_not_given_a_clean_end() -> None:
    async def die(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(b"abc"))
        await out.drain()
        await asyncio.sleep(0.05)
        reset(out)

    async with upstream(die) as engine, proxy(engine.url) as p, client(p.port) as c:
        c.send(b"POST /x HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
        await c.until(b"abc")
        with pytest.raises(ConnectionResetError):
            await c.reader.read()


async def test_a_client_that_leaves_a_stream_frees_the_engine() -> None:
    async with upstream(two_then_stall) as engine, proxy(engine.url) as p:
        async with client(p.port) as c:
            c.send(CHAT)
            await c.until(b'"b"')
            c.leave()
        async with asyncio.timeout(5):
            await engine.gone.wait()
        sample = await p.finished()
    assert (sample.outcome, sample.num_output_tokens) == (Outcome.CLIENT_CANCELLED, 2)
    assert sample.estimated
    assert p.routing.num_in_flight() == 0


async def test_a_client_that_leaves_before_the_response_frees_the_engine() -> None:
    async with upstream(stall) as engine, proxy(engine.url) as p:
        async with client(p.port) as c:
            c.send(CHAT)
            await engine.asked.wait()
            c.leave()
        async with asyncio.timeout(5):
            await engine.gone.wait()
        assert (await p.finished()).outcome is Outcome.CLIENT_CANCELLED


async def test_an_engine_that_is_not_there_is_a_502_that_says_when_to_retry() -> None:
    async with proxy(NOBODY) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert response.startswith(b"HTTP/1.1 502 ")
    assert b"Retry-After: 1" in response
    assert set(json.loads(body_of(response))["error"]) == {"message", "type", "param", "code"}
    assert sample.outcome is Outcome.UPSTREAM_UNREACHABLE


async def test_a_canary_that_is_not_there_leaves_its_requests_to_stable() -> None:
    async with upstream() as engine, proxy(engine.url, canary=(NOBODY,), weight=1.0) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
        assert p.routing.num_in_flight() == 0
    assert response.startswith(b"HTTP/1.1 200 ")
    assert sample.arm == "stable"


async def test_a_reused_connection_that_closes_without_a_byte_is_replaced_once() -> None:
    async def once(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        if seen.num_on_connection == 2:
            out.close()
        else:
            out.write(OK)

    async with upstream(once) as engine, proxy(engine.url) as p:
        answers = [await ask(p.port, closing(CHAT)) for _ in range(2)]
    assert [body_of(a) for a in answers] == [b"ok", b"ok"]
    assert [s.num_on_connection for s in engine.seen] == [1, 2, 1]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_fresh_connection_or_a_begun_answer_is_never_tried_again(
    said: bytes, how: str
) -> None:
    async def hang_up(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        if said and seen.num_on_connection == 1:
            out.write(OK)
            return
        out.write(said)
        await out.drain()
        await asyncio.sleep(0.02)
        out.close() if how == "close" else reset(out)

    async with upstream(hang_up) as engine, proxy(engine.url) as p:
        if said:
            await ask(p.port, closing(CHAT))
        num = len(engine.seen)
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished(num + 1)
    assert response.startswith(b"HTTP/1.1 502 ")
    assert len(engine.seen) == num + 1
    expected = Outcome.UPSTREAM_RESET if said else Outcome.UPSTREAM_UNREACHABLE
    assert sample.outcome is expected


async def test_a_body_that_was_streamed_is_not_sent_twice() -> None:
    async def once(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        if seen.num_on_connection == 2:
            out.close()
        else:
            out.write(OK)

    settings = RelaySettings(max_kept_body_bytes=10)
    async with upstream(once) as engine, proxy(engine.url, settings=settings) as p:
        await ask(p.port, closing(CHAT))
        response = await ask(p.port, closing(post("/v1/completions", b"x" * 100)))
    assert response.startswith(b"HTTP/1.1 502 ")
    assert len(engine.seen) == 2


async def test_an_early_answer_ends_the_upload() -> None:
    ended = asyncio.Event()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        ended.set()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, proxy(url) as p, client(p.port) as c:
        c.send(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + bytes(2 << 20))
        assert (await c.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 No")
        assert (await p.finished()).outcome is Outcome.CLIENT_ERROR
        await ended.wait()


async def test_nothing_is_left_open_after_every_kind_of_end() -> None:
    async def vary(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(token("a")))
        if b"/die" in seen.line:
            await out.drain()
            reset(out)
        elif b"/stall" in seen.line:
            await asyncio.sleep(30)
        else:
            out.write(END)

    async def round_trip(p_port: int) -> None:
        for path in ("/ok", "/die"):
            await ask(p_port, closing(post(path, b"{}")))
        async with client(p_port) as c:
            c.send(post("/stall", b"{}"))
            await c.until(b'"a"')
            c.leave()

    async with upstream(vary) as engine, proxy(engine.url) as p:
        await round_trip(p.port)
        await p.finished(3)
        await asyncio.sleep(0.1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await round_trip(p.port)
        await p.finished(63)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert p.routing.num_in_flight() == 0


async def test_leaving_waits_for_streams_within_the_grace_time() -> None:
    finish = asyncio.Event()

    async def slow(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(token("a")))
        await finish.wait()
        out.write(chunked(token("b")) + END)

    async with upstream(slow) as engine, AsyncExitStack() as later:
        async with proxy(engine.url, grace_s=10.0) as p:
            c = await later.enter_async_context(client(p.port))
            c.send(CHAT)
            await c.until(b'"a"')
            asyncio.get_running_loop().call_later(0.2, finish.set)
        assert (await c.rest()).endswith(chunked(token("b")) + END)


async def test_a_stream_beyond_the_grace_time_is_broken_off_without_an_end() -> None:
    async with upstream(two_then_stall) as engine, AsyncExitStack() as later:
        async with proxy(engine.url, grace_s=0.1) as p:
            c = await later.enter_async_context(client(p.port))
            c.send(CHAT)
            await c.until(b'"b"')
        assert END not in await c.rest()


# ---- tunnels

UPGRADE = (
    b"GET /v1/realtime?x=%2F HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: k\r\nSec-WebSocket-Protocol: p\r\n\r\n"
)
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@asynccontextmanager
async def raw_engine(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_upgraded_connection_is_passed_byte_for_byte_both_ways() -> None:
    heads = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(SWITCHED + b"\x81\x01a")
        writer.write(await reader.readexactly(300_000))
        writer.write(b"\x88\x02\x03\xf0")
        await writer.drain()

    sent = random.Random(1).randbytes(300_000)
    async with raw_engine(talk) as url, proxy(url) as p, client(p.port) as c:
        c.send(UPGRADE)
        assert await c.until(b"\x81\x01a") == SWITCHED + b"\x81\x01a"
        c.send(sent)
        assert await c.rest() == sent + b"\x88\x02\x03\xf0"
    assert heads == [UPGRADE]
    assert p.notes.counts == [(Outcome.OK, Role.STABLE, Route.OTHER)]


async def test_a_client_that_leaves_a_tunnel_frees_the_engine() -> None:
    freed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SWITCHED)
        with suppress(ConnectionError):
            await reader.read()
        freed.set()

    async with raw_engine(talk) as url, proxy(url) as p, client(p.port) as c:
        c.send(UPGRADE)
        await c.until(b"\r\n\r\n")
        c.leave()
        async with asyncio.timeout(5):
            await freed.wait()
        await until(lambda: p.routing.num_in_flight() == 0)


async def test_a_refused_upgrade_is_passed_on() -> None:
    refusal = b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)

    async with raw_engine(talk) as url, proxy(url) as p:
        assert await ask(p.port, UPGRADE) == refusal


async def test_an_upgrade_to_an_engine_that_is_not_there_is_a_502() -> None:
    async with proxy(NOBODY) as p, client(p.port) as c:
        c.send(UPGRADE)
        assert (await c.until(b"}}")).startswith(b"HTTP/1.1 502 ")


# ---- arms


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("POST", "/v1/chat/completions?x=1", Route.GENERATION),
        ("GET", "/v1/chat/completions", Route.OTHER),
        ("POST", "/v1/embeddings", Route.OTHER),
        ("POST", "/v1/load_lora_adapter", Route.CONTROL),
        ("POST", "//%66lush_cache/?timeout=2", Route.CONTROL),
        ("POST", "http://x/flush_cache", Route.CONTROL),
        ("POST", "/update_weights_from_disk", Route.CONTROL),
        ("GET", "/health", Route.OTHER),
    ],
)
def test_what_a_path_is_for(method: str, target: str, kind: Route) -> None:
    assert route(method, target) is kind


async def test_all_but_generation_goes_to_stable() -> None:
    async with upstream() as a, upstream() as b, proxy(a.url, canary=(b.url,), weight=1.0) as p:
        for path in ("/health", "/metrics", "/v1/models"):
            await ask(
                p.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
        await ask(p.port, closing(CHAT))
    assert (len(a.seen), len(b.seen)) == (3, 1)
    assert [arm for _, arm, _ in p.notes.counts] == [Role.STABLE] * 3 + [Role.CANARY]


@pytest.mark.parametrize(("weight", "status"), [(0.0, 200), (0.2, 409)])
async def test_control_routes_are_refused_while_a_canary_is_open(
    weight: float, status: int
) -> None:
    async with upstream() as a, upstream() as b, proxy(a.url, canary=(b.url,), weight=weight) as p:
        response = await ask(p.port, closing(post("/flush_cache", b"")))
    assert response.startswith(b"HTTP/1.1 %d " % status)
    assert len(b.seen) == 0


async def test_a_session_stays_on_its_arm_by_header_or_by_its_first_bytes() -> None:
    async with upstream() as a, upstream() as b, proxy(a.url, canary=(b.url,), weight=0.5) as p:
        for i in range(8):
            for _ in range(2):
                await ask(p.port, closing(post("/v1/completions", b"", f"X-Session-Id: {i}")))
                await ask(p.port, closing(post("/v1/completions", b"%d" % i, f"A: {_}")))
    bodies = (
        {seen.body for seen in a.seen if seen.body},
        {seen.body for seen in b.seen if seen.body},
    )
    assert min(map(len, bodies)) > 0
    assert not bodies[0] & bodies[1]
    ids = [{dict(s.headers).get("X-Session-Id") for s in e.seen} - {None} for e in (a, b)]
    assert min(map(len, ids)) > 0
    assert not ids[0] & ids[1]


async def test_a_rollback_moves_the_next_request_and_breaks_no_stream() -> None:
    finish = asyncio.Event()

    async def slow(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(token("a")))
        await finish.wait()
        out.write(END)

    async with upstream() as a, upstream(slow) as b:
        async with proxy(a.url, canary=(b.url,), weight=1.0) as p, client(p.port) as c:
            c.send(CHAT)
            await c.until(b'"a"')
            p.routing.install(RoutingTable(2, (a.url,)))
            assert body_of(await ask(p.port, closing(CHAT))) == b"ok"
            finish.set()
            await c.until(END)


async def test_the_digest_is_shown_only_when_asked_for() -> None:
    async with upstream() as engine:
        digests = ((engine.url, "d1"),)
        async with proxy(engine.url, digests=digests) as p:
            quiet = await ask(p.port, closing(CHAT))
            assert (await p.finished()).digest == "d1"
        async with proxy(
            engine.url, settings=RelaySettings(show_digest=True), digests=digests
        ) as p:
            loud = await ask(p.port, closing(CHAT))
    assert b"trimtab" not in quiet
    assert b"x-trimtab-digest: d1\r\n" in loud


# ---- samples


async def test_one_sample_says_what_the_response_said() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    final = f"data: {json.dumps({'model': 'm', 'choices': [], 'usage': usage})}\n\n".encode()
    reply = SSE + chunked(token("a") + token("b") + final) + END
    async with upstream(say(reply)) as engine, proxy(engine.url) as p:
        await ask(p.port, closing(post("/v1/chat/completions", b"{}", "Authorization: Bearer k")))
        sample = await p.finished()
    assert (sample.num_prompt_tokens, sample.num_cached_tokens, sample.num_output_tokens) == (
        9,
        4,
        2,
    )
    assert (sample.outcome, sample.model, sample.arm) == (Outcome.OK, "m", "stable")
    assert sample.ttft_s is not None
    assert sample.ttft_s <= sample.e2e_s
    assert len(sample.tenant) == 16
    assert p.notes.counts == [(Outcome.OK, Role.STABLE, Route.GENERATION)]


async def test_a_compressed_stream_passes_as_it_is_and_is_sampled_all_the_same() -> None:
    final = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    packer = zlib.compressobj(wbits=31)
    packed = [
        packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in (token("a"), final)
    ]
    head = SSE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    reply = head + b"".join(chunked(part) for part in [*packed, packer.flush()]) + END
    async with upstream(say(reply)) as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert all(part in response for part in packed)
    assert (sample.num_prompt_tokens, sample.num_output_tokens) == (9, 1)
    assert sample.ttft_s is not None


async def test_looking_at_the_engine_is_not_traffic() -> None:
    async with upstream() as engine, proxy(engine.url) as p:
        await ask(p.port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert p.notes.counts == [(Outcome.OK, Role.STABLE, Route.OTHER)]
    assert p.notes.samples == []


async def test_bypass_looks_at_nothing() -> None:
    reply = SSE + chunked(token("a")) + END
    async with upstream(say(reply)) as engine, proxy(engine.url, bypass=True) as p:
        await ask(p.port, closing(CHAT))
        sample = await p.finished()
    assert (sample.outcome, sample.num_output_tokens) == (Outcome.OK, None)
    assert p.notes.lives == []


async def test_a_fault_of_ours_after_the_answer_adds_no_second_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with upstream() as engine, proxy(engine.url) as p, client(p.port) as c:
        p.notes.samples = None  # type: ignore[assignment]
        c.send(CHAT)
        assert await c.rest() == OK
    assert "request failed in the relay" in caplog.text


async def test_a_fault_of_ours_before_the_answer_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    async with upstream() as engine, proxy(engine.url) as p:
        p.routing.pick = None  # type: ignore[assignment, method-assign]
        response = await ask(p.port, closing(CHAT))
    assert response.startswith(b"HTTP/1.1 500 ")
    assert "request failed in the relay" in caplog.text


async def test_user_text_is_never_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("DEBUG")
    secret = b'{"prompt": "CANARY-7F3A"}'

    async def fail(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        if b"die" in seen.line:
            reset(out)
        out.write(SSE + chunked(b"data: {CANARY-7F3A\n\n") + END)

    async with upstream(fail) as engine, proxy(engine.url) as p, proxy(NOBODY) as dead:
        for port, path in (
            (p.port, "/v1/completions?k=CANARY-7F3A"),
            (p.port, "/die"),
            (dead.port, "/"),
        ):
            await ask(port, closing(post(path, secret, "Authorization: Bearer CANARY-7F3A")))
        await ask(p.port, b"GET / HTTP/1.1\r\nCANARY-7F3A\r\nX: CANARY-7F3A\x00\r\n\r\n")
    assert "CANARY" not in caplog.text


# ---- what is never relayed


@pytest.mark.parametrize(
    "target",
    [
        *("/collective_rpc", "/%63ollective_rpc", "//collective_rpc", "/collective_rpc/"),
        *("/collective_rpc?x=1", "/a/../collective_rpc", "/./collective_rpc", "/collective_rpc#x"),
        *("http://x/collective_rpc", "/api/collective_rpc", "/v1/../pause", "/sleep?level=2"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_the_engines_development_endpoints_are_not_relayed(method: str, target: str) -> None:
    request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    async with upstream() as engine, proxy(engine.url) as p:
        response = await ask(p.port, f"{request}Connection: close\r\n\r\n".encode())
    assert response.startswith(b"HTTP/1.1 403 ")
    assert set(json.loads(body_of(response))["error"]) == {"message", "type", "param", "code"}
    assert engine.seen == []
    assert [outcome for outcome, _, _ in p.notes.counts] == [Outcome.CLIENT_ERROR]


@pytest.mark.parametrize("target", ["/v1/models", "/v1/jobs/1/pause", "/collective_rpc_x", "/"])
async def test_what_only_looks_like_a_development_endpoint_is_relayed(target: str) -> None:
    async with upstream() as engine, proxy(engine.url) as p:
        response = await ask(p.port, closing(post(target, b"")))
    assert response.startswith(b"HTTP/1.1 200 ")
    assert len(engine.seen) == 1


@pytest.mark.parametrize("path", ["/health", "/collective_rpc"])
async def test_no_request_is_smuggled_behind_an_upgrade(path: str) -> None:
    upgrade = UPGRADE.replace(b"/v1/realtime?x=%2F", path.encode())
    async with upstream() as engine, proxy(engine.url) as p, client(p.port) as c:
        c.send(upgrade + post("/collective_rpc", b"{}"))
        await c.until(b"HTTP/1.1 ")
        c.send(post("/collective_rpc", b"{}"))
        await asyncio.sleep(0.2)
    assert not any(b"collective_rpc" in seen.line for seen in engine.seen)
