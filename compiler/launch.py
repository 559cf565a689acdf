"""Launch commands as typed plans: what serves, and from it what a search runs on."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

OURS = ("engine", "embedded")
OTHERS = {
    ("vllm", "serve"): "vLLM",
    ("vllm.entrypoints.openai.api_server",): "vLLM",
    ("sglang.launch_server",): "SGLang",
}
LOOPBACK = "127.0.0.1"


class LaunchError(ValueError):
    """The launch command cannot be understood, or not be used for a search. Says why."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to start one embedded engine. `rest` is whatever else was said, in its order."""

    model: str | None = None  # None: the engine's own default, as for all of these
    dtype: str | None = None
    host: str = LOOPBACK
    port: int | None = None
    rest: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For a shell, and for `parse`."""
        return shlex.join(self.words)

    @property
    def words(self) -> tuple[str, ...]:
        named = (("model", self.model), ("dtype", self.dtype), ("port", self.port))
        flags = [w for name, value in named if value is not None for w in (f"--{name}", str(value))]
        return ("trimtab", *OURS, *flags, "--host", self.host, *self.rest)

    @property
    def url(self) -> str:
        """Raises `LaunchError` when the plan names no port."""
        if self.port is None:
            raise LaunchError(f"{self.line!r} names no port; add --port 8000")
        return f"http://{self.host}:{self.port}"

    def tuning(self, port: int) -> LaunchPlan:
        """The same engine for trials, on this machine only. Its scope is `trial` by the key that
        its launcher puts into the environment."""
        return replace(self, host=LOOPBACK, port=port)

    def reference(self, port: int) -> LaunchPlan:
        """The same model in float64: what outputs are compared with."""
        return replace(self, host=LOOPBACK, port=port, dtype="float64")


def parse(command: str | Sequence[str]) -> LaunchPlan:
    """Read `trimtab engine embedded [--model …] [--dtype …] [--host …] [--port …] …`. Raises
    `LaunchError`, by name for engines that Trimtab knows but cannot start for a search."""
    words = _split(command)
    for i in range(len(words)):
        if words[i : i + len(OURS)] == OURS:
            return _plan(words[i + len(OURS) :])
    for signs, name in OTHERS.items():
        if set(signs) <= {w.rsplit("/", 1)[-1] for w in words}:
            raise LaunchError(
                f"{name} launches are recognised, but a search starts embedded engines only so "
                "far; write 'trimtab engine embedded --model DIR' to tune that one"
            )
    raise LaunchError(
        f"{shlex.join(words)!r} starts no engine that Trimtab knows; write "
        "'trimtab engine embedded --model DIR'"
    )


def _split(command: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(command, str):
        return tuple(command)
    try:
        return tuple(shlex.split(command))
    except ValueError as e:
        raise LaunchError(f"{command!r} is no command line: {e}") from e


def _plan(words: Sequence[str]) -> LaunchPlan:
    plan, rest, given = LaunchPlan(), [], list(words)
    while given:
        name, is_joined, value = given.pop(0).partition("=")
        if name not in ("--model", "--dtype", "--host", "--port"):
            rest.append(f"{name}{is_joined}{value}")
            continue
        if not is_joined and not given:
            raise LaunchError(f"{name} has no value; write {name} VALUE")
        plan = _with(plan, name[2:], value if is_joined else given.pop(0))
    return replace(plan, rest=tuple(rest))


def _with(plan: LaunchPlan, name: str, value: str) -> LaunchPlan:
    match name:
        case "model":
            return replace(plan, model=value)
        case "dtype":
            return replace(plan, dtype=value)
        case "host":
            return replace(plan, host=value)
    if not value.isdecimal() or not 0 < int(value) < 2**16:
        raise LaunchError(f"--port is {value!r}; write a number from 1 to 65535")
    return replace(plan, port=int(value))
