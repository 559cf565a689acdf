"""The controller: what the data planes saw becomes verdicts, searches and rollouts.

Everything here belongs to one event loop. Engines, the store and the detector block, so they are
called in threads; between two awaits the state is whole, and a rollback needs no lock: it publishes
the table at once and leaves the engine to whoever holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from compiler.candidates import Candidate, Event, Stage
from drift.detector import DriftDetector
from engines.engine import STOCK, CandidateError, Engine, EngineGone, Portfolio, Scope, sign
from profiler.reservoir import Reservoir, Workload, workload_to_json
from profiler.samples import RequestSample
from profiler.window import TrafficProfile, Window, profile_to_json
from sidecar.comparison import MirrorResult
from sidecar.config import Autonomy
from sidecar.control import (
    ArmStatus,
    CandidateCard,
    Fleet,
    Happening,
    NotThere,
    RolledBack,
    Status,
    VerdictCard,
    WrongState,
)
from sidecar.link import PlaneState
from sidecar.metrics import Metrics
from sidecar.retune import NO_WINNER, WINNER, SearchOrder
from sidecar.rollout import (
    FAILURES,
    MEETS_TRAFFIC,
    Action,
    ArmFigures,
    Do,
    Figures,
    Rollout,
    RolloutPolicy,
    decide,
    furthest,
)
from sidecar.routing import Role, RoutingTable
from sidecar.store import StoredEvent, StoredVerdict

log = logging.getLogger(__name__)

T = TypeVar("T")

RECENT = 400  # samples of an arm, and mirror results, that a rule looks at
MAX_SILENCES = 3  # health checks in a row before an engine counts as gone
VERSION_JUMP = 1000  # over whatever leased tables a dead controller gave out
VERSION_KEY = "table_version"


class Records(Protocol):
    """What the controller keeps; `sidecar.store` does. Blocks, and is called from one thread."""

    def put_candidate(self, candidate: Candidate) -> None: ...
    def candidates(self, search_id: str | None = None) -> Sequence[Candidate]: ...
    def add_event(self, kind: str, text: str, candidate_id: str = "") -> object: ...
    def events(self, after: int = 0, limit: int = 1000) -> Sequence[StoredEvent]: ...
    def add_verdict(self, drifted: bool, text: str, json: str = "{}") -> object: ...
    def verdicts(self, limit: int = 1000) -> Sequence[StoredVerdict]: ...
    def audit(self, who: str, what: str, why: str, outcome: str) -> object: ...
    def put(self, key: str, value: object) -> None: ...
    def get(self, key: str) -> Any: ...


class MakesWorkloads(Protocol):
    async def workload(self, live: Sequence[Any], max_concurrency: int) -> Workload: ...


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    name: str
    version: str  # of this program
    state: Path
    autonomy: Autonomy
    policy: RolloutPolicy
    lease_s: float
    launch: str  # "" is derived from the primary
    budget: str
    agent: str
    keeps_requests: bool
    tick_s: float = 0.2
    health_s: float = 1.0
    drain_s: float = 30.0  # for streams on an engine before it reverts
    min_live_requests: int = 8  # kept before a search has anything to tune on


@dataclass(slots=True)
class _Health:
    digest: str = ""
    num_changes: int = 0  # of the digest, by us: an answer from before one is stale
    num_silences: int = 0
    is_cold: bool = True  # has never answered: no engine control there

    def runs(self, digest: str) -> None:
        self.digest = digest
        self.num_changes += 1

    @property
    def is_good(self) -> bool:
        return self.is_cold or self.num_silences < MAX_SILENCES


@dataclass(slots=True)
class _Seen:
    """Recent traffic, newest last."""

    stable: deque[RequestSample] = field(default_factory=lambda: deque(maxlen=RECENT))
    canary: deque[RequestSample] = field(default_factory=lambda: deque(maxlen=RECENT))
    mirrored: deque[MirrorResult] = field(default_factory=lambda: deque(maxlen=RECENT))
    baseline: tuple[RequestSample, ...] = ()

    def add(self, state: PlaneState, digest: str | None) -> None:
        """`digest` is the candidate's; what others answered on its arm is not its doing."""
        for sample in state.samples:
            if sample.arm == Role.STABLE:
                self.stable.append(sample)
            elif sample.digest == digest:
                self.canary.append(sample)
        self.mirrored.extend(r for r in state.mirrored if r.digest == digest)

    def start(self) -> None:
        """Forget what an earlier candidate did."""
        self.canary.clear()
        self.mirrored.clear()
        self.baseline = ()


