"""The hot path: every byte of a request to an engine, every byte of its answer to the client.

Bytes first: a chunk is written to the client before the tap sees it. Nothing is decoded, nothing is
made up: when the engine breaks off, so do we. One `finally` releases the upstream and says how the
request ended, however it ended.

`Relay.handle` is an aiohttp handler for a bare `web.Server` (no router: paths pass as they are);
`serve` makes the server around it. Known limits of aiohttp's wire: header values and paths that are
not UTF-8 lose their foreign bytes, and trailers stop here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import orjson
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    client_proto,
    hdrs,
    web,
)
from aiohttp.connector import Connection
from yarl import URL

from profiler.samples import Outcome, RequestSample
from sidecar.routing import Role, Routing, RoutingTable, Upstream, position
from sidecar.tap import LiveRequest, Reading, Tap

log = logging.getLogger(__name__)

Data = bytes | AsyncIterator[bytes] | None
Headers = list[tuple[str, str]]  # as sent: order, case and duplicates kept

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-connection proxy-authenticate proxy-authorization "
    "te trailer transfer-encoding upgrade".split()
)
MAX_HEAD_BYTES = 256 << 10  # one header line; the engine decides what is too much
MAX_HEADERS = 1000
KEY_BYTES = 512  # of a body, to tell sessions apart
SWITCHED = b"HTTP/1.1 101"


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits of the hot path. There is no limit on a request's whole time."""

    connect_timeout_s: float = 5.0
    keepalive_s: float = 4.0  # of idle engine connections; vLLM closes them after 5
    session_header: str = "x-session-id"
    show_digest: bool = False  # answer with x-trimtab-digest
    tenant_salt: bytes = b""  # the same for all workers, 64 bytes at most
    max_kept_body_bytes: int = 1 << 20  # larger ones stream: not replayed, mirrored or sampled


class Route(StrEnum):
    """What a path is for."""

    GENERATION = "generation"  # either arm can answer
    CONTROL = "control"  # changes the engine: stable only, and not beside a canary
    OTHER = "other"  # stable only


GENERATION = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/messages"))
CONTROL = frozenset(
    "/v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /unload_lora_adapter "
    "/pause_generation /continue_generation /release_memory_occupation /resume_memory_occupation "
    "/set_internal_state /flush_cache /init_weights_update_group "
    "/destroy_weights_update_group".split()
)
# vLLM's under VLLM_SERVER_DEV_MODE, which no key of vLLM's guards, and scaling: they run any method
# of the workers, stop the engine or replace its weights. Whoever may, asks the engine itself.
FORBIDDEN = frozenset(
    "/collective_rpc /pause /resume /is_paused /abort_requests /sleep /wake_up /is_sleeping "
    "/release_kv_cache_memory /reset_prefix_cache /reset_mm_cache /reset_encoder_cache "
    "/server_info /init_weight_transfer_engine /start_weight_update /start_draft_weight_update "
    "/update_weights /finish_weight_update /shutdown_weight_transfer_engine /weight_checker "
    "/weight_info /update_weight_version /get_world_size /scale_elastic_ep "
    "/is_scaling_elastic_ep".split()
)


def route(method: str, target: str) -> Route:
    """A disguised control path (`//flush_cache/`, `/%66lush_cache`) is one all the same."""
    if method != "POST":
        return Route.OTHER
    if _path(target) in GENERATION:
        return Route.GENERATION
    plain = _plain(target)
    if plain in CONTROL or plain.startswith(("/update_weight", "/v1/update_weight")):
        return Route.CONTROL
    return Route.OTHER


def is_forbidden(target: str) -> bool:
    """Also behind a prefix, since vLLM's --root-path adds one, but not in `/v1`."""
    plain = _plain(target)
    if plain.startswith("/v1/"):
        return False
    return plain[plain.rfind("/") :] in FORBIDDEN


