"""A data plane and its controller, over real gRPC, and the whole data-plane process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fakes_upstream import (
    CHAT,
    END,
    SSE,
    FakeUpstream,
    Seen,
    ask,
    body_of,
    chunked,
    client,
    closing,
    token,
    until,
    upstream,
)

from profiler.samples import Outcome, RequestSample
from protos import sidecar_fleet_pb2 as pb
from protos.sidecar_fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from sidecar.comparison import MirrorResult
from sidecar.link import (
    CounterTotal,
    Link,
    LinkSettings,
    PlaneState,
    order_to_wire,
    state_from_wire,
    state_to_wire,
    table_from_wire,
    table_to_wire,
)
from sidecar.plane import PlaneSettings, plane, run_plane
from sidecar.relay import CannotListen
from sidecar.routing import Role, Routing, RoutingTable, load_table, save_table
from sidecar.supervisor import free_port
from sidecar.tap import LiveRequest

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
SAMPLE = RequestSample(
    5.0, Outcome.OK, 9, None, 2, 0.1, None, 0.4, "t", "m", "canary", "d", 3, True
)


class FakeController(FleetServicer):
    """Writes down what it hears and says what it is told to."""

    def __init__(self) -> None:
        self.heard: list[PlaneState] = []
        self.orders: queue.Queue[pb.PlaneOrder | None] = queue.Queue()

    def Join(self, reports, context):  # type: ignore[no-untyped-def]
        threading_pool = futures.ThreadPoolExecutor(1)
        threading_pool.submit(self._hear, reports)
        while (order := self.orders.get()) is not None:
            yield order

    def _hear(self, reports: Iterator[pb.PlaneReport]) -> None:
        try:
            for report in reports:
                self.heard.append(state_from_wire(report, time.monotonic()))
        except grpc.RpcError:
            pass
        self.orders.put(None)

    def tell(self, table: RoutingTable) -> None:
        self.orders.put(order_to_wire(table))

    @property
    def samples(self) -> list[RequestSample]:
        return [sample for state in self.heard for sample in state.samples]


@contextmanager
def controller(address: str) -> Iterator[FakeController]:
    fake = FakeController()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_FleetServicer_to_server(fake, server)
    server.add_insecure_port(f"unix:{address}")
    server.start()
    try:
        yield fake
    finally:
        fake.orders.put(None)
        server.stop(0).wait()


@asynccontextmanager
async def linked(
    address: str, settings: LinkSettings | None = None, table_path: Path | None = None
) -> AsyncIterator[tuple[Link, Routing]]:
    routing = Routing(RoutingTable(1, (A,)))
    link = Link(address, "h:1/2", routing, settings or LinkSettings(), table_path)
    link.start()
    try:
        yield link, routing
    finally:
        await asyncio.to_thread(link.close)


# ---- wire


@pytest.mark.parametrize("lease_s", [None, 30.0])
def test_a_table_survives_the_wire(lease_s: float | None) -> None:
    table = RoutingTable(7, (A,), (B,), 0.25, True, False, lease_s, ((A, "x"), (B, "y")))
    assert table_from_wire(table_to_wire(table)) == table


def test_a_table_that_cannot_be_obeyed_does_not_come_off_the_wire() -> None:
    with pytest.raises(ValueError, match="no stable upstream"):
        table_from_wire(pb.RoutingTable(version=3))


def test_a_report_survives_the_wire_in_the_readers_clock() -> None:
    state = PlaneState(
        "h:1/2",
        7,
        (SAMPLE,),
        (MirrorResult("diff", "d", 0.5, 3, 0.1, 0.2, 0.3, 0.4, "same"),),
        (LiveRequest("/v1/completions", b"\xff{}", "北", 4.0),),
        (CounterTotal("requests", (("outcome", "ok"), ("arm", "stable")), 3.0),),
        2,
    )
    heard = state_from_wire(state_to_wire(state, now_s=6.0), received_s=106.0)
    assert heard == replace(
        state,
        samples=(replace(SAMPLE, finished_s=105.0),),
        reservoir=(replace(state.reservoir[0], arrived_s=104.0),),
    )


def test_what_is_not_known_stays_unknown_on_the_wire() -> None:
    unknown = RequestSample(1.0, Outcome.CLIENT_CANCELLED, None, None, None, None, None, 0.4)
    wire = state_to_wire(PlaneState("h", 1, (unknown,)), 1.0)
    assert state_from_wire(wire, 1.0).samples == (unknown,)


# ---- the link


async def test_samples_arrive_and_say_which_table_is_in_force(tmp_path: Path) -> None:
    with controller(f"{tmp_path}/c") as fake:
        async with linked(f"{tmp_path}/c") as (link, _):
            link.sample(SAMPLE)
            link.count(Outcome.OK, Role.STABLE, "other")
            await until(lambda: len(fake.samples) == 1 and bool(fake.heard[-1].counters))
    assert (fake.heard[0].plane_id, fake.heard[0].table_version) == ("h:1/2", 1)
    labels = (("outcome", "ok"), ("arm", "stable"), ("route", "other"))
    assert fake.heard[-1].counters == (CounterTotal("requests", labels, 1.0),)


async def test_a_table_is_obeyed_and_acknowledged_before_the_next_report_is_due(
    tmp_path: Path,
) -> None:
    with controller(f"{tmp_path}/c") as fake:
        async with linked(f"{tmp_path}/c", LinkSettings(report_every_s=3600.0)) as (_, routing):
            await until(lambda: bool(fake.heard))
            fake.tell(RoutingTable(2, (B,)))
            await until(lambda: fake.heard[-1].table_version == 2)
            assert routing.table.stable == (B,)


async def test_an_impossible_or_older_table_changes_nothing_and_the_link_goes_on(
    tmp_path: Path,
) -> None:
    with controller(f"{tmp_path}/c") as fake:
        async with linked(f"{tmp_path}/c") as (_, routing):
            fake.orders.put(pb.PlaneOrder(table=pb.RoutingTable(version=9)))
            fake.tell(RoutingTable(0, (B,)))
            fake.tell(RoutingTable(2, (A, B)))
            await until(lambda: routing.table.version == 2)


async def test_a_committed_table_is_kept_and_a_leased_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with controller(f"{tmp_path}/c") as fake:
        async with linked(f"{tmp_path}/c", table_path=path) as (_, routing):
            fake.tell(RoutingTable(2, (B,)))
            fake.tell(RoutingTable(3, (A,), (B,), 0.5, lease_s=30.0))
            await until(lambda: routing.table.version == 3)
    kept = await asyncio.to_thread(load_table, path)
    assert kept is not None
    assert kept.version == 2


async def test_a_new_controller_is_joined_and_hears_what_waited(tmp_path: Path) -> None:
    async with linked(f"{tmp_path}/c") as (link, routing):
        for table in (RoutingTable(2, (A,)), RoutingTable(3, (B,))):
            with controller(f"{tmp_path}/c") as fake:
                link.sample(SAMPLE)
                fake.tell(table)
                await until(lambda t=table: routing.table == t)  # type: ignore[misc]
                await until(lambda f=fake: len(f.samples) == 1)  # type: ignore[misc]


async def test_without_a_controller_samples_are_dropped_and_counted(tmp_path: Path) -> None:
    async with linked(f"{tmp_path}/c", LinkSettings(max_samples=3)) as (link, _):
        for _ in range(10):
            link.sample(SAMPLE)
        with controller(f"{tmp_path}/c") as fake:
            await until(lambda: bool(fake.heard))
    assert len(fake.samples) == 3
    assert fake.heard[-1].num_samples_dropped == 7


async def test_a_report_carries_a_fair_few_live_requests(tmp_path: Path) -> None:
    settings = LinkSettings(max_live_per_report=4, max_live_bytes=100)
    async with linked(f"{tmp_path}/c", settings) as (link, _):
        link.live(LiveRequest("/x", b"y" * 200, "", 0.0))
        for i in range(200):
            link.live(LiveRequest("/x", str(i).encode(), "", 0.0))
        with controller(f"{tmp_path}/c") as fake:
            await until(lambda: bool(fake.heard))
    kept = [int(r.body) for r in fake.heard[0].reservoir]
    assert len(kept) == 4
    assert max(kept) > 4


async def test_the_reservoir_can_be_switched_off(tmp_path: Path) -> None:
    async with linked(f"{tmp_path}/c", LinkSettings(max_live_bytes=0)) as (link, _):
        link.live(LiveRequest("/x", b"1", "", 0.0))
        with controller(f"{tmp_path}/c") as fake:
            await until(lambda: bool(fake.heard))
    assert fake.heard[0].reservoir == ()


# ---- the data plane


def settings_for(url: str, **fields: object) -> PlaneSettings:
    return PlaneSettings(RoutingTable(1, (url,)), port=0, **fields)  # type: ignore[arg-type]


async def test_a_plane_reports_its_requests_and_obeys(tmp_path: Path) -> None:
    with controller(f"{tmp_path}/c") as fake:
        async with upstream() as a, upstream() as b:
            settings = settings_for(a.url, controller_address=f"{tmp_path}/c", grace_s=1.0)
            async with plane(settings) as running:
                await ask(running.port, closing(CHAT))
                await until(lambda: len(fake.samples) == 1)
                fake.tell(RoutingTable(2, (b.url,)))
                await until(lambda: fake.heard[-1].table_version == 2)
                await ask(running.port, closing(CHAT))
    assert (len(a.seen), len(b.seen)) == (1, 1)


async def test_a_plane_that_starts_alone_serves_the_table_that_was_kept(tmp_path: Path) -> None:
    async with upstream() as engine:
        await asyncio.to_thread(save_table, tmp_path / "t", RoutingTable(9, (engine.url,)))
        settings = settings_for(A, table_path=tmp_path / "t", controller_address=f"{tmp_path}/c")
        async with plane(settings) as running:
            assert body_of(await ask(running.port, closing(CHAT))) == b"ok"


async def test_a_port_that_is_taken_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(settings_for(A), port=taken.getsockname()[1])
        with pytest.raises(CannotListen, match=r"already in use.*give another --port"):
            async with plane(settings):
                pass


def test_settings_travel_to_another_process() -> None:
    settings = settings_for(A, table_path=Path("/tmp/t"))
    assert pickle.loads(pickle.dumps(settings)) == settings


async def test_sigterm_lets_a_stream_finish_and_the_process_ends_well() -> None:
    finish, port = asyncio.Event(), free_port()

    async def slow(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        out.write(SSE + chunked(token("a")))
        await finish.wait()
        out.write(END)

    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    async with upstream(slow) as engine:
        settings = replace(settings_for(engine.url), port=port, grace_s=20.0)
        process = spawn.Process(target=run_plane, args=(settings, ready))
        await asyncio.to_thread(process.start)
        await asyncio.to_thread(ready.wait)
        async with client(port) as c:
            c.send(CHAT)
            await c.until(b'"a"')
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            await until(lambda: refused(port))
            finish.set()
            await c.until(END)
        await asyncio.to_thread(process.join)
    assert process.exitcode == 0


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
