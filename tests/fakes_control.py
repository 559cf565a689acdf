"""What stands around a controller: an engine that only swaps, an operator that only answers, and a
data plane that is really joined over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compiler.candidates import Candidate, Event
from drift.detector import DriftVerdict
from engines.checks import RMS_NORM_REWRITE
from engines.engine import (
    STOCK,
    CandidateError,
    EngineGone,
    EngineInfo,
    ForwardPass,
    Portfolio,
    Scope,
    SwapReport,
    sign,
)
from profiler.reservoir import Reservoir, Workload, WorkloadKind, WorkloadRequest
from profiler.samples import Outcome, RequestSample, StepSample
from profiler.window import TrafficProfile, Window
from sidecar.comparison import AgreementPolicy, MirrorResult
from sidecar.config import Autonomy
from sidecar.control import CandidateCard, Happening, NotThere, RolledBack, Status, VerdictCard
from sidecar.controller import Controller, ControllerSettings
from sidecar.link import Link, LinkSettings, PlaneState
from sidecar.metrics import Metrics
from sidecar.retune import SearchOrder
from sidecar.rollout import RolloutPolicy
from sidecar.routing import Routing, RoutingTable
from sidecar.store import FILE_NAME, SqliteStore
from sidecar.tap import LiveRequest

KEY = b"k" * 32
PRIMARY, SHADOW = "http://127.0.0.1:1", "http://127.0.0.1:2"
TABLE = RoutingTable(1, (PRIMARY,), (SHADOW,))
FORWARD = ForwardPass.from_source('TARGETS = {"cls:RMSNorm": "f"}\ndef f(self, x): return x\n')
OTHER = ForwardPass.from_source('TARGETS = {"cls:RMSNorm": "g"}\ndef g(self, x): return x\n')


def candidate(id: str = "c-0001", forward: ForwardPass = FORWARD, *events: Event) -> Candidate:
    """Confirmed, then whatever `events` say."""
    new = Candidate(id, "s-1", None, "search", "a norm", Portfolio((forward,)), gain=0.1)
    for event in (Event.AGREES, Event.FASTER, Event.FASTER, *events):
        new = new.after(event, 1.0)
    return new


def keep_confirmed(state: Path) -> str:
    """A real candidate as a search leaves it, in the store of a controller's state folder; its id.
    Blocks."""
    store = SqliteStore(state / FILE_NAME)
    try:
        made = candidate(store.next_candidate_id(), ForwardPass.from_source(RMS_NORM_REWRITE))
        store.put_candidate(made)
        return made.id
    finally:
        store.close()


def sample(arm: str = "stable", digest: str = "", **changes: Any) -> RequestSample:
    good = RequestSample(
        finished_s=time.monotonic(),
        outcome=Outcome.OK,
        num_prompt_tokens=100,
        num_cached_tokens=0,
        num_output_tokens=10,
        ttft_s=0.1,
        tpot_s=0.01,
        e2e_s=0.2,
        arm=arm,
        digest=digest,
    )
    return replace(good, **changes)


def mirrored(digest: str, outcome: str = "ok") -> MirrorResult:
    return MirrorResult(
        outcome, digest, 0.001, 10, 0.1, 0.1, 0.2, 0.2, "same" if outcome != "error" else ""
    )


class SwapEngine:
    """Keeps what the controller asks of `Engine`: who runs, and the way back."""

    def __init__(self, portfolio: Portfolio = STOCK) -> None:
        self.running, self.previous = portfolio, None if portfolio == STOCK else STOCK
        self.refuses = self.is_gone = False
        self.swap_takes_s = 0.0

    def info(self) -> EngineInfo:
        self._alive()
        previous = None if self.previous is None else self.previous.digest
        return EngineInfo(
            *("fake", "m", "float32", "cpu", 2, 64, 512, Scope.SERVE),
            *(self.running.digest, previous, 0, 0.1, ()),
        )

    def swap(self, portfolio: Portfolio, signature: str) -> SwapReport:
        self._alive()
        if signature != sign(KEY, Scope.SERVE, portfolio.digest):
            raise PermissionError("wrong signature")
        if self.refuses:
            raise CandidateError("it does not load")
        time.sleep(self.swap_takes_s)
        self.running, self.previous = portfolio, self.running
        return SwapReport(portfolio.digest, 1, 0, 0.0, 0.0)

    def revert(self) -> SwapReport:
        self._alive()
        if self.previous is None:
            raise CandidateError("nothing to revert to")
        self.running, self.previous = self.previous, None
        return SwapReport(self.running.digest, 1, 0, 0.0, 0.0)

    def drain(self, deadline_s: float) -> bool:
        return True

    def steps(self) -> tuple[StepSample, ...]:
        return ()

    def _alive(self) -> None:
        if self.is_gone:
            raise EngineGone("engine is gone")


@dataclass
class FakeDetector:
    """Says what it is told to say."""

    drifts: bool = False
    num_rebased: int = 0

    def update(self, profile: TrafficProfile) -> DriftVerdict:
        return DriftVerdict(self.drifts, 0.9 if self.drifts else 0.0, 0.5, "", None, None, ())

    def rebase(self) -> None:
        self.num_rebased += 1


@dataclass
class FakeTokenizer:
    async def workload(self, live: Sequence[Any], max_concurrency: int) -> Workload:
        requests = tuple(WorkloadRequest((1, 2), (3,)) for _ in live)
        return Workload(WorkloadKind.REAL, requests, max_concurrency)


@dataclass
class FakeSearch:
    """A search process: leaves `finds` in the store and exits with `code`."""

    store: SqliteStore
    finds: Candidate | None = None
    code: int = 3
    orders: list[SearchOrder] = field(default_factory=list)

    async def __call__(self, order: SearchOrder, workload: str) -> int:
        self.orders.append(order)
        if self.finds is not None:
            found = replace(self.finds, search_id=order.id)
            await asyncio.to_thread(self.store.put_candidate, found)
        return self.code


QUICK = RolloutPolicy(
    steps=(0.5, 1.0),
    step_s=0.0,
    step_requests=3,
    shadow_s=0.0,
    agreement=AgreementPolicy(min_results=5),
)


@dataclass
class Room:
    """A running controller and all that it touches."""

    store: SqliteStore
    primary: SwapEngine = field(default_factory=SwapEngine)
    shadow: SwapEngine = field(default_factory=SwapEngine)
    detector: FakeDetector = field(default_factory=FakeDetector)
    table: RoutingTable = TABLE
    autonomy: Autonomy = Autonomy.AUTO
    committed: list[RoutingTable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.search = FakeSearch(self.store)

    def controller(self) -> Controller:
        engines: Any = {PRIMARY: self.primary, SHADOW: self.shadow}
        return Controller(
            settings=ControllerSettings(
                *(
                    "test",
                    "0",
                    Path("."),
                    self.autonomy,
                    QUICK,
                    30.0,
                    "trimtab engine",
                    "1m",
                    "search",
                ),
                keeps_requests=True,
                tick_s=0.01,
                health_s=0.02,
                min_live_requests=1,
            ),
            records=self.store,
            first_table=self.table,
            commit=self.committed.append,
            engines=engines,
            pulses=engines,
            swap_key=KEY,
            window=Window(5, 60.0),
            reservoir=Reservoir(8),
            detector=lambda: self.detector,
            tokenizer=FakeTokenizer(),
            search=self.search,
            metrics=Metrics(),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Controller]:
        controller = self.controller()
        await controller.reconcile()
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(controller.run())
                await asyncio.sleep(0)
                yield controller
                task.cancel()
        finally:
            await controller.close()

    async def keep(self, candidate: Candidate) -> None:
        await asyncio.to_thread(self.store.put_candidate, candidate)

    def stage(self, id: str = "c-0001") -> str:
        found = self.store.candidate(id)
        return found.stage if found else ""


def state(*samples: RequestSample, mirror: Sequence[MirrorResult] = ()) -> PlaneState:
    return PlaneState("p/1", 1, samples, tuple(mirror))


def live_request() -> LiveRequest:
    return LiveRequest("/v1/completions", b'{"prompt": "a"}', "b", time.monotonic())


async def until(true: Callable[[], Any]) -> None:
    """Wait for something to come true, a few seconds at most."""
    async with asyncio.timeout(5.0):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_stored(true: Callable[[], Any]) -> None:
    """The same, for what has to be read from a store."""
    async with asyncio.timeout(5.0):
        while not await asyncio.to_thread(true):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def open_store(folder: Path) -> SqliteStore:
    return SqliteStore(folder / FILE_NAME)


@asynccontextmanager
async def joined(address: str, table: RoutingTable = TABLE) -> AsyncIterator[tuple[Link, Routing]]:
    """A data plane's end of `Fleet.Join`, the real one."""
    routing = Routing(table)
    link = Link(address.removeprefix("unix:"), "127.0.0.1:1/1", routing, LinkSettings(0.02))
    link.start()
    try:
        yield link, routing
    finally:
        await asyncio.to_thread(link.close)


