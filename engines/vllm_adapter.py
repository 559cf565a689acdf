"""A stock vLLM server as an `Engine`, over the socket that `engines.inside` opened in it.

vLLM's own process is somebody else's: started, watched and ended by `engines.vllm_launch`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.engine import (
    Array,
    CandidateError,
    EngineGone,
    EngineInfo,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
)
from engines.inside import wire
from engines.inside.vllm_server import PAUSE_DEADLINE_S, SLACK_S
from profiler.reservoir import Workload
from profiler.samples import StepSample

GRACE_S = 2 * PAUSE_DEADLINE_S + SLACK_S + 10.0  # the inside gives up first, and says why
POLL_S = 0.02


class VllmUnsupported(RuntimeError):
    """This vLLM lacks what Trimtab hooks into. Names it."""


class VllmEngine:
    """Keeps `engines.engine.Engine`. After `EngineGone` `is_lost` is True: a rank hangs where no
    signal reaches it, and the process is to be ended."""

    def __init__(
        self,
        path: Path,
        key: bytes,
        scope: Scope,
        start_to_ready_s: float,
        timeout_s: float = 60.0,
    ) -> None:
        """Attaches: the engine takes portfolios that `key` signed in `scope`, and no other key
        from here on. Raises `VllmUnsupported`, `EngineGone`."""
        self._path, self._scope, self._timeout_s = path, scope, timeout_s
        self._start_to_ready_s = start_to_ready_s
        self.is_lost = False
        try:
            self._about = self._ask("attach", key=key, scope=str(scope))
        except _InsideFailed as e:
            raise VllmUnsupported(str(e)) from e

    def about(self) -> wire.Message:
        """What the worker said of itself when it was attached: runner, graph sizes, version."""
        return dict(self._about)

    def info(self) -> EngineInfo:
        now = self._ask("info")
        return EngineInfo(
            engine="vllm",
            model=now["model"],
            dtype=now["dtype"],
            device=now["device"],
            num_layers=now["num_layers"],
            vocab_size=now["vocab_size"],
            max_model_len=now["max_model_len"],
            scope=self._scope,
            digest=now["digest"],
            previous_digest=now["previous_digest"],
            num_running=self._num_pending(),
            start_to_ready_s=self._start_to_ready_s,
            modules=tuple(ModuleInfo(*m) for m in now["modules"]),
        )

    def source(self, target: str) -> str:
        return str(self._ask("source", target=target)["source"])

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        sources = [f.source for f in portfolio.forwards]
        return _report(self._ask("swap", sources=sources, signature=signature))

    def revert(self) -> SwapReport:
        return _report(self._ask("revert"))

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        reply = self._ask("call", module=module, inputs=[np.asarray(a) for a in inputs])
        return tuple(reply["outputs"])

    def probe(
        self, workload: Workload, num_layers: int | None = None
    ) -> tuple[npt.NDArray[np.float32], ...]:
        reply = self._replay(workload, num_layers, rows=True)
        return tuple(o["logprobs"] for o in reply["outputs"])

    def measure(self, workload: Workload, num_layers: int | None = None) -> Replay:
        reply = self._replay(workload, num_layers, rows=False)
        return Replay(
            tuple(RequestOutput(o["logprobs"], o["top_token_ids"]) for o in reply["outputs"]),
            reply["num_steps"],
            reply["num_tokens"],
            reply["num_orig_calls"],
            reply["num_candidate_calls"],
        )

    def fingerprint(self) -> str:
        """Over all tensor-parallel ranks."""
        ranks = self._ask("fingerprint")["fingerprints"]
        return hashlib.blake2b("/".join(ranks).encode(), digest_size=16).hexdigest()

    def drain(self, deadline_s: float) -> bool:
        until_s = time.monotonic() + deadline_s
        while self._num_pending():
            if time.monotonic() >= until_s:
                return False
            time.sleep(POLL_S)
        return True

    def steps(self) -> tuple[StepSample, ...]:
        """Waiting requests and KV use are those of now: the worker does not know them."""
        reply = self._ask("steps")
        gauges = reply["gauges"]
        return tuple(
            StepSample(
                num_running=s["num_running"],
                num_waiting=int(gauges["num_waiting"]),
                num_tokens=s["num_tokens"],
                kv_cache_usage=gauges["kv_cache_usage"],
                expert_load=s["expert_load"],
                step_s=s["step_s"],
            )
            for s in reply["steps"]
        )

    def graph_gaps(self) -> dict[int, tuple[float, float]]:
        """(largest difference, largest number) between each captured graph's replay and the same
        step run eagerly, by number of tokens."""
        found = self._ask("graph_check")["gaps"]
        return {int(size): (gap, scale) for size, (gap, scale) in found.items()}

    def close(self) -> None:
        """Nothing is held: each call has a connection of its own."""

    # --- the socket -------------------------------------------------------------------------------

    def _num_pending(self) -> int:
        return int(self._ask("pending")["num_pending"])

    def _replay(self, workload: Workload, num_layers: int | None, rows: bool) -> wire.Message:
        requests = [
            {"prompt": r.prompt_token_ids, "output": r.output_token_ids} for r in workload.requests
        ]
        return self._ask(
            "replay",
            requests=requests,
            max_concurrency=workload.max_concurrency,
            num_layers=num_layers,
            rows=rows,
        )

    def _ask(self, what: str, **said: Any) -> wire.Message:
        message = {"do": what, "deadline_s": self._timeout_s, **said}
        try:
            with socket.socket(socket.AF_UNIX) as to:
                to.settimeout(self._timeout_s + GRACE_S)
                to.connect(str(self._path))
                to.sendall(wire.pack(message))
                reply = wire.unpack(_frame(to))
        except OSError as e:
            self.is_lost = self.is_lost or isinstance(e, TimeoutError)
            raise EngineGone(f"vLLM, {what}: {type(e).__name__} {e}") from e
        match reply.get("error"):
            case None:
                return reply
            case "candidate":
                raise CandidateError(reply["text"])
            case "permission":
                raise PermissionError(reply["text"])
            case "deadline":
                self.is_lost = True
                raise EngineGone(f"vLLM, {what}: {reply['text']}")
        raise _InsideFailed(reply["text"])


class _InsideFailed(RuntimeError):
    """Neither the candidate nor the connection is at fault."""


def _frame(source: socket.socket) -> bytes:
    head = _exactly(source, wire.LENGTHS.size)
    return head + _exactly(source, sum(wire.lengths(head)))


def _exactly(source: socket.socket, num: int) -> bytes:
    parts, left = [], num
    while left:
        part = source.recv(min(left, 1 << 20))
        if not part:
            raise wire.WireError("the connection ended within a message")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _report(reply: wire.Message) -> SwapReport:
    return SwapReport(
        digest=reply["digest"],
        num_modules=reply["num_modules"],
        num_preempted=reply["num_preempted"],
        load_s=reply["load_s"],
        swap_s=reply["swap_s"],
    )
