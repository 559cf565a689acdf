"""Every setting, checked once: `trimtab.toml`, then `TRIMTAB_…`, then flags; the last one wins.

In the environment a section is joined with two underscores (`TRIMTAB_PROXY__DRAIN_S`) and a list
is separated by commas.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

PREFIX = "TRIMTAB_"
FILE = Path("trimtab.toml")
OTHERS = frozenset({"TRIMTAB_TRIAL_KEY", "TRIMTAB_PARENT"})  # between our processes, no settings


class ConfigError(ValueError):
    """A setting is unknown or wrong. Says where it stands and what to write."""


class Autonomy(StrEnum):
    """How far a change may go without a person, weakest first."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    SHADOW = "shadow"
    CANARY = "canary"
    AUTO = "auto"

    def allows(self, needed: Autonomy) -> bool:
        order = list(Autonomy)
        return order.index(self) >= order.index(needed)


def _listed(value: object) -> object:
    if isinstance(value, str):
        return tuple(v for v in value.split(",") if v)
    return tuple(value) if isinstance(value, list) else value


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("is not a URL; write http://HOST:PORT")
    return value.rstrip("/")


def _paired(value: object) -> object:
    if not isinstance(value, str):
        return value
    return dict(pair.partition("=")[::2] for pair in value.split(",") if pair)


Url = Annotated[str, AfterValidator(_url)]
Urls = Annotated[tuple[Url, ...], NoDecode, BeforeValidator(_listed)]
Share = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProxySettings(Section):
    """The relay. There is no total timeout."""

    connect_timeout_s: PositiveFloat = 5.0
    show_digest: bool = False  # tell clients which forward pass answered, in a header
    drain_s: PositiveFloat = 10.0  # on SIGTERM, for streams in flight


class ReservoirSettings(Section):
    """Live requests kept for replay, in memory only."""

    enabled: bool = True
    num_requests: PositiveInt = 64


class CanarySettings(Section):
    """How traffic moves over. A step is over when its time and its requests are both there."""

    steps: Annotated[tuple[Share, ...], NoDecode, BeforeValidator(_listed)] = (0.05, 0.25, 0.5, 1.0)
    step_s: PositiveFloat = 10.0
    step_requests: PositiveInt = 20
    lease_s: PositiveFloat = 30.0
    shadow_requests: PositiveInt = 20  # mirrored and compared before any traffic moves
    max_latency_ratio: PositiveFloat = 2.0  # canary over stable, medians
    max_diverged_rate: Share = 0.02  # of mirrored answers


class SearchSettings(Section):
    """What one search may cost, as `30m` or `200 experiments`."""

    budget: str = "10m"
    agent: str = "search"
    launch: str = (
        ""  # how to start a tuning engine; "" is the embedded one with the primary's model
    )


class DriftSettings(Section):
    """One window is closed by its number of requests or its seconds, whichever comes first."""

    window_requests: PositiveInt = 200
    window_s: PositiveFloat = 60.0