class FakeOperator:
    """Answers what it was built with and keeps the audit."""

    def __init__(self) -> None:
        self.audits: list[tuple[str, str, str, str]] = []
        self.told: list[Happening] = [Happening(n, 1.0, "stage", f"line {n}") for n in (1, 2, 3)]
        self.cards = [
            CandidateCard(f"c-{n:04d}", "s", "", "a", "x", "d", "valid", (), None)
            for n in range(250)
        ]

    async def status(self) -> Status:
        return Status("n", "0", "auto", "idle", "", 7, 1, 2, 0, 0, 0, (), "", 1.0)

    async def happenings(self, after: int) -> Sequence[Happening]:
        return [h for h in self.told if h.seq > after]

    async def candidates(self) -> Sequence[CandidateCard]:
        return self.cards

    async def profile(self) -> str:
        raise NotThere("no window of traffic is full yet; send requests")

    async def verdicts(self) -> Sequence[VerdictCard]:
        return [VerdictCard(1.0, True, "drifted", "{}")]

    async def retune(self, why: str) -> str:
        return "s-1"

    async def promote(self, candidate_id: str, why: str) -> str:
        raise NotThere(f"candidate {candidate_id} is not there")

    async def rollback(self, why: str) -> RolledBack:
        return RolledBack("rolled_back", 9, 0.01, True)

    async def audit(self, who: str, what: str, why: str, outcome: str) -> None:
        self.audits.append((who, what, why, outcome))
