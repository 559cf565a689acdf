"""What one response says about itself while it passes by: tokens, times, how it ended.

The tap is fed after the client was served. It is synchronous, holds a bounded copy, and never
raises: a response that it cannot read gives a reading full of None. Output text leaves it for the
mirror and the reservoir only, both in memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from sidecar.inflate import inflater
from sidecar.sse import SseParser

log = logging.getLogger(__name__)

MAX_TEXT = 64 << 10  # characters
MAX_JSON_BYTES = 256 << 10  # parsed on the event loop, in about a millisecond
BYTES_PER_TOKEN = 4  # where there is no usage to go by


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine says them; None is not said."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None

    def updated(self, newer: Usage) -> Usage:
        """The later word counts; it may leave out what was said before."""

        def pick(new: int | None, old: int | None) -> int | None:
            return old if new is None else new

        return Usage(
            pick(newer.num_prompt_tokens, self.num_prompt_tokens),
            pick(newer.num_cached_tokens, self.num_cached_tokens),
            pick(newer.num_output_tokens, self.num_output_tokens),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a response at its end. Times are on the tap's clock."""

    usage: Usage = Usage()
    estimated: bool = False  # counts come from bytes and events, not from `usage`
    first_token_s: float | None = None  # streams only
    tpot_s: float | None = None
    finish_reason: str | None = None
    model: str = ""
    text: str | None = None  # the whole answer, where plain text is all of it; else None


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A finished request kept for replay, in memory only. `body` is the client's, byte for byte."""

    path: str
    body: bytes
    output_text: str
    arrived_s: float  # time.monotonic


