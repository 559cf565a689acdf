from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes_control import (
    FORWARD,
    OTHER,
    PRIMARY,
    SHADOW,
    TABLE,
    Room,
    SwapEngine,
    candidate,
    live_request,
    mirrored,
    open_store,
    sample,
    state,
    until,
    until_stored,
)

from compiler.candidates import Event, Stage
from engines.engine import STOCK, Portfolio
from profiler.samples import Outcome
from sidecar.config import Autonomy
from sidecar.control import NotThere, WrongState
from sidecar.controller import Controller

NEW = Portfolio((FORWARD,))
GOOD_STABLE = tuple(sample() for _ in range(20))


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    store = open_store(tmp_path)
    yield Room(store)
    store.close()


def report(controller: Controller, *samples: object, **more: object) -> None:
    controller._report(replace(state(*samples, **more)))  # type: ignore[arg-type]


def agree(controller: Controller, digest: str) -> None:
    report(controller, *GOOD_STABLE, mirror=[mirrored(digest)] * 10)


def serve_some(controller: Controller, digest: str) -> None:
    report(controller, *(sample("canary", digest) for _ in range(5)))


async def go_live(controller: Controller, id: str, digest: str) -> None:
    await controller.promote(id, "")
    await until(lambda: controller.fleet.table.mirror)
    agree(controller, digest)
    await until(lambda: controller.fleet.table.weight == 0.5)
    serve_some(controller, digest)
    await until(lambda: controller.fleet.table.weight == 1.0)
    serve_some(controller, digest)
    await until(lambda: controller.fleet.table.lease_s is None)


