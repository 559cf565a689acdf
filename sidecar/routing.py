"""Who serves the next request: a pure function of the table and the session key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum


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
