"""`trimtab compile`: one search, from a launch command and a workload to a winner with evidence."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.commands.errors import NO
from sidecar.commands.settings import AsJson, ConfigFile, Name, PortOption, StateDir

if TYPE_CHECKING:
    from compiler.bench import Agent
    from compiler.search import SearchReport
    from engines.engine import EngineInfo
    from profiler.reservoir import Workload
    from profiler.window import TrafficProfile

log = logging.getLogger(__name__)

PARTS_OF_EXPERTS = ("Moe", "MoE")


def add_to(app: typer.Typer) -> None:
    app.command("compile")(compile_)


def compile_(
    launch: Annotated[str, typer.Option(help="How the engine is started: trimtab engine …")],
    workload: Annotated[
        str | None, typer.Option(help="Requests to replay, as JSON: a file, or - for stdin.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="What `trimtab profile --json` wrote.")
    ] = None,
    search_id: Annotated[str | None, typer.Option(help="Resume this one.")] = None,
    budget: Annotated[str, typer.Option(help="30m, or '200 experiments'.")] = "30m",
    agent: Annotated[str, typer.Option(help="search, or no-effect.")] = "search",
    name: Name = None,
    port: PortOption = None,
    state: StateDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Search for a faster forward pass; 0 with a winner, 3 without."""
    from compiler import launch as launches
    from sidecar.config import load, parse_budget
    from sidecar.store import FILE_NAME, SqliteStore

    limits, plan, who = parse_budget(budget), launches.parse(launch), _agent(agent)
    folder = load({"name": name, "port": port, "state_dir": state}, config).config.state
    traffic, requests = _inputs(profile, workload)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    store = SqliteStore(folder / FILE_NAME)
    try:
        with _engines(plan, folder) as engines:
            search = _Search(store, engines, traffic, search_id or _fresh_id())
            report = search.run(requests, limits.max_s, limits.max_experiments, who)
            ready_s = engines.start_to_ready_s
    finally:
        store.close()
    _tell(report, ready_s, as_json)
    return NO if report.winner_id is None else 0


class _Search:
    """Wires one search: judge, agents, store."""

    def __init__(
        self, store: Any, engines: Any, traffic: TrafficProfile | None, search_id: str
    ) -> None:
        self._store, self._engines = store, engines
        self._traffic, self._id = traffic, search_id

    def run(
        self,
        requests: Workload | None,
        max_s: float | None,
        max_experiments: int | None,
        agent: Agent,
    ) -> SearchReport:
        from compiler import evidence, search
        from compiler.bench import Hardware, headroom
        from compiler.judge import Judge, Workloads
        from engines.remote import connect
        from profiler.reservoir import split

        tuning = connect(self._engines.tuning_address)
        info = tuning.info()
        screen, confirm, held_out = split(requests or _rebuilt(self._traffic, info))
        room = headroom(tuning, screen, Hardware.measured())
        tuning.close()
        judge = Judge(
            connect=connect,
            tuning_address=self._engines.tuning_address,
            reference_address=self._engines.reference_address,
            trial_key=self._engines.trial_key,
            workloads=Workloads(screen, confirm, held_out),
        )
        named = (("screen", screen), ("confirm", confirm), ("held_out", held_out))
        digests = {name: workload.digest for name, workload in named}
        try:
            return search.run(
                search_id=self._id,
                store=self._store,
                judge=judge,
                engines=self._engines,
                agents=[agent],
                budget=search.SearchBudget(max_s, max_experiments),
                exhibits=search.Exhibits(digests, evidence.environment(info)),
                assignment=search.Assignment(self._traffic, room),
                on_event=self._on_event,
            )
        finally:
            judge.close()

    def _on_event(self, progress: Any) -> None:
        log.info(progress.kind, extra={"text": progress.text, "candidate": progress.candidate_id})
        self._store.add_event(progress.kind, progress.text, progress.candidate_id)


def _agent(name: str) -> Agent:
    from compiler.agents.search import agent_named
    from sidecar.config import ConfigError

    try:
        return agent_named(name)
    except ValueError as e:
        raise ConfigError(str(e)) from e


def _engines(plan: Any, folder: Path) -> Any:
    from sidecar.tuning import TuningEngines

    return TuningEngines(plan, folder / "logs")


def _inputs(
    profile: Path | None, workload: str | None
) -> tuple[TrafficProfile | None, Workload | None]:
    """What was given, read and checked; raises `ConfigError`."""
    from profiler.reservoir import workload_from_json
    from profiler.window import profile_from_json
    from sidecar.config import ConfigError

    if profile is None and workload is None:
        raise ConfigError("there is nothing to be fast for; write --workload or --profile FILE")
    try:
        traffic = profile_from_json(profile.read_text()) if profile else None
        text = (
            sys.stdin.read() if workload == "-" else Path(workload).read_text() if workload else ""
        )
        return traffic, workload_from_json(text) if text else None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{workload if profile is None else profile}: {e}") from e


def _rebuilt(traffic: TrafficProfile | None, info: EngineInfo) -> Workload:
    """From lengths alone. Random tokens go to other experts than real ones: dense models only."""
    from profiler.reservoir import rebuilt
    from sidecar.config import ConfigError

    assert traffic is not None
    if any(part in module.cls for module in info.modules for part in PARTS_OF_EXPERTS):
        raise ConfigError(
            f"{info.model} is a mixture of experts and needs real requests; give --workload"
        )
    return rebuilt(traffic, info.vocab_size, seed=0)


def _fresh_id() -> str:
    return f"s-{time.strftime('%Y%m%d-%H%M%S')}"


def _tell(report: SearchReport, ready_s: float, as_json: bool) -> None:
    best = report.best
    if as_json:
        facts = {k: v for k, v in asdict(report).items() if k != "best"}
        gain = best.gain if best else None
        print(json.dumps({**facts, "gain": gain, "start_to_ready_s": ready_s}))
        return
    print(
        f"{report.num_experiments} experiments in {report.seconds:.0f} s, {report.ended}; "
        f"starting an engine takes {ready_s:.1f} s"
    )
    if best is None:
        print("no forward pass was honestly faster")
    elif report.winner_id is None:
        print(f"{best.id} looked faster with few layers, and was not confirmed")
    else:
        print(f"{best.id} wins, {best.gain or 0.0:+.1%} tokens/s: {best.summary}")
