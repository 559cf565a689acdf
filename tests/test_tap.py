"""What a response says about itself."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.tap import Reading, Tap, Usage

SSE = "text/event-stream; charset=utf-8"


class Clock:
    """One second later at each look."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = iter(range(1, 10_000))

    def __call__(self) -> float:
        return float(next(self._ticks))


def sse(*messages: Any) -> bytes:
    return b"".join(f"data: {json.dumps(m)}\n\n".encode() for m in messages) + b"data: [DONE]\n\n"


def delta(**said: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": 0, "delta": said, "finish_reason": None}]}


def last(reason: str = "stop") -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"model": "m", "choices": [], "usage": counts}


def read(*messages: Any, request_bytes: int | None = None) -> Reading:
    tap = Tap(SSE, clock=Clock())
    tap.feed(sse(*messages))
    return tap.read(request_bytes)


def test_the_first_token_is_the_first_content_not_the_role() -> None:
    tap = Tap(SSE, clock=Clock())
    tap.feed(sse(delta(role="assistant", content="")) + b": ping\n\n")
    assert tap.read().first_token_s is None
    tap.feed(sse(delta(content="a")))
    assert tap.read().first_token_s == 1.0


@pytest.mark.parametrize("kind", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_tokens_but_no_plain_text(kind: str) -> None:
    reading = read(delta(**{kind: ["x"]}), delta(content="a"), last())
    assert (reading.first_token_s, reading.text) == (1.0, None)


def test_tpot_divides_by_the_tokens_of_usage_not_by_events() -> None:
    reading = read(delta(content="a b"), delta(content=" c d"), last(), usage(3, 5))
    assert reading.tpot_s == (2.0 - 1.0) / (5 - 1)


def test_usage_text_and_finish_reason_of_a_chat_stream() -> None:
    reading = read(delta(content="a"), delta(content="b"), last("length"), usage(9, 2, cached=4))
    assert reading.usage == Usage(9, 4, 2)
    assert (reading.text, reading.finish_reason, reading.model) == ("ab", "length", "m")
    assert not reading.estimated


def test_a_completion_stream_is_read_alike() -> None:
    choice = {"index": 0, "text": "a", "finish_reason": "stop"}
    reading = read({"model": "m", "choices": [choice]}, usage(1, 1))
    assert (reading.text, reading.first_token_s, reading.finish_reason) == ("a", 1.0, "stop")


def test_usage_in_every_chunk_is_not_added_up() -> None:
    parts = [delta(content="a") | {"usage": usage(9, n)["usage"]} for n in (1, 2, 3)]
    assert read(*parts).usage == Usage(9, None, 3)


def test_without_usage_tokens_are_estimated_and_say_so() -> None:
    reading = read(delta(content="a"), delta(content="b"), request_bytes=10)
    assert reading.estimated
    assert reading.usage == Usage(3, None, 2)


def test_a_whole_json_message_is_read_at_its_end() -> None:
    choice = {"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}
    body = json.dumps(usage(9, 2, cached=0) | {"choices": [choice]}).encode()
    tap = Tap("application/json", clock=Clock())
    for i in range(len(body)):
        tap.feed(body[i : i + 1])
    reading = tap.read()
    assert reading.usage == Usage(9, 0, 2)
    assert (reading.text, reading.first_token_s) == ("hello", None)


RESPONSES = [
    {"type": "response.created", "response": {"model": "m", "status": "in_progress"}},
    {"type": "response.output_text.delta", "delta": "a"},
    {
        "type": "response.incomplete",
        "response": {
            "model": "m",
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": 7,
                "output_tokens": 2,
                "input_tokens_details": {"cached_tokens": 3},
            },
        },
    },
]
MESSAGES = [
    {
        "type": "message_start",
        "message": {
            "model": "m",
            "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 1},
        },
    },
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
]


@pytest.mark.parametrize(
    ("messages", "end"),
    [(RESPONSES, "max_output_tokens"), (MESSAGES, "end_turn")],
    ids=["responses", "messages"],
)
def test_other_protocols_say_their_usage_and_their_end_too(messages: list[Any], end: str) -> None:
    reading = read(*messages)
    assert reading.finish_reason == end
    assert reading.usage == Usage(7, 3, 2)
    assert (reading.model, reading.first_token_s) == ("m", 1.0)


def test_numbers_that_json_does_not_know_do_not_hide_the_token() -> None:
    tap = Tap(SSE, clock=Clock())
    tap.feed(b'data: {"choices":[{"delta":{"content":"a"},"x":[-Infinity,NaN,18446744073709551617')
    tap.feed(b"]}]}\n\n")
    assert tap.read().text == "a"


def test_a_huge_event_costs_that_event_only() -> None:
    huge = delta(content="a", logprobs="x" * (2 << 20))
    assert read(huge, delta(content="b"), usage(1, 2)).usage == Usage(1, None, 2)


@pytest.mark.parametrize(
    "junk",
    [
        *(b"data: {", b"data: 7", b'data: {"choices":[7]}', b'data: {"usage":[]}'),
        *(b'data: {"choices":{"a":1}}', b'data: {"choices":[{"text":7}]}', b"\xff\xfe\x00" * 50),
    ],
)
def test_junk_never_raises_and_what_follows_is_read(junk: bytes) -> None:
    tap = Tap(SSE)
    tap.feed(junk + b"\n\n" + sse(usage(5, 7)))
    assert tap.read().usage == Usage(5, None, 7)


def test_an_empty_answer_is_an_answer() -> None:
    reading = read(delta(role="assistant", content=""), last(), request_bytes=8)
    assert (reading.text, reading.first_token_s) == ("", None)
    assert reading.usage == Usage(2, None, 0)


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ({"object": "response", "status": "completed", "incomplete_details": None}, "completed"),
        ({"object": "response", "status": "failed", "incomplete_details": 7}, "failed"),
        ({"object": "response", "status": "queued"}, None),
        ({"type": "message", "stop_reason": "tool_use", "content": []}, "tool_use"),
        ({"type": "message", "stop_reason": None}, None),
        ({"type": "message", "stop_reason": ["x"], "delta": 3}, None),
    ],
)
def test_a_whole_answer_of_theirs_says_its_end(message: dict[str, Any], end: str | None) -> None:
    tap = Tap("application/json")
    tap.feed(json.dumps(message).encode())
    reading = tap.read(num_request_bytes=400)
    assert reading.finish_reason == end
    assert (reading.text, reading.estimated) == (None, False), "what it said is not read"


