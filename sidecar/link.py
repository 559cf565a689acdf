"""A data plane and its controller: `Fleet.Join` and what its messages mean on either side.

`Link` is the data plane's end. It is a thread of its own that speaks synchronous gRPC, so that no
gRPC ever runs on an event loop; the loop's side only appends to bounded queues and never waits. A
controller that is gone costs samples, which are counted, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from profiler.samples import Outcome, RequestSample
from protos import sidecar_fleet_pb2 as pb
from protos.sidecar_fleet_pb2_grpc import FleetStub
from sidecar.comparison import MirrorResult
from sidecar.routing import Role, Routing, RoutingTable, save_table
from sidecar.tap import LiveRequest

log = logging.getLogger(__name__)

_T = TypeVar("_T")

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 32 << 20),
    ("grpc.max_send_message_length", 32 << 20),
)


@dataclass(frozen=True, slots=True)
class CounterTotal:
    """One series' total since its process started."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True, slots=True)
class PlaneState:
    """What one report said, in the reader's own clock."""

    plane_id: str
    table_version: int  # in force at the data plane now
    samples: tuple[RequestSample, ...] = ()
    mirrored: tuple[MirrorResult, ...] = ()
    reservoir: tuple[LiveRequest, ...] = ()
    counters: tuple[CounterTotal, ...] = ()
    num_samples_dropped: int = 0


# ---- wire --------------------------------------------------------------------------------------


def table_to_wire(table: RoutingTable) -> pb.RoutingTable:
    return pb.RoutingTable(
        version=table.version,
        stable=table.stable,
        canary=table.canary,
        weight=table.weight,
        mirror=table.mirror,
        bypass=table.bypass,
        lease_s=table.lease_s,
        digests=dict(table.digests),
    )


def table_from_wire(wire: pb.RoutingTable) -> RoutingTable:
    """Raises `ValueError` when the table cannot be obeyed."""
    return RoutingTable(
        version=wire.version,
        stable=tuple(wire.stable),
        canary=tuple(wire.canary),
        weight=wire.weight,
        mirror=wire.mirror,
        bypass=wire.bypass,
        lease_s=wire.lease_s if wire.HasField("lease_s") else None,
        digests=tuple(sorted(wire.digests.items())),
    )


def order_to_wire(table: RoutingTable) -> pb.PlaneOrder:
    return pb.PlaneOrder(table=table_to_wire(table))


def sample_to_wire(sample: RequestSample, now_s: float) -> pb.RequestSample:
    return pb.RequestSample(
        age_s=max(0.0, now_s - sample.finished_s),
        outcome=sample.outcome,
        num_prompt_tokens=sample.num_prompt_tokens,
        num_cached_tokens=sample.num_cached_tokens,
        num_output_tokens=sample.num_output_tokens,
        ttft_s=sample.ttft_s,
        tpot_s=sample.tpot_s,
        e2e_s=sample.e2e_s,
        tenant=sample.tenant,
        model=sample.model,
        arm=sample.arm,
        digest=sample.digest,
        num_in_flight=sample.num_in_flight,
        estimated=sample.estimated,
    )


def sample_from_wire(wire: pb.RequestSample, received_s: float) -> RequestSample:
    """`received_s` is the reader's `time.monotonic`. Raises `ValueError` on an unknown outcome."""
    return RequestSample(
        finished_s=received_s - wire.age_s,
        outcome=Outcome(wire.outcome),
        num_prompt_tokens=wire.num_prompt_tokens if wire.HasField("num_prompt_tokens") else None,
        num_cached_tokens=wire.num_cached_tokens if wire.HasField("num_cached_tokens") else None,
        num_output_tokens=wire.num_output_tokens if wire.HasField("num_output_tokens") else None,
        ttft_s=wire.ttft_s if wire.HasField("ttft_s") else None,
        tpot_s=wire.tpot_s if wire.HasField("tpot_s") else None,
        e2e_s=wire.e2e_s,
        tenant=wire.tenant,
        model=wire.model,
        arm=wire.arm,
        digest=wire.digest,
        num_in_flight=wire.num_in_flight,
        estimated=wire.estimated,
    )


