"""Trimtab's door into vLLM's API process: a unix socket beside the HTTP that clients use.

`--middleware` names `Middleware`. It passes everything on untouched and, when the server starts up,
opens the socket; no route is added, so that no client of the HTTP port can reach it, and vLLM's
development mode is not needed. What comes there is passed on to the workers between two steps by
vLLM's own collective RPC.

**KV belongs to the forward pass that wrote it.** A flip happens with the scheduler paused, every
running request preempted and the prefix cache cleared; requests stay, and are computed again under
what runs then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from engines.inside import wire

PAUSE_DEADLINE_S = 10.0
GIVE_WAY_S = 30.0
SLACK_S = 5.0  # the worker breaks a hang off first, where it can
FLIPS = frozenset({"swap", "revert", "give_way"})
REPLAYS = frozenset({"replay", "call", "graph_check"})
GAUGES = {
    "num_waiting": "vllm:num_requests_waiting",
    "num_running": "vllm:num_requests_running",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}

log = logging.getLogger("vllm.trimtab")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Middleware:
    """An ASGI middleware that only looks at the server's start and end."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" or wire.SOCKET not in os.environ:
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        async with Door(engine, Path(os.environ[wire.SOCKET])):
            await self._app(scope, receive, send)


class Busy(RuntimeError):
    """It would have to wait for clients' requests. Says so."""


class Door:
    """Serves the socket while the context is open. One operation at a time."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine, self._path = engine, path
        self._turn = asyncio.Lock()
        self._num_steps: int | None = None  # the workers' live ones, when no KV was left last
        self._num_swaps = 0
        self._about: wire.Message = {}  # an idle engine's own account; its workers are left alone
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Door:
        await asyncio.to_thread(self._path.unlink, missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._path.chmod(0o600)  # its folder is 0700, so nobody came in before
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.to_thread(self._path.unlink, missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while True:
                head = await reader.readexactly(wire.LENGTHS.size)
                frame = head + await reader.readexactly(sum(wire.lengths(head)))
                writer.write(wire.pack(await self._answer(wire.unpack(frame))))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, message: wire.Message) -> wire.Message:
        try:
            return await self._do(message)
        except Busy as e:
            return {"error": "candidate", "text": str(e)}
        except TimeoutError as e:
            return {"error": "deadline", "text": str(e) or "the engine did not answer in time"}
        except Exception as e:
            log.exception("Trimtab's %s failed", message.get("do"))
            return {"error": "engine", "text": f"{type(e).__name__}: {e}"}

    async def _do(self, message: wire.Message) -> wire.Message:
        match message["do"]:
            case "pending":
                return {"num_pending": self._num_pending()}
            case "fault":
                return await self._give_way(message)
        float(message["deadline_s"])  # or nobody is kept waiting
        async with self._turn:
            if message["do"] in FLIPS:
                return await self._flip(message)
            if message["do"] in REPLAYS:
                return await self._replay(message)
            if message["do"] == "info" and self._about and not self._num_pending():
                return dict(self._about)
            reply = {**await self._workers(message), **_gauges()}
            if message["do"] in ("attach", "info") and "error" not in reply:
                self._about = reply
            return reply

    def _num_pending(self) -> int:
        return int(self._engine.output_processor.get_num_unfinished_requests())

    async def _flip(self, message: wire.Message) -> wire.Message:
        num_pending = self._num_pending()
        return {**await self._between_steps(message), "num_preempted": num_pending}

    async def _replay(self, message: wire.Message) -> wire.Message:
        """On an engine without requests; one that comes meanwhile waits."""
        if self._num_pending():
            raise Busy("the engine is serving; drain it first")
        return await self._between_steps(message, idle=True)

    async def _give_way(self, message: wire.Message) -> wire.Message:
        """A forward raised while it served: stock has answered, and now recomputes."""
        log.error("a forward pass faulted, stock serves: %s", message["text"])
        async with self._turn:
            return await self._flip({**message, "do": "give_way", "deadline_s": GIVE_WAY_S})

    async def _between_steps(self, message: wire.Message, idle: bool = False) -> wire.Message:
        """The workers' answer with the scheduler paused. Before it goes on, what KV there is goes:
        nothing when no step has run since the last time (of a large cache, clearing it takes
        longer than a flip). When the pause does not come in time, it is undone and the requests go
        on. Raises `TimeoutError`, `Busy`."""
        core = self._engine.engine_core
        try:
            await _paused(core, clear=False)
            if idle and self._num_pending():
                raise Busy("the engine is serving; drain it first")
            reply: wire.Message = {}
            try:
                reply = await self._workers(message)
                return reply
            finally:
                num_steps = reply.get("num_live_steps")
                if num_steps is None or num_steps != self._num_steps:
                    await _paused(core, clear=True)
                    self._num_steps = num_steps
        finally:
            await core.resume_scheduler_async()

    async def _workers(self, message: wire.Message) -> wire.Message:
        """The first rank's answer, or the first error. A swap that failed on some ranks is taken
        back on the others."""
        self._num_swaps += message["do"] == "swap"
        ranks = await self._every_rank({**message, "swap_id": self._num_swaps})
        failed = [i for i, rank in enumerate(ranks) if "error" in rank]
        if not failed:
            for name in ("digest", "previous_digest"):
                if self._about and name in ranks[0]:
                    self._about[name] = ranks[0][name]
            fingerprints = [r["fingerprint"] for r in ranks if "fingerprint" in r]
            return {**ranks[0], "num_ranks": len(ranks), "fingerprints": fingerprints}
        if message["do"] == "swap" and len(failed) < len(ranks):
            undo = {"do": "undo", "swap_id": self._num_swaps, "deadline_s": GIVE_WAY_S}
            await self._every_rank(undo)
        error = ranks[failed[0]]
        where = f" (rank {failed[0]} of {len(ranks)})" if len(ranks) > 1 else ""
        return {**error, "text": error["text"] + where}

    async def _every_rank(self, message: wire.Message) -> list[wire.Message]:
        """Raises `TimeoutError`: a rank hangs, or waits for one that failed."""
        asked = self._engine.collective_rpc("trimtab", args=(wire.pack(message),))
        replies = await asyncio.wait_for(asked, float(message["deadline_s"]) + SLACK_S)
        return [wire.unpack(reply) for reply in replies]


async def _paused(core: Any, clear: bool) -> None:
    """Freeze all requests where they are; with `clear` they are preempted, and no KV is left.
    Raises `Busy`."""
    pause = core.pause_scheduler_async(mode="keep", clear_cache=clear)
    try:
        await asyncio.wait_for(pause, PAUSE_DEADLINE_S)
    except TimeoutError as e:
        raise Busy(f"no step ended within {PAUSE_DEADLINE_S:g} s; the requests go on") from e


def _gauges() -> wire.Message:
    """vLLM's own, of its first engine; zero where its statistics are off."""
    registry = REGISTRY.restricted_registry(list(GAUGES.values()))
    found = {}
    for ours, theirs in GAUGES.items():
        samples = (s for m in registry.collect() for s in m.samples if s.name == theirs)
        found[ours] = next((s.value for s in samples), 0.0)
    return {"gauges": found}