class Config(BaseModel):
    """All settings. Build it with `load`; every field has a default that works on a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="", pattern=r"^[\w.:-]*$")  # "" is the data port
    host: str = "127.0.0.1"
    port: Port = 8080
    admin_port: Port = 8081
    workers: PositiveInt = 1
    upstreams: Urls = ()
    shadows: Urls = ()
    engine_control: Annotated[dict[str, str], NoDecode, BeforeValidator(_paired)] = Field(
        default_factory=dict
    )
    autonomy: Autonomy = Autonomy.RECOMMEND
    state_dir: Path | None = None  # None is $XDG_STATE_HOME/trimtab/NAME
    proxy: ProxySettings = ProxySettings()
    reservoir: ReservoirSettings = ReservoirSettings()
    canary: CanarySettings = CanarySettings()
    search: SearchSettings = SearchSettings()
    drift: DriftSettings = DriftSettings()

    @property
    def label(self) -> str:
        return self.name or str(self.port)

    @property
    def state(self) -> Path:
        return self.state_dir or state_root() / self.label


class _Environment(BaseSettings, Config):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", frozen=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and for each dotted key the place its value came from."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """(key, value as JSON, origin) for each setting, in the order of the file."""
        values = _flat(self.config.model_dump(mode="json"))
        return [(k, json.dumps(v), self.origins.get(k, "default")) for k, v in values]


def state_root() -> Path:
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local/state") / "trimtab"


def load(flags: Mapping[str, object] | None = None, file: Path | None = None) -> Loaded:
    """Read every layer, check each by itself, merge. Raises `ConfigError`.

    A `file` that is named must exist; `trimtab.toml` in the working directory may.
    """
    given = {k: v for k, v in (flags or {}).items() if v is not None and v != ()}
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {}
    for origin, strict, layer in (*_toml(file), ("environment", False, _environment())):
        _check(layer, origin, strict)
        _merge(merged, layer, origin, origins)
    _check(given, "flags", strict=False)
    _merge(merged, given, "flags", origins)
    try:
        return Loaded(_consistent(Config.model_validate(merged)), origins)
    except ValidationError as e:
        raise ConfigError(_first(e)) from e


def _consistent(config: Config) -> Config:
    if config.port == config.admin_port:
        raise ConfigError(f"port and admin_port are both {config.port}; give each its own")
    if both := set(config.upstreams) & set(config.shadows):
        raise ConfigError(f"{min(both)} is an upstream and a shadow; it can be one of them")
    steps = config.canary.steps
    if sorted(set(steps)) != list(steps) or steps[-1:] != (1.0,):
        raise ConfigError(f"canary.steps is {list(steps)}; write rising shares that end with 1.0")
    parse_budget(config.search.budget)
    return config


def _toml(file: Path | None) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    path = file or FILE
    if not path.exists():
        if file is not None:
            raise ConfigError(f"{file} does not exist; leave --config out or write the file")
        return
    try:
        yield path.name, True, tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}") from e


def _environment() -> dict[str, Any]:
    known = {PREFIX + k.replace(".", "__").upper() for k in known_keys()} | OTHERS
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"{name} in the environment is no setting{_nearest(name, known)}")
    return EnvSettingsSource(_Environment)()


def known_keys() -> list[str]:
    """Every dotted key: `port`, `proxy.connect_timeout_s`."""
    return [k for k, _ in _flat(Config().model_dump())]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "engine_control":
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _merge(into: dict[str, Any], layer: dict[str, Any], origin: str, to: dict[str, str]) -> None:
    for key, value in _flat(layer):
        *sections, leaf = key.split(".")
        place = into
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
        to[key] = origin


def _check(layer: Mapping[str, Any], origin: str, strict: bool) -> None:
    try:
        if strict:
            Config.model_validate_json(json.dumps(layer, default=str), strict=True)
        else:
            Config.model_validate(layer)
    except ValidationError as e:
        raise ConfigError(_first(e, origin)) from e


def _first(error: ValidationError, origin: str = "") -> str:
    found = error.errors()[0]
    key = ".".join(str(p) for p in found["loc"] if not isinstance(p, int))
    where = f" in {origin}" if origin else ""
    said = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return f"{key}{where} is no setting{_nearest(key, known_keys())}"
    if not key:
        return f"{said}{where}"
    value = found["input"]
    return f"{key} is {_shown(value)}{where}; {_way_out(found['type'], value, said)}"


def _shown(value: object) -> str:
    kinds = {str: "a string", bool: "a boolean", int: "a whole number", float: "a number"}
    kind = kinds.get(type(value), "a list" if isinstance(value, list) else "a table")
    return f"{json.dumps(value, default=str)} ({kind})"


def _way_out(kind: str, value: object, said: str) -> str:
    if kind in {"float_type", "int_type"} and isinstance(value, str):
        try:
            return f"write {float(value) if kind == 'float_type' else int(value)}"
        except ValueError:
            pass
    return said[0].lower() + said[1:]


def _nearest(key: str, known: list[str] | set[str]) -> str:
    leaves = {k.rsplit(".", 1)[-1]: k for k in known}
    near = difflib.get_close_matches(key, [*known, *leaves], n=1, cutoff=0.5)
    return f"; did you mean {leaves.get(near[0], near[0])}?" if near else ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may cost; None is no limit of that kind."""

    max_s: float | None = None
    max_experiments: int | None = None


def parse_budget(text: str) -> Budget:
    """`90s`, `30m`, `1h`, or `200 experiments`. Raises `ConfigError`."""
    found = re.fullmatch(r"([1-9]\d*) ?(s|m|h|experiments?)", text.strip())
    if found is None:
        raise ConfigError(f"budget is {text!r}; write 30m or '200 experiments'")
    number, unit = int(found[1]), found[2]
    if unit.startswith("e"):
        return Budget(max_experiments=number)
    return Budget(max_s=number * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit])
