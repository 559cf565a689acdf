"""Engines that speak real HTTP from raw sockets, and a raw client: bytes matter here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from profiler.samples import Outcome, RequestSample
from sidecar.comparison import MirrorResult
from sidecar.mirror import Mirror, MirrorSettings
from sidecar.relay import Engines, Relay, RelaySettings, Route, serve
from sidecar.routing import Role, Routing, RoutingTable
from sidecar.tap import LiveRequest

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str) -> bytes:
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    return f"data: {event}\n\n".encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHAT = post("/v1/chat/completions", b'{"messages":[]}')


@dataclass(slots=True)
class Seen:
    """One request as it came over the wire."""

    head: bytes
    body: bytes = b""
    num_on_connection: int = 1  # 2: the connection was used before

    @property
    def line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.head.decode().split("\r\n")[1:]
        return [(k, v) for k, _, v in (line.partition(": ") for line in lines if line)]


Script = Callable[["FakeUpstream", Seen, asyncio.StreamWriter], Awaitable[None]]


async def say_ok(upstream: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
    out.write(OK)


def say(reply: bytes) -> Script:
    async def script(upstream: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(reply)

    return script


async def say_nothing(upstream: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
    """A head, and then nothing."""
    out.write(SSE)
    await asyncio.sleep(60)


@dataclass(slots=True)
class FakeUpstream:
    """Answers each request by `script`. `gone` is set when a client closes its connection."""

    script: Script = say_ok
    seen: list[Seen] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    tasks: asyncio.TaskGroup | None = None
    connections: list[asyncio.Task[None]] = field(default_factory=list)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.tasks is not None
        self.connections.append(self.tasks.create_task(self.serve(reader, writer)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num = 0
        try:
            while True:
                seen = Seen(await reader.readuntil(b"\r\n\r\n"))
                num += 1
                seen.num_on_connection = num
                seen.body = await _read_body(reader, seen)
                self.seen.append(seen)
                self.asked.set()
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(self._watch(reader, writer))
                    await self.script(self, seen, writer)
                    watch.cancel()
                await writer.drain()
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, BaseExceptionGroup):
            self.gone.set()
        finally:
            writer.close()

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # a stream has no event for its end
        self.gone.set()
        raise ConnectionResetError


async def _read_body(reader: asyncio.StreamReader, seen: Seen) -> bytes:
    headers = {k.lower(): v for k, v in seen.headers}
    if "transfer-encoding" not in headers:
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readuntil(b"\r\n")
    return body


@asynccontextmanager
async def upstream(script: Script = say_ok) -> AsyncIterator[FakeUpstream]:
    fake = FakeUpstream(script)
    server = await asyncio.start_server(fake.accept, "127.0.0.1", 0, limit=1 << 26)
    fake.port = server.sockets[0].getsockname()[1]
    async with asyncio.TaskGroup() as fake.tasks:
        try:
            yield fake
        finally:
            server.close()
            for connection in fake.connections:
                connection.cancel()


@dataclass(slots=True)
class Notebook:
    """An `Observer` that writes down everything."""

    samples: list[RequestSample] = field(default_factory=list)
    counts: list[tuple[Outcome, Role, Route]] = field(default_factory=list)
    lives: list[LiveRequest] = field(default_factory=list)
    mirrored: list[MirrorResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def sample(self, sample: RequestSample) -> None:
        self.samples.append(sample)

    def count(self, outcome: Outcome, arm: Role, route: Route) -> None:
        self.counts.append((outcome, arm, route))

    def live(self, request: LiveRequest) -> None:
        self.lives.append(request)

    def note(self, result: MirrorResult) -> None:
        self.mirrored.append(result)


@dataclass(slots=True)
class Proxy:
    """A relay under test, with what it reported."""

    port: int
    routing: Routing
    relay: Relay
    notes: Notebook

    async def finished(self, num: int = 1) -> RequestSample:
        """The last of `num` samples, once they are there."""
        await until(lambda: len(self.notes.samples) >= num)
        return self.notes.samples[-1]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # threads and processes set no event of ours


@asynccontextmanager
async def proxy(
    *stable: str,
    canary: tuple[str, ...] = (),
    weight: float = 0.0,
    mirror: bool = False,
    settings: RelaySettings | None = None,
    mirror_settings: MirrorSettings | None = None,
    grace_s: float = 0.0,
    **table: Any,
) -> AsyncIterator[Proxy]:
    routing = Routing(RoutingTable(1, stable, canary, weight, mirror, **table))
    notes, settings = Notebook(), settings or RelaySettings()
    engines = Engines(settings.connect_timeout_s, settings.keepalive_s)
    shadowing = Mirror(notes.note, mirror_settings or MirrorSettings())
    relay = Relay(routing, engines, notes, shadowing, settings)
    try:
        async with serve(relay, "127.0.0.1", 0, False, grace_s) as port, shadowing.running():
            yield Proxy(port, routing, relay, notes)
    finally:
        await engines.close()


@dataclass(slots=True)
class Client:
    """A raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Everything until the connection ends, however it ends."""
        data = b""
        async with asyncio.timeout(20):
            with suppress(ConnectionError):
                while part := await self.reader.read(1 << 20):
                    data += part
        return data

    def leave(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 27)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def ask(port: int, request: bytes) -> bytes:
    """The whole raw response to one request, which must ask for `Connection: close`."""
    async with client(port) as c:
        c.send(request)
        return await c.rest()


def closing(request: bytes) -> bytes:
    """The same request with `Connection: close`."""
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


def body_of(response: bytes) -> bytes:
    """Body bytes, chunked framing undone. Raises `ValueError` when it breaks off."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        num = int(size, 16)
        if num == 0:
            return body
        body, rest = body + rest[:num], rest[num + 2 :]
