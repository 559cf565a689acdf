"""What each rewrite of vLLM's modules is worth, and what vLLM's own compiler is worth beside them.

`python -m bench.vllm_rewrites VLLM [--compiled]`, VLLM being the program of an environment with
vLLM for the CPU. The model that Trimtab ships, one core; each lap replays the same requests under
every portfolio in turn, stock between them, and with `--compiled` on a second server, on the same
core, that compiles as vLLM does by default. The clock is this process's. Medians over laps, with
half the distance between the quartiles. No gate here: the judge's verdicts are the demo's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from compiler.agents.rewrites import ALL, Rewrite, idea
from compiler.agents.vllm_rewrites import VLLM_REWRITES
from compiler.launch import parse
from engines.engine import STOCK, Portfolio, Scope, sign
from engines.host import socket_path
from engines.remote import RemoteEngine, control_address
from profiler.reservoir import Workload, WorkloadKind, WorkloadRequest
from sidecar.supervisor import EngineProcess, as_command, free_port
from sidecar.troupe import troupe_named
from sidecar.tuning import TRIAL_KEY

KEY = secrets.token_bytes(32)


def workload(num: int, prompt: int, output: int, concurrency: int) -> Workload:
    rng = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(4, 4096, n).tolist())

    requests = tuple(WorkloadRequest(ids(prompt), ids(output)) for _ in range(num))
    return Workload(WorkloadKind.REAL, requests, concurrency)


WORKLOADS = {
    "decode, 4 at once": workload(4, 10, 50, 4),
    "prefill of 180": workload(10, 180, 1, 1),
    "180 in, 12 out, 4 at once": workload(12, 180, 12, 4),
}
WARM_UP = workload(1, 10, 2, 1)


@contextmanager
def server(launch: str, name: str, logs: Path) -> Iterator[RemoteEngine]:
    plan = parse(launch).tuning(free_port())
    control = control_address(plan.url)
    process = EngineProcess(
        as_command(plan.words),
        plan.url,
        logs / f"{name}.log",
        {TRIAL_KEY: KEY.hex()},
        socket_path(control),
        plan.grace_s,
    )
    try:
        print(f"{name}: {process.wait_ready(plan.ready_s):.1f} s from start to ready", flush=True)
        engine = RemoteEngine(control)
        yield engine
        engine.close()
    finally:
        process.close()


def seconds(engine: RemoteEngine, portfolio: Portfolio, work: Workload) -> float:
    engine.swap(portfolio, sign(KEY, Scope.TRIAL, portfolio.digest))
    engine.measure(WARM_UP)
    started_s = time.perf_counter()
    engine.measure(work)
    return time.perf_counter() - started_s


def portfolios(engine: RemoteEngine) -> dict[str, Portfolio]:
    fitting = [r for r in VLLM_REWRITES if r.fits(engine.source)]
    singles = {r.name: _portfolio(r) for r in fitting}
    return {**singles, "all of them": _portfolio(*fitting)}


def _portfolio(*rewrites: Rewrite) -> Portfolio:
    return Portfolio(tuple(idea(r, r.first(), ALL).forward_pass() for r in rewrites))


def row(name: str, ours_s: list[float], stock_s: list[float]) -> str:
    low, middle, high = np.percentile(np.divide(stock_s, ours_s), [25, 50, 75])
    ms = np.median(ours_s) * 1e3
    return f"| {name} | {ms:.0f} | {middle - 1:+.1%} ± {(high - low) / 2:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vllm", type=Path)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--laps", type=int, default=11)
    said = parser.parse_args()
    *_, cpu = sorted(os.sched_getaffinity(0))
    launch = troupe_named("vllm", said.vllm).launch(cpu)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tt-")))
        os.environ["XDG_RUNTIME_DIR"] = str(home)
        eager = stack.enter_context(server(launch, "eager", home))
        sides: Mapping[str, tuple[RemoteEngine, Portfolio]] = {
            name: (eager, portfolio) for name, portfolio in portfolios(eager).items()
        }
        if said.compiled:
            line = launch.replace(" --enforce-eager", "")
            compiled = stack.enter_context(server(line, "compiled", home))
            sides = {**sides, "vLLM's compiler": (compiled, STOCK)}
        for title, work in WORKLOADS.items():
            laps: dict[str, list[float]] = {name: [] for name in sides}
            stock: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(said.laps):
                for name, (engine, portfolio) in sides.items():
                    stock[name].append(seconds(eager, STOCK, work))
                    laps[name].append(seconds(engine, portfolio, work))
            every = np.concatenate(list(stock.values()))
            print(f"\n| {title}: stock, eager, {np.median(every) * 1e3:.0f} ms | ms | faster |")
            print("|---|---|---|")
            for name in sides:
                print(row(name, laps[name], stock[name]), flush=True)


if __name__ == "__main__":
    main()
