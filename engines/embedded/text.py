"""Text to tokens and back: the tokenizer, the chat template, and words as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engines.embedded.weights import ModelError, read_json

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class Text:
    """The tokenizer of a model directory. Raises `ModelError`."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ModelError(f"{file} does not exist")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises the bare class
            raise ModelError(f"{file} is not a tokenizer: {e}") from e
        config = directory / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        self._special = _special_tokens(settings)
        self._template = _read_template(directory, settings.get("chat_template"))
        self.stop_token_ids = _stop_ids(directory)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """One token by itself, special ones included."""
        return self.decode([token_id], skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_prompt: bool, go_on: bool) -> str:
        """Messages through the model's template; `go_on` leaves the last message open.
        Raises `ValueError` when the template refuses them."""
        if self._template is None:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=add_prompt, **self._special
            )
        except (TemplateError, TypeError, KeyError) as e:
            raise ValueError(f"the chat template refused the messages: {e}") from e
        if not go_on:
            return text
        last = str(messages[-1].get("content", "")).strip()
        if last not in text:
            raise ValueError("the chat template changes the last message; it cannot be continued")
        return text[: text.rindex(last) + len(last)]


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind, which templates write by name."""
    found = {k: v for k, v in settings.items() if k.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _read_template(directory: Path, source: Any) -> Any:
    """The chat template, the one called default where there are several; None without one."""
    loose = directory / "chat_template.jinja"
    if isinstance(source, list):
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if loose.exists():
        source = loose.read_text()
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _to_json(value: object, indent: int | None = None) -> str:
    """jinja's own escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _stop_ids(directory: Path) -> frozenset[int]:
    """End-of-sequence ids of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        found = read_json(file).get("eos_token_id") if file.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


class Words:
    """Tokens to text as they come. A character is held back until all its bytes are there, and so
    is what could be the beginning of a stop string."""

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text, self._stops = text, tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # first token of the piece that is decoded again each time
        self._given = 0  # characters of that piece that are in `_pending` or gone
        self._pending = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """What can be said now; nothing more after a stop string."""
        self._ids.append(token_id)
        piece = self._text.decode(self._ids[self._start :])
        if not piece.endswith(REPLACEMENT):
            self._pending += piece[self._given :]
            self._given = len(piece)
            self._shorten()
        return self._say(final=False)

    def finish(self) -> str:
        """The rest, unfinished characters included."""
        if not self.stopped:
            self._pending += self._text.decode(self._ids[self._start :])[self._given :]
        return self._say(final=True)

    def _shorten(self) -> None:
        """Decode only a short tail from now on: a whole answer again and again is quadratic."""
        if len(self._ids) - self._start > 16:
            self._start = len(self._ids) - 4
            self._given = len(self._text.decode(self._ids[self._start :]))

    def _say(self, final: bool) -> str:
        if self.stopped:
            return ""
        ends = [i for s in self._stops if (i := self._pending.find(s)) >= 0]
        if ends:
            self.stopped = True
            return self._pending[: min(ends)]
        keep = 0 if final else self._open_stop()
        said = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(said) :]
        return said

    def _open_stop(self) -> int:
        """Length of the longest ending that a stop string begins with."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for n in range(min(longest, len(self._pending)), 0, -1):
            if any(s.startswith(self._pending[-n:]) for s in self._stops):
                return n
        return 0
