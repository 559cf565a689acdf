"""`trimtab demo`: one true turn of the loop on this machine, told as it happens.

Everything in it is the product: the engines, the sidecar and the search are the same commands an
operator would start, and the requests are sent as any client would. Only the settings are the
demo's own: short windows, short canary steps, `autonomy = auto`. Which engines play, our own or
stock vLLM servers, is `sidecar.troupe`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compiler.candidates import Candidate
from compiler.candidates import Stage as Life
from drift.detector import DriftKind
from engines.embedded import SHIPPED_MODEL
from engines.engine import Scope, sign
from engines.host import socket_path
from engines.remote import RemoteEngine, control_address, swap_key
from sidecar import closing
from sidecar.closing import ClosingTable
from sidecar.control import ControlClient, ControllerGone, RolledBack, Status
from sidecar.control import control_address as controller_address
from sidecar.replay import Replayer, ReplayReport
from sidecar.store import FILE_NAME, SqliteStore
from sidecar.supervisor import EngineProcess, as_command, free_ports, our_command
from sidecar.traffic import Domain, Phase, PlannedRequest, Shape, plan, tokenizer
from sidecar.troupe import EMBEDDED, Troupe

SHAPE = Shape(divide_lengths_by=8.0, prefix_share=0.5)
BUSY = 0.45  # share of the primary's time that the traffic is planned to take; 0.6 is the promise
MAX_PER_S = 5.0  # requests: the clients live on the same two cores
WINDOW = 40  # requests of one drift window
NUM_CHAT = 2 * WINDOW
MANY = 100_000  # code-like requests: until told to stop
NUM_CLOSING, NUM_PAIRS, CONCURRENCY = 24, 5, 4
NO_WINNER = 3

SETTINGS = """\
autonomy = "auto"
[drift]
window_requests = {window}
window_s = 60.0
[canary]
steps = [0.25, 0.5, 1.0]
step_s = 2.0
step_requests = 6
shadow_requests = 12
max_latency_ratio = 4.0
[search]
budget = "{budget}"
agent = "{agent}"
launch = {launch}
"""


class DemoFailed(RuntimeError):
    """The turn did not end well. Says where, and where the logs are."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """`agent` is `search`, or `no-effect` for a search that cannot win."""

    troupe: Troupe = EMBEDDED
    seed: int = 0
    agent: str = "search"
    search_budget: str = ""  # "": the troupe's own
    keep: Path | None = None  # state and logs go here and stay


@dataclass(frozen=True, slots=True)
class Cast:
    """What runs. `control` and `engine` (the shadow's) block: call them in threads."""

    primary: EngineProcess
    shadow: EngineProcess
    serve: EngineProcess
    control: ControlClient
    engine: RemoteEngine
    state: Path


def run(settings: DemoSettings) -> int:
    """The whole demo; blocks. 0 with a winner, 3 without; raises `DemoFailed`."""
    with _home(settings.keep) as home:
        return asyncio.run(_Demo(settings, home).tell())


@contextlib.contextmanager
def _home(keep: Path | None) -> Iterator[Path]:
    """State, sockets and logs of this demo alone; its children inherit the two variables. A demo
    that fails leaves its folder behind: the logs say why."""
    home = keep or Path(tempfile.mkdtemp(prefix="trimtab-demo-"))
    (home / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(home / "run")
    os.environ["XDG_STATE_HOME"] = str(home / "state")
    try:
        yield home
    except BaseException as e:
        if isinstance(e, Exception):
            raise DemoFailed(f"{e} (logs: {home})") from e
        raise
    if keep is None:
        shutil.rmtree(home, ignore_errors=True)


@dataclass(slots=True)
class _Demo:
    settings: DemoSettings
    home: Path
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    began_s: float = field(default_factory=time.monotonic)

    async def tell(self) -> int:
        self.say(f"two {self.settings.troupe.name} engines and the sidecar start")
        async with self._cast() as cast, asyncio.TaskGroup() as group:
            self.say(f"ready: {_ready(cast.primary)} primary, {_ready(cast.shadow)} shadow")
            narrator = group.create_task(self._narrate(cast.control))
            rates = await self._rates(cast)
            replayer = Replayer(cast.serve.url)
            traffic = group.create_task(replayer.run(self._traffic(rates)))
            try:
                winner = await self._turn(cast)
                taken_back = await self._take_back(cast) if winner is not None else None
            finally:
                replayer.stop()
                report = await traffic
            status = await asyncio.to_thread(cast.control.status)
            candidates = await asyncio.to_thread(_candidates, cast.state)
            table = await self._closing(cast, winner) if winner is not None else None
            narrator.cancel()
        self._sum_up(self._facts(report, status, candidates, cast, table, taken_back), table)
        return self._verdict(report, winner, candidates, table)

    def say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.began_s:6.1f} s] {text}", markup=False)

    # --- the cast ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _cast(self) -> AsyncIterator[Cast]:
        """The last core is for what is measured: the shadow and the search's engines. All else,
        this process included, keeps to the others."""
        *others, last = sorted(os.sched_getaffinity(0))
        first = others[0] if others else last
        os.sched_setaffinity(0, others or [last])  # children inherit it
        ports, troupe = free_ports(4), self.settings.troupe
        config = self.home / "trimtab.toml"
        config.write_text(
            SETTINGS.format(
                window=WINDOW,
                budget=self.settings.search_budget or troupe.search_budget,
                agent=self.settings.agent,
                launch=json.dumps(troupe.launch(last)),
            )
        )
        urls = [f"http://127.0.0.1:{port}" for port in ports[:3]]
        with contextlib.ExitStack() as stack:
            primary, shadow = (
                stack.enter_context(
                    contextlib.closing(
                        EngineProcess(
                            as_command([*shlex.split(troupe.launch(cpu)), "--port", str(port)]),
                            url,
                            self.home / f"{name}.log",
                            control=socket_path(control_address(url)),
                            grace_s=troupe.grace_s,
                        )
                    )
                )
                for name, url, port, cpu in zip(
                    ("primary", "shadow"), urls, ports, (first, last), strict=False
                )
            )
            for engine in (primary, shadow):
                await asyncio.to_thread(engine.wait_ready, troupe.ready_s)
            serve = EngineProcess(
                our_command(
                    *("serve", "--config", str(config), "--name", "demo"),
                    *("--upstream", urls[0], "--shadow", urls[1]),
                    *("--port", str(ports[2]), "--admin-port", str(ports[3])),
                ),
                urls[2],
                self.home / "serve.log",
            )
            stack.callback(serve.close)
            await asyncio.to_thread(serve.wait_ready)
            state = self.home / "state" / "trimtab" / "demo"
            control = ControlClient(controller_address(state))
            stack.callback(control.close)
            engine_control = RemoteEngine(control_address(urls[1]))
            stack.callback(engine_control.close)
            await self._until(control, lambda s: s.num_data_planes > 0, 30.0, "the controller")
            yield Cast(primary, shadow, serve, control, engine_control, state)

    async def _narrate(self, control: ControlClient) -> None:
        """What `trimtab watch` would show, but a verdict only when it is another one."""
        events, last = control.watch(), ""
        with contextlib.suppress(ControllerGone):
            while (h := await asyncio.to_thread(next, events, None)) is not None:
                gist = next((k for k in DriftKind if f"({k}," in h.text), "as before")
                if h.kind == "verdict" and gist == last:
                    continue
                last = gist if h.kind == "verdict" else last
                self.say(f"{h.kind}: {h.text}")

    async def _until(
        self, control: ControlClient, done: Callable[[Status], bool], within_s: float, what: str
    ) -> Status:
        """Poll until `done`. Raises `DemoFailed`."""
        until_s = time.monotonic() + within_s
        while True:
            with contextlib.suppress(ControllerGone):
                status = await asyncio.to_thread(control.status)
                if done(status):
                    return status
            if time.monotonic() > until_s:
                raise DemoFailed(f"{what} did not come within {within_s:g} s")
            await asyncio.sleep(0.25)

    # --- the turn ---------------------------------------------------------------------------------

    async def _rates(self, cast: Cast) -> dict[Domain, float]:
        """Requests per second of each kind, from what one takes on an idle primary."""
        rates = {}
        for domain in Domain:
            sample = self._plan([Phase(domain, 8, MAX_PER_S)], seed=1)
            report = await Replayer(cast.primary.url, max_concurrency=1).run(sample)
            mean_s = sum(report.e2e_s()) / max(1, report.num_ok)
            rates[domain] = min(MAX_PER_S, BUSY / mean_s)
            self.say(
                f"{domain}-like requests take {mean_s * 1e3:.0f} ms alone: {rates[domain]:.1f} a "
                f"second keep the primary {rates[domain] * mean_s:.0%} busy"
            )
        return rates

    def _traffic(self, rates: Mapping[Domain, float]) -> Iterator[PlannedRequest]:
        """Chat-like, then code-like without an end."""
        chat = Phase(Domain.CHAT, NUM_CHAT, rates[Domain.CHAT])
        return self._plan([chat, Phase(Domain.CODE, MANY, rates[Domain.CODE])], seed=0)

    def _plan(self, phases: Sequence[Phase], seed: int) -> Iterator[PlannedRequest]:
        encode = tokenizer(SHIPPED_MODEL)
        return plan(phases, SHIPPED_MODEL.name, self.settings.seed + seed, SHAPE, encode)

    async def _turn(self, cast: Cast) -> Candidate | None:
        """Drift, search, shadow, canary, live. The candidate that went live, or None."""
        searches = {"searching", *_MEETS_TRAFFIC}
        await self._until(cast.control, lambda s: s.state in searches, 90.0, "a drift verdict")
        after = await self._until(
            cast.control,
            lambda s: s.state != "searching",
            self.settings.troupe.search_s,
            "the search's end",
        )
        if after.state == "idle":
            if not await asyncio.to_thread(_candidates, cast.state):
                raise DemoFailed("the search ended without one proposal; see search.log")
            return None
        await self._until(
            cast.control, lambda s: s.state in {"live", "rolled_back", "idle"}, 60.0, "the switch"
        )
        found = await asyncio.to_thread(_candidates, cast.state)
        return next((c for c in found if c.stage is Life.LIVE), None)

    async def _take_back(self, cast: Cast) -> RolledBack:
        """One call, with requests in flight; then the primary answers a little longer."""
        self.say("everything runs on the new forward pass; now one call takes it back")
        await asyncio.sleep(2.0)
        done = await asyncio.to_thread(cast.control.rollback, "the demo takes it back")
        if not done.complete:
            raise DemoFailed("the rollback was not acknowledged by every data plane")
        await asyncio.sleep(2.0)  # the primary answers again; what was in flight ends where it is
        return done

    async def _closing(self, cast: Cast, winner: Candidate) -> ClosingTable:
        """The traffic has stopped and the search is over: only the shadow works now."""
        self.say("closing table: the same code-like requests, old and new forward, in turn")
        await self._until(cast.control, lambda s: _is_stock(s, cast.shadow.url), 20.0, "stock")
        requests = await asyncio.to_thread(
            lambda: list(self._plan([Phase(Domain.CODE, NUM_CLOSING, 1.0)], seed=2))
        )
        signature = sign(await asyncio.to_thread(swap_key), Scope.SERVE, winner.change.digest)
        return await closing.measure(
            cast.engine,
            cast.shadow.url,
            requests,
            winner.change,
            signature,
            num_pairs=NUM_PAIRS,
            concurrency=CONCURRENCY,
        )

    # --- the end ----------------------------------------------------------------------------------

    def _sum_up(self, facts: Iterator[tuple[str, str]], table: ClosingTable | None) -> None:
        self.console.print()
        if table is not None:
            self.console.print(_figures(table))
        shown = Table(show_header=False, box=None)
        for name, value in facts:
            shown.add_row(name, value)
        self.console.print(shown)

    def _facts(
        self,
        report: ReplayReport,
        status: Status,
        candidates: Sequence[Candidate],
        cast: Cast,
        table: ClosingTable | None,
        taken_back: RolledBack | None,
    ) -> Iterator[tuple[str, str]]:
        ready_s = cast.shadow.start_to_ready_s or 0.0
        if table is not None:
            yield "old", self.settings.troupe.baseline
            pairs = len(table.swaps_s)
            yield (
                "swap + revert",
                f"p50 {table.swap_and_revert_p50_s * 1e3:.1f} ms over {pairs} pairs, on the wire; "
                f"start to ready {ready_s:.1f} s",
            )
        if taken_back is not None:
            yield (
                "rollback",
                f"in force on every data plane after {taken_back.took_s * 1e3:.0f} ms, "
                "with requests in flight",
            )
        finished = [c for c in candidates if c.stage is not Life.PROPOSED]
        hours = _search_hours(candidates)
        rate = f"{len(finished) / hours:.0f} an hour" if hours else "none timed"
        rejected = sum(c.stage is Life.REJECTED for c in candidates)
        yield "experiments", f"{len(finished)} finished verdicts, {rejected} rejected, {rate}"
        yield (
            "requests",
            f"{report.num_sent} sent, {report.num_failed} failed, {report.num_cut} cut, "
            f"{status.num_mirrored} mirrored, {status.num_diverged} diverged",
        )
        yield "whole turn", f"{time.monotonic() - self.began_s:.0f} s"

    def _verdict(
        self,
        report: ReplayReport,
        winner: Candidate | None,
        candidates: Sequence[Candidate],
        table: ClosingTable | None,
    ) -> int:
        failed = report.num_failed + report.num_cut + (table.num_failed if table else 0)
        if failed:
            raise DemoFailed(f"{failed} requests failed or were cut")
        if winner is None:
            self.say(f"no winner, the old forward pass stays: {_why_not(candidates)}")
            return NO_WINNER
        self.say(f"{winner.id} ({winner.summary}) went live and was taken back; nothing failed")
        return 0


