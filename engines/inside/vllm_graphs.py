"""Full CUDA graphs: one set for each portfolio that is resident, flipped with it.

Stock's graphs stay as vLLM captured them. A portfolio's set takes stock's graph for every batch
size that its guards leave to stock, and captures the others into a pool of its own: first the sizes
that traffic uses, any other one when it first comes. (Releasing graphs and capturing again into the
same pool trips an assertion of torch 2.11's allocator.) A graph of n tokens also serves smaller
batches, padded; it is captured under the portfolio only when the guards let all of those in.

Variants of a set, captured by use: of the model's first layers only, and with the expert counters
in it, for the few steps that are counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from engines.inside.forward import Calls, Fault
from engines.inside.vllm_runner import Descriptor, GraphSet, Runner

STOCK = 0
COUNTED = -1
ROOM = 0.1  # of the device's memory, free before a capture
CHECKED_GAP = 0.02  # of the largest hidden state: graph against eager, other split of attention

Serves = Callable[[int, int], bool]
Name = tuple[int, int | None]  # a binding's serial and its variant: first layers, or COUNTED

log = logging.getLogger("vllm.trimtab")


@dataclass(slots=True)
class _Resident:
    """One portfolio's graphs. `lazy` are sizes to be captured when they first come."""

    graphs: GraphSet
    lazy: dict[int, Descriptor] = field(default_factory=dict)  # by num_tokens
    calls: dict[int, Calls] = field(default_factory=dict)  # of one replay, by num_tokens