def mirrored_to_wire(result: MirrorResult) -> pb.MirrorResult:
    return pb.MirrorResult(
        outcome=result.outcome,
        digest=result.digest,
        max_logprob_gap=result.max_logprob_gap,
        num_compared_tokens=result.num_compared_tokens,
        primary_ttft_s=result.primary_ttft_s,
        shadow_ttft_s=result.shadow_ttft_s,
        primary_e2e_s=result.primary_e2e_s,
        shadow_e2e_s=result.shadow_e2e_s,
        note=result.note,
    )


def mirrored_from_wire(wire: pb.MirrorResult) -> MirrorResult:
    return MirrorResult(
        outcome=wire.outcome,
        digest=wire.digest,
        max_logprob_gap=wire.max_logprob_gap,
        num_compared_tokens=wire.num_compared_tokens,
        primary_ttft_s=wire.primary_ttft_s,
        shadow_ttft_s=wire.shadow_ttft_s,
        primary_e2e_s=wire.primary_e2e_s,
        shadow_e2e_s=wire.shadow_e2e_s,
        note=wire.note,
    )


def state_to_wire(state: PlaneState, now_s: float) -> pb.PlaneReport:
    return pb.PlaneReport(
        plane_id=state.plane_id,
        table_version=state.table_version,
        samples=[sample_to_wire(s, now_s) for s in state.samples],
        mirrored=[mirrored_to_wire(r) for r in state.mirrored],
        reservoir=[
            pb.LiveRequest(
                path=r.path,
                body=r.body,
                output_text=r.output_text,
                age_s=max(0.0, now_s - r.arrived_s),
            )
            for r in state.reservoir
        ],
        counters=[
            pb.Counter(name=c.name, labels=[w for kv in c.labels for w in kv], value=c.value)
            for c in state.counters
        ],
        num_samples_dropped=state.num_samples_dropped,
    )


def state_from_wire(wire: pb.PlaneReport, received_s: float) -> PlaneState:
    """Read a whole report. Raises `ValueError` when it does not make sense."""
    return PlaneState(
        plane_id=wire.plane_id,
        table_version=wire.table_version,
        samples=tuple(sample_from_wire(s, received_s) for s in wire.samples),
        mirrored=tuple(mirrored_from_wire(r) for r in wire.mirrored),
        reservoir=tuple(
            LiveRequest(r.path, r.body, r.output_text, received_s - r.age_s) for r in wire.reservoir
        ),
        counters=tuple(
            CounterTotal(c.name, tuple(zip(c.labels[::2], c.labels[1::2], strict=True)), c.value)
            for c in wire.counters
        ),
        num_samples_dropped=wire.num_samples_dropped,
    )


# ---- the data plane's end ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How much waits for the controller, at most."""

    report_every_s: float = 0.25
    max_samples: int = 20_000
    max_mirrored: int = 5_000
    max_per_report: int = 4_000  # of each
    max_live_per_report: int = 4
    max_live_bytes: int = 64 << 10  # of one request; 0 keeps none
    max_retry_s: float = 2.0


