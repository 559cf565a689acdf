"""The processes: started, kept alive, ended with everything they started.

A child is a session of its own, so that ending it ends its whole group. It dies with us: on Linux
each of our commands calls `tether` first and is then told by the kernel when its parent is gone,
however the parent went.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

PARENT = "TRIMTAB_PARENT"  # pid of the process that started this one
PR_SET_PDEATHSIG = 1
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
STEADY_S = 10.0  # alive for so long, a child's next death starts the backoff anew


class ProcessFailed(RuntimeError):
    """A process did not start, or ended before it was ready. Says which, and where its log is."""


def tether() -> None:
    """Die with the process that started us, if it asked for that. Called first thing in `main`."""
    parent = os.environ.pop(PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent) and not Path(f"/proc/{parent}").exists():
        raise SystemExit(1)  # it was gone before we asked


def our_command(*arguments: str) -> list[str]:
    """A `trimtab` command in this environment, whatever PATH says."""
    return [sys.executable, "-m", "sidecar", *arguments]


def as_command(words: Sequence[str]) -> list[str]:
    """A launch line's words. `trimtab` and `python` are this environment's."""
    match list(words):
        case ["trimtab", *rest]:
            return our_command(*rest)
        case ["python" | "python3", *rest]:
            return [sys.executable, *rest]
    return list(words)


def free_ports(num: int, host: str = "127.0.0.1") -> list[int]:
    """Different ones that nobody listens on now: all are held until all are known."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on now."""
    return free_ports(1, host)[0]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, **(extra or {}), PARENT: str(os.getpid())}


def end_group(pid: int, signal_number: int) -> None:
    """Signal the session that `pid` leads; nothing when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal_number)


# --- one engine, synchronously --------------------------------------------------------------------


class EngineProcess:
    """An engine started from a launch line, ready when its `/health` says so. Blocks: use it off
    the event loop. Whoever starts it closes it; its output is in `log_file`."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        control: Path | None = None,
        grace_s: float = 5.0,
    ) -> None:
        """`control` is a socket without which it is not ready. After `grace_s` of SIGTERM what is
        left of it is killed."""
        self.url = url
        self.log_file = log_file
        self.start_to_ready_s: float | None = None
        self._control, self._grace_s = control, grace_s
        self._started_s = time.monotonic()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log_file.open("ab") as out:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=child_environment(environment),
                    start_new_session=True,
                )
        except OSError as e:
            raise ProcessFailed(f"engine for {url} did not start: {e}") from e

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, deadline_s: float = 120.0) -> float:
        """Seconds from start to ready. Raises `ProcessFailed` when it ends first or
        takes longer; the process is closed then."""
        while time.monotonic() < self._started_s + deadline_s:
            if not self.is_alive:
                self.close()
                raise ProcessFailed(
                    f"engine for {self.url} ended with {self._process.returncode} before it was "
                    f"ready: {self.last_line()} (log: {self.log_file})"
                )
            if answers(f"{self.url}/health") and self._has_control:
                self.start_to_ready_s = time.monotonic() - self._started_s
                return self.start_to_ready_s
            time.sleep(0.05)
        self.close()
        raise ProcessFailed(
            f"engine for {self.url} was not ready within {deadline_s:g} s (log: {self.log_file})"
        )

    @property
    def _has_control(self) -> bool:
        return self._control is None or self._control.exists()

    def last_line(self) -> str:
        lines = self.log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def close(self, grace_s: float | None = None) -> None:
        """End it and what it started. Twice is fine."""
        end_group(self.pid, signal.SIGTERM)
        try:
            self._process.wait(self._grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            pass
        end_group(self.pid, signal.SIGKILL)
        self._process.wait()


def answers(url: str) -> bool:
    """A 200 within a second, no proxy in between."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


# --- many processes, kept -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running. `stdin` is written once, at each start."""

    name: str
    command: tuple[str, ...]
    stdin: bytes = field(default=b"", repr=False)


class Supervisor:
    """Keeps children running until `run` is told to stop; restarts the dead with backoff."""

    def __init__(self, children: Sequence[Child], grace_s: float) -> None:
        """`grace_s` is what a child has between SIGTERM and SIGKILL."""
        self._children = children
        self._grace_s = grace_s
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def stop(self) -> None:
        """End all children, gently; a second call ends them at once. Safe in a signal handler."""
        sign = signal.SIGKILL if self._stopping.is_set() else signal.SIGTERM
        self._stopping.set()
        for process in self._running.values():
            end_group(process.pid, sign)

    async def run(self) -> None:
        """Returns when every child has ended after `stop`."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._keep(child))
        finally:
            for process in self._running.values():
                end_group(process.pid, signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self._once(child)
            if self._stopping.is_set():
                return
            if time.monotonic() - started_s > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            log.warning(
                "process ended, starting it again",
                extra={"child": child.name, "code": code, "in_s": backoff_s},
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _once(self, child: Child) -> int:
        process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
        )
        self._running[child.name] = process
        try:
            await _feed(process, child.stdin)
            return await self._ended(process)
        finally:
            end_group(process.pid, signal.SIGKILL)  # what it left behind, or all of it
            self._running.pop(child.name, None)

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code. Once stopping, it has `grace_s` left."""
        async with asyncio.TaskGroup() as group:
            end = group.create_task(process.wait())
            stop = group.create_task(self._stopping.wait())
            await asyncio.wait({end, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not end.done():
                end_group(process.pid, signal.SIGTERM)  # it may have started after `stop`
                await asyncio.wait({end}, timeout=self._grace_s)
                end_group(process.pid, signal.SIGKILL)
        return end.result()


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