class Graphs:
    """Of one model. Without full graphs (a CPU, eager mode) there is nothing to do."""

    def __init__(
        self,
        runner: Runner,
        running: Callable[[int], AbstractContextManager[None]],
        calls: Calls,
    ) -> None:
        """`running(n)` is the context of a step of n tokens under the installed portfolio, which
        counts its calls in `calls`."""
        self._runner, self._running, self._calls = runner, running, calls
        self._descriptors = sorted(runner.descriptors(), key=lambda d: d.num_tokens)
        self.sizes = [d.num_tokens for d in self._descriptors]
        self._resident: dict[Name, _Resident] = {}
        self._current: Name = (STOCK, None)
        if self._descriptors:
            self._resident[self._current] = _Resident(runner.graph_set())
        self._serves: Serves = lambda low, high: False
        self._seen: Counter[int] = Counter()  # graph sizes of live decode steps
        self.last_capture_s = 0.0
        self.last_num_captured = 0

    def select(self, serial: int, serves: Serves) -> None:
        """Install the graphs of the binding `serial` of a portfolio, captured where they are
        missing. Raises `Fault`; the caller then selects what ran before."""
        self.last_capture_s, self.last_num_captured = 0.0, 0
        if not self._descriptors:
            return
        self._current, self._serves = (serial, None), serves
        if (known := self._resident.get(self._current)) is not None:
            self._runner.install(known.graphs)
            return
        covered = {d for low, d in self._ranges() if serves(low, d.num_tokens)}
        made = self._make(covered)
        wanted = [d for d in covered if not self._seen or d.num_tokens in self._seen]
        self._capture(made, wanted)
        self._resident[self._current] = made
        self._check_ends(wanted)

    def fall_back(self) -> None:
        """Stock's graphs, and no other, until the next `select`."""
        if self._descriptors and self._current != (STOCK, None):
            self._current = (STOCK, None)
            self._runner.install(self._resident[self._current].graphs)

    def _make(self, covered: Collection[Descriptor]) -> _Resident:
        """A set in which `covered` sizes are to be captured, and the others are the present
        portfolio's or stock's."""
        base = self._resident.get(self._current, self._resident[STOCK, None])
        kept = {d: g for d, g in base.graphs.graphs.items() if d not in covered}
        _make_room()
        made = _Resident(GraphSet(kept, torch.cuda.graph_pool_handle()))
        made.lazy = {d.num_tokens: d for d in covered}
        self._runner.install(made.graphs)
        return made

    def _ranges(self) -> Iterator[tuple[int, Descriptor]]:
        """The smallest batch that each graph serves, and the graph's shape."""
        low = 1
        for descriptor in self._descriptors:
            yield low, descriptor
            low = descriptor.num_tokens + 1

    def _uniform(self) -> set[Descriptor]:
        """Sizes of which every batch runs the same forward, the portfolio's or stock's."""
        return {
            d
            for low, d in self._ranges()
            if self._serves(low, d.num_tokens)
            or not any(self._serves(n, n) for n in range(low, d.num_tokens + 1))
        }

    def _capture(self, made: _Resident, wanted: Collection[Descriptor]) -> None:
        """Into the set that is installed; the largest first, since smaller ones fit its pool."""
        if not wanted:
            return
        started_s = time.monotonic()
        for i, descriptor in enumerate(sorted(wanted, key=lambda d: d.num_tokens, reverse=True)):
            size, before = descriptor.num_tokens, (self._calls.candidate, self._calls.orig)
            with self._running(size):
                num_runs = self._capture_one(descriptor, warm=i == 0)
            made.calls[size] = Calls(
                (self._calls.candidate - before[0]) // num_runs,
                (self._calls.orig - before[1]) // num_runs,
            )
            self._calls.candidate, self._calls.orig = before  # nothing was answered
            made.lazy.pop(size, None)
        self._runner.install(made.graphs)
        self.last_num_captured = len(wanted)
        self.last_capture_s = time.monotonic() - started_s

    def _capture_one(self, descriptor: Descriptor, warm: bool) -> int:
        """A forward pass that has run at one size can mostly be captured at another without a
        warm-up, which is half of the time; not when it tunes itself by size."""
        if warm:
            return self._runner.capture(descriptor, warm=True)
        before = self._calls.candidate, self._calls.orig
        try:
            return self._runner.capture(descriptor, warm=False)
        except Exception as e:
            log.info("capturing %d tokens again, warm: %s", descriptor.num_tokens, e)
            self._calls.candidate, self._calls.orig = before
            return self._runner.capture(descriptor, warm=True)

    def _check_ends(self, wanted: Collection[Descriptor]) -> None:
        """Graphs hold addresses: the smallest and the largest must say what an eager step says."""
        sizes = sorted(d.num_tokens for d in wanted)
        for size in {*sizes[:1], *sizes[-1:]}:
            gap, scale = self._gap(size)
            if not gap <= CHECKED_GAP * scale:
                raise Fault(f"its graph of {size} tokens is off by {gap:g} from the same step")

    def _gap(self, size: int) -> tuple[float, float]:
        """Largest difference between a replayed and an eager step, and the largest number."""
        with self._running(size):
            eager = self._runner.dummy_step(size, graph=False).float()
            replayed = self._runner.dummy_step(size, graph=True).float()
        return float((eager - replayed).abs().max()), float(eager.abs().max())

    def check(self) -> dict[str, tuple[float, float]]:
        """(largest difference, largest number) of every captured size, by its number of tokens."""
        if not self._descriptors:
            return {}
        graphs = self._resident[self._current].graphs.graphs
        return {str(d.num_tokens): self._gap(d.num_tokens) for d in graphs}

    def before_step(self, num_scheduled: Mapping[str, int], counted: bool = False) -> bool:
        """A step comes: note its size, and capture it if it is a decode step that has no graph.
        With `counted` it is to replay a graph with the expert counters; whether it does."""
        if not self._descriptors or max(num_scheduled.values()) > 1:
            return False
        size = next((s for s in self.sizes if s >= len(num_scheduled)), None)
        if size is None:
            return False
        self._seen[size] += 1
        now = self._counted() if counted else self._resident[self._current]
        if (descriptor := now.lazy.get(size)) is not None:
            self._try_capture(now, descriptor)
        if (calls := now.calls.get(size)) is not None:
            self._calls.candidate += calls.candidate
            self._calls.orig += calls.orig
        return counted and size in now.calls

    def _try_capture(self, now: _Resident, descriptor: Descriptor) -> None:
        """In the middle of traffic: without a graph, steps of this size run all the same."""
        size = descriptor.num_tokens
        is_served = self._serves(size, size)
        try:
            self._capture(now, [descriptor])
            if self._serves(size, size) != is_served:
                raise Fault("it faulted there, and the graph is stock's")
        except Exception:
            log.exception("no graph of %d tokens", size)
            now.lazy.pop(size, None)
            now.calls.pop(size, None)
            now.graphs.graphs.pop(descriptor, None)
            self._runner.install(now.graphs)

    def _counted(self) -> _Resident:
        name = (self._current[0], COUNTED)
        if name not in self._resident:
            self._resident[name] = self._make(self._uniform())
        self._runner.install(self._resident[name].graphs)
        return self._resident[name]

    def after_counted(self) -> None:
        """Back to the graphs without counters."""
        if self._descriptors:
            self._runner.install(self._resident[self._current].graphs)

    def keep(self, serials: Collection[int]) -> None:
        """Let go of every other portfolio's graphs. Stock's are kept."""
        for name in list(self._resident):
            if name[0] not in {STOCK, *serials}:
                del self._resident[name]

    @contextmanager
    def cut(self, num_layers: int) -> Iterator[None]:
        """Of the model's first layers only."""
        if not self._descriptors:
            yield
            return
        before = self._current
        name = (before[0], num_layers)
        if name not in self._resident:
            made = self._make(self._descriptors)
            made.lazy = {d.num_tokens: d for d in self._uniform()}
            self._resident[name] = made
        self._current = name
        self._runner.install(self._resident[name].graphs)
        try:
            yield
        finally:
            self._current = before
            self._runner.install(self._resident[before].graphs)


def _make_room() -> None:
    """Pools of graphs that were let go of stay with the allocator, which cannot give them back in
    the middle of a capture."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if free < ROOM * total:
        torch.cuda.empty_cache()
