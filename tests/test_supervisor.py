from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sidecar.supervisor import (
    PARENT,
    Child,
    EngineProcess,
    ProcessFailed,
    Supervisor,
    as_command,
    free_port,
)

SLEEP = "import time; time.sleep(60)"
TETHERED = f"from sidecar.supervisor import tether; tether(); {SLEEP}"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wait_until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_dead_child_is_started_again() -> None:
    supervisor = Supervisor([Child("a", python(SLEEP))], grace_s=1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await until(lambda: "a" in supervisor.pids)
        first = supervisor.pids["a"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pids.get("a", first) != first)
        supervisor.stop()


async def test_a_child_gets_its_words_at_each_start(tmp_path: Path) -> None:
    file = tmp_path / "said"
    code = f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read())"
    supervisor = Supervisor([Child("a", python(code), b"settings.")], grace_s=1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        size = 0
        while size < len("settings.settings."):
            await asyncio.sleep(0.05)
            size = await asyncio.to_thread(lambda: file.stat().st_size if file.exists() else 0)
        supervisor.stop()


async def test_stop_ends_children_and_what_they_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
        f"open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    supervisor = Supervisor([Child("a", python(code))], grace_s=1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        text = ""
        while not text:
            await asyncio.sleep(0.05)
            text = await asyncio.to_thread(lambda: file.read_text() if file.exists() else "")
        supervisor.stop()
    await until(lambda: not is_alive(int(text)))


async def test_a_child_that_does_not_listen_is_killed() -> None:
    code = f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEP}"
    supervisor = Supervisor([Child("a", python(code))], grace_s=0.2)
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await until(lambda: "a" in supervisor.pids)
        await asyncio.sleep(0.3)  # until it ignores the signal
        supervisor.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells on Linux only")
def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; from sidecar.supervisor import child_environment; "
        f"p = subprocess.Popen([sys.executable, '-c', {TETHERED!r}], env=child_environment()); "
        f"time.sleep(1); open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    parent = subprocess.Popen(python(code))
    wait_until(lambda: file.exists() and bool(file.read_text()))
    child = int(file.read_text())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(child))


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    environment = {**os.environ, PARENT: "999999999"}
    done = subprocess.run(python(TETHERED), env=environment, timeout=30, check=False)
    assert done.returncode == 1


def test_our_commands_run_in_this_environment() -> None:
    assert as_command(["trimtab", "status"]) == [sys.executable, "-m", "sidecar", "status"]
    assert as_command(["vllm", "serve"]) == ["vllm", "serve"]


# --- engines --------------------------------------------------------------------------------------

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    port = free_port()
    command = [*python(SERVER), str(port)]
    process = EngineProcess(command, f"http://127.0.0.1:{port}", tmp_path / "engine.log")
    yield process
    process.close()


def test_an_engine_is_ready_when_its_health_says_so(engine: EngineProcess) -> None:
    assert engine.wait_ready(20.0) == engine.start_to_ready_s
    assert engine.is_alive


def test_a_closed_engine_is_gone(engine: EngineProcess) -> None:
    engine.wait_ready(20.0)
    engine.close()
    assert not is_alive(engine.pid)


def test_an_engine_that_ends_before_it_is_ready_shows_its_last_line(tmp_path: Path) -> None:
    code = "import sys; sys.exit('model directory /nope does not exist')"
    process = EngineProcess(python(code), "http://127.0.0.1:9", tmp_path / "engine.log")
    with pytest.raises(ProcessFailed, match=r"model directory /nope does not exist \(log: "):
        process.wait_ready(20.0)


def test_an_engine_that_is_never_ready_is_closed(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    process = EngineProcess(python(SLEEP), url, tmp_path / "engine.log")
    with pytest.raises(ProcessFailed, match=r"not ready within 0\.2 s"):
        process.wait_ready(0.2)
    assert not is_alive(process.pid)


def test_a_command_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="did not start"):
        EngineProcess(["/no/such/engine"], "http://127.0.0.1:9", tmp_path / "engine.log")
