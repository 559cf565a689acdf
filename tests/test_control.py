from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from fakes_control import PRIMARY, SHADOW, TABLE, FakeOperator, joined, sample, until
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from sidecar.control import (
    ControlClient,
    ControllerGone,
    ControlServer,
    Fleet,
    NotThere,
    WronglyAsked,
    control_address,
)
from sidecar.link import PlaneState
from sidecar.routing import RoutingTable

T = TypeVar("T")


@pytest.fixture(autouse=True)
async def _one_poller() -> None:
    """grpc's thread is joined, and so the loop blocked, when its last server goes; keep it."""
    grpc.aio.init_grpc_aio()


@asynccontextmanager
async def serving(
    folder: Path, lease_s: float = 30.0
) -> AsyncIterator[tuple[str, FakeOperator, Fleet, list[PlaneState]]]:
    reports: list[PlaneState] = []
    operator, fleet = FakeOperator(), Fleet(TABLE, reports.append, lease_s)
    server = ControlServer(operator, fleet, control_address(folder))
    await server.start()
    try:
        yield control_address(folder), operator, fleet, reports
    finally:
        await server.stop(0.1)


async def ask(address: str, question: Callable[[ControlClient], T]) -> T:
    def blocking() -> T:
        client = ControlClient(address, timeout_s=5.0)
        try:
            return question(client)
        finally:
            client.close()

    return await asyncio.to_thread(blocking)


async def test_status_arrives_as_the_operator_gave_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, operator, _, _):
        assert await ask(address, lambda c: c.status()) == await operator.status()


async def test_watch_goes_on_where_it_was_left(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, _, _):
        lines = await ask(
            address, lambda c: [next(w) for w in [c.watch(after_seq=1)] for _ in "ab"]
        )
    assert [h.seq for h in lines] == [2, 3]


async def test_candidates_come_in_pages_and_all_of_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, operator, _, _):
        found = await ask(address, lambda c: list(c.candidates()))
    assert found == operator.cards


async def test_an_unknown_stage_is_an_error_that_lists_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, _, _):
        with pytest.raises(WronglyAsked, match="'vald' is none of proposed, valid"):
            await ask(address, lambda c: list(c.candidates("vald")))


async def test_what_is_not_there_says_the_way_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, _, _):
        with pytest.raises(NotThere, match="send requests"):
            await ask(address, lambda c: c.profile())


async def test_every_call_that_changes_something_is_audited(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, operator, _, _):
        await ask(address, lambda c: c.retune("mondays"))
        await ask(address, lambda c: c.rollback("p99"))
    assert [a[1:] for a in operator.audits] == [
        ("retune", "mondays", "s-1"),
        ("rollback", "p99", "rolled_back, table 9, complete=True"),
    ]


async def test_a_refused_call_is_audited_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, operator, _, _):
        with pytest.raises(NotThere):
            await ask(address, lambda c: c.promote("c-9", "because"))
    who, what, why, outcome = operator.audits[0]
    assert "pid" in who
    assert (what, why, outcome) == (
        "promote c-9",
        "because",
        "NotThere: candidate c-9 is not there",
    )


async def test_no_controller_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ControllerGone, match=r"is `trimtab serve` running"):
        await ask(control_address(tmp_path), lambda c: c.status())


async def test_health_answers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, _, _), grpc.aio.insecure_channel(address) as ch:
        request = health_pb2.HealthCheckRequest(service="trimtab.v1.Control")
        reply = await health_pb2_grpc.HealthStub(ch).Check(request)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_state_folder_too_deep_for_a_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter state_dir"):
        control_address(Path("/" + "x" * 120))


# --- data planes ----------------------------------------------------------------------------------

LEASED = RoutingTable(2, (PRIMARY,), (SHADOW,), weight=0.5, lease_s=0.3)


async def test_a_data_plane_obeys_a_table_and_acknowledges_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, fleet, _), joined(address) as (_, routing):
        await until(lambda: fleet.num_planes == 1)
        fleet.publish(LEASED)
        assert await fleet.acknowledged(2, deadline_s=5.0)
        assert routing.table == LEASED


async def test_a_lease_is_renewed_while_the_controller_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, fleet, _), joined(address) as (_, routing):
        fleet.publish(LEASED)
        await until(lambda: routing.table == LEASED)
        await asyncio.sleep(0.6)
        assert routing.table == LEASED


async def test_a_lease_lapses_when_the_controller_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, fleet, _), joined(address) as (_, routing):
        fleet.publish(LEASED)
        await until(lambda: routing.table == LEASED)
        fleet.close()
        await until(lambda: routing.table == TABLE)


async def test_samples_arrive_on_the_controllers_clock(tmp_path: Path) -> None:
    async with serving(tmp_path) as (address, _, _, reports), joined(address) as (link, _):
        sent = sample()
        link.sample(sent)
        await until(lambda: any(r.samples for r in reports))
    got = next(r.samples[0] for r in reports if r.samples)
    assert abs(got.finished_s - sent.finished_s) < 1.0
    assert got.outcome == sent.outcome


async def test_a_plane_that_left_counts_until_its_lease_is_over(tmp_path: Path) -> None:
    async with serving(tmp_path, lease_s=1.5) as (address, _, fleet, _):
        async with joined(address):
            await until(lambda: fleet.num_planes == 1)
        await until(lambda: fleet.num_planes == 0)
        fleet.publish(RoutingTable(3, (PRIMARY,)))
        assert not await fleet.acknowledged(3, deadline_s=0.05)
        assert await fleet.acknowledged(3, deadline_s=5.0)


async def test_without_data_planes_there_is_nobody_to_wait_for() -> None:
    fleet = Fleet(TABLE, lambda _: None, 30.0)
    assert await fleet.acknowledged(1, deadline_s=0.0)
