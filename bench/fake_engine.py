"""An engine that costs next to nothing, for measuring what stands in front of it.

`python -m bench.fake_engine PORT`. A POST is answered with a small JSON message; one whose body
has `"stream":true` with `max_tokens` server-sent events, one every `GAP_S`. One process, uvloop and
httptools.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import httptools
import uvloop

GAP_S = 0.004  # between two chunks of a stream
MODEL = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":%d,"total_tokens":%d}'
ANSWER = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello there, how can I help?"},"finish_reason":"stop"}],'
    + USAGE % (8, 17)
    + b"}"
)
CHUNK = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":'
    b'0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    + USAGE
    + b"}\n\ndata: [DONE]\n\n"
)
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class FakeEngine(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        if self._parser.get_method() != b"POST":
            self._transport.write(_json(MODEL))
        elif re.search(rb'"stream": ?true', body):
            found = re.search(rb'"max_tokens": ?(\d+)', body)
            self._transport.write(STREAM)
            self._next(0, int(found[1]) if found else 16)
        else:
            self._transport.write(_json(ANSWER))

    def _next(self, num_sent: int, num_chunks: int) -> None:
        if self._transport.is_closing():
            return
        if num_sent == num_chunks:
            last = LAST % (num_chunks, 9 + num_chunks)
            self._transport.write(_chunk(last) + b"0\r\n\r\n")
            return
        self._transport.write(_chunk(CHUNK))
        asyncio.get_running_loop().call_later(GAP_S, self._next, num_sent + 1, num_chunks)


def _json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
