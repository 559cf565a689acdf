"""kill -9 in the middle of a turn: clients see nothing, and the state afterwards is a clear one."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from stage import Running, running

from compiler.candidates import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short paths: a unix socket's is limited."""
    with tempfile.TemporaryDirectory(prefix="tt-") as made:
        (Path(made) / "run").mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{made}/run")
        monkeypatch.setenv("XDG_STATE_HOME", f"{made}/state")
        yield Path(made)


@pytest.fixture
async def house(home: Path) -> AsyncIterator[Running]:
    async with running(home) as made:
        yield made


async def test_a_killed_controller_leaves_everything_on_stable(house: Running) -> None:
    candidate = await house.put_confirmed()
    async with house.traffic() as reports:
        await asyncio.to_thread(house.control.promote, candidate, "test")
        await house.until(lambda s: s.state == "canary")
        await asyncio.to_thread(lambda: house.child("controller-process").kill())
        after = await house.until(lambda s: s.uptime_s < 5 and s.num_data_planes == 1)
        await asyncio.sleep(3.0)  # the lease lapses, the engine goes back
    assert reports[0].num_sent == reports[0].num_ok > 0
    assert [a.weight for a in after.arms if a.role == "canary"] == [0.0]
    assert await house.stage(candidate) is Stage.ROLLED_BACK
    assert await house.digest(house.shadow.url) == ""


async def test_a_killed_shadow_ends_its_candidate_and_no_request(home: Path) -> None:
    async with running(home, shadow_requests=10_000) as house:
        candidate = await house.put_confirmed()
        async with house.traffic() as reports:
            await asyncio.to_thread(house.control.promote, candidate, "test")
            await house.until(lambda s: s.state == "shadow" and s.num_mirrored > 3)
            await asyncio.to_thread(house.shadow.close, 0.0)
            await house.until(lambda s: s.state != "shadow")
            await asyncio.sleep(1.0)
        assert reports[0].num_sent == reports[0].num_ok > 0
        assert await house.stage(candidate) is Stage.ROLLED_BACK


async def test_a_killed_compiler_leaves_no_half_verdict_and_no_engine(house: Running) -> None:
    async with house.traffic() as reports:
        await house.until(lambda s: s.num_requests > 35)
        await asyncio.to_thread(house.control.retune, "test")
        await house.until(lambda s: s.state == "searching")
        compiler, engines = await asyncio.to_thread(_with_engines, house)
        compiler.kill()
        await house.until(lambda s: s.state == "idle")
        await asyncio.sleep(1.0)
    assert reports[0].num_sent == reports[0].num_ok > 0
    assert not [p for p in engines if _lives(p)]
    arms = (await house.until(lambda s: True)).arms
    assert {a.digest for a in arms} == {""}


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _with_engines(house: Running) -> tuple[psutil.Process, list[psutil.Process]]:
    """The compiler, once it has started its own engines."""
    for _ in range(300):
        with contextlib.suppress(AssertionError):
            compiler = house.child("compile")
            if len(engines := compiler.children(recursive=True)) >= 2:
                return compiler, engines
        time.sleep(0.1)
    raise AssertionError("the compiler started no engines")


async def test_rollback_with_requests_in_flight_cuts_none(home: Path) -> None:
    async with running(home, settings="") as house:
        candidate = await house.put_confirmed()
        async with house.traffic(per_s=10.0) as reports:
            await asyncio.to_thread(house.control.promote, candidate, "test")
            await house.until(lambda s: s.state == "canary")
            done = await asyncio.to_thread(house.control.rollback, "test")
            again = await asyncio.to_thread(house.control.rollback, "twice is once")
            await asyncio.sleep(1.0)
        assert done.complete
        assert again.table_version == done.table_version
        assert reports[0].num_sent == reports[0].num_ok > 0
        assert await house.stage(candidate) is Stage.ROLLED_BACK
        assert await house.digest(house.shadow.url) == ""
