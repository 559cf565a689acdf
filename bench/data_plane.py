"""What a request costs on its way through: Trimtab beside the routers that people use.

    python -m bench.data_plane --routers /path/to/bin --nginx /usr/sbin/nginx [--out FILE]

`--routers` is where `vllm-router` and `smg` are installed (PyPI); what is not there is left out.
One fake engine serves all. Each round asks every one of them in turn, in an order of its own: small
requests at concurrency 16, streams, and single requests with small, 64 KB and 1 MB bodies. CPU time
is that of the process tree by `/proc` (nanoseconds on a core), wall time that of the client.
Medians over the rounds, with half the distance between the quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import psutil
import uvloop

from sidecar.supervisor import EngineProcess

CONCURRENCY, NUM_REQUESTS = 16, 2000  # small requests a round
NUM_STREAMS, NUM_CHUNKS = 32, 100
SINGLE = {"small": (0, 300), "64 KB": (64 << 10, 100), "1 MB": (1 << 20, 20)}  # padding, requests
ENGINE, FIRST_PORT = 18000, 18010
NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 0; keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_set_header Host $http_host;
    }}
  }}
}}
"""
Row = dict[str, float]  # a figure by its name


class Client(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self.num_bytes = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.num_bytes += len(body)

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            self._done.set_exception(RuntimeError(f"status {status}"))
        else:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionResetError("closed"))

    async def ask(self, body: bytes) -> None:
        """Send a request and wait for the end of its answer."""
        self._done = self._loop.create_future()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n"
        )
        self._transport.write(head % len(body) + body)
        await self._done

    def close(self) -> None:
        self._done.cancel()
        self._transport.close()


@asynccontextmanager
async def connected(port: int, number: int) -> AsyncIterator[list[Client]]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Client, "127.0.0.1", port) for _ in range(number)]
    clients = [client for _, client in made]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def chat(padding: int = 0, **more: Any) -> bytes:
    text = "Hello " + "x" * padding
    message = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return json.dumps(message).encode()


async def throughput(port: int, pid: int) -> Row:
    """CPU and wall time of small requests, many at once."""
    body = chat(max_tokens=16)

    async def several(client: Client) -> None:
        for _ in range(NUM_REQUESTS // CONCURRENCY):
            await client.ask(body)

    async with connected(port, CONCURRENCY) as clients:
        before_s, started_s = cpu_s(pid), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(several(client))
        wall_s = time.perf_counter() - started_s
        return {
            "CPU µs/request": 1e6 * (cpu_s(pid) - before_s) / NUM_REQUESTS,
            "requests/s": NUM_REQUESTS / wall_s,
        }


async def streams(port: int, pid: int) -> Row:
    body = chat(max_tokens=NUM_CHUNKS, stream=True)
    async with connected(port, NUM_STREAMS) as clients:
        before_s = cpu_s(pid)
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.ask(body))
        took_s = cpu_s(pid) - before_s
        assert len({client.num_bytes for client in clients}) == 1
        return {"CPU µs/chunk": 1e6 * took_s / (NUM_STREAMS * NUM_CHUNKS)}


async def single(port: int) -> Row:
    """Median ms of requests that are alone, by the size of their bodies."""
    row: Row = {}
    async with connected(port, 1) as [client]:
        for name, (padding, number) in SINGLE.items():
            body, took_s = chat(padding), []
            for _ in range(number):
                started_s = time.perf_counter()
                await client.ask(body)
                took_s.append(time.perf_counter() - started_s)
            row[f"p50 ms, {name}"] = 1e3 * float(np.median(took_s))
            row[f"p99 ms, {name}"] = 1e3 * float(np.percentile(took_s, 99))
    return row


async def measured(port: int, pid: int) -> Row:
    return await throughput(port, pid) | await streams(port, pid) | await single(port)


# --- processes ------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Of all threads of a process and of those that it started."""
    root = psutil.Process(pid)
    pids = [pid, *(child.pid for child in root.children(recursive=True))]
    total_ns = 0
    for path in (p for i in pids for p in Path(f"/proc/{i}/task").glob("*/schedstat")):
        with suppress(FileNotFoundError, ProcessLookupError):
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


def commands(args: argparse.Namespace, folder: Path) -> dict[str, tuple[int, list[str]]]:
    """Whoever is there: its port and how it is started."""
    engine = f"http://127.0.0.1:{ENGINE}"
    names = ("trimtab", "vllm-router", "smg", "nginx")
    ports = {name: FIRST_PORT + 10 * i for i, name in enumerate(names)}
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, engine=ENGINE, port=ports["nginx"]))

    def router(name: str, *words: str) -> list[str]:
        where = ["--worker-urls", engine, "--host", "127.0.0.1", "--port", str(ports[name])]
        spare = ["--policy", "round_robin", "--log-level", "error"]
        spare += ["--prometheus-port", str(ports[name] + 1)]
        return [str(args.routers / name), *words, *where, *spare]

    where = f"--host 127.0.0.1 --port {ports['trimtab']} --admin-port {ports['trimtab'] + 1}"
    trimtab = [sys.executable, *"-m sidecar serve --upstream".split(), engine, *where.split()]
    found = {"trimtab": trimtab}
    if args.routers is not None:
        found |= {"vllm-router": router("vllm-router"), "smg": router("smg", "launch")}
    if args.nginx is not None:
        found["nginx"] = [str(args.nginx), "-e", str(folder / "error"), "-c", str(config)]
    return {name: (ports[name], words) for name, words in found.items() if Path(words[0]).exists()}


# --- the table ------------------------------------------------------------------------------------


def table(rounds: Mapping[str, Sequence[Row]]) -> str:
    names = list(next(iter(rounds.values()))[0])
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for who, rows in rounds.items():
        cells = []
        for name in names:
            low, mid, high = np.percentile([row[name] for row in rows], [25, 50, 75])
            cells.append(f"{mid:.4g} ± {(high - low) / 2:.2g}")
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=Path, help="the folder of vllm-router and smg")
    parser.add_argument("--nginx", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds: dict[str, list[Row]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        engine = [sys.executable, "-m", "bench.fake_engine", str(ENGINE)]
        ports, pids = {}, {}
        for who, (port, words) in {"direct": (ENGINE, engine), **commands(args, folder)}.items():
            process = EngineProcess(words, f"http://127.0.0.1:{port}", folder / f"{who}.log")
            stack.callback(process.close)
            process.wait_ready(60)
            ports[who], pids[who] = port, process.pid
        for _ in range(args.rounds + 1):
            for who in random.sample(list(pids), len(pids)):
                rounds[who].append(uvloop.run(measured(ports[who], pids[who])))
    found = {who: rounds[who][1:] for who in pids}  # the first one warms up
    about = (
        f"`python -m bench.data_plane`, {datetime.date.today()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {args.rounds} rounds, interleaved. Median ± half the distance "
        "between the quartiles; `direct` is the fake engine itself."
    )
    text = f"# What a request costs on its way through\n\n{about}\n\n{table(found)}\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
