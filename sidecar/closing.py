"""The demo's closing table: the same requests under the old and the new forward pass.

One engine, nothing else running, swapped and reverted between passes: old, new, old, new, …, old.
Each pass starts its prompts with a line of its own, so that no pass reads another's prefix cache;
the two passes of a pair share that line and so do the same work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.engine import Engine, Portfolio
from sidecar.replay import Replayer, ReplayReport
from sidecar.traffic import PlannedRequest


@dataclass(frozen=True, slots=True)
class Pass:
    """One replay of all requests under one forward pass."""

    tokens_per_s: float  # prompt and output tokens over the wall time of the pass
    ttft_s: float  # median over requests
    tpot_s: float  # median over requests


@dataclass(frozen=True, slots=True)
class ClosingTable:
    """Passes in pairs by position, one old pass more than new ones; swap and revert in seconds."""

    old: tuple[Pass, ...]
    new: tuple[Pass, ...]
    swaps_s: tuple[float, ...]
    reverts_s: tuple[float, ...]
    num_requests: int  # of one pass
    num_failed: int  # over all passes

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(figure, old, new, change); medians ± half the distance between the quartiles."""
        return [
            self._row("tokens/s", "{:.0f}", lambda p: p.tokens_per_s),
            self._row("TTFT ms", "{:.1f}", lambda p: p.ttft_s * 1e3),
            self._row("TPOT ms", "{:.2f}", lambda p: p.tpot_s * 1e3),
        ]

    @property
    def swap_and_revert_p50_s(self) -> float:
        return float(np.median(np.add(self.swaps_s, self.reverts_s)))

    def _row(self, name: str, form: str, of: Callable[[Pass], float]) -> tuple[str, str, str, str]:
        old, new = [of(p) for p in self.old], [of(p) for p in self.new]
        change = float(np.median(new) / np.median(old) - 1)
        return name, _with_spread(old, form), _with_spread(new, form), f"{change:+.1%}"


def _with_spread(values: Sequence[float], form: str) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{form.format(middle)} ± {form.format((high - low) / 2)}"


async def measure(
    engine: Engine,
    url: str,
    requests: Sequence[PlannedRequest],
    portfolio: Portfolio,
    signature: str,
    *,
    num_pairs: int,
    concurrency: int,
) -> ClosingTable:
    """Run the table on an idle engine that runs stock; leaves it on stock. `requests` are
    completions. Raises what `Engine.swap` raises."""
    old: list[Pass] = []
    new: list[Pass] = []
    swaps_s: list[float] = []
    reverts_s: list[float] = []
    reports: list[ReplayReport] = []

    async def one(mark: int) -> Pass:
        report = await Replayer(url, concurrency).run(_marked(requests, mark))
        reports.append(report)
        return _figures(report)

    await one(-1)  # warms the engine up; its figures are not kept
    for pair in range(num_pairs):
        old.append(await one(pair))
        swaps_s.append(await _timed(lambda: engine.swap(portfolio, signature)))
        new.append(await one(pair))
        reverts_s.append(await _timed(engine.revert))
    old.append(await one(num_pairs))
    num_failed = sum(r.num_failed + r.num_cut for r in reports)
    return ClosingTable(
        tuple(old), tuple(new), tuple(swaps_s), tuple(reverts_s), len(requests), num_failed
    )


def _marked(requests: Sequence[PlannedRequest], mark: int) -> list[PlannedRequest]:
    """All at once, so that the engine and not the plan sets the pace."""
    return [
        replace(r, arrival_s=0.0, body={**r.body, "prompt": f"# pass {mark}\n{r.body['prompt']}"})
        for r in requests
    ]


def _figures(report: ReplayReport) -> Pass:
    return Pass(
        tokens_per_s=report.num_tokens / report.duration_s,
        ttft_s=float(np.median(report.ttft_s())),
        tpot_s=float(np.median(report.tpot_s())),
    )


async def _timed(call: Callable[[], object]) -> float:
    """Seconds of an engine call, its way there and back included."""
    began_s = time.perf_counter()
    await asyncio.to_thread(call)
    return time.perf_counter() - began_s
