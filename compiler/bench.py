"""What an agent may ask and submit. An agent knows nothing else of the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from compiler.board import Board
from compiler.candidates import Candidate, Stage
from engines.engine import CandidateError, Engine, EngineInfo, ForwardPass, Portfolio
from profiler.reservoir import Workload
from profiler.window import TrafficProfile

BYTES_PER_VALUE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
NUM_TIMED = 7  # calls of one module; the quickest counts, for an estimate


class SearchOver(Exception):
    """The budget is spent, or the agent struck out. An agent lets it pass, or returns."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of the search; infinite where there is no limit of that kind."""

    seconds: float
    experiments: float

    @property
    def is_spent(self) -> bool:
        return self.seconds <= 0 or self.experiments <= 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a submission. Texts are for reading."""

    candidate: Candidate
    reason: str  # in one line
    gain: float | None  # 0.12: 12 % more tokens/s, shrunk by its noise; None when never timed
    seen: float | None  # the same as it was seen, noise and all: a hint, never a claim
    report: str  # what the gate measured, in a few lines
    evidence: str  # digest of the bundle, or ""

    @property
    def is_faster(self) -> bool:
        return self.candidate.stage in (Stage.SCREENED, Stage.CONFIRMED)


class Bench(Protocol):
    """One agent's place at the bench."""

    @property
    def board(self) -> Board: ...

    def source(self, target: str) -> str:
        """Stock source of a `cls:` or `path:` target. Raises `CandidateError` when there is
        none."""

    def profile(self) -> TrafficProfile | None:
        """The traffic to be fast for; None when only a workload is known."""

    def headroom(self) -> Mapping[str, float]:
        """Module class to the share of a step that a perfect kernel would save. An estimate that
        says where to look, not what can be won; classes nest, so shares do not add up to one."""

    def submit(
        self, change: ForwardPass | Portfolio, summary: str, parent_id: str | None = None
    ) -> Verdict:
        """Have it judged; blocks for seconds. The same digest gets its old verdict at once.
        Raises `SearchOver`."""

    def remaining(self) -> Remaining: ...


class Agent(Protocol):
    """Who proposes. `run` returns when it has no further idea."""

    @property
    def name(self) -> str: ...

    def run(self, bench: Bench) -> None: ...


# --- headroom -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine could do at best."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(cls, clock: Callable[[], float] = time.perf_counter) -> Hardware:
        """Of this machine's CPU, in a few milliseconds: a copy and a matrix product."""
        block, square = np.ones(1 << 22, np.float32), np.ones((384, 384), np.float32)
        copy_s = _quickest_s(block.copy, clock)
        product_s = _quickest_s(lambda: square @ square, clock)
        return cls(2 * block.nbytes / copy_s, 2 * 384**3 / product_s)


def headroom(
    engine: Engine,
    workload: Workload,
    hardware: Hardware,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """By module class, from a stock engine: what its modules take beyond the roofline, as a share
    of a step. Modules that can be called alone are timed at the workload's mean batch; attention
    has what is left of the step. Raises `EngineGone`.
    """
    engine.measure(workload)  # the first one also pays for what is lazy
    start = clock()
    replay = engine.measure(workload)
    step_s = (clock() - start) / max(1, replay.num_steps)
    num_tokens = max(1, round(replay.num_tokens / max(1, replay.num_steps)))
    info = engine.info()
    times = _times(engine, info, num_tokens, clock)
    rest_s = step_s - sum(s for cls, s in times.items() if cls.endswith(("Norm", "Block", "MLP")))
    times |= {m.cls: rest_s for m in info.modules if m.cls.endswith("Attention")}
    return {
        cls: min(1.0, max(0.0, spent_s - _ideal_s(cls, info, num_tokens, hardware)) / step_s)
        for cls, spent_s in times.items()
    }


def _times(
    engine: Engine, info: EngineInfo, num_tokens: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Class to seconds a step, all its modules together, without the wire: what the cheapest call
    takes on one row is taken for the wire's."""
    classes = [m.cls for m in info.modules]
    largest = {m.cls: m for m in sorted(info.modules, key=lambda m: m.num_weight_bytes)}
    rows = np.ones((num_tokens, _hidden_size(info)), np.float32)
    one_s, all_s = (
        {cls: _call_s(engine, m.path, x, clock) for cls, m in largest.items()}
        for x in (rows[:1], rows)
    )
    wire_s = min((s for s in one_s.values() if s is not None), default=0.0)
    return {
        cls: max(0.0, s - wire_s) * classes.count(cls) for cls, s in all_s.items() if s is not None
    }


def _call_s(
    engine: Engine, path: str, rows: npt.NDArray[np.float32], clock: Callable[[], float]
) -> float | None:
    """None when the module cannot be called alone."""
    try:
        return _quickest_s(lambda: engine.call(path, [rows]), clock)
    except CandidateError:
        return None


def _ideal_s(cls: str, info: EngineInfo, num_tokens: int, hardware: Hardware) -> float:
    """Weights read once and used once a token. Of experts only the reading is known: how many a
    token visits is the model's business."""
    weights = sum(m.num_weight_bytes for m in info.modules if m.cls == cls)
    read_s = weights / hardware.bytes_per_s
    if any(part in cls for part in ("MoE", "Moe", "Experts")):
        return read_s
    num_values = weights / BYTES_PER_VALUE.get(info.dtype, 4)
    return max(read_s, 2 * num_values * num_tokens / hardware.flops_per_s)


def _hidden_size(info: EngineInfo) -> int:
    """A norm's weight is as long as its rows; the hidden state's is the longest."""
    norms = [m.num_weight_bytes for m in info.modules if m.cls == "RMSNorm"]
    return max(norms, default=4) // BYTES_PER_VALUE.get(info.dtype, 4)


def _quickest_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    samples = []
    for _ in range(NUM_TIMED):
        start = clock()
        call()
        samples.append(clock() - start)
    return min(samples)
