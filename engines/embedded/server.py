"""The embedded engine over HTTP, in vLLM's and OpenAI's shapes. One event loop, no torch on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from aiohttp import web

from engines.embedded.engine import EmbeddedEngine
from engines.embedded.metrics import Metrics, Timing
from engines.embedded.scheduler import (
    Finish,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from engines.embedded.text import Text, Words

GRACE_S = 10.0
MAX_LOGPROBS = 20
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # parameter -> values that change nothing
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("repetition_penalty",), (1,)),
    **dict.fromkeys(("logit_bias", "min_p", "min_tokens"), ({}, 0)),
    **dict.fromkeys(("tools", "functions", "bad_words"), ([],)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "echo"), (False,)),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ()),
    **dict.fromkeys(("allowed_token_ids", "prompt_embeds", "truncate_prompt_tokens"), ()),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}


class BadRequest(ValueError):
    """The client asked wrongly. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: int = 400) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked generation request."""

    chat: bool
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    id: str
    created: int
    words: Words
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


def run(
    engine: EmbeddedEngine, host: str, port: int, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then let running streams finish for `GRACE_S`. Blocks.
    Raises `OSError`, naming the port, when it is taken. The caller closes the engine."""
    import uvloop

    uvloop.run(_serve(engine, host, port, on_ready))


