"""Requests to replay: the `Workload` noun, and a bounded reservoir of live requests.

Prompts live here in memory only; nothing in this module writes or logs them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class WorkloadKind(StrEnum):
    REAL = "real"  # live requests, token for token
    REBUILT = "rebuilt"  # lengths and reuse from a profile, text made to fit


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to replay. Outputs are forced: every forward pass does the same work."""

    prompt_token_ids: tuple[int, ...]  # at least one
    output_token_ids: tuple[int, ...]  # at least one
    arrival_s: float = 0.0  # offset from the workload's start


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in arrival order and how many of them run at once."""

    kind: WorkloadKind
    requests: tuple[WorkloadRequest, ...]
    max_concurrency: int = 8

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(r.output_token_ids) for r in self.requests)

    @property
    def digest(self) -> str:
        """sha256 hex over token ids and concurrency: names the workload without showing it."""
        h = hashlib.sha256(f"{self.kind}/{self.max_concurrency}".encode())
        for r in self.requests:
            for ids in (r.prompt_token_ids, r.output_token_ids):
                h.update(len(ids).to_bytes(8, "little"))
                h.update(np.asarray(ids, dtype="<i8").tobytes())
        return h.hexdigest()