_MEETS_TRAFFIC = frozenset({"shadow", "canary", "live"})


def _candidates(state: Path) -> list[Candidate]:
    """Read beside the controller, which owns the store."""
    store = SqliteStore(state / FILE_NAME)
    try:
        return list(store.candidates())
    finally:
        store.close()


def _ready(engine: EngineProcess) -> str:
    return f"{engine.start_to_ready_s or 0.0:.1f} s from start to ready"


def _is_stock(status: Status, url: str) -> bool:
    return any(arm.url == url and not arm.digest for arm in status.arms)


def _search_hours(candidates: Sequence[Candidate]) -> float:
    """From the first verdict's line to the last one's, before any traffic was met."""
    early = {Life.VALID, Life.SCREENED, Life.CONFIRMED, Life.REJECTED}
    at = [line.at for c in candidates for line in c.story if line.stage in early]
    return (max(at) - min(at)) / 3600 if len(at) > 1 else 0.0


def _why_not(candidates: Sequence[Candidate]) -> str:
    taken_back = [c for c in candidates if c.stage is Life.ROLLED_BACK]
    if taken_back:
        return f"{taken_back[-1].id} was rolled back, {taken_back[-1].story[-1].note}"
    return f"none of {len(candidates)} candidates was honestly faster"


def _figures(table: ClosingTable) -> Table:
    title = (
        f"{table.num_requests} code-like requests, {len(table.old)} passes old and "
        f"{len(table.new)} new in turn, {CONCURRENCY} at once, one core"
    )
    shown = Table(title=title, title_justify="left")
    for heading in ("median ± spread", "old", "new", "change"):
        shown.add_column(heading, justify="right")
    for row in table.rows():
        shown.add_row(*row)
    return shown
