"""The one place that wires the others together: `serve` and the processes it starts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import pickle
import secrets
import signal
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from drift.detector import DriftDetector
from engines.remote import RemoteEngine, control_address, swap_key
from profiler.reservoir import Reservoir
from profiler.window import Window
from sidecar import control
from sidecar.comparison import AgreementPolicy
from sidecar.config import Config, ConfigError
from sidecar.control import ControlServer
from sidecar.controller import Controller, ControllerSettings
from sidecar.link import LinkSettings
from sidecar.metrics import Metrics, admin_site
from sidecar.plane import PlaneSettings
from sidecar.relay import RelaySettings
from sidecar.retune import Tokenizer, search
from sidecar.rollout import RolloutPolicy
from sidecar.routing import RoutingTable, load_table, save_table
from sidecar.store import FILE_NAME, SqliteStore
from sidecar.supervisor import Child, Supervisor, our_command

log = logging.getLogger(__name__)

TABLE_FILE = "table.json"  # the last committed routing table, in the state folder
SWAP_TIMEOUT_S = 60.0
PULSE_TIMEOUT_S = 5.0
KILL_AFTER_S = 2.0  # beyond the data planes' own grace


class CannotServe(RuntimeError):
    """Something else has what we need: a port, or the state folder."""


# --- serve ----------------------------------------------------------------------------------------


def serve(config: Config) -> None:
    """Run data planes and the controller until SIGTERM or SIGINT; blocks. Raises `ConfigError` and
    `CannotServe` before anything is started."""
    if not config.upstreams:
        raise ConfigError("there is nothing to serve; write --upstream http://HOST:PORT")
    control.control_address(config.state)
    with _sole(config.state):
        for port in (config.port, config.admin_port):
            _check_free(config.host, port)
        children = [*_planes(config), _controller(config)]
        asyncio.run(_supervise(Supervisor(children, config.proxy.drain_s + KILL_AFTER_S)))


async def _supervise(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()


@contextlib.contextmanager
def _sole(state: Path) -> Iterator[None]:
    """Be the one `serve` of this state; the kernel lets go when we end, however we end."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(state / "serve.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(fd, state)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, state: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        holder = os.pread(fd, 100, 0).decode(errors="replace")
        raise CannotServe(
            f"{state} is in use by process {holder}, another `trimtab serve`; stop it, or give "
            "this one another --name"
        ) from e


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as e:
            if e.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
                raise
            raise CannotServe(
                f"{host}:{port} cannot be listened on ({e.strerror}); stop who does, or give "
                "another --port and --admin-port"
            ) from e


def _planes(config: Config) -> Iterator[Child]:
    settings = PlaneSettings(
        initial=first_table(config),
        host=config.host,
        port=config.port,
        reuse_port=config.workers > 1,
        controller_address=control.control_address(config.state).removeprefix("unix:"),
        table_path=config.state / TABLE_FILE,
        grace_s=config.proxy.drain_s,
        relay=RelaySettings(
            connect_timeout_s=config.proxy.connect_timeout_s,
            show_digest=config.proxy.show_digest,
            tenant_salt=_salt(config.state / "tenant.salt"),
        ),
        link=LinkSettings() if config.reservoir.enabled else LinkSettings(max_live_bytes=0),
    )
    for number in range(config.workers):
        command = tuple(our_command("plane-process"))
        yield Child(f"plane-{number}", command, pickle.dumps(settings))


def _controller(config: Config) -> Child:
    command = tuple(our_command("controller-process"))
    return Child("controller", command, config.model_dump_json().encode())


def first_table(config: Config) -> RoutingTable:
    """The last committed table while it speaks of the same engines; else everything to the
    upstreams, newer than whatever was. Blocks."""
    kept = load_table(config.state / TABLE_FILE)
    if kept is None:
        return RoutingTable(1, config.upstreams, config.shadows)
    if {*kept.stable, *kept.canary} == {*config.upstreams, *config.shadows}:
        return kept
    return RoutingTable(kept.version + 1, config.upstreams, config.shadows)


def _salt(path: Path) -> bytes:
    """Keeps tenants' hashes the same over restarts, and unlike anybody else's."""
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    return path.read_bytes()


# --- the controller's process ---------------------------------------------------------------------


def run_controller(config: Config) -> None:
    """The controller from start to end; blocks until SIGTERM or SIGINT. Raises `StateLocked` when
    another one runs on this state."""
    store = SqliteStore(config.state / FILE_NAME)
    try:
        with store.lock():
            asyncio.run(_control(config, store))
    finally:
        store.close()


async def _control(config: Config, store: SqliteStore) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engines, pulses = _engines(config, SWAP_TIMEOUT_S), _engines(config, PULSE_TIMEOUT_S)
    tokenizer, metrics = Tokenizer(config.upstreams[0]), Metrics()
    table_path = config.state / TABLE_FILE
    controller = Controller(
        settings=await asyncio.to_thread(_settings, config),
        records=store,
        first_table=await asyncio.to_thread(first_table, config),
        commit=lambda table: save_table(table_path, table),
        engines=engines,
        pulses=pulses,
        swap_key=await asyncio.to_thread(swap_key),
        window=Window(config.drift.window_requests, config.drift.window_s),
        reservoir=Reservoir(config.reservoir.num_requests),
        detector=_detector,
        tokenizer=tokenizer,
        search=search,
        metrics=metrics,
    )
    server = ControlServer(controller, controller.fleet, control.control_address(config.state))
    try:
        await controller.reconcile()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(controller.run())
            await server.start()
            site = admin_site(metrics, lambda: controller.is_ready, config.host, config.admin_port)
            async with site:
                log.info("controller runs", extra={"state": str(config.state)})
                await stop.wait()
            running.cancel()
    finally:
        await server.stop()
        await controller.close()
        await tokenizer.close()
        for engine in (*engines.values(), *pulses.values()):
            engine.close()


def _detector() -> DriftDetector:
    from drift.learned import LearnedDetector

    return LearnedDetector()


def _engines(config: Config, timeout_s: float) -> dict[str, RemoteEngine]:
    urls = (*config.upstreams, *config.shadows)
    addresses = {url: config.engine_control.get(url) or control_address(url) for url in urls}
    return {url: RemoteEngine(address, timeout_s) for url, address in addresses.items()}


def _settings(config: Config) -> ControllerSettings:
    canary = config.canary
    return ControllerSettings(
        name=config.label,
        version=version("trimtab"),
        state=config.state,
        autonomy=config.autonomy,
        policy=RolloutPolicy(
            steps=canary.steps,
            step_s=canary.step_s,
            step_requests=canary.step_requests,
            max_latency_ratio=canary.max_latency_ratio,
            agreement=AgreementPolicy(
                min_results=canary.shadow_requests,
                max_diff_rate=canary.max_diverged_rate,
                max_latency_ratio=canary.max_latency_ratio,
            ),
        ),
        lease_s=canary.lease_s,
        launch=config.search.launch,
        budget=config.search.budget,
        agent=config.search.agent,
        keeps_requests=config.reservoir.enabled,
    )
