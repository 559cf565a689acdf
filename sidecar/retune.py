"""From live requests to a search: tokenised off the hot path, handed to `trimtab compile` on its
standard input, never on disk.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from profiler.reservoir import LiveRequest, Workload, WorkloadKind, WorkloadRequest
from sidecar.supervisor import child_environment, end_group, our_command

log = logging.getLogger(__name__)

MAX_IDS = 4096  # of one prompt or answer, in a workload
WINNER, NO_WINNER = 0, 3  # exit codes of `trimtab compile`
GRACE_S = 5.0


class Tokenizer:
    """The engine's own `/tokenize`. Whoever opens it closes it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def workload(self, live: Sequence[LiveRequest], max_concurrency: int) -> Workload:
        """Token ids of what was asked and answered, in order of arrival. Requests that the engine
        cannot tokenise are left out."""
        requests = []
        for request in live:
            try:
                ids = await self._ids(request)
            except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as e:
                log.warning("request not tokenised", extra={"why": type(e).__name__})
                continue
            if ids is not None:
                offset_s = request.arrived_s - live[0].arrived_s
                requests.append(WorkloadRequest(*ids, arrival_s=offset_s))
        return Workload(WorkloadKind.REAL, tuple(requests), max(1, max_concurrency))

    async def _ids(self, live: LiveRequest) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        body = orjson.loads(live.body)
        if not isinstance(body, dict):
            return None
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            asked = tuple(prompt)
        else:
            asked = await self._tokenize(_question(body))
        said = await self._tokenize({"prompt": live.output_text, "add_special_tokens": False})
        return (asked[-MAX_IDS:], said[:MAX_IDS]) if asked and said else None

    async def _tokenize(self, question: Mapping[str, Any]) -> tuple[int, ...]:
        if self._session is None:  # not before there is a loop
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0))
        async with self._session.post(f"{self._url}/tokenize", json=question) as reply:
            reply.raise_for_status()
            return tuple(int(t) for t in orjson.loads(await reply.read())["tokens"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _question(body: Mapping[str, Any]) -> dict[str, Any]:
    """What `/tokenize` is asked: the prompt, or the messages with the template's end."""
    model = {"model": body["model"]} if "model" in body else {}
    if "messages" in body:
        return {**model, "messages": body["messages"], "add_generation_prompt": True}
    if not isinstance(body.get("prompt"), str):
        raise ValueError("neither messages nor one prompt")
    return {**model, "prompt": body["prompt"]}


@dataclass(frozen=True, slots=True)
class SearchOrder:
    """One search, as `trimtab compile` is told it."""

    id: str
    state: Path
    launch: str
    budget: str
    agent: str

    def command(self) -> list[str]:
        return our_command(
            *("compile", "--state", str(self.state), "--search-id", self.id, "--workload", "-"),
            *("--launch", self.launch, "--budget", self.budget, "--agent", self.agent, "--json"),
        )


async def search(order: SearchOrder, workload: str) -> int:
    """Run one search to its end in a process group of its own; its exit code. Its words go to
    `search.log` in the state folder. Cancelled, it ends the whole group."""
    log_file = order.state / "search.log"
    out = await asyncio.to_thread(log_file.open, "ab")
    with out:
        process = await asyncio.create_subprocess_exec(
            *order.command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(),
            start_new_session=True,
        )
    try:
        await process.communicate(workload.encode())
    finally:
        end_group(process.pid, signal.SIGTERM)
        await _reap(process)
    return process.returncode or 0


async def _reap(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        pass
    finally:
        end_group(process.pid, signal.SIGKILL)
        await process.wait()