class Link:
    """Reports to the controller and obeys its tables; the relay's `Observer`.

    `start` it once, on the loop; `close` it off the loop. Tables are installed on the loop; its
    thread only reads them. What a dying stream carried is lost: no report is sent twice.
    """

    def __init__(
        self,
        address: str,
        plane_id: str,
        routing: Routing,
        settings: LinkSettings,
        table_path: Path | None = None,
    ) -> None:
        """`address` is a unix socket's path or HOST:PORT; "" reports to nobody. Committed tables
        are kept at `table_path`."""
        self._address = f"unix:{address}" if address.startswith("/") else address
        self._plane_id = plane_id
        self._routing = routing
        self._settings = settings
        self._table_path = table_path
        self._samples: deque[RequestSample] = deque()
        self._mirrored: deque[MirrorResult] = deque()
        self._live: list[LiveRequest] = []
        self._num_live_seen = 0
        self._num_dropped = 0
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- on the loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._address:
            self._thread = threading.Thread(target=self._run, name="link", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say goodbye with a last report. Blocks, a second at most."""
        self._closed.set()
        self._wake.set()
        if self._thread is None:
            return
        self._thread.join(timeout=0.5)
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=0.5)

    def sample(self, sample: RequestSample) -> None:
        if len(self._samples) >= self._settings.max_samples:
            self._num_dropped += 1
        else:
            self._samples.append(sample)

    def mirrored(self, result: MirrorResult) -> None:
        self._add("mirrored", ("outcome", result.outcome))
        if len(self._mirrored) >= self._settings.max_mirrored:
            self._add("results_dropped")
        else:
            self._mirrored.append(result)

    def count(self, outcome: Outcome, arm: Role, route: str) -> None:
        self._add("requests", ("outcome", outcome), ("arm", arm), ("route", route))

    def live(self, request: LiveRequest) -> None:
        """Keep a fair few of all that finish between two reports."""
        num_bytes = len(request.body) + len(request.output_text)
        if not self._address or num_bytes > self._settings.max_live_bytes:
            return
        self._num_live_seen += 1
        if len(self._live) < self._settings.max_live_per_report:
            self._live.append(request)
            return
        place = random.randrange(self._num_live_seen)
        if place < len(self._live):
            self._live[place] = request

    def counters(self) -> tuple[CounterTotal, ...]:
        """Totals since this process started. Label values come from enums and few fixed words."""
        totals = self._totals.copy().items()
        return tuple(CounterTotal(name, labels, value) for (name, labels), value in totals)

    def _add(self, name: str, *labels: tuple[str, str]) -> None:
        key = (name, tuple((k, str(v)) for k, v in labels))
        self._totals[key] = self._totals.get(key, 0.0) + 1.0

    def _install(self, table: RoutingTable) -> None:
        if self._routing.install(table):
            log.info("routing table installed", extra={"version": table.version})
        self._wake.set()  # the next report acknowledges it

    # ---- in the thread

    def _run(self) -> None:
        """Join, and join again when the controller went away, until closed."""
        retry_s = 0.1
        while not self._closed.is_set():
            try:
                with grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
                    grpc.channel_ready_future(channel).result(timeout=1.0)  # or reports get lost
                    retry_s = 0.1
                    self._join(channel)
            except (grpc.RpcError, grpc.FutureTimeoutError) as e:
                log.debug("controller is away", extra={"why": type(e).__name__})
            except Exception:
                log.exception("link failed and joins again")
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, self._settings.max_retry_s)

    def _join(self, channel: grpc.Channel) -> None:
        ended = threading.Event()
        self._call = FleetStub(channel).Join(self._reports(ended))
        try:
            for order in self._call:
                self._obey(order.table)
        finally:
            ended.set()
            self._wake.set()

    def _reports(self, ended: threading.Event) -> Iterator[pb.PlaneReport]:
        """One at once, then one per interval and one per table, until the call or we end."""
        while not ended.is_set():
            last = self._closed.is_set()
            self._wake.clear()
            yield self._report()
            if last:
                return
            self._wake.wait(self._settings.report_every_s)

    def _report(self) -> pb.PlaneReport:
        live, self._live, self._num_live_seen = self._live, [], 0
        state = PlaneState(
            plane_id=self._plane_id,
            table_version=self._routing.table.version,
            samples=tuple(_take(self._samples, self._settings.max_per_report)),
            mirrored=tuple(_take(self._mirrored, self._settings.max_per_report)),
            reservoir=tuple(live),
            counters=self.counters(),
            num_samples_dropped=self._num_dropped,
        )
        return state_to_wire(state, time.monotonic())

    def _obey(self, wire: pb.RoutingTable) -> None:
        assert self._loop is not None
        try:
            table = table_from_wire(wire)
        except ValueError as e:
            log.error("routing table refused", extra={"version": wire.version, "why": str(e)})
            return
        with suppress(RuntimeError):  # the loop is closed: nothing left to route
            self._loop.call_soon_threadsafe(self._install, table)
        if self._table_path is not None and table.lease_s is None:
            self._keep(self._table_path, table)

    def _keep(self, path: Path, table: RoutingTable) -> None:
        try:
            save_table(path, table)
        except OSError as e:
            log.error("routing table not kept", extra={"path": str(path), "why": str(e)})


def _take(queue: deque[_T], most: int) -> Iterator[_T]:
    for _ in range(min(most, len(queue))):
        yield queue.popleft()