def _path(target: str) -> str:
    """What an engine reads from a request line: decoded, without query and fragment."""
    path = unquote(target.partition("?")[0].partition("#")[0])
    return path if path.startswith("/") else urlsplit(path).path  # absolute form


def _plain(target: str) -> str:
    """No doubled or trailing slash, no dot segments."""
    parts: list[str] = []
    for part in _path(target).split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request that the stable arm answered with 2xx, for the mirror to repeat."""

    target: str  # path and query, raw
    headers: Headers
    body: bytes | None  # None: it was too large to keep
    shadow_url: str
    shadow_digest: str
    shadow_serves: bool  # it has clients of its own: no replays there
    outcome: Outcome
    reading: Reading
    ttft_s: float | None
    e2e_s: float


class Observer(Protocol):
    """Whoever wants to know. Synchronous, bounded, never raises, never blocks."""

    def sample(self, sample: RequestSample) -> None:
        """One finished request that asked an engine to work (a POST that controls nothing)."""

    def count(self, outcome: Outcome, arm: Role, route: Route) -> None:
        """Every finished request, once."""

    def live(self, request: LiveRequest) -> None:
        """A generation that went well, to keep or not to keep."""


class Shadowing(Protocol):
    """The mirror, as the relay sees it. Never raises, never blocks."""

    def offer(self, exchange: Exchange) -> None:
        """Take an eligible request, or say why not: it gets exactly one label."""


# ---- upstream connections ----------------------------------------------------------------------


class NoResponse(Exception):
    """The engine closed the connection before the response head was complete. `stale`: it was a
    reused connection and no byte had come, so that the engine most likely never saw the request."""

    def __init__(self, num_bytes: int, reused: bool) -> None:
        super().__init__(f"closed after {num_bytes} bytes of the response head")
        self.num_bytes = num_bytes
        self.stale = reused and num_bytes == 0


class _Wire(client_proto.ResponseHandler):
    """A client connection that knows whether it was used before and what came back."""

    num_requests = 0
    num_bytes = 0  # since the present request began

    def set_response_params(self, **params: Any) -> None:
        self.num_requests += 1
        self.num_bytes = 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        super().data_received(data)


class _Response(ClientResponse):
    async def start(self, connection: Connection) -> ClientResponse:
        wire = connection.protocol
        assert isinstance(wire, _Wire)
        try:
            return await super().start(connection)
        except (ClientError, OSError) as e:
            raise NoResponse(wire.num_bytes, wire.num_requests > 1) from e


class Engines:
    """A client for engines that passes bytes as they are. Whoever makes it closes it; needs a
    running loop."""

    def __init__(self, connect_timeout_s: float, keepalive_s: float) -> None:
        self._timeout_s = connect_timeout_s
        self._pooled = self._session(TCPConnector(limit=0, keepalive_timeout=keepalive_s))
        self._fresh = self._session(TCPConnector(limit=0, force_close=True))

    def _session(self, connector: TCPConnector) -> ClientSession:
        loop = asyncio.get_running_loop()
        connector._factory = lambda: _Wire(loop)  # type: ignore[assignment]
        return ClientSession(
            connector=connector,
            response_class=_Response,
            timeout=ClientTimeout(connect=self._timeout_s, sock_connect=self._timeout_s),
            cookie_jar=DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEADERS,
        )

    async def send(
        self, method: str, url: URL, headers: Headers, data: Data, fresh: bool = False
    ) -> ClientResponse:
        """Returns with the response head; whoever gets it closes it. `fresh` takes a connection
        that nobody used before. Raises `NoResponse`, or what aiohttp raises."""
        session = self._fresh if fresh else self._pooled
        alike = _one_spelling(headers)
        return await session.request(method, url, headers=alike, data=data, allow_redirects=False)

    async def close(self) -> None:
        await self._pooled.close()
        await self._fresh.close()


def engine_url(base: str, target: str) -> URL:
    """`target` goes to the wire byte for byte: as a path, since a URL drops an empty query."""
    parts = urlsplit(base)
    assert parts.hostname is not None
    return URL.build(
        scheme=parts.scheme, host=parts.hostname, port=parts.port, path=target, encoded=True
    )


def end_to_end(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers that pass through: all but the hop-by-hop ones and those that `Connection` names."""
    headers = [
        (k.decode(errors="surrogateescape"), v.decode(errors="surrogateescape")) for k, v in raw
    ]
    named = ",".join(v for k, v in headers if k.lower() == "connection").lower().split(",")
    stop = HOP_BY_HOP | {name.strip() for name in named}
    return [(k, v) for k, v in headers if k.lower() not in stop]


