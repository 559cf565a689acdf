"""What the search must not lose, as a protocol: `sidecar.store` keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from compiler.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Post:
    """One append-only word on the board. Data for agents and people; no gate reads it."""

    seq: int  # given by the store, rising from 1
    at: float  # Unix seconds
    search_id: str
    author: str
    claim: str
    evidence: str  # digest of the evidence bundle, or ""
    scope: str  # where it was seen: module class, batch sizes
    refuted_by: int | None = None  # seq of the post that shows otherwise


class Store(Protocol):
    """Synchronous; each process opens its own. A call returns after the write is durable."""

    def next_candidate_id(self) -> str:
        """A fresh id such as "c-0142", never given twice."""

    def put_candidate(self, candidate: Candidate) -> None:
        """Insert, or replace the row with the same id."""

    def candidates(self, search_id: str | None = None) -> Sequence[Candidate]:
        """All, oldest first."""

    def post(
        self, search_id: str, author: str, claim: str, evidence: str = "", scope: str = ""
    ) -> Post: ...

    def refute(self, seq: int, by: int) -> None: ...

    def posts(self, search_id: str | None = None, after: int = 0) -> Sequence[Post]: ...

    def put_evidence(self, bundle: str) -> str:
        """Keep a JSON bundle; returns its sha256 hex digest."""

    def evidence(self, digest: str) -> str | None: ...
