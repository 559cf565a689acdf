"""Copies for the shadow: exactly one label each, and the primary never notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fakes_upstream import (
    FakeUpstream,
    Proxy,
    Seen,
    ask,
    body_of,
    client,
    closing,
    post,
    proxy,
    say,
    say_nothing,
    until,
    upstream,
)

from sidecar.comparison import MirrorResult
from sidecar.mirror import MirrorSettings
from sidecar.relay import RelaySettings

COMPLETIONS = "/v1/completions"


def reply(document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def model(text: str, gap: float = 0.0, finish: str = "stop") -> Any:
    """An engine that answers `text`, a token a word, and would rather have said something else by
    `gap` nats at the last word of any answer that it is forced through."""

    async def script(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        asked = json.loads(seen.body)
        prompt = asked["prompt"]
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
        if "prompt_logprobs" in asked:
            positions: list[Any] = [None, *[{"1": {"logprob": -0.5, "rank": 1}} for _ in prompt]]
            positions = positions[: len(prompt.split())]
            positions[-1] = {"1": {"logprob": -0.5 - gap}, "2": {"logprob": -0.5}}
            choice["prompt_logprobs"] = positions
        counts = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
        out.write(reply({"model": "m", "choices": [choice], "usage": counts}))

    return script


def completion(**fields: Any) -> bytes:
    body = {"model": "m", "prompt": "one two", "temperature": 0} | fields
    return closing(post(COMPLETIONS, json.dumps(body).encode(), "Authorization: Bearer k"))


async def labelled(p: Proxy, num: int = 1) -> list[MirrorResult]:
    await until(lambda: len(p.notes.mirrored) >= num)
    return p.notes.mirrored


async def compare(primary: Any, shadow: Any, request: bytes) -> MirrorResult:
    async with upstream(primary) as a, upstream(shadow) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, digests=((b.url, "d"),)) as p:
            await ask(p.port, request)
            return (await labelled(p))[0]


async def test_the_same_answer_is_ok_and_was_replayed() -> None:
    result = await compare(model(" three four"), model(" three four"), completion())
    assert (result.outcome, result.digest, result.note) == ("ok", "d", "same")
    assert (result.max_logprob_gap, result.num_compared_tokens) == (0.0, 2)
    assert result.primary_e2e_s > 0
    assert result.shadow_e2e_s > 0


async def test_a_near_tie_that_flipped_is_ok() -> None:
    result = await compare(model(" three four"), model(" three five", gap=0.01), completion())
    assert result.outcome == "ok"
    assert result.max_logprob_gap == pytest.approx(0.01)
    assert result.num_compared_tokens == 4


async def test_another_answer_by_a_wide_gap_is_a_diff() -> None:
    result = await compare(model(" three four"), model(" three five", gap=2.0), completion())
    assert result.outcome == "diff"
    assert result.max_logprob_gap == pytest.approx(2.0)


async def test_a_broken_decode_shows_in_what_the_shadow_wrote_itself() -> None:
    """The primary's answer is fine by the shadow's prefill; its own answer is not."""
    own = " three wrong"

    async def script(engine: FakeUpstream, seen: Seen, out: asyncio.StreamWriter) -> None:
        gap = 3.0 if own in json.loads(seen.body)["prompt"] else 0.0
        await model(own, gap)(engine, seen, out)

    result = await compare(model(" three four"), script, completion())
    assert result.outcome == "diff"
    assert result.max_logprob_gap == pytest.approx(3.0)


async def test_a_sampled_answer_may_be_another_one() -> None:
    shadow = model(" five six seven", gap=9.0, finish="length")
    result = await compare(model(" three"), shadow, completion(temperature=1))
    assert (result.outcome, result.num_compared_tokens) == ("ok", 0)
    assert result.note == "longer finish stop>length"


async def test_a_shadow_that_fails_is_an_error() -> None:
    failing = say(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
    result = await compare(model(" three"), failing, completion())
    assert (result.outcome, result.note) == ("error", "status 500")


async def test_a_shadow_that_is_not_there_is_an_error() -> None:
    async with (
        upstream(model(" three")) as a,
        proxy(a.url, canary=("http://127.0.0.1:9",), mirror=True) as p,
    ):
        assert body_of(await ask(p.port, completion()))
        assert (await labelled(p))[0].outcome == "error"


async def test_a_shadow_that_ignores_the_replay_is_an_error_not_agreement() -> None:
    choice = {"index": 0, "text": " three", "finish_reason": "stop"}
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    shadow = say(reply({"choices": [choice], "usage": usage}))
    result = await compare(model(" three"), shadow, completion())
    assert (result.outcome, result.note) == ("error", "the reply has no prompt_logprobs")


async def test_a_copy_is_the_clients_request_and_says_what_it_is() -> None:
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True) as p:
            await ask(p.port, completion())
            await labelled(p)
    headers = dict(b.seen[0].headers)
    assert b.seen[0].body == a.seen[0].body
    assert headers["x-trimtab-mirror"] == "1"
    assert headers["Authorization"] == "Bearer k"
    assert "x-trimtab-mirror" not in dict(a.seen[0].headers)


async def test_credentials_can_be_kept_from_the_shadow() -> None:
    settings = MirrorSettings(forward_credentials=False)
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, mirror_settings=settings) as p:
            await ask(p.port, completion())
            await labelled(p)
    assert "Authorization" not in dict(b.seen[0].headers)


async def test_every_eligible_request_gets_exactly_one_label() -> None:
    requests = {
        "ok": completion(),
        "skipped:side_effect": completion(store=True),
        "skipped:choices": completion(n=2),
        "skipped:size": completion(pad="x" * 5000),
        "skipped:route": closing(post("/v1/messages", b'{"prompt": "a"}')),
    }
    settings = RelaySettings(max_kept_body_bytes=4000)
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, settings=settings) as p:
            for request in requests.values():
                await ask(p.port, request)
            await ask(p.port, closing(post("/v1/embeddings", b'{"prompt": "a"}')))
            await labelled(p, len(requests))
            await p.finished(6)
    assert sorted(r.outcome for r in p.notes.mirrored) == sorted(requests)
    assert len(b.seen) == 2  # the copy and its replay


@pytest.mark.parametrize("status", [401, 500])
async def test_a_request_that_the_primary_refused_is_not_eligible(status: int) -> None:
    refusing = say(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status)
    async with upstream(refusing) as a, upstream() as b:
        async with proxy(a.url, canary=(b.url,), mirror=True) as p:
            await ask(p.port, completion())
            await p.finished()
    assert p.notes.mirrored == []
    assert b.seen == []


async def test_a_client_that_left_is_skipped() -> None:
    async with upstream(say_nothing) as a, upstream() as b:
        async with proxy(a.url, canary=(b.url,), mirror=True) as p, client(p.port) as c:
            c.send(completion())
            await c.until(b"\r\n\r\n")
            c.leave()
            assert (await labelled(p))[0].outcome == "skipped:cancelled"
    assert b.seen == []


async def test_a_shadow_that_hangs_sheds_the_newest_and_holds_nobody_up() -> None:
    settings = MirrorSettings(max_waiting=3, max_concurrency=1)
    async with upstream(model(" three")) as a, upstream(say_nothing) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, mirror_settings=settings) as p:
            for _ in range(10):
                assert body_of(await ask(p.port, completion()))
            await p.finished(10)
            assert [r.outcome for r in p.notes.mirrored] == ["shed"] * 6
    assert [r.outcome for r in p.notes.mirrored] == ["shed"] * 10  # and those that still waited


async def test_what_waits_is_bounded_in_bytes() -> None:
    settings = MirrorSettings(max_waiting_bytes=1500, max_concurrency=1)
    async with upstream(model(" three")) as a, upstream(say_nothing) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, mirror_settings=settings) as p:
            for _ in range(3):
                await ask(p.port, completion(pad="x" * 1000))
            await p.finished(3)
            assert [r.outcome for r in p.notes.mirrored] == ["shed", "shed"]


async def test_copies_are_not_traffic() -> None:
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True) as p:
            await ask(p.port, completion())
            await labelled(p)
    assert len(p.notes.samples) == len(p.notes.counts) == 1


async def test_a_shadow_with_clients_of_its_own_is_spared_the_replay() -> None:
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,), mirror=True, weight=1e-9) as p:
            await ask(p.port, completion())
            result = (await labelled(p))[0]
    assert (result.outcome, result.num_compared_tokens, len(b.seen)) == ("ok", 0, 1)


async def test_without_a_mirror_in_the_table_nothing_is_copied() -> None:
    async with upstream(model(" three")) as a, upstream(model(" three")) as b:
        async with proxy(a.url, canary=(b.url,)) as p:
            await ask(p.port, completion())
            await p.finished()
    assert p.notes.mirrored == []