def _one_spelling(headers: Headers) -> Headers:
    """aiohttp's client keeps duplicates of a header only where they are spelled alike."""
    spelling: dict[str, str] = {}
    return [(spelling.setdefault(k.lower(), k), v) for k, v in headers]


# ---- the client's side -------------------------------------------------------------------------


class _Answer(web.StreamResponse):
    """A response with the headers that it was given and no others."""

    def __init__(self, status: int, reason: str | None, headers: Headers) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self._given = {name.lower() for name, _ in headers}

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        for name in (hdrs.CONTENT_TYPE, hdrs.DATE, hdrs.SERVER):
            if name.lower() not in self._given:
                self.headers.popall(name, None)


class CannotListen(Exception):
    """The address cannot be had. Says why, and the way out."""


class ClientLeft(Exception):
    """The client's connection is gone."""


class Refusal(Exception):
    """We answer, not the engine. The message goes to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UpstreamBroke(Exception):
    """The engine broke off within its response body."""


class _Body:
    """A request body: kept whole while it is small, passed on as it comes when it is not."""

    def __init__(self, request: web.BaseRequest, max_kept_bytes: int) -> None:
        self._request = request
        self._content = request.content
        self._max = max_kept_bytes
        self._start = bytearray()
        self.complete = False  # all of it has been read
        self.num_bytes = 0
        self.sent_s = 0.0
        self.failure: Refusal | None = None

    async def read_start(self) -> None:
        """Invite the body where the client waits for that, and read until the end or until there
        is too much to keep. Raises `Refusal` when it is malformed."""
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._request.writer.output_size = 0
        while not self.complete and self.num_bytes <= self._max:
            await self._read(self._start.extend)

    @property
    def head(self) -> bytes:
        return bytes(self._start[:KEY_BYTES])

    @property
    def kept(self) -> bytes | None:
        """The whole body, or None where it was too large to keep."""
        return bytes(self._start) if self.complete and self.num_bytes <= self._max else None

    def data(self) -> Data:
        """What to send. An iterator can be sent once."""
        if self.kept is None:
            return self._pass_on()
        return self.kept or None

    async def _pass_on(self) -> AsyncIterator[bytes]:
        yield bytes(self._start)
        self._start = self._start[:KEY_BYTES]
        chunks: list[bytes] = []
        while not self.complete:
            await self._read(chunks.append)
            yield chunks.pop()
        self.sent_s = time.monotonic()

    async def _read(self, take: Callable[[bytes], object]) -> None:
        try:
            chunk = await self._content.readany()
        except web.RequestPayloadError as e:
            self.failure = Refusal(400, "the request body is malformed")
            raise self.failure from e
        take(chunk)
        self.num_bytes += len(chunk)
        self.complete = self._content.at_eof()


@dataclass(slots=True)
class _Journey:
    """One request on its way, and what is known of it so far."""

    request: web.BaseRequest
    route: Route
    table: RoutingTable
    headers: Headers
    body: _Body
    session_key: bytes
    upstream: Upstream
    num_in_flight: int  # at its upstream when it began, itself included
    started_s: float
    sent_s: float = 0.0
    status: int = 0
    outcome: Outcome = Outcome.CLIENT_CANCELLED  # until it is known better
    tap: Tap | None = None

    @property
    def digest(self) -> str:
        return self.table.digest(self.upstream.url)

    @property
    def works(self) -> bool:
        """It asks the engine to work, so that its figures are traffic."""
        return self.request.method == "POST" and self.route is not Route.CONTROL


class Relay:
    """Passes requests on. One per event loop; `engines` and the mirror are closed by others."""

    def __init__(
        self,
        routing: Routing,
        engines: Engines,
        observer: Observer,
        mirror: Shadowing,
        settings: RelaySettings,
    ) -> None:
        self._routing = routing
        self._engines = engines
        self._observer = observer
        self._mirror = mirror
        self._settings = settings
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False  # answers ask clients to come back on a new connection

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request, from its head to the end of its response."""
        self._num_active += 1
        self._idle.clear()
        try:
            return await self._handle(request)
        except (ConnectionError, asyncio.CancelledError):
            raise  # the client left
        except Exception as e:
            _log_unexpected(e)
            if request.writer.output_size:  # a second head must not follow the first
                raise ConnectionResetError("broken off by the relay") from None
            return self._refuse(Refusal(500, "the relay failed; the engine may be well"))
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        started_s = time.monotonic()
        kind = route(request.method, request.raw_path)
        if kind is not Route.GENERATION and is_forbidden(request.raw_path):
            self._observer.count(Outcome.CLIENT_ERROR, Role.STABLE, kind)
            return self._refuse(Refusal(403, "this path is not relayed: ask the engine itself"))
        if request.method == "GET" and request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._tunnel(request)
        body = _Body(request, self._settings.max_kept_body_bytes)
        try:
            self._check(request, kind)
            await body.read_start()
        except Refusal as e:
            self._observer.count(Outcome.CLIENT_ERROR, Role.STABLE, kind)
            return self._refuse(e)
        except BaseException:
            self._observer.count(Outcome.CLIENT_CANCELLED, Role.STABLE, kind)
            raise
        journey = self._begin(request, kind, body, started_s)
        try:
            return await self._travel(journey)
        finally:
            self._end(journey)

    def _check(self, request: web.BaseRequest, kind: Route) -> None:
        table = self._routing.table
        if request.method == "CONNECT":
            raise Refusal(405, "this is not a forward proxy")
        if kind is Route.CONTROL and table.canary and table.weight > 0:
            raise Refusal(409, "a canary is open and this changes the engine: end the canary first")

    def _begin(
        self, request: web.BaseRequest, kind: Route, body: _Body, started_s: float
    ) -> _Journey:
        headers = [(k, v) for k, v in end_to_end(request.raw_headers) if k.lower() != "expect"]
        key = self._session_key(request, body)
        upstream = self._routing.pick(key, None if kind is Route.GENERATION else Role.STABLE)
        table, busy = self._routing.table, upstream.num_in_flight
        return _Journey(request, kind, table, headers, body, key, upstream, busy, started_s)

    def _session_key(self, request: web.BaseRequest, body: _Body) -> bytes:
        named = request.headers.get(self._settings.session_header)
        if named:
            return named.encode(errors="surrogateescape")
        return _credential(request) + b"\0" + body.head

    # ---- there and back

    async def _travel(self, journey: _Journey) -> web.StreamResponse:
        try:
            response = await self._ask(journey)
        except (NoResponse, ClientError, OSError) as e:
            return self._unanswered(journey, e)
        try:
            return await self._bring_back(journey, response)
        finally:
            response.close()  # does nothing to a connection that came to its response's end

    async def _ask(self, journey: _Journey) -> ClientResponse:
        """A second time only where the engine most likely never saw the first. An arm on trial
        that cannot be connected to took nothing: its request is the stable arm's."""
        try:
            return await self._send(journey, fresh=False)
        except ClientConnectorError:
            if journey.upstream.role is Role.STABLE:
                raise
            log.warning("canary did not answer, stable does", extra={"url": journey.upstream.url})
            self._routing.release(journey.upstream)
            journey.upstream = self._routing.pick(journey.session_key, Role.STABLE)
            return await self._send(journey, fresh=False)
        except NoResponse as e:
            if not e.stale or journey.body.kept is None:
                raise
            return await self._send(journey, fresh=True)

    async def _send(self, journey: _Journey, fresh: bool) -> ClientResponse:
        request, body = journey.request, journey.body
        url = engine_url(journey.upstream.url, request.raw_path)
        journey.sent_s = time.monotonic()
        return await self._engines.send(request.method, url, journey.headers, body.data(), fresh)

    def _unanswered(self, journey: _Journey, error: Exception) -> web.StreamResponse:
        if journey.body.failure is not None:
            journey.outcome = Outcome.CLIENT_ERROR
            return self._refuse(journey.body.failure)
        began = isinstance(error, NoResponse) and error.num_bytes > 0
        journey.outcome = Outcome.UPSTREAM_RESET if began else Outcome.UPSTREAM_UNREACHABLE
        fields = {"url": journey.upstream.url, "error": type(error).__name__}
        log.warning("engine did not answer", extra=fields)
        return self._refuse(Refusal(502, "the engine does not answer; try again"))

    async def _bring_back(self, journey: _Journey, response: ClientResponse) -> web.StreamResponse:
        journey.status, journey.tap = response.status, self._tap(journey, response)
        answer = _Answer(response.status, response.reason, self._answer_headers(journey, response))
        if self.draining:
            answer.force_close()
        try:
            await _copy(journey, response, answer)
        except UpstreamBroke:
            journey.outcome = Outcome.UPSTREAM_RESET
            _break_off(journey.request, answer)
        except ClientLeft:
            pass
        else:
            journey.outcome = _outcome(response.status)
        return answer

    def _tap(self, journey: _Journey, response: ClientResponse) -> Tap | None:
        if journey.table.bypass or response.status // 100 != 2 or not journey.works:
            return None
        headers = response.headers
        return Tap(headers.get("Content-Type", ""), headers.get("Content-Encoding", ""))

    def _answer_headers(self, journey: _Journey, response: ClientResponse) -> Headers:
        headers = end_to_end(response.raw_headers)
        if "Transfer-Encoding" in response.headers:
            headers = [(k, v) for k, v in headers if k.lower() != "content-length"]
        if self._settings.show_digest:
            headers.append(("x-trimtab-digest", journey.digest or "stock"))
        return headers

    def _refuse(self, refusal: Refusal) -> web.StreamResponse:
        error = {"message": str(refusal), "type": "trimtab", "param": None, "code": refusal.status}
        response = web.Response(
            status=refusal.status,
            body=orjson.dumps({"error": error}),
            content_type="application/json",
            headers={"Retry-After": "1"} if refusal.status >= 500 else None,
        )
        if self.draining:
            response.force_close()
        return response

    async def _tunnel(self, request: web.BaseRequest) -> web.StreamResponse:
        """A WebSocket is the stable engine's affair: bytes both ways, whatever they mean."""
        upstream = self._routing.pick(_credential(request), Role.STABLE)
        outcome = Outcome.CLIENT_CANCELLED
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                connection = await _connect(upstream.url)
            await _pass_both_ways(request, *connection)
            outcome = Outcome.OK
        except (OSError, TimeoutError) as e:
            outcome = Outcome.UPSTREAM_UNREACHABLE
            log.warning("engine did not answer", extra={"error": type(e).__name__})
            return self._refuse(Refusal(502, "the engine does not answer; try again"))
        finally:
            self._routing.release(upstream)
            self._observer.count(outcome, Role.STABLE, Route.OTHER)
        return web.StreamResponse()  # goes nowhere: the connection is closed

    # ---- the end

    def _end(self, journey: _Journey) -> None:
        self._routing.release(journey.upstream)
        self._observer.count(journey.outcome, journey.upstream.role, journey.route)
        if not journey.works:
            return
        finished_s = time.monotonic()
        tap, body = journey.tap, journey.body
        reading = tap.read(body.num_bytes) if tap is not None else Reading()
        sample = self._sample(journey, reading, finished_s)
        self._observer.sample(sample)
        self._show(journey, reading, sample)

    def _sample(self, journey: _Journey, reading: Reading, finished_s: float) -> RequestSample:
        sent_s, first_s = journey.body.sent_s or journey.sent_s, reading.first_token_s
        return RequestSample(
            finished_s=finished_s,
            outcome=journey.outcome,
            num_prompt_tokens=reading.usage.num_prompt_tokens,
            num_cached_tokens=reading.usage.num_cached_tokens,
            num_output_tokens=reading.usage.num_output_tokens,
            ttft_s=None if first_s is None else first_s - sent_s,
            tpot_s=reading.tpot_s,
            e2e_s=finished_s - journey.started_s,
            tenant=self._tenant(journey.request),
            model=reading.model,
            arm=journey.upstream.role,
            digest=journey.digest,
            num_in_flight=journey.num_in_flight,
            estimated=reading.estimated,
        )

    def _tenant(self, request: web.BaseRequest) -> str:
        credential = _credential(request)
        if not credential:
            return ""
        salt = self._settings.tenant_salt
        return hashlib.blake2b(credential, key=salt, digest_size=8).hexdigest()

    def _show(self, journey: _Journey, reading: Reading, sample: RequestSample) -> None:
        """To the reservoir and to the mirror, under the table of now: a rollback counts at once."""
        table, body = self._routing.table, journey.body.kept
        if table.bypass or journey.route is not Route.GENERATION or journey.status // 100 != 2:
            return
        target = journey.request.raw_path
        if sample.outcome is Outcome.OK and body is not None and reading.text:
            self._observer.live(LiveRequest(target, body, reading.text, journey.started_s))
        if not (table.mirror and table.canary) or journey.upstream.role is not Role.STABLE:
            return
        shadow = table.canary[int(position(journey.session_key) * len(table.canary))]
        self._mirror.offer(
            Exchange(
                target=target,
                headers=journey.headers,
                body=body,
                shadow_url=shadow,
                shadow_digest=table.digest(shadow),
                shadow_serves=table.weight > 0,
                outcome=sample.outcome,
                reading=reading,
                ttft_s=sample.ttft_s,
                e2e_s=sample.e2e_s,
            )
        )


