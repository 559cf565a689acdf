"""The smallest facts: one finished request, one engine step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Outcome(StrEnum):
    """How a request ended, as the client would say it."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # the engine said 4xx
    SERVER_ERROR = "server_error"  # the engine said 5xx
    CLIENT_CANCELLED = "client_cancelled"
    UPSTREAM_RESET = "upstream_reset"  # the engine broke off after the first byte
    UPSTREAM_UNREACHABLE = "upstream_unreachable"  # no response byte at all


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One finished request. Times are `time.monotonic` seconds; None says not known, never zero."""

    finished_s: float
    outcome: Outcome
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    ttft_s: float | None  # request's last byte sent to the first token, not to the headers
    tpot_s: float | None  # (last token - first token) / (num_output_tokens - 1)
    e2e_s: float
    tenant: str = ""
    model: str = ""
    arm: str = "stable"
    digest: str = ""  # portfolio that answered; "" is stock
    num_in_flight: int = 0  # this request included, when it started
    estimated: bool = False  # token counts come from bytes, not from `usage`


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step. `expert_load` is int64[num_moe_layers, num_experts], padding excluded."""

    num_running: int
    num_waiting: int
    num_tokens: int  # scheduled tokens of this step, padding excluded
    kv_cache_usage: float  # 0-1
    expert_load: npt.NDArray[np.int64] | None
    step_s: float | None = None  # where the engine tells; on a device, the device's own time