def test_embeddings_say_their_prompt_tokens_and_nothing_is_estimated() -> None:
    tap = Tap("application/json")
    tap.feed(b'{"object":"list","data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":5}}')
    reading = tap.read(num_request_bytes=400)
    assert (reading.usage, reading.estimated) == (Usage(5, None, None), False)


STREAM = sse(delta(content="北京"), last(), usage(5, 7))


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(STREAM)),
        ("GZIP", gzip.compress(STREAM[:50]) + gzip.compress(STREAM[50:]) + bytes(9)),
        ("deflate", zlib.compress(STREAM)),
    ],
    ids=["gzip", "two members", "deflate"],
)
def test_a_compressed_stream_is_read_however_it_is_cut(
    encoding: str, packed: bytes, step: int
) -> None:
    tap = Tap(SSE, encoding)
    for i in range(0, len(packed), step):
        tap.feed(packed[i : i + step])
    reading = tap.read()
    assert (reading.text, reading.usage) == ("北京", Usage(5, None, 7))


def test_a_flushed_event_is_read_at_once() -> None:
    packer, tap = zlib.compressobj(wbits=31), Tap(SSE, "gzip", Clock())
    for message in (delta(content="a"), delta(content="b")):
        packed = packer.compress(sse(message)) + packer.flush(zlib.Z_SYNC_FLUSH)
        tap.feed(packed)
    assert tap.read().text == "ab"


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("br", STREAM),
        ("gzip, zstd", STREAM),
        ("gzip", STREAM),
        ("gzip", gzip.compress(b"data: " + bytes(64 << 20))),
        ("gzip", gzip.compress(STREAM)[:20] + b"\xff" * 50),
    ],
    ids=["brotli", "two encodings", "plain", "a bomb", "corrupt"],
)
def test_what_cannot_be_inflated_is_not_looked_into(encoding: str, packed: bytes) -> None:
    tap = Tap(SSE, encoding)
    tap.feed(packed)
    tap.feed(STREAM)
    assert tap.read() == Reading()


def test_text_that_is_too_long_to_keep_is_not_kept_in_part() -> None:
    assert read(*[delta(content="x" * 1000)] * 100).text is None


def test_a_second_choice_makes_the_text_not_the_whole_answer() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "b"}}]}
    assert read(delta(content="a"), second).text is None