async def test_a_promoted_candidate_goes_live_step_by_step(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        await until_stored(lambda: room.stage() == Stage.LIVE)
        assert room.shadow.running == NEW
        assert room.primary.running == STOCK
        assert controller.fleet.table.weight == 1.0


async def test_data_planes_learn_which_forward_pass_answers(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        await until(lambda: controller.fleet.table.mirror)
        assert controller.fleet.table.digest(SHADOW) == NEW.digest


async def test_canary_tables_are_leased_and_the_last_one_is_not(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        await until(lambda: controller.fleet.table.mirror)
        assert controller.fleet.table.lease_s == 30.0
        await controller.rollback("")
        assert controller.fleet.table.lease_s is None


async def test_rollback_flips_the_table_at_once_and_reverts_the_engine_after(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        done = await controller.rollback("p99")
        assert (done.state, controller.fleet.table.weight) == ("rolled_back", 0.0)
        await until(lambda: room.shadow.running == STOCK)
        await until_stored(lambda: room.stage() == Stage.ROLLED_BACK)
    assert room.committed[-1].weight == 0.0


async def test_a_rollback_during_the_swap_wins(room: Room) -> None:
    await room.keep(candidate())
    room.shadow.swap_takes_s = 0.2
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        await controller.rollback("")
        await until(lambda: room.shadow.previous == NEW or room.shadow.running == STOCK)
        await until_stored(lambda: room.stage() == Stage.REJECTED)
        await until(lambda: room.shadow.running == STOCK)
        assert not controller.fleet.table.mirror


async def test_a_second_rollback_changes_nothing(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        first = await controller.rollback("")
        again = await controller.rollback("")
        assert again.table_version == first.table_version


async def test_a_live_candidate_that_fails_is_rolled_back_without_being_asked(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        bad = sample("canary", NEW.digest, outcome=Outcome.SERVER_ERROR)
        report(controller, *[bad] * 6)
        await until(lambda: controller.fleet.table.weight == 0.0)
        await until_stored(lambda: room.stage() == Stage.ROLLED_BACK)


async def test_an_engine_that_was_restarted_under_a_live_candidate_is_noticed(room: Room) -> None:
    await room.keep(candidate())
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        room.shadow.running = STOCK
        await until(lambda: controller.fleet.table.weight == 0.0)


async def test_a_candidate_that_the_engine_refuses_is_rejected(room: Room) -> None:
    await room.keep(candidate())
    room.shadow.refuses = True
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        await until_stored(lambda: room.stage() == Stage.REJECTED)
        assert controller.fleet.table.weight == 0.0


async def test_the_next_candidate_goes_live_on_the_other_engine(room: Room) -> None:
    await room.keep(candidate())
    await room.keep(candidate("c-0002", OTHER))
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        await go_live(controller, "c-0002", Portfolio((OTHER,)).digest)
        await until_stored(lambda: room.stage("c-0001") == Stage.SUPERSEDED)
        assert controller.fleet.table.canary == (PRIMARY,)
        await until(lambda: room.shadow.running == STOCK)


async def test_a_failed_successor_leaves_the_live_candidate_live(room: Room) -> None:
    await room.keep(candidate())
    await room.keep(candidate("c-0002", OTHER))
    async with room.running() as controller:
        await go_live(controller, "c-0001", NEW.digest)
        await controller.promote("c-0002", "")
        await until(lambda: controller.fleet.table.mirror)
        await controller.rollback("")
        await until(lambda: controller.fleet.table.weight == 1.0)
        assert controller.fleet.table.canary == (SHADOW,)
        await until(lambda: room.primary.running == STOCK)
        assert room.shadow.running == NEW
        await controller.rollback("")
        await until_stored(lambda: room.stage() == Stage.ROLLED_BACK)


# --- who may start what ---------------------------------------------------------------------------


async def drift(room: Room, controller: Controller) -> None:
    room.detector.drifts = True
    controller._report(replace(state(*GOOD_STABLE), reservoir=(live_request(),)))


async def test_drift_starts_a_search_whose_winner_is_rolled_out(room: Room) -> None:
    room.search.finds, room.search.code = candidate(), 0
    async with room.running() as controller:
        await drift(room, controller)
        await until(lambda: controller.fleet.table.mirror)
        assert len(room.search.orders) == 1
        assert room.detector.num_rebased == 1


async def test_autonomy_recommend_searches_and_moves_nothing(room: Room) -> None:
    room.search.finds, room.search.code = candidate(), 0
    room.autonomy = Autonomy.RECOMMEND
    async with room.running() as controller:
        await drift(room, controller)
        await until(lambda: room.detector.num_rebased)
        await until_stored(lambda: room.stage() == Stage.CONFIRMED)
        assert room.shadow.running == STOCK


async def test_autonomy_observe_only_tells(room: Room) -> None:
    room.autonomy = Autonomy.OBSERVE
    async with room.running() as controller:
        await drift(room, controller)
        await until_stored(room.store.verdicts)
        assert room.search.orders == []


async def test_a_search_without_live_requests_says_the_way_out(room: Room) -> None:
    async with room.running() as controller:
        with pytest.raises(WrongState, match="wait for traffic"):
            await controller.retune("")


async def test_only_a_confirmed_candidate_can_be_promoted(room: Room) -> None:
    await room.keep(candidate("c-0001", FORWARD, Event.BREACHED))
    async with room.running() as controller:
        with pytest.raises(WrongState, match="c-0001 is rejected"):
            await controller.promote("c-0001", "")
        with pytest.raises(NotThere):
            await controller.promote("c-0009", "")


async def test_one_rollout_at_a_time(room: Room) -> None:
    await room.keep(candidate())
    await room.keep(candidate("c-0002", OTHER))
    async with room.running() as controller:
        await controller.promote("c-0001", "")
        with pytest.raises(WrongState, match="one rollout runs at a time"):
            await controller.promote("c-0002", "")


async def test_a_shadow_without_engine_control_cannot_be_promoted_to(room: Room) -> None:
    await room.keep(candidate())
    room.shadow.is_gone = True
    async with room.running() as controller:
        with pytest.raises(WrongState, match="has no engine control"):
            await controller.promote("c-0001", "")


# --- after a restart ------------------------------------------------------------------------------


async def test_what_was_under_way_is_rolled_back_after_a_restart(room: Room) -> None:
    await room.keep(candidate("c-0001", FORWARD, Event.ADMITTED, Event.AGREES))
    room.shadow = SwapEngine(NEW)
    async with room.running() as controller:
        await until(lambda: room.shadow.running == STOCK)
        assert controller.fleet.table.weight == 0.0
        assert controller.fleet.table.version > 1000
    (found,) = await asyncio.to_thread(room.store.candidates)
    assert (found.stage, found.story[-1].note) == (Stage.ROLLED_BACK, "controller restarted")


async def test_what_was_live_stays_live_after_a_restart(room: Room) -> None:
    events = (Event.ADMITTED, Event.AGREES, Event.HELD)
    await room.keep(candidate("c-0001", FORWARD, *events))
    room.shadow, room.table = SwapEngine(NEW), replace(TABLE, weight=1.0)
    async with room.running() as controller:
        assert controller.fleet.table.weight == 1.0
        await controller.rollback("still there")
        await until(lambda: room.shadow.running == STOCK)


async def test_a_live_candidate_that_no_engine_runs_any_more_is_ended(room: Room) -> None:
    events = (Event.ADMITTED, Event.AGREES, Event.HELD)
    await room.keep(candidate("c-0001", FORWARD, *events))
    room.table = replace(TABLE, weight=1.0)
    async with room.running() as controller:
        assert controller.fleet.table.weight == 0.0
    await until_stored(lambda: room.stage() == Stage.ROLLED_BACK)
