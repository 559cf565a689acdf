"""Two real engines and a real sidecar in processes of their own, for tests that kill them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from fakes_control import keep_confirmed

from compiler.candidates import Stage
from engines.remote import RemoteEngine, control_address
from sidecar.control import ControlClient, ControllerGone, Status
from sidecar.control import control_address as controller_address
from sidecar.replay import Replayer, ReplayReport
from sidecar.supervisor import EngineProcess, free_ports, our_command
from sidecar.traffic import Domain, Phase, PlannedRequest, plan

SETTINGS = """
autonomy = "auto"
[drift]
window_requests = 30
[canary]
steps = [0.5, 1.0]
step_s = 60.0
step_requests = 4
shadow_requests = {shadow_requests}
max_latency_ratio = 50.0
lease_s = 3.0
[search]
budget = "60s"
"""


@dataclass(frozen=True, slots=True)
class Running:
    """What runs. `control` blocks."""

    primary: EngineProcess
    shadow: EngineProcess
    serve: EngineProcess
    control: ControlClient
    state: Path

    async def until(self, done: Callable[[Status], bool], within_s: float = 40.0) -> Status:
        """Poll the controller, dead or alive, until `done`."""
        end_s, status = time.monotonic() + within_s, None
        while time.monotonic() < end_s:
            try:
                status = await asyncio.to_thread(self.control.status)
                if done(status):
                    return status
            except ControllerGone:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {within_s:g} s; last seen: {status}")

    async def put_confirmed(self) -> str:
        """A candidate as a search leaves it, in the controller's store; its id."""
        return await asyncio.to_thread(keep_confirmed, self.state)

    async def stage(self, candidate_id: str) -> Stage:
        cards = await asyncio.to_thread(lambda: list(self.control.candidates()))
        return Stage(next(c.stage for c in cards if c.id == candidate_id))

    def child(self, word: str) -> psutil.Process:
        """The process below `serve` whose command line holds `word`."""
        for process in psutil.Process(self.serve.pid).children(recursive=True):
            if word in process.cmdline():
                return process
        raise AssertionError(f"serve has no child with {word!r} on its command line")

    async def digest(self, url: str) -> str:
        """What an engine says that it runs."""
        engine = await asyncio.to_thread(RemoteEngine, control_address(url))
        try:
            return (await asyncio.to_thread(engine.info)).digest
        finally:
            engine.close()

    @asynccontextmanager
    async def traffic(self, per_s: float = 5.0) -> AsyncIterator[list[ReplayReport]]:
        """Code-like requests while the block runs; the report is there after it."""
        replayer, reports = Replayer(self.serve.url), list[ReplayReport]()
        planned = await asyncio.to_thread(requests, per_s)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(replayer.run(planned))
            try:
                yield reports
            finally:
                replayer.stop()
                reports.append(await sending)


def requests(per_s: float, num: int = 2000) -> list[PlannedRequest]:
    """From few texts: the plan is made at once and holds nothing up."""
    made = list(plan([Phase(Domain.CODE, 20, per_s)], "tiny-moe"))
    spaced = [made[i % len(made)] for i in range(num)]
    return [_at(r, i / per_s) for i, r in enumerate(spaced)]


def _at(request: PlannedRequest, arrival_s: float) -> PlannedRequest:
    body = {**request.body, "max_tokens": 4, "user": f"user-{arrival_s}"}
    return replace(request, arrival_s=arrival_s, body=body)


@asynccontextmanager
async def running(
    home: Path, *, shadow_requests: int = 5, settings: str = ""
) -> AsyncIterator[Running]:
    """Everything started and ready; ended at the end, whatever is left of it."""
    stack, made = await asyncio.to_thread(_start, home, shadow_requests, settings)
    try:
        await made.until(lambda s: s.num_data_planes == 1)
        yield made
    finally:
        await asyncio.to_thread(stack.close)


def _start(home: Path, shadow_requests: int, settings: str) -> tuple[ExitStack, Running]:
    config = home / "trimtab.toml"
    config.write_text(SETTINGS.format(shadow_requests=shadow_requests) + settings)
    ports = free_ports(4)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:3]]
    with ExitStack() as starting:

        def start(name: str, url: str, *words: str) -> EngineProcess:
            process = EngineProcess(our_command(*words), url, home / f"{name}.log")
            starting.callback(process.close)
            return process

        primary, shadow = (
            start(name, url, "engine", "embedded", "--port", str(port))
            for name, url, port in zip(("primary", "shadow"), urls, ports, strict=False)
        )
        for engine in (primary, shadow):
            engine.wait_ready()
        serve = start(
            *("serve", urls[2], "serve", "--config", str(config), "--name", "t"),
            *("--upstream", urls[0], "--shadow", urls[1]),
            *("--port", str(ports[2]), "--admin-port", str(ports[3])),
        )
        serve.wait_ready()
        state = home / "state" / "trimtab" / "t"
        control = ControlClient(controller_address(state), timeout_s=10.0)
        starting.callback(control.close)
        return starting.pop_all(), Running(primary, shadow, serve, control, state)