class Controller:
    """Keeps `control.Operator`. Build it, `reconcile`, then `run` until cancelled."""

    def __init__(
        self,
        *,
        settings: ControllerSettings,
        records: Records,
        first_table: RoutingTable,
        commit: Callable[[RoutingTable], None],
        engines: Mapping[str, Engine],
        pulses: Mapping[str, Engine],
        swap_key: bytes,
        window: Window,
        reservoir: Reservoir,
        detector: Callable[[], DriftDetector],
        tokenizer: MakesWorkloads,
        search: Callable[[SearchOrder, str], Any],
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` maps every URL to its control, whether or not anybody answers there (else the
        arm is cold); `pulses` are the same with a short deadline. `commit` writes a committed table
        where data planes find it without us, and blocks. `detector` is called in a thread, once
        there is traffic to judge: its libraries take seconds to import."""
        self._settings = settings
        self._records = records
        self._commit = commit
        self._engines, self._pulses = engines, pulses
        self._swap_key = swap_key
        self._window = window
        self._reservoir = reservoir
        self._make_detector = detector
        self._detector: DriftDetector | None = None
        self._detector_lock = asyncio.Lock()  # it learns in threads, one at a time
        self._tokenizer = tokenizer
        self._search = search
        self._metrics = metrics
        self._clock = clock
        self._fleet = Fleet(first_table, self._report, settings.lease_s, clock)
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._engine_lock = asyncio.Lock()  # one swap or revert at a time
        self._health = {url: _Health() for url in engines}
        self._seen = _Seen()
        self._profiles: asyncio.Queue[TrafficProfile] = asyncio.Queue(maxsize=4)
        self._profile: TrafficProfile | None = None
        self._version = first_table.version
        self._kept_version = 0  # belongs to the store's thread
        self._serving, self._spare = first_table.stable, first_table.canary
        self._rollout: Rollout | None = None  # the open one, or the live candidate's
        self._known: dict[str, Candidate] = {}  # those in the rollout's hands
        self._incumbent = ""  # live on the stable arm while another one is tried
        self._search_id = ""  # of the running search
        self._to_search: asyncio.Queue[tuple[str, str]] = asyncio.Queue(maxsize=1)
        self._fresh_search = ""  # ended, its winner not yet looked at
        self._last_end = ""  # "rolled_back" after one
        self._last_verdict = ""
        self._last_hold = ""
        self._onset_s = float("-inf")  # of the last drift
        self._reverts: list[tuple[Sequence[str], str]] = []  # due once we run
        self._chores: asyncio.TaskGroup | None = None
        self._started_s = clock()

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def is_ready(self) -> bool:
        return self._chores is not None

    # --- start ------------------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """After a restart: bring store, engines and table back to one truth. What was under way
        when the last controller died is rolled back; what was live stays live if it still runs."""
        stored = await self._stored(lambda: self._records.get(VERSION_KEY))
        self._version = max(self._version, int(stored or 0)) + VERSION_JUMP
        await asyncio.gather(*(self._check(url) for url in self._engines))
        live: Candidate | None = None
        for candidate in await self._stored(self._records.candidates):
            if candidate.stage is Stage.LIVE and self._runs(candidate):
                live = candidate
            elif candidate.stage in MEETS_TRAFFIC:
                self._known[candidate.id] = candidate
                await self._record(candidate.id, Event.BREACHED, "controller restarted")
        await self._take_up(live)

    def _runs(self, live: Candidate) -> bool:
        """Does the arm that serves still run it?"""
        table = self._fleet.table
        arm = table.canary if table.weight == 1.0 else table.stable
        return bool(arm) and all(self._digest(u) == live.change.digest for u in arm)

    async def _take_up(self, live: Candidate | None) -> None:
        """A live candidate stays; everything else goes to stock."""
        if live is not None:
            if self._fleet.table.weight < 1.0:  # it served as stable while another was tried
                self._serving, self._spare = self._spare, self._serving
            self._known[live.id] = live
            self._rollout = _live(live, self._clock())
        await self._publish_committed(self._table(weight=1.0 if live else 0.0))
        self._reverts.append((self._serving if live else self._spare, "controller restarted"))

    async def run(self) -> None:
        """Until cancelled. A chore that fails is logged and goes on."""
        async with asyncio.TaskGroup() as group:
            self._chores = group
            for arm, why in self._reverts:
                self._later(self._to_stock(arm, why))
            self._reverts.clear()
            group.create_task(self._every(self._settings.tick_s, self._tick))
            group.create_task(self._every(self._settings.health_s, self._look_after_engines))
            group.create_task(self._every(0.0, self._judge_traffic))
            group.create_task(self._every(0.0, self._run_search))

    async def _every(self, pause_s: float, chore: Callable[[], Any]) -> None:
        while True:
            try:
                await chore()
            except Exception:
                log.exception("chore failed", extra={"chore": chore.__name__})
                pause_s = max(pause_s, 0.1)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Let the store's last writes end. Engines and store stay the caller's."""
        await asyncio.to_thread(self._store_thread.shutdown)

    # --- traffic ----------------------------------------------------------------------------------

    def _report(self, state: PlaneState) -> None:
        """One data plane's report; must not block."""
        self._metrics.observe(state)
        self._seen.add(state, self._rollout.digest if self._rollout else None)
        if self._settings.keeps_requests:
            for request in state.reservoir:
                self._reservoir.add(request)
        for sample in state.samples:
            profile = self._window.add(sample)
            if profile is not None:
                self._offer(profile)

    def _offer(self, profile: TrafficProfile) -> None:
        self._profile = profile
        if self._profiles.full():
            self._profiles.get_nowait()  # the newest counts
        self._profiles.put_nowait(profile)

    async def _judge_traffic(self) -> None:
        profile = await self._profiles.get()
        async with self._detector_lock:
            if self._detector is None:
                self._detector = await asyncio.to_thread(self._make_detector)
            verdict = await asyncio.to_thread(self._detector.update, profile)
        self._last_verdict = str(verdict)
        document = json.dumps(asdict(verdict))
        if verdict.onset_s is not None:
            self._onset_s = verdict.onset_s
        await self._stored(
            lambda: self._records.add_verdict(verdict.drifted, str(verdict), document)
        )
        await self._tell("verdict", str(verdict))
        if verdict.drifted and self._may_search():
            with contextlib.suppress(WrongState):
                await self._start_search(f"drift: {verdict}")

    def _may_search(self) -> bool:
        allowed = self._settings.autonomy.allows(Autonomy.RECOMMEND)
        open_rollout = self._rollout is not None and self._rollout.stage is not Stage.LIVE
        return allowed and not self._search_id and not open_rollout and not self._fresh_search

    # --- searches ---------------------------------------------------------------------------------

    async def _start_search(self, why: str) -> str:
        """Raises `WrongState` when one runs or there is nothing to tune on."""
        if self._search_id:
            raise WrongState(f"search {self._search_id} is running; `trimtab watch` shows it")
        num, wanted = len(self._reservoir), self._settings.min_live_requests
        if num < wanted:
            keeps = self._settings.keeps_requests
            way_out = "wait for traffic" if keeps else "switch reservoir.enabled on"
            raise WrongState(f"{num} live requests are kept and a search needs {wanted}; {way_out}")
        self._search_id = f"s-{time.strftime('%Y%m%d-%H%M%S')}"
        self._to_search.put_nowait((self._search_id, why))
        return self._search_id

    async def _run_search(self) -> None:
        search_id, why = await self._to_search.get()
        try:
            code = await self._searched(search_id, why)
            async with self._detector_lock:
                if self._detector is not None:
                    await asyncio.to_thread(self._detector.rebase)
            self._fresh_search = search_id if code == WINNER else ""
        except (WrongState, EngineGone) as e:
            await self._tell("experiment", f"search {search_id} could not start: {e}")
        finally:
            self._search_id = ""

    async def _searched(self, search_id: str, why: str) -> int:
        settings = self._settings
        await self._tell("experiment", f"search {search_id} starts ({why})")
        live = self._reservoir.snapshot(self._onset_s)
        if len(live) < settings.min_live_requests:
            live = self._reservoir.snapshot()
        workload = await self._tokenizer.workload(live, _concurrency(self._profile))
        if len(workload.requests) < settings.min_live_requests:
            raise WrongState(f"only {len(workload.requests)} live requests could be tokenised")
        launch = settings.launch or await self._launch_line()
        order = SearchOrder(search_id, settings.state, launch, settings.budget, settings.agent)
        code = int(await self._search(order, workload_to_json(workload)))
        said = {WINNER: "found a winner", NO_WINNER: "found no winner"}
        text = said.get(code, f"failed with exit code {code}; see search.log in the state folder")
        await self._tell("experiment", f"search {search_id} {text}")
        return code

    async def _launch_line(self) -> str:
        """An engine like the primary."""
        for url in (*self._serving, *self._spare):
            if not self._health[url].is_cold:
                info = await asyncio.to_thread(self._engines[url].info)
                if info.engine != "embedded":
                    raise WrongState(
                        f"{url} is {info.engine}, and only you know how it was started; set "
                        "search.launch to its launch command"
                    )
                return f"trimtab engine embedded --model {info.model} --dtype {info.dtype}"
        raise WrongState("no upstream has engine control; set search.launch")

    # --- rollout ----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if self._rollout is None or self._rollout.stage is Stage.LIVE:
            await self._look_for_winner()
        rollout = self._rollout
        if rollout is None:
            return
        action = decide(rollout, self._figures(rollout), self._clock(), self._settings.policy)
        await self._carry_out(rollout, action)

    def _figures(self, rollout: Rollout) -> Figures:
        seen = self._seen
        return Figures(
            stable=ArmFigures(tuple(seen.stable)),
            canary=ArmFigures(tuple(seen.canary)),
            baseline=ArmFigures(seen.baseline),
            mirrored=tuple(seen.mirrored),
            trouble=self._trouble(rollout),
        )

    def _trouble(self, rollout: Rollout) -> str | None:
        if rollout.stage not in MEETS_TRAFFIC:
            return None
        for url in self._spare:
            health = self._health[url]
            if not health.is_good:
                return f"engine {url} does not answer"
            if health.digest != rollout.digest:
                return f"engine {url} no longer runs it: was it restarted?"
        return None

    async def _look_for_winner(self) -> None:
        """One admission per search: what an operator took back does not come again by itself."""
        search_id, until = self._fresh_search, furthest(self._settings.autonomy)
        if not search_id:
            return
        found = await self._stored(lambda: self._records.candidates(search_id))
        confirmed = [c for c in found if c.stage is Stage.CONFIRMED]
        if not self._fresh_search:
            return  # a rollback came meanwhile
        self._fresh_search = ""
        if not confirmed or until is None:
            return
        best = max(confirmed, key=lambda c: c.gain or 0.0)
        try:
            await self._open(best, until)
        except WrongState as e:
            await self._tell("stage", f"{best.id} waits: {e}", best.id)

    async def _open(self, candidate: Candidate, until: Stage) -> None:
        """Begin a rollout. A live candidate's arm becomes the stable one first."""
        cold = [u for u in self._spare if self._health[u].is_cold]
        if cold or not self._spare:
            what = f"shadow {cold[0]} has no engine control" if cold else "there is no --shadow"
            raise WrongState(f"{what}; start one with `trimtab engine` and pass its URL")
        live, turned = self._rollout, None
        if live is not None:
            self._incumbent = live.candidate_id
            self._serving, self._spare = self._spare, self._serving
            turned = self._publish(self._table(weight=0.0))
        self._known[candidate.id] = candidate
        self._last_hold = self._last_end = ""
        self._rollout = Rollout(
            candidate.id, candidate.change.digest, candidate.stage, self._clock(), until
        )
        if turned is not None:
            await self._kept(turned)

    async def _carry_out(self, rollout: Rollout, action: Action) -> None:
        match action.do:
            case Do.ADMIT:
                await self._admit(rollout)
            case Do.STEP:
                await self._step(rollout, action)
            case Do.COMMIT:
                await self._go_live(rollout, action)
            case Do.ROLL_BACK:
                self._take_back(action.reason)
            case Do.HOLD:
                await self._hold(rollout, action)
            case Do.WAIT:
                pass

    async def _hold(self, rollout: Rollout, action: Action) -> None:
        """Say so once per reason, its figures aside."""
        kind = action.reason.partition(":")[0]
        if kind != self._last_hold:
            self._last_hold = kind
            await self._tell("stage", f"{rollout.candidate_id} holds: {action.reason}")

    async def _admit(self, rollout: Rollout) -> None:
        """Swap it onto the spare arm, then mirror."""
        portfolio, arm = self._known[rollout.candidate_id].change, self._spare
        try:
            async with self._engine_lock:
                took_s = await self._swap(arm, portfolio)
        except (CandidateError, PermissionError, EngineGone) as e:
            if self._rollout is rollout:
                self._rollout = None
                await self._end(rollout.candidate_id, Event.FAULTED, f"not taken: {e}", arm)
            return
        if self._rollout is not rollout:
            return  # rolled back meanwhile; whoever did that reverts
        self._seen.start()
        self._rollout = rollout.at(Stage.SHADOW, self._clock(), step=-1)
        table = self._publish(self._table(weight=0.0, leased=True, mirror=True))
        await self._record(rollout.candidate_id, Event.ADMITTED, f"swapped in {took_s:.2f} s")
        await self._kept(table)

    async def _step(self, rollout: Rollout, action: Action) -> None:
        if rollout.stage is Stage.SHADOW:
            self._seen.baseline = tuple(self._seen.stable)
        self._rollout = rollout.at(Stage.CANARY, self._clock(), rollout.step + 1)
        mirror = action.weight <= self._settings.policy.mirror_up_to
        table = self._publish(self._table(action.weight, leased=True, mirror=mirror))
        self._last_hold = ""
        if action.event is not None:
            await self._record(rollout.candidate_id, action.event, action.reason)
        await self._kept(table)

    async def _go_live(self, rollout: Rollout, action: Action) -> None:
        """All that others can see changes before the first await."""
        old, self._incumbent = self._incumbent, ""
        self._rollout = rollout.at(Stage.LIVE, self._clock(), rollout.step)
        table = self._publish(self._table(weight=1.0))
        await self._record(rollout.candidate_id, Event.HELD, action.reason)
        await self._kept(table)
        if old:
            await self._record(old, Event.OUTDONE, f"{rollout.candidate_id} took its place")
            await self._to_stock(table.stable, "superseded")

    def _take_back(self, why: str) -> RoutingTable:
        """Routing flips now, without waiting for anything; the rest follows by itself."""
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            return self._fleet.table
        self._last_end = Stage.ROLLED_BACK
        table = self._publish(self._table(weight=0.0))
        self._later(self._clean_up(rollout.candidate_id, table, why))
        return table

    async def _clean_up(self, candidate_id: str, table: RoutingTable, why: str) -> None:
        text = f"table {table.version}: everything to stable ({why})"
        await self._tell("rollback", text, candidate_id)
        await self._kept(table)
        await self._end(candidate_id, Event.BREACHED, why, table.canary)

    async def _end(self, candidate_id: str, event: Event, why: str, arm: Sequence[str]) -> None:
        await self._record(candidate_id, event, why)
        await self._restore_incumbent()
        await self._to_stock(arm, why)

    async def _restore_incumbent(self) -> None:
        """The live candidate that served as stable is again the one that a rollback ends."""
        if not self._incumbent or self._rollout is not None:
            return
        candidate, self._incumbent = self._known[self._incumbent], ""
        self._serving, self._spare = self._spare, self._serving
        self._seen.start()
        self._rollout = _live(candidate, self._clock())
        await self._publish_committed(self._table(weight=1.0))

    def _later(self, chore: Any) -> None:
        assert self._chores is not None, "the controller is not running"
        self._chores.create_task(self._guarded(chore))

    async def _guarded(self, chore: Any) -> None:
        try:
            await chore
        except Exception:
            log.exception("chore failed", extra={"chore": getattr(chore, "__name__", "")})

    # --- engines ----------------------------------------------------------------------------------

    async def _swap(self, arm: Sequence[str], portfolio: Portfolio) -> float:
        """Onto every engine of the arm; seconds. When one refuses, those before it go back."""
        signature, began_s = sign(self._swap_key, Scope.SERVE, portfolio.digest), self._clock()
        done: list[str] = []
        try:
            for url in arm:
                report = await asyncio.to_thread(self._engines[url].swap, portfolio, signature)
                self._health[url].runs(report.digest)
                done.append(url)
        except (CandidateError, PermissionError, EngineGone):
            for url in done:
                report = await asyncio.to_thread(self._engines[url].revert)
                self._health[url].runs(report.digest)
            raise
        took_s = self._clock() - began_s
        await self._tell("engine", f"swapped {portfolio.digest[:12]} in {took_s:.2f} s")
        return took_s

    async def _to_stock(self, arm: Sequence[str], why: str) -> None:
        """Drain each engine of the arm, then revert it. One that does not answer is left alone."""
        for url in arm:
            if self._health[url].is_cold:
                continue
            try:
                async with self._engine_lock:
                    await self._revert(url, self._engines[url], why)
            except (CandidateError, PermissionError, EngineGone) as e:
                await self._tell("engine", f"{url} could not go back to stock: {e}")

    async def _revert(self, url: str, engine: Engine, why: str) -> None:
        info = await asyncio.to_thread(engine.info)
        self._health[url].runs(info.digest)
        if info.digest == STOCK.digest:
            return
        await asyncio.to_thread(engine.drain, self._settings.drain_s)
        if info.previous_digest == STOCK.digest:
            report = await asyncio.to_thread(engine.revert)
        else:
            signature = sign(self._swap_key, Scope.SERVE, STOCK.digest)
            report = await asyncio.to_thread(engine.swap, STOCK, signature)
        self._health[url].runs(report.digest)
        await self._tell("engine", f"{url} is back to stock in {report.swap_s:.3f} s ({why})")

    async def _look_after_engines(self) -> None:
        await asyncio.gather(*(self._check(url) for url in self._engines))
        await asyncio.gather(*(self._collect_steps(url) for url in self._engines))
        self._metrics.show(await self.status())

    async def _check(self, url: str) -> None:
        health = self._health[url]
        if self._engine_lock.locked():
            return  # its swap or revert says how it is
        num_changes = health.num_changes
        try:
            info = await asyncio.to_thread(self._pulses[url].info)
        except EngineGone:
            health.num_silences += 1
            if health.num_silences == MAX_SILENCES and not health.is_cold:
                await self._tell("engine", f"{url} does not answer")
            return
        if not health.is_good:
            await self._tell("engine", f"{url} answers again")
        health.num_silences, health.is_cold = 0, False
        if num_changes == health.num_changes and not self._engine_lock.locked():
            health.digest = info.digest

    async def _collect_steps(self, url: str) -> None:
        answers_clients = url in self._serving or self._fleet.table.weight > 0
        if not answers_clients or self._health[url].is_cold or not self._health[url].is_good:
            return
        with contextlib.suppress(EngineGone):
            self._window.add_steps(await asyncio.to_thread(self._engines[url].steps))

    def _digest(self, url: str) -> str:
        return self._health[url].digest

    # --- tables -----------------------------------------------------------------------------------

    def _table(self, weight: float, leased: bool = False, mirror: bool = False) -> RoutingTable:
        self._version += 1
        arms = (*self._serving, *self._spare)
        return RoutingTable(
            version=self._version,
            stable=self._serving,
            canary=self._spare,
            weight=weight,
            mirror=mirror,
            lease_s=self._settings.lease_s if leased else None,
            digests=tuple((u, self._digest(u)) for u in arms if self._digest(u)),
        )

    def _publish(self, table: RoutingTable) -> RoutingTable:
        self._fleet.publish(table)
        return table

    async def _publish_committed(self, table: RoutingTable) -> None:
        await self._kept(self._publish(table))

    async def _kept(self, table: RoutingTable) -> None:
        def write() -> None:
            if table.version <= self._kept_version:
                return  # a rollback overtook it
            self._kept_version = table.version
            self._records.put(VERSION_KEY, table.version)
            if table.lease_s is None:
                self._commit(table)

        await self._stored(write)
        kind = "committed" if table.lease_s is None else f"leased for {table.lease_s:g} s"
        mirror = ", mirrored" if table.mirror else ""
        text = f"table {table.version}: weight {table.weight:g}{mirror}, {kind}"
        await self._tell("table", text, self._rollout.candidate_id if self._rollout else "")

    # --- store ------------------------------------------------------------------------------------

    async def _stored(self, work: Callable[[], T]) -> T:
        """In the store's one thread, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, work)

    async def _tell(self, kind: str, text: str, candidate_id: str = "") -> None:
        log.info(kind, extra={"text": text, "candidate": candidate_id})
        await self._stored(lambda: self._records.add_event(kind, text, candidate_id))

    async def _record(self, candidate_id: str, event: Event, note: str) -> None:
        candidate = self._known[candidate_id].after(event, time.time(), note)
        self._known[candidate_id] = candidate
        await self._stored(lambda: self._records.put_candidate(candidate))
        await self._tell("stage", f"{candidate_id} is {candidate.stage}: {note}", candidate_id)

    # --- operator ---------------------------------------------------------------------------------

    @property
    def _state(self) -> str:
        rollout = self._rollout
        if rollout is not None and rollout.stage is not Stage.LIVE:
            return Stage.SHADOW if rollout.stage is Stage.CONFIRMED else rollout.stage
        if self._search_id or self._fresh_search:  # its winner is looked at in a moment
            return "searching"
        return rollout.stage if rollout is not None else self._last_end or "idle"

    async def status(self) -> Status:
        totals, table = self._metrics.totals, self._fleet.table
        asked = ("ok", "diff", "error")
        return Status(
            name=self._settings.name,
            version=self._settings.version,
            autonomy=self._settings.autonomy,
            state=self._state,
            candidate_id=self._rollout.candidate_id if self._rollout else "",
            table_version=table.version,
            num_data_planes=self._fleet.num_planes,
            num_requests=totals.sum("requests"),
            num_failed=totals.sum("requests", lambda of: of.get("outcome") in FAILURES),
            num_mirrored=totals.sum("mirrored", lambda of: of.get("outcome") in asked),
            num_diverged=totals.sum("mirrored", lambda of: of.get("outcome") == "diff"),
            arms=self._arms(table),
            last_verdict=self._last_verdict,
            uptime_s=self._clock() - self._started_s,
        )

    def _arms(self, table: RoutingTable) -> tuple[ArmStatus, ...]:
        sides = (
            (Role.STABLE, table.stable, 1.0 - table.weight),
            (Role.CANARY, table.canary, table.weight),
        )
        return tuple(
            ArmStatus(
                url,
                role,
                weight / len(urls),
                self._digest(url),
                self._health[url].is_good,
                not self._health[url].is_cold,
            )
            for role, urls, weight in sides
            for url in urls
        )

    async def happenings(self, after: int) -> Sequence[Happening]:
        found = await self._stored(lambda: self._records.events(after))
        return [Happening(e.seq, e.at, e.kind, e.text, e.candidate_id) for e in found]

    async def candidates(self) -> Sequence[CandidateCard]:
        return [_card(c) for c in await self._stored(self._records.candidates)]

    async def profile(self) -> str:
        if self._profile is None:
            raise NotThere("no window of traffic is full yet; send requests, then ask again")
        return profile_to_json(self._profile)

    async def verdicts(self) -> Sequence[VerdictCard]:
        found = await self._stored(self._records.verdicts)
        return [VerdictCard(v.at, v.drifted, v.text, v.json) for v in found]

    async def retune(self, why: str) -> str:
        return await self._start_search(why or "asked by the operator")

    async def promote(self, candidate_id: str, why: str) -> str:
        """Let it go all the way, through every check that it would meet by itself."""
        rollout = self._rollout
        if rollout is not None and rollout.candidate_id == candidate_id:
            self._rollout = replace(rollout, until=Stage.LIVE)
            return self._state
        if rollout is not None and rollout.stage is not Stage.LIVE:
            raise WrongState(
                f"{rollout.candidate_id} is {rollout.stage}, and one rollout runs at a time; "
                "wait for it, or `trimtab rollback`"
            )
        found = {c.id: c for c in await self._stored(self._records.candidates)}
        if candidate_id not in found:
            raise NotThere(f"candidate {candidate_id} is not there; `trimtab candidates` lists all")
        candidate = found[candidate_id]
        if candidate.stage is not Stage.CONFIRMED:
            raise WrongState(
                f"candidate {candidate_id} is {candidate.stage}; only a confirmed one can be "
                "promoted, `trimtab retune` looks for one"
            )
        await self._open(candidate, Stage.LIVE)
        return self._state

    async def rollback(self, why: str) -> RolledBack:
        """From any state; when there is nothing to take back it says so and changes nothing."""
        began_s, had = self._clock(), self._rollout is not None
        self._fresh_search = ""  # nor does a search's winner come by itself now
        table = self._take_back(why or "asked by the operator")
        wait_s = self._settings.lease_s + 1.0
        complete = await self._fleet.acknowledged(table.version, wait_s)
        state = Stage.ROLLED_BACK if had else self._state
        return RolledBack(state, table.version, self._clock() - began_s, complete)

    async def audit(self, who: str, what: str, why: str, outcome: str) -> None:
        await self._stored(lambda: self._records.audit(who, what, why, outcome))
        await self._tell("audit", f"{who}: {what}{f' ({why})' if why else ''}: {outcome}")


def _live(candidate: Candidate, now_s: float) -> Rollout:
    return Rollout(candidate.id, candidate.change.digest, Stage.LIVE, now_s, Stage.LIVE)


def _concurrency(profile: TrafficProfile | None) -> int:
    if profile is None or math.isnan(profile.concurrency_p50):
        return 4
    return max(1, round(profile.concurrency_p50))


def _card(candidate: Candidate) -> CandidateCard:
    return CandidateCard(
        id=candidate.id,
        search_id=candidate.search_id,
        parent_id=candidate.parent_id or "",
        author=candidate.author,
        summary=candidate.summary,
        digest=candidate.change.digest,
        stage=candidate.stage,
        story=candidate.story,
        gain=candidate.gain,
    )