class Tap:
    """One response. `feed` it what the client got, then `read` it once, at the end."""

    def __init__(
        self,
        content_type: str = "",
        content_encoding: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both headers are the response's own. Of the encodings, gzip and deflate are read."""
        kind = content_type.lower()
        try:
            self._inflater = inflater(content_encoding)
        except LookupError:
            self._inflater, kind = None, ""
        self._sse = SseParser() if kind.startswith("text/event-stream") else None
        self._copy = bytearray() if kind.startswith("application/json") else None
        self._clock = clock
        self._usage = Usage()
        self._model = ""
        self._finish_reason: str | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_events = 0  # with content
        self._parts: list[str] = []
        self._num_chars = 0
        self._plain = True

    def feed(self, chunk: bytes) -> None:
        if self._sse is None and self._copy is None:
            return
        try:
            if self._inflater is not None:
                chunk = self._inflater.feed(chunk)
            if self._sse is not None:
                for event in self._sse.feed(chunk):
                    self._event(event.data)
            else:
                self._keep(chunk)
        except Exception:
            self._give_up()

    def read(self, num_request_bytes: int | None = None) -> Reading:
        """`num_request_bytes` is what a missing prompt count is estimated from."""
        try:
            if self._copy is not None:
                self._look(_parse(bytes(self._copy)), streamed=False)
        except Exception:
            self._give_up()
        usage, estimated = self._counts(num_request_bytes)
        return Reading(
            usage=usage,
            estimated=estimated,
            first_token_s=self._first_s,
            tpot_s=self._tpot_s(usage.num_output_tokens),
            finish_reason=self._finish_reason,
            model=self._model,
            text="".join(self._parts) if self._plain and self._answered else None,
        )

    @property
    def _answered(self) -> bool:
        """An answer may be empty and yet be one, where its text would be read."""
        return self._num_events > 0 or (self._plain and self._finish_reason is not None)

    def _give_up(self) -> None:
        log.debug("response not understood")  # its words are the user's, so no traceback
        self._sse = self._copy = None
        self._plain = False

    def _keep(self, chunk: bytes) -> None:
        assert self._copy is not None
        if len(self._copy) + len(chunk) > MAX_JSON_BYTES:
            self._give_up()
        else:
            self._copy += chunk

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            self._look(_parse(data), streamed=True)
        except (ValueError, TypeError, AttributeError):
            self._plain = False  # this event only; the next one may say the usage

    def _look(self, message: Any, streamed: bool) -> None:
        """Any OpenAI or Anthropic message, in a stream or whole."""
        if not isinstance(message, dict):
            return
        inner = message.get("response") or message.get("message")
        inner = inner if isinstance(inner, dict) else message
        self._model = str(inner.get("model") or self._model)[:128]
        for usage in (inner.get("usage"), message.get("usage")):
            if isinstance(usage, dict):
                self._usage = self._usage.updated(_usage(usage))
        self._choices(message, streamed)
        if (end := _end(message, inner)) is not None:
            self._finish_reason, self._plain = end, False  # its text is not read
        if _is_typed_delta(message):
            self._plain = False
            self._token()

    def _choices(self, message: dict[str, Any], streamed: bool) -> None:
        choices = message.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            said = choice.get("delta") or choice.get("message") or choice
            text = said.get("content") or choice.get("text") or ""
            other = any(said.get(key) for key in _NOT_PLAIN)
            self._plain = self._plain and not other and not choice.get("index")
            if text or other:
                self._say(text)
                self._token() if streamed else self._count()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _say(self, text: object) -> None:
        if not isinstance(text, str) or self._num_chars + len(text) > MAX_TEXT:
            self._plain = False
        if self._plain and isinstance(text, str):
            self._parts.append(text)
            self._num_chars += len(text)

    def _count(self) -> None:
        self._num_events += 1

    def _token(self) -> None:
        self._count()
        self._last_s = self._clock()
        self._first_s = self._last_s if self._first_s is None else self._first_s

    def _counts(self, num_request_bytes: int | None) -> tuple[Usage, bool]:
        usage, num_chars = self._usage, self._num_chars
        if usage.num_output_tokens is not None and usage.num_prompt_tokens is not None:
            return usage, False
        if not self._answered:
            return usage, False
        # an event is a token or more; a message says nothing of its tokens but its length
        output = self._num_events if self._sse is not None else -(-num_chars // BYTES_PER_TOKEN)
        prompt = None if num_request_bytes is None else -(-num_request_bytes // BYTES_PER_TOKEN)
        return Usage(prompt, None, output).updated(usage), True

    def _tpot_s(self, num_output_tokens: int | None) -> float | None:
        if self._first_s is None or num_output_tokens is None or num_output_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (num_output_tokens - 1)


_NOT_PLAIN = ("reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


def _end(message: dict[str, Any], inner: dict[str, Any]) -> str | None:
    """Why an answer of the Messages or the Responses API ended, in its own words."""
    delta, details = message.get("delta"), inner.get("incomplete_details")
    stopped = delta.get("stop_reason") if isinstance(delta, dict) else None
    reason = stopped or inner.get("stop_reason")
    if reason is None and inner.get("status") in _ENDED:
        cut = details.get("reason") if isinstance(details, dict) else None
        reason = cut or inner["status"]
    return reason if isinstance(reason, str) else None


_ENDED = ("completed", "incomplete", "failed", "cancelled")


def _is_typed_delta(message: dict[str, Any]) -> bool:
    """A token of the Responses or the Messages API."""
    kind = message.get("type")
    return isinstance(kind, str) and (kind == "content_block_delta" or _is_output_delta(kind))


def _is_output_delta(kind: str) -> bool:
    return kind.startswith("response.") and kind.endswith(".delta")


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)  # takes NaN, infinities and integers of any size


def _usage(fields: dict[str, Any]) -> Usage:
    """OpenAI chat and completions, Responses, Anthropic Messages (whose prompt excludes cached)."""
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details") or {}
    cached = _number(details.get("cached_tokens"))
    read, made = (_number(fields.get(f"cache_{k}_input_tokens")) for k in ("read", "creation"))
    prompt = _number(fields.get("prompt_tokens", fields.get("input_tokens")))
    if prompt is not None:
        prompt += (read or 0) + (made or 0)
    output = _number(fields.get("completion_tokens", fields.get("output_tokens")))
    return Usage(prompt, read if cached is None else cached, output)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