async def _copy(journey: _Journey, response: ClientResponse, answer: _Answer) -> None:
    """Chunk by chunk, at the client's pace. Raises `UpstreamBroke` or `ClientLeft`."""
    try:
        await answer.prepare(journey.request)
        while chunk := await _next_chunk(response):
            await answer.write(chunk)  # the client first
            if journey.tap is not None:
                journey.tap.feed(chunk)  # then us
        await answer.write_eof()
    except ConnectionError as e:
        raise ClientLeft from e


async def _next_chunk(response: ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (ClientError, OSError) as e:
        raise UpstreamBroke from e


def _break_off(request: web.BaseRequest, answer: web.StreamResponse) -> None:
    """End the client's connection within the response, so that it cannot be taken for whole.

    Without a length or chunks the connection's end is the body's end: only a reset tells. With
    them, what is still on its way may arrive.
    """
    transport = request.transport
    if transport is None:
        return
    if answer.content_length is None and "Transfer-Encoding" not in answer.headers:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    transport.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return await asyncio.open_connection(
        parts.hostname, parts.port or (443 if tls else 80), ssl=tls or None
    )


async def _pass_both_ways(
    request: web.BaseRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Until either side closes. Closes both: the engine's end at once, the client's once all of the
    engine's bytes are sent."""
    client = request.transport
    assert client is not None
    lines = [f"{request.method} {request.raw_path} HTTP/1.1".encode()]
    lines += [name + b": " + value for name, value in request.raw_headers]
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    inlet = _Inlet(client, writer)
    request.protocol.set_parser(inlet)  # type: ignore[arg-type]
    try:
        async with asyncio.TaskGroup() as tasks:
            upward = tasks.create_task(inlet.keep_pace())
            start = b""
            with suppress(ConnectionError):
                while chunk := await reader.read(1 << 16):
                    await request.writer.write(chunk)
                    start = (start + chunk)[: len(SWITCHED)]
                    if start == SWITCHED:
                        inlet.open()
            upward.cancel()
    finally:
        writer.transport.abort()
        client.close()


class _Inlet:
    """What the client sends goes straight on once it is `open`; when the engine is slow, the client
    has to wait. Before the engine has switched protocols, it could be a second request that passed
    by all of our checks. In the place of aiohttp's WebSocket parser."""

    def __init__(self, client: asyncio.Transport, writer: asyncio.StreamWriter) -> None:
        self._client = client
        self._writer = writer
        self._full = asyncio.Event()
        self._held: bytearray | None = bytearray()

    def open(self) -> None:
        if self._held is None:
            return
        held, self._held = bytes(self._held), None
        self.feed_data(held)
        self._client.resume_reading()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if self._held is not None:
            self._held += data
            if len(self._held) > MAX_HEAD_BYTES:
                self._client.pause_reading()
            return False, b""
        self._writer.write(data)
        if self._writer.transport.get_write_buffer_size() > MAX_HEAD_BYTES:
            self._client.pause_reading()
            self._full.set()
        return False, b""

    def feed_eof(self) -> None:
        self._writer.transport.abort()

    async def keep_pace(self) -> None:
        while True:
            await self._full.wait()
            self._full.clear()
            with suppress(ConnectionError):
                await self._writer.drain()
            self._client.resume_reading()


def _log_unexpected(error: Exception) -> None:
    """Where, but not what it said: that may quote the user."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    fields = {"error": type(error).__name__, "at": f"{place.filename}:{place.lineno}"}
    log.error("request failed in the relay", extra=fields)


def _outcome(status: int) -> Outcome:
    if status >= 500:
        return Outcome.SERVER_ERROR
    return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK


def _credential(request: web.BaseRequest) -> bytes:
    value = request.headers.get("Authorization") or request.headers.get("x-api-key") or ""
    return value.encode(errors="surrogateescape")


@asynccontextmanager
async def serve(
    relay: Relay, host: str, port: int, reuse_port: bool, grace_s: float
) -> AsyncIterator[int]:
    """Listen; gives the port. Leaving stops accepting, waits up to `grace_s` for what is in flight,
    and aborts the rest. Raises `CannotListen`."""
    server = web.Server(
        relay.handle,
        handler_cancellation=True,
        access_log=None,
        logger=logging.Logger("silent", logging.CRITICAL + 1),  # its errors quote the request
        auto_decompress=False,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        max_headers=MAX_HEADERS,
    )
    runner = web.ServerRunner(server, shutdown_timeout=0.05)  # 0 would be for ever
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=2048, reuse_port=reuse_port)
        await _start(site, host, port)
        yield int(runner.addresses[0][1])
        relay.draining = True
        await site.stop()
        try:
            async with asyncio.timeout(grace_s):
                await relay.drained()
        except TimeoutError:
            log.warning("requests in flight are broken off", extra={"grace_s": grace_s})
    finally:
        await runner.cleanup()


async def _start(site: web.TCPSite, host: str, port: int) -> None:
    try:
        await site.start()
    except OSError as e:
        why = os.strerror(e.errno or 0).lower()
        raise CannotListen(
            f"{host}:{port} cannot be listened on ({why}): stop who does, or give another --port"
        ) from e
