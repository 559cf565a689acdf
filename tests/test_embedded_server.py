"""The embedded engine over HTTP, as clients of OpenAI and vLLM use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from engines.embedded.engine import EmbeddedEngine, EngineSettings
from engines.embedded.server import serving
from engines.embedded.text import Text, Words
from engines.embedded.weights import SHIPPED_MODEL

GREEDY: dict[str, Any] = {"model": "tiny-moe", "temperature": 0, "max_tokens": 12}
HELLO: list[Any] = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    engine = await asyncio.to_thread(EmbeddedEngine, EngineSettings())
    async with serving(engine, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}"
    await asyncio.to_thread(engine.close)


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url) as made:
        yield made


async def test_a_stream_says_what_one_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(prompt="def main():", **GREEDY)
    stream = await client.completions.create(prompt="def main():", stream=True, **GREEDY)
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


async def test_a_chat_stream_ends_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_usage_says_how_much_came_from_the_cache(client: openai.AsyncOpenAI) -> None:
    for expected in (0, 32):
        reply = await client.completions.create(prompt=list(range(50, 90)), **GREEDY)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == expected


async def test_log_probabilities_come_with_chat_answers(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY
    )
    assert reply.choices[0].logprobs is not None
    first = (reply.choices[0].logprobs.content or [])[0]
    assert first.token == first.top_logprobs[0].token
    assert first.logprob == first.top_logprobs[0].logprob > first.top_logprobs[1].logprob


async def test_an_answer_replayed_as_a_prompt_has_rank_one_everywhere(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    said = await client.chat.completions.create(messages=HELLO, **GREEDY)
    replay = {
        "messages": [*HELLO, {"role": "assistant", "content": said.choices[0].message.content}],
        "prompt_logprobs": 1,
        "max_tokens": 1,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with http.post("/v1/chat/completions", json=replay) as reply:
        told = (await reply.json())["prompt_logprobs"][-10:]
    assert all(next(iter(t.values()))["rank"] == 1 and len(t) == 1 for t in told)


async def test_a_stop_string_ends_the_answer_and_is_left_out(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(prompt="def main():", **GREEDY)
    stop = whole.choices[0].text[5:8]
    cut = await client.completions.create(prompt="def main():", stop=stop, **GREEDY)
    assert cut.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": [99999]}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [1] * 5000}, 400, "prompt"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "n": 2}, 400, "n"),
        ({"prompt": "x", "echo": True}, 400, "echo"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "stop": [1]}, 400, "stop"),
        ({"prompt": "x", "stop": 5}, 400, "stop"),
        ({"prompt": "x", "stop_token_ids": ["a"]}, 400, "stop_token_ids"),
        ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
        ({"prompt": "x", "structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
        ({"prompt": "\ud800"}, 400, "prompt"),
    ],
)
async def test_what_is_asked_wrongly_is_named(
    http: aiohttp.ClientSession, body: dict[str, Any], status: int, param: str
) -> None:
    async with http.post("/v1/completions", json=body) as reply:
        assert reply.status == status
        assert (await reply.json())["error"]["param"] == param


async def test_a_stop_token_ends_the_answer(client: openai.AsyncOpenAI) -> None:
    body = {**GREEDY, "extra_body": {"return_token_ids": True}}
    whole = await client.completions.create(prompt="def main():", **body)
    third = whole.choices[0].model_extra["token_ids"][2]
    body["extra_body"] = {"stop_token_ids": [third]}
    cut = await client.completions.create(prompt="def main():", **body)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens <= 3


async def test_text_offsets_point_into_the_answer(client: openai.AsyncOpenAI) -> None:
    choice = (await client.completions.create(prompt="def main():", logprobs=1, **GREEDY)).choices[
        0
    ]
    told = choice.logprobs
    assert told is not None
    for token, offset in zip(told.tokens or [], told.text_offset or [], strict=True):
        assert choice.text[offset:].startswith(token)


async def test_health_says_when_no_answer_can_come() -> None:
    engine = await asyncio.to_thread(EmbeddedEngine, EngineSettings())
    async with (
        serving(engine, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        assert (await http.get("/health")).status == 200
        await asyncio.to_thread(engine.close)
        assert (await http.get("/health")).status == 503


async def test_a_body_that_is_not_json_is_a_clear_400(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", data=b"{") as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["message"] == "the body is not JSON"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted(http: aiohttp.ClientSession, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3), http.post("/v1/completions", json=body) as reply:
            await reply.read()
    await _until_metric(http, "num_requests_running", 0)


async def test_metrics_have_vllm_names(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4}) as reply:
        assert reply.status == 200
    page = await _metrics(http)
    for line in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"):
        assert f'vllm:{line}{{engine="0",model_name="tiny-moe"}}' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page


async def test_tokenize_and_back(http: aiohttp.ClientSession) -> None:
    async with http.post("/tokenize", json={"prompt": "naïve 北京"}) as reply:
        tokens = (await reply.json())["tokens"]
    async with http.post("/detokenize", json={"tokens": tokens}) as reply:
        assert (await reply.json())["prompt"] == "naïve 北京"


async def test_a_taken_port_is_named(url: str) -> None:
    engine = await asyncio.to_thread(EmbeddedEngine, EngineSettings())
    port = int(url.rpartition(":")[2])
    with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is taken"):
        async with serving(engine, "127.0.0.1", port):
            pass
    await asyncio.to_thread(engine.close)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content | tojson }}{% endfor %}"
)


@pytest.fixture
def templated(tmp_path: Path) -> Text:
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", tmp_path)
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Text(tmp_path)


def test_a_template_finds_what_it_does_in_transformers(templated: Text) -> None:
    said = templated.chat([{"role": "user", "content": "<é>"}], add_prompt=False, go_on=False)
    assert said == '<s>"<é>"'


def test_what_a_template_refuses_is_said(templated: Text) -> None:
    with pytest.raises(ValueError, match="no tools here"):
        templated.chat([{"role": "tool", "content": ""}], add_prompt=True, go_on=False)


def test_no_character_comes_in_halves() -> None:
    text = Text(SHIPPED_MODEL)
    words, whole = Words(text), "naïve 北京🚀 " * 20
    said = [words.push(t) for t in text.encode(whole)] + [words.finish()]
    assert "".join(said) == whole
    assert not any("\ufffd" in s for s in said)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    text = Text(SHIPPED_MODEL)
    words = Words(text, ["END"])
    said = [words.push(t) for t in text.encode("fine EN END gone")] + [words.finish()]
    assert "".join(said) == "fine EN "
    assert words.stopped


async def _metrics(http: aiohttp.ClientSession) -> str:
    async with http.get("/metrics") as reply:
        return await reply.text()


async def _until_metric(http: aiohttp.ClientSession, name: str, value: int) -> None:
    wanted = f'vllm:{name}{{engine="0",model_name="tiny-moe"}} {value:.1f}'
    async with asyncio.timeout(5):
        while wanted not in await _metrics(http):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
