"""Who serves the next request: a pure function of the table and the session key.

`Routing` holds the tables of one data plane. It does no I/O: `save_table` and `load_table` do, off
the event loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)


class Role(StrEnum):
    STABLE = "stable"
    CANARY = "canary"


@dataclass(slots=True)
class Upstream:
    """One serving endpoint. `num_in_flight` is this worker's own count."""

    url: str  # http://127.0.0.1:8000, no trailing slash
    role: Role
    num_in_flight: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """What every data plane obeys. A table with a lease lapses to the last committed one."""

    version: int
    stable: tuple[str, ...]  # upstream URLs, at least one
    canary: tuple[str, ...] = ()
    weight: float = 0.0  # 0-1, the canary's share of sessions
    mirror: bool = False  # copy eligible stable requests to the canary
    bypass: bool = False  # plain relay to stable: no tap, no mirror, no canary
    lease_s: float | None = None  # None: committed
    digests: tuple[tuple[str, str], ...] = ()  # (url, portfolio digest) for samples and headers

    def __post_init__(self) -> None:
        if not self.stable:
            raise ValueError(f"routing table {self.version} has no stable upstream")
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(
                f"routing table {self.version}: weight {self.weight} is not within 0-1"
            )
        if self.weight > 0 and not self.canary:
            raise ValueError(f"routing table {self.version}: weight {self.weight} but no canary")
        for url in (*self.stable, *self.canary):
            _check_url(self.version, url)
        if self.lease_s is not None and not self.lease_s > 0:
            raise ValueError(f"routing table {self.version}: a lease of {self.lease_s} s is none")

    def role(self, session_key: bytes) -> Role:
        """Monotone in the weight: a rising weight moves nobody back to stable."""
        if self.bypass or not self.canary:
            return Role.STABLE
        return Role.CANARY if position(session_key) < self.weight else Role.STABLE

    def digest(self, url: str) -> str:
        return dict(self.digests).get(url, "")


def position(session_key: bytes) -> float:
    """A session's fixed place in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(session_key, digest_size=8).digest(), "big") / 2**64


def _check_url(version: int, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or url.endswith("/"):
        raise ValueError(
            f"routing table {version}: {url!r} is no upstream; write http://127.0.0.1:8000"
        )


class Routing:
    """The tables of one data plane and what is in flight. Belongs to one thread, the event loop's.

    A leased table lapses by itself to the last committed one, which never lapses.
    """

    def __init__(
        self, committed: RoutingTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is monotonic, in seconds. Raises `ValueError` when `committed` has a lease."""
        if committed.lease_s is not None:
            raise ValueError(f"routing table {committed.version} is leased, not committed")
        self._committed = self._newest = committed
        self._deadline_s = float("inf")  # of the newest table
        self._clock = clock
        self._upstreams: dict[tuple[Role, str], Upstream] = {}

    @property
    def table(self) -> RoutingTable:
        """The table in force now."""
        return self._newest if self._clock() < self._deadline_s else self._committed

    @property
    def committed(self) -> RoutingTable:
        return self._committed

    def install(self, table: RoutingTable) -> bool:
        """Obey a newer table from now on, or renew the newest one's lease. False: it is neither."""
        if table.version < self._newest.version:
            return False
        if table.version == self._newest.version and table != self._newest:
            return False
        lease_s = float("inf") if table.lease_s is None else table.lease_s
        self._newest, self._deadline_s = table, self._clock() + lease_s
        if table.lease_s is None:
            self._committed = table
        self._forget()
        return True

    def pick(self, session_key: bytes, role: Role | None = None) -> Upstream:
        """Choose and reserve an upstream: the least busy of the session's arm, or of `role`'s.
        Whoever picks calls `release`, once."""
        table = self.table
        role = role or table.role(session_key)
        urls = table.canary if role is Role.CANARY else table.stable
        arm = [self._upstream(role, url) for url in urls]
        first = int(position(session_key) * len(arm))  # ties: a session stays where its cache is
        chosen = min(arm[first:] + arm[:first], key=lambda u: u.num_in_flight)
        chosen.num_in_flight += 1
        return chosen

    def release(self, upstream: Upstream) -> None:
        upstream.num_in_flight -= 1
        self._forget()

    def num_in_flight(self) -> int:
        return sum(u.num_in_flight for u in self._upstreams.values())

    def _upstream(self, role: Role, url: str) -> Upstream:
        return self._upstreams.setdefault((role, url), Upstream(url, role))

    def _forget(self) -> None:
        """Drop idle upstreams: they are made again when picked."""
        for key in [k for k, u in self._upstreams.items() if u.num_in_flight == 0]:
            del self._upstreams[key]


def save_table(path: Path, table: RoutingTable) -> None:
    """Write a committed table for a restart without a controller. Atomic, and never over a newer
    one. Blocks: call it off the event loop."""
    if table.lease_s is not None:
        raise ValueError(f"routing table {table.version} is leased; only committed ones are kept")
    kept = load_table(path)
    if kept is not None and kept.version >= table.version:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(table)), encoding="utf-8")
    draft.replace(path)


def load_table(path: Path) -> RoutingTable | None:
    """The committed table of an earlier life; None, and a line in the log, when there is none that
    can be obeyed. Blocks."""
    try:
        return _table_from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning("kept routing table ignored", extra={"path": str(path), "why": str(e)})
        return None


def _table_from_json(fields: dict[str, Any]) -> RoutingTable:
    fields["stable"], fields["canary"] = tuple(fields["stable"]), tuple(fields["canary"])
    fields["digests"] = tuple((str(url), str(digest)) for url, digest in fields["digests"])
    table = RoutingTable(**fields)
    if table.lease_s is not None:
        raise ValueError(f"routing table {table.version} is leased")
    return table
