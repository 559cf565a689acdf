from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from sidecar.retune import SearchOrder, Tokenizer, search
from sidecar.supervisor import free_port
from sidecar.tap import LiveRequest


@asynccontextmanager
async def tokenizing() -> AsyncIterator[tuple[Tokenizer, list[dict[str, object]]]]:
    """An engine whose token ids are the code points of what it was given."""
    asked: list[dict[str, object]] = []

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        text = body.get("prompt") or body["messages"][0]["content"]
        return web.json_response({"tokens": [ord(c) for c in text]})

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    tokenizer = Tokenizer(f"http://127.0.0.1:{port}")
    try:
        yield tokenizer, asked
    finally:
        await tokenizer.close()
        await runner.cleanup()


def live(body: bytes, output: str = "ok", arrived_s: float = 5.0) -> LiveRequest:
    return LiveRequest("/v1/completions", body, output, arrived_s)


async def test_a_live_request_becomes_what_was_asked_and_what_was_said() -> None:
    async with tokenizing() as (tokenizer, _):
        workload = await tokenizer.workload([live(b'{"prompt": "ab"}', "c")], 3)
    (request,) = workload.requests
    assert (request.prompt_token_ids, request.output_token_ids) == ((97, 98), (99,))
    assert workload.max_concurrency == 3


async def test_arrivals_are_offsets_from_the_first() -> None:
    both = [live(b'{"prompt": "a"}', arrived_s=t) for t in (5.0, 7.5)]
    async with tokenizing() as (tokenizer, _):
        workload = await tokenizer.workload(both, 1)
    assert [r.arrival_s for r in workload.requests] == [0.0, 2.5]


async def test_a_chat_is_tokenised_with_its_template() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    async with tokenizing() as (tokenizer, asked):
        await tokenizer.workload([live(body)], 1)
    assert asked[0]["add_generation_prompt"] is True
    assert asked[1] == {"prompt": "ok", "add_special_tokens": False}


async def test_a_prompt_of_ids_is_taken_as_it_is() -> None:
    async with tokenizing() as (tokenizer, asked):
        workload = await tokenizer.workload([live(b'{"prompt": [7, 8]}')], 1)
    assert workload.requests[0].prompt_token_ids == (7, 8)
    assert len(asked) == 1


@pytest.mark.parametrize("body", [b"no json", b"[]", b'{"prompt": ["a", "b"]}', b'{"input": "a"}'])
async def test_what_cannot_be_tokenised_is_left_out(body: bytes) -> None:
    async with tokenizing() as (tokenizer, _):
        workload = await tokenizer.workload([live(body), live(b'{"prompt": "a"}')], 1)
    assert len(workload.requests) == 1


def order(folder: Path) -> SearchOrder:
    return SearchOrder("s-1", folder, "trimtab engine embedded", "1m", "search")


async def test_a_search_that_fails_says_so_by_its_exit_code(tmp_path: Path) -> None:
    assert await search(order(tmp_path), "no workload") == 2
    log = await asyncio.to_thread((tmp_path / "search.log").read_text)
    assert "this is no workload" in log


async def test_a_cancelled_search_leaves_no_process(tmp_path: Path) -> None:
    others = await asyncio.to_thread(psutil.Process().children)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(search(order(tmp_path), "x" * (1 << 22)))
        children: list[psutil.Process] = []
        while not children:
            await asyncio.sleep(0.02)
            now = await asyncio.to_thread(psutil.Process().children)
            children = [c for c in now if c not in others]
        running.cancel()
    alive = await asyncio.to_thread(lambda: [c for c in children if c.is_running()])
    assert alive == []
