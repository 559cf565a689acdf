"""Launch commands as typed plans: what serves, and from it what a search runs on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

EMBEDDED, VLLM = ("engine", "embedded"), ("engine", "vllm")
VLLM_SERVERS = (  # what comes right before vLLM's own arguments
    ("vllm", "serve"),
    ("vllm.entrypoints.openai.api_server",),
    ("vllm.entrypoints.cli.main", "serve"),
)
SGLANG = "sglang.launch_server"
LOOPBACK = "127.0.0.1"
VLLM_PORT = 8000  # vLLM's own default
OPTIONS_WITH_VALUE = (  # of `trimtab engine vllm`
    *("--scope", "--ready-timeout", "--call-timeout"),
    "--expert-counts-every",
)
ROUNDING = ("--dtype", "--kv-cache-dtype")


class LaunchError(ValueError):
    """The launch command cannot be understood, or not be used for a search. Says why."""


class LaunchPlan(Protocol):
    """How to start one engine, and two more for a search on it. Values; nothing runs here."""

    @property
    def words(self) -> tuple[str, ...]:
        """A command that `trimtab` starts as it is."""

    @property
    def line(self) -> str:
        """For a shell, and for `parse`."""

    @property
    def url(self) -> str:
        """Raises `LaunchError` when the plan names no port."""

    @property
    def ready_s(self) -> float:
        """No such engine takes longer to start on a busy machine."""

    @property
    def grace_s(self) -> float:
        """From SIGTERM to the end of all its processes, at most."""

    def tuning(self, port: int) -> LaunchPlan:
        """The same engine for trials, on this machine only. Its scope is `trial` by the key that
        its launcher puts into the environment."""

    def reference(self, port: int) -> LaunchPlan:
        """The same model, as exact as its engine computes: what outputs are compared with."""


@dataclass(frozen=True, slots=True)
class EmbeddedPlan:
    """One embedded engine. `rest` is whatever else was said, in its order."""

    model: str | None = None  # None: the engine's own default, as for all of these
    dtype: str | None = None
    host: str = LOOPBACK
    port: int | None = None
    rest: tuple[str, ...] = ()
    ready_s = 180.0
    grace_s = 5.0

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    @property
    def words(self) -> tuple[str, ...]:
        named = (("model", self.model), ("dtype", self.dtype), ("port", self.port))
        flags = [w for name, value in named if value is not None for w in (f"--{name}", str(value))]
        return ("trimtab", *EMBEDDED, *flags, "--host", self.host, *self.rest)

    @property
    def url(self) -> str:
        if self.port is None:
            raise LaunchError(f"{self.line!r} names no port; add --port 8000")
        return f"http://{self.host}:{self.port}"

    def tuning(self, port: int) -> EmbeddedPlan:
        return replace(self, host=LOOPBACK, port=port)

    def reference(self, port: int) -> EmbeddedPlan:
        """In float64."""
        return replace(self, host=LOOPBACK, port=port, dtype="float64")


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """One vLLM server under `trimtab engine vllm`. The command's own words name the program, so it
    may live in another environment: `/path/to/venv/bin/vllm serve …`."""

    options: tuple[str, ...]  # of `trimtab engine vllm`
    head: tuple[str, ...]  # environment, runners such as taskset, program, `serve`
    arguments: tuple[str, ...]  # vLLM's own
    ready_s = 600.0  # three imports of torch one after the other, then weights, then compiling
    grace_s = 20.0

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    @property
    def words(self) -> tuple[str, ...]:
        return ("trimtab", *VLLM, *self.options, "--", *self.head, *self.arguments)

    @property
    def url(self) -> str:
        host = _last(self.arguments, "--host") or LOOPBACK
        return f"http://{host}:{_port(_last(self.arguments, '--port') or str(VLLM_PORT))}"

    def tuning(self, port: int) -> VllmPlan:
        return replace(
            self,
            options=_without(self.options, "--scope"),
            arguments=(*_without(self.arguments, "--host", "--port"), *_at(port)),
        )

    def reference(self, port: int) -> VllmPlan:
        """In float32, since vLLM computes in nothing wider; stepwise as written, without compiling
        anything, and no KV block of an earlier request."""
        kept = _without(self.arguments, "--host", "--port", *ROUNDING)
        exact = ("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching")
        return replace(
            self, options=_without(self.options, "--scope"), arguments=(*kept, *exact, *_at(port))
        )


def parse(command: str | Sequence[str]) -> LaunchPlan:
    """Read `trimtab engine embedded …`, `trimtab engine vllm … -- COMMAND`, or vLLM's own launch
    command as it is. Raises `LaunchError`, by name for engines that Trimtab knows but cannot start
    for a search."""
    words = _split(command)
    for i in range(len(words)):
        match words[i : i + 2]:
            case ours if ours == EMBEDDED:
                return _embedded(words[i + 2 :])
            case ours if ours == VLLM:
                options, server = _behind_options(words[i + 2 :])
                return _vllm(options, server)
    names = _names(words)
    if SGLANG in names:
        raise LaunchError(
            "SGLang launches are recognised, but a search starts embedded and vLLM engines only so "
            "far; write 'vllm serve MODEL' to tune that one"
        )
    if _num_head(names):
        return _vllm((), words)
    raise LaunchError(
        f"{shlex.join(words)!r} starts no engine that Trimtab knows; write "
        "'trimtab engine embedded --model DIR' or 'vllm serve MODEL'"
    )


def _split(command: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(command, str):
        return tuple(command)
    try:
        return tuple(shlex.split(command))
    except ValueError as e:
        raise LaunchError(f"{command!r} is no command line: {e}") from e


# --- embedded -------------------------------------------------------------------------------------


def _embedded(words: Sequence[str]) -> EmbeddedPlan:
    plan, rest, given = EmbeddedPlan(), [], list(words)
    while given:
        name, is_joined, value = given.pop(0).partition("=")
        if name not in ("--model", "--dtype", "--host", "--port"):
            rest.append(f"{name}{is_joined}{value}")
            continue
        if not is_joined and not given:
            raise LaunchError(f"{name} has no value; write {name} VALUE")
        plan = _with(plan, name[2:], value if is_joined else given.pop(0))
    return replace(plan, rest=tuple(rest))


def _with(plan: EmbeddedPlan, name: str, value: str) -> EmbeddedPlan:
    match name:
        case "model":
            return replace(plan, model=value)
        case "dtype":
            return replace(plan, dtype=value)
        case "host":
            return replace(plan, host=value)
    return replace(plan, port=_port(value))


def _port(value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 2**16:
        raise LaunchError(f"--port is {value!r}; write a number from 1 to 65535")
    return int(value)


# --- vLLM -----------------------------------------------------------------------------------------


def _behind_options(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of `trimtab engine vllm`, and the user's command behind them."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] != "--":
        i += 2 if words[i] in OPTIONS_WITH_VALUE else 1
    options, server = words[:i], words[i:]
    return options, server[1:] if server[:1] == ("--",) else server


def _vllm(options: tuple[str, ...], server: tuple[str, ...]) -> VllmPlan:
    num_head = _num_head(_names(server))
    if not num_head:
        raise LaunchError(
            f"{shlex.join(server)!r} starts no vLLM server; write 'vllm serve MODEL …' or "
            "'python -m vllm.entrypoints.openai.api_server --model MODEL …'"
        )
    plan = VllmPlan(options, server[:num_head], server[num_head:])
    plan.url  # noqa: B018 - a port that is none is told now
    return plan


def _names(words: Sequence[str]) -> tuple[str, ...]:
    """Programs without their folders."""
    return tuple(word.rsplit("/", 1)[-1] for word in words)


def _num_head(names: tuple[str, ...]) -> int:
    """How many words come before vLLM's own arguments; 0 where no vLLM server is started."""
    for i in range(len(names)):
        for signs in VLLM_SERVERS:
            if names[i : i + len(signs)] == signs:
                return i + len(signs)
    return 0


def _at(port: int) -> tuple[str, ...]:
    return "--host", LOOPBACK, "--port", str(port)


def _last(arguments: Sequence[str], flag: str) -> str | None:
    """Its value; the last one counts, as for vLLM."""
    found = None
    for i, word in enumerate(arguments):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if is_joined else next(iter(arguments[i + 1 : i + 2]), None)
            if found is None:
                raise LaunchError(f"{flag} has no value; write {flag} VALUE")
    return found


def _without(arguments: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Those flags and their values left out."""
    kept, i = list[str](), 0
    while i < len(arguments):
        name, is_joined, _ = arguments[i].partition("=")
        if name.replace("_", "-") in flags:
            i += 1 if is_joined else 2
        else:
            kept.append(arguments[i])
            i += 1
    return tuple(kept)