async def _serve(
    engine: EmbeddedEngine, host: str, port: int, on_ready: Callable[[], None] | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(engine, host, port):
        if on_ready is not None:
            on_ready()
        await stop.wait()


@asynccontextmanager
async def serving(engine: EmbeddedEngine, host: str, port: int) -> AsyncIterator[int]:
    """The server, listening; yields the port. For tests, port 0 takes a free one."""
    server = Server(engine, await asyncio.to_thread(Text, engine.settings.model_dir))
    runner = web.AppRunner(
        server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            raise OSError(e.errno, f"port {port} on {host} is taken; give --port another") from e
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Server:
    """The routes. Whoever leaves is aborted: handlers are cancelled when their client goes."""

    def __init__(self, engine: EmbeddedEngine, text: Text) -> None:
        self._engine, self._text = engine, text
        self._name = engine.settings.model_dir.name
        self._metrics = Metrics(engine, self._name)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/metrics", self._show_metrics),
            ]
        )
        return app

    # --- small routes -----------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "trimtab",
            "max_model_len": self._engine.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        """503 when the engine's thread has ended. A hanging one is silent on its control socket."""
        return web.Response(status=200 if self._engine.is_running else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), content_type="text/plain", charset="utf-8")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        ids = self._chat_ids(body) if "messages" in body else self._prompt_ids(body)
        reply = {
            "count": len(ids),
            "max_model_len": self._engine.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        return web.json_response(reply)

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await _body(request)).get("tokens")
        text = self._text.decode(self._checked_ids(tokens, "tokens"), skip_special_tokens=False)
        return web.json_response({"prompt": text})

    # --- generation -------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        return await self._generate(request, self._asked(body, self._prompt_ids(body), chat=False))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        return await self._generate(request, self._asked(body, self._chat_ids(body), chat=True))

    async def _generate(self, http: web.Request, asked: Asked) -> web.StreamResponse:
        kind = "chatcmpl" if asked.chat else "cmpl"
        answer = Answer(
            f"{kind}-{secrets.token_hex(12)}", int(time.time()), Words(self._text, asked.stops)
        )
        request, events = self._submit(answer.id, asked)
        timing = self._metrics.begin(len(asked.prompt))
        try:
            if asked.stream:
                return await self._stream(http, asked, answer, request, events, timing)
            async for _ in self._grow(answer, events, timing):
                pass
            return web.json_response(self._whole(asked, answer, request))
        finally:
            if answer.finish is None or answer.words.stopped:
                self._engine.abort(request)
            self._metrics.end(timing, request, answer.finish)

    def _submit(self, id_: str, asked: Asked) -> tuple[Request, asyncio.Queue[TokenEvent]]:
        """Events cross from the engine's thread; there is at most one a token, so the queue is
        bounded by `max_tokens`."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[TokenEvent]()

        def on_event(event: TokenEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = Request(id_, asked.prompt, asked.params, on_event)
        self._engine.submit(request)
        return request, events

    async def _grow(
        self, answer: Answer, events: asyncio.Queue[TokenEvent], timing: Timing
    ) -> AsyncIterator[tuple[str, list[TokenEvent]]]:
        """Text as it can be said, with the tokens that made it."""
        pending: list[TokenEvent] = []
        while answer.finish is None:
            event = await events.get()
            said = self._take(answer, event, timing)
            pending.append(event)
            if said or answer.finish is not None:
                answer.text += said
                yield said, pending
                pending = []

    def _take(self, answer: Answer, event: TokenEvent, timing: Timing) -> str:
        if event.token_id is None:
            raise BadRequest("the engine gave the request up; try again", code=500)
        self._metrics.token(timing)
        answer.token_ids.append(event.token_id)
        if event.logprob is not None:
            answer.logprobs.append(event.logprob)
        said = answer.words.push(event.token_id)
        if event.finish is not None:
            said += answer.words.finish()
            answer.finish = event.finish.value
        if answer.words.stopped:
            answer.finish = Finish.STOP.value
        return said

    async def _stream(
        self,
        http: web.Request,
        asked: Asked,
        answer: Answer,
        request: Request,
        events: asyncio.Queue[TokenEvent],
        timing: Timing,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["Cache-Control"] = "no-cache"
        await response.prepare(http)
        if asked.chat:
            await response.write(_event(self._chunk(asked, answer, self._role())))
        try:
            async for said, taken in self._grow(answer, events, timing):
                piece = self._piece(asked, said, taken, answer)
                await response.write(_event(self._chunk(asked, answer, piece)))
        except BadRequest:  # too late for a status: the client sees the stream break off
            assert http.transport is not None
            http.transport.abort()
            return response
        if asked.include_usage:
            last = self._chunk(asked, answer, None) | {"usage": _usage(request, answer)}
            await response.write(_event(last))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _role(self) -> dict[str, Any]:
        return {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def _piece(
        self, asked: Asked, said: str, taken: list[TokenEvent], answer: Answer
    ) -> dict[str, Any]:
        described = [e.logprob for e in taken if e.logprob is not None]
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._logprobs(asked, described, len(answer.text) - len(said)),
            "finish_reason": answer.finish,
        }
        if asked.chat:
            choice["delta"] = {"content": said}
        else:
            choice["text"] = said
            choice["stop_reason"] = None
        if asked.return_token_ids:
            choice["token_ids"] = [e.token_id for e in taken]
        return choice

    def _chunk(self, asked: Asked, answer: Answer, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": answer.id,
            "object": "chat.completion.chunk" if asked.chat else "text_completion",
            "created": answer.created,
            "model": asked.model,
            "choices": [] if choice is None else [choice],
        }

    def _whole(self, asked: Asked, answer: Answer, request: Request) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._logprobs(asked, answer.logprobs),
            "finish_reason": answer.finish,
            "stop_reason": None,
        }
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        if asked.return_token_ids:
            choice["token_ids"] = answer.token_ids
            if not asked.chat:
                choice["prompt_token_ids"] = asked.prompt
        whole: dict[str, Any] = {
            "id": answer.id,
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": answer.created,
            "model": asked.model,
            "choices": [choice],
            "usage": _usage(request, answer),
        }
        if asked.return_token_ids and asked.chat:
            whole["prompt_token_ids"] = asked.prompt
        if asked.params.num_prompt_logprobs is not None:
            told = [self._prompt_logprob(p) for p in request.prompt_logprobs]
            (whole if asked.chat else choice)["prompt_logprobs"] = told
        return whole

    # --- log-probabilities ------------------------------------------------------------------------

    def _logprobs(
        self, asked: Asked, described: list[TokenLogprob], offset: int = 0
    ) -> dict[str, Any] | None:
        """`offset`: characters of the answer before these tokens."""
        if asked.params.num_logprobs is None:
            return None
        if asked.chat:
            return {"content": [self._chat_logprob(d) for d in described]}
        tokens = [self._text.token(d.token_id) for d in described]
        return {
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
            "tokens": tokens,
            "token_logprobs": [d.logprob for d in described],
            "top_logprobs": [
                {self._text.token(t): p for t, p in (*d.top, (d.token_id, d.logprob))}
                for d in described
            ],
        }

    def _chat_logprob(self, described: TokenLogprob) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            token = self._text.token(token_id)
            return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

        return entry(described.token_id, described.logprob) | {
            "top_logprobs": [entry(t, p) for t, p in described.top]
        }

    def _prompt_logprob(self, described: TokenLogprob | None) -> dict[str, Any] | None:
        """vLLM's shape: the prompt's token and the best ones, by id."""
        if described is None:
            return None
        told = {t: (p, rank) for rank, (t, p) in enumerate(described.top, 1)}
        told[described.token_id] = (described.logprob, described.rank)
        return {
            str(t): {"logprob": p, "rank": rank, "decoded_token": self._text.token(t)}
            for t, (p, rank) in told.items()
        }

    # --- checking ---------------------------------------------------------------------------------

    def _asked(self, body: dict[str, Any], prompt: list[int], chat: bool) -> Asked:
        model = body.get("model", self._name)
        if model != self._name:
            raise BadRequest(f"The model `{model}` does not exist.", "model", 404)
        _refuse_unsupported(body)
        if not prompt:
            raise BadRequest("the prompt is empty", "messages" if chat else "prompt")
        room = self._engine.max_model_len - len(prompt)
        if room < 1:
            raise BadRequest(
                f"This model's maximum context length is {self._engine.max_model_len} tokens, "
                f"but the prompt has {len(prompt)}.",
                "messages" if chat else "prompt",
            )
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise BadRequest("stream_options must be an object", "stream_options")
        return Asked(
            chat=chat,
            model=model,
            prompt=tuple(prompt),
            params=self._params(body, chat, room),
            stops=_stops(body),
            stream=bool(body.get("stream", False)),
            include_usage=bool(options.get("include_usage")),
            return_token_ids=bool(body.get("return_token_ids", False)),
        )

    def _params(self, body: dict[str, Any], chat: bool, room: int) -> SamplingParams:
        both = ("max_completion_tokens", "max_tokens")
        key = next((k for k in both if body.get(k) is not None), both[1])
        wanted = _integer(body, key, room if chat else 16, 1, 1 << 30)
        seed = body.get("seed")
        prompt_logprobs = body.get("prompt_logprobs")
        if prompt_logprobs is not None and body.get("stream"):
            raise BadRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
        return SamplingParams(
            max_tokens=min(wanted, room),
            temperature=float(_number(body, "temperature", 1.0, 0.0, 100.0)),
            top_p=float(_number(body, "top_p", 1.0, 1e-9, 1.0)),
            top_k=max(0, _integer(body, "top_k", 0, -1, 1 << 30)),
            seed=secrets.randbits(63) if seed is None else _integer(body, "seed", 0, 0, 2**64),
            stop_token_ids=self._stop_token_ids(body),
            num_logprobs=_num_logprobs(body, chat),
            num_prompt_logprobs=(
                None
                if prompt_logprobs is None
                else _integer(body, "prompt_logprobs", 0, 0, MAX_LOGPROBS)
            ),
        )

    def _stop_token_ids(self, body: dict[str, Any]) -> frozenset[int]:
        extra = self._checked_ids(body.get("stop_token_ids") or [], "stop_token_ids")
        return frozenset(extra) | (
            frozenset() if body.get("ignore_eos") else self._text.stop_token_ids
        )

    def _prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self._encode(prompt, bool(body.get("add_special_tokens", True)), "prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            return self._prompt_ids({**body, "prompt": prompt[0]})
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            raise BadRequest("several prompts in one request are not supported", "prompt")
        return self._checked_ids(prompt)

    def _checked_ids(self, ids: object, param: str = "prompt") -> list[int]:
        size = self._engine.model.config.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            text = "a string or " if param == "prompt" else ""
            raise BadRequest(f"{param} must be {text}token ids below {size}", param)
        return ids

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadRequest(f"{param} holds half a surrogate pair, which is no text", param) from e
        return self._text.encode(text, add_special_tokens)

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list with at least one message", "messages")
        plain = [_plain(m) for m in messages]
        go_on = bool(body.get("continue_final_message", False))
        add = bool(body.get("add_generation_prompt", not go_on))
        if go_on and add:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        try:
            text = self._text.chat(plain, add, go_on)
        except ValueError as e:
            raise BadRequest(str(e), "messages") from e
        return self._encode(text, bool(body.get("add_special_tokens", False)), "messages")


def _plain(message: object) -> dict[str, Any]:
    """A message whose content is one string; text parts are joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("each message needs a role and a content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict)]
        if any(p.get("type") != "text" for p in parts):
            raise BadRequest("only text content is supported", "messages")
        content = "".join(str(p.get("text", "")) for p in parts)
    if not isinstance(content, str | None):
        raise BadRequest("content must be a string or a list of text parts", "messages")
    return {**message, "content": content or ""}


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """What would change the answer and is not done here is refused, not ignored."""
    for key, harmless in UNSUPPORTED.items():
        if body.get(key) not in (None, *harmless):
            raise BadRequest(f"{key} is not supported by this engine; leave it out", key)


def _number(body: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = body.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadRequest(f"{key} is {value!r}; it must be within {low:g} and {high:g}", key)
    return value  # type: ignore[no-any-return]


def _integer(body: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    if isinstance(body.get(key), float):
        raise BadRequest(f"{key} is {body[key]!r}; it must be a whole number", key)
    return int(_number(body, key, default, low, high))


def _num_logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        asked = body.get("logprobs")
        return None if asked is None else _integer(body, "logprobs", 0, 0, MAX_LOGPROBS)
    if not body.get("logprobs"):
        return None
    return _integer(body, "top_logprobs", 0, 0, MAX_LOGPROBS)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest("stop must be a string or a list of strings", "stop")
    return tuple(stops)


def _usage(request: Request, answer: Answer) -> dict[str, Any]:
    num_prompt, num_output = len(request.prompt), len(answer.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": request.num_cached or 0},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as e:
        raise BadRequest("the body is not JSON") from e
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """OpenAI's error shape for everything that goes wrong before the first byte."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except BadRequest as e:
        return _error(str(e), e.code, e.param)
    except web.HTTPException as e:
        if e.status < 400:
            raise
        return _error(e.reason, e.status)


def _error(message: str, code: int, param: str | None = None) -> web.Response:
    kind = {404: "NotFoundError", 500: "InternalServerError"}.get(code, "BadRequestError")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return web.json_response({"error": error}, status=code)
