"""The data-plane process: relay, mirror and link around one event loop.

It needs nobody: without a controller it serves on with the last committed table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import uvloop

from sidecar.link import Link, LinkSettings
from sidecar.mirror import Mirror, MirrorSettings
from sidecar.relay import CannotListen, Engines, Relay, RelaySettings, serve
from sidecar.routing import Routing, RoutingTable, load_table

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """Everything a data plane needs to know. Can be pickled."""

    initial: RoutingTable  # committed; a newer one at `table_path` goes first
    host: str = "127.0.0.1"
    port: int = 8080  # 0 is any free one
    reuse_port: bool = False  # several workers listen on one port
    controller_address: str = ""  # a unix socket's path or HOST:PORT; "" is nobody
    table_path: Path | None = None  # where committed tables are kept over a restart
    grace_s: float = 30.0  # that streams have to end after SIGTERM
    relay: RelaySettings = field(default_factory=RelaySettings)
    mirror: MirrorSettings = field(default_factory=MirrorSettings)
    link: LinkSettings = field(default_factory=LinkSettings)


@dataclass(frozen=True, slots=True)
class Plane:
    """A running data plane."""

    port: int
    routing: Routing
    link: Link


class Ready(Protocol):
    """Told once, when the port accepts: a `multiprocessing.Event` does."""

    def set(self) -> None: ...


@asynccontextmanager
async def plane(settings: PlaneSettings) -> AsyncIterator[Plane]:
    """Serve until left, then drain within the grace time. Raises `CannotListen`."""
    routing = Routing(await asyncio.to_thread(_first_table, settings))
    plane_id = f"{settings.host}:{settings.port}/{os.getpid()}"
    link = Link(settings.controller_address, plane_id, routing, settings.link, settings.table_path)
    mirror = Mirror(link.mirrored, settings.mirror, settings.relay.connect_timeout_s)
    engines = Engines(settings.relay.connect_timeout_s, settings.relay.keepalive_s)
    relay = Relay(routing, engines, link, mirror, settings.relay)
    try:
        where = settings.host, settings.port, settings.reuse_port
        async with serve(relay, *where, settings.grace_s) as port, mirror.running():
            link.start()
            yield Plane(port, routing, link)
    finally:
        await engines.close()
        await asyncio.to_thread(link.close)


def _first_table(settings: PlaneSettings) -> RoutingTable:
    kept = load_table(settings.table_path) if settings.table_path is not None else None
    if kept is None or kept.version <= settings.initial.version:
        return settings.initial
    return kept


def run_plane(settings: PlaneSettings, ready: Ready | None = None) -> None:
    """A data-plane process from start to end: serves until SIGTERM or SIGINT, then drains. A second
    signal ends it at once. Raises `SystemExit` with a line for the user when it cannot listen."""
    try:
        uvloop.run(_until_signalled(settings, ready))
    except CannotListen as e:
        raise SystemExit(f"trimtab: {e}") from e


async def _until_signalled(settings: PlaneSettings, ready: Ready | None) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop)
    async with plane(settings) as running:
        log.info("data plane serves", extra={"host": settings.host, "port": running.port})
        if ready is not None:
            ready.set()
        await stop.wait()
        log.info("data plane drains", extra={"grace_s": settings.grace_s})


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)
    stop.set()
