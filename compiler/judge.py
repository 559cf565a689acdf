"""The judge: a process of its own that holds the clock, the seeds, the expected outputs and the
verdict. `Judge` is its client in the search; `Court` is what runs inside.

An engine that runs a candidate is untrusted. It is asked for outputs and counts only; what it says
about itself decides nothing but labels. Seeds are minted after the candidate is loaded.
"""

from __future__ import annotations

import multiprocessing
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar, cast

import numpy as np

from compiler import gate
from compiler.gate import Band, Distance, ErrorSpread, GatePolicy, Trial, ValidationReport
from engines.engine import (
    STOCK,
    Array,
    CandidateError,
    Engine,
    EngineGone,
    EngineInfo,
    Guard,
    Measurement,
    ModuleInfo,
    Portfolio,
    Replay,
    RequestOutput,
    Scope,
    SwapReport,
    sign,
)
from profiler.reservoir import Workload, WorkloadRequest

T = TypeVar("T")
Connect = Callable[[str], Engine]
Verdict = Literal["validate", "screen", "confirm"]


class VerdictVoid(EngineGone):
    """The judge was silent past its deadline and was killed. `Judge.use` a fresh engine."""


@dataclass(frozen=True, slots=True)
class Workloads:
    """What a candidate is tried on. `held_out` comes from a later slice of time than the rest;
    without one the confirmation says nothing of tomorrow."""

    screen: Workload
    confirm: Workload
    held_out: Workload | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """All a court needs; travels to the judge's process by pickle. `connect` is a module-level
    function. The reference engine is trusted, stock, and as exact as its kind computes: float64,
    or float32 behind vLLM."""

    connect: Connect
    tuning_address: str
    reference_address: str
    trial_key: bytes = field(repr=False)
    workloads: Workloads = field(repr=False)
    policy: GatePolicy


# --- the client -----------------------------------------------------------------------------------


class Judge:
    """Asks the judge's process for verdicts, one at a time; blocks. Whoever makes it closes it.

    Every verdict raises `EngineGone` when an engine hangs or dies: give the judge a recycled one
    with `use`. `VerdictVoid`, which is one, says that the judge itself was killed.
    """

    def __init__(
        self,
        *,
        connect: Connect,
        tuning_address: str,
        reference_address: str,
        trial_key: bytes,
        workloads: Workloads,
        policy: GatePolicy | None = None,
    ) -> None:
        self._setup = Setup(
            connect,
            tuning_address,
            reference_address,
            trial_key,
            workloads,
            policy or GatePolicy(),
        )
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._open()  # its imports overlap with whatever the caller starts next

    def validate(self, portfolio: Portfolio) -> ValidationReport:
        """Same outputs as the reference, module by module and as a whole? Leaves stock behind."""
        return cast(ValidationReport, self._ask("validate", portfolio))

    def screen(self, portfolio: Portfolio) -> Trial:
        """Faster with the first layers, on the screening workload?"""
        return cast(Trial, self._ask("screen", portfolio))

    def confirm(self, portfolio: Portfolio) -> Trial:
        """Faster with all layers, on real requests and on a later slice, on fresh seeds?"""
        return cast(Trial, self._ask("confirm", portfolio))

    def use(self, tuning_address: str) -> None:
        """Move to another tuning engine, fresh and stock. Its first verdict calibrates it."""
        self._setup = replace(self._setup, tuning_address=tuning_address)
        self._kill()
        self._open()

    def close(self) -> None:
        self._kill()

    def _ask(self, verdict: Verdict, portfolio: Portfolio) -> object:
        pipe, deadline_s = self._open(), self._setup.policy.verdict_deadline_s
        try:
            pipe.send((verdict, portfolio))
            if not pipe.poll(deadline_s):
                raise TimeoutError(f"silent for {deadline_s:g} s")
            answer = pipe.recv()
        except (OSError, EOFError) as e:
            self._kill()
            raise VerdictVoid(
                f"the judge's {verdict} of {portfolio.digest[:12]} is void: {e}"
            ) from e
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _open(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self._kill()
            context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=_sit, args=(theirs, self._setup), name="trimtab-judge", daemon=True
            )
            self._process.start()
            theirs.close()
        return self._pipe

    def _kill(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._pipe = self._process = None


def _sit(pipe: Connection, setup: Setup) -> None:
    """The judge's process: ends when its client closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the search's to handle
    court: Court | None = None
    while True:
        try:
            verdict, portfolio = pipe.recv()
        except EOFError:
            return
        try:
            court = court or Court(setup)
            pipe.send(getattr(court, verdict)(portfolio))
        except Exception as e:
            pipe.send(e if type(e) in (EngineGone, PermissionError) else _plain(e))


def _plain(error: Exception) -> Exception:
    """Travels by pickle whatever the error holds."""
    if isinstance(error, EngineGone):
        return EngineGone(str(error))
    return RuntimeError(f"the judge failed: {type(error).__name__}: {error}")


# --- the tuning engine ----------------------------------------------------------------------------


class Dock:
    """The tuning engine and what it runs now. No call outlasts `deadline_s`: `EngineGone`."""

    def __init__(self, engine: Engine, key: bytes, deadline_s: float) -> None:
        self._engine, self._key, self._deadline_s = engine, key, deadline_s
        self._loaded: Portfolio = STOCK
        self._lost = ""  # why no call will be made again

    def empty(self) -> None:
        """To stock, whatever an earlier judge left."""
        if self.info().digest != STOCK.digest:
            self._guarded("swap", lambda e: e.swap(STOCK, sign(self._key, Scope.TRIAL, "")))
        self._loaded = STOCK

    def run(self, portfolio: Portfolio) -> bool:
        """Make `portfolio` (a candidate, or stock) the running one. False when it was already."""
        if portfolio == self._loaded:
            return False
        if self._loaded != STOCK:
            self._loaded = STOCK
            self._settled(self._guarded("revert", lambda e: e.revert()), STOCK)
        if portfolio != STOCK:
            signature = sign(self._key, Scope.TRIAL, portfolio.digest)
            report = self._guarded("swap", lambda e: e.swap(portfolio, signature))
            self._loaded = portfolio
            self._settled(report, portfolio)
        return True

    def leave(self) -> None:
        """Back to stock where the engine still answers; never raises for the engine."""
        try:
            if not self._lost:
                self.run(STOCK)
        except (EngineGone, CandidateError) as e:
            self.condemn(f"it did not go back to stock: {e}")

    def condemn(self, why: str) -> None:
        """No candidate is tried on it again."""
        self._lost = self._lost or why

    @property
    def why_lost(self) -> str:
        return self._lost

    def info(self) -> EngineInfo:
        return self._guarded("info", lambda e: e.info())

    def mark(self) -> str:
        """The engine's fingerprint; "" from one that cannot tell."""
        try:
            return self._guarded("fingerprint", lambda e: e.fingerprint())
        except CandidateError:
            return ""

    def call(self, module: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
        return self._guarded("call", lambda e: e.call(module, inputs))

    def probe(self, workload: Workload) -> Sequence[np.ndarray[Any, np.dtype[np.float32]]]:
        return self._guarded("probe", lambda e: e.probe(workload))

    def measure(
        self, workload: Workload, num_layers: int | None, clock: Callable[[], float]
    ) -> tuple[Replay, float]:
        """A replay and its seconds by our clock."""

        def timed(engine: Engine) -> tuple[Replay, float]:
            start = clock()
            replay = engine.measure(workload, num_layers)
            return replay, clock() - start

        return self._guarded("measure", timed)

    def _settled(self, report: SwapReport, wanted: Portfolio) -> None:
        if report.digest != wanted.digest:
            self.condemn(f"it runs {report.digest[:12]!r}, not {wanted.digest[:12]!r}")
            raise EngineGone(f"the tuning engine is lost: {self._lost}")

    def _guarded(self, what: str, call: Callable[[Engine], T]) -> T:
        if self._lost:
            raise EngineGone(f"the tuning engine is lost ({self._lost}); recycle it")
        try:
            return _within(self._deadline_s, what, lambda: call(self._engine))
        except EngineGone as e:
            self.condemn(str(e))
            raise
        except (CandidateError, PermissionError):
            raise
        except Exception as e:
            raise CandidateError(f"{what} failed: {type(e).__name__}: {e}") from e


def _within(deadline_s: float, what: str, call: Callable[[], T]) -> T:
    """A call that may never return runs in a thread that we can leave behind."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as e:
            answers.put((None, e))

    threading.Thread(target=answer, daemon=True, name=f"judge-{what}").start()
    try:
        result, error = answers.get(timeout=deadline_s)
    except queue.Empty:
        raise EngineGone(f"the tuning engine was silent for {deadline_s:g} s in {what}") from None
    if error is not None:
        raise error
    return cast(T, result)


# --- the court ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the fresh engine is and leaves, taken before any candidate entered it."""

    dtype: str
    fingerprint: str
    band: Band
    stock_s: Mapping[str, float]  # best of a few, by the workload's digest and layers


@dataclass(frozen=True, slots=True)
class Case:
    """One module to call, where the portfolio's `guard` serves it. Inputs are [n, `width`]."""

    module: ModuleInfo
    guard: Guard
    width: int
    is_first: bool  # of its class and size: gets the long list of batch sizes

    @property
    def arities(self) -> tuple[int, ...]:
        return (1, 2) if self.module.cls == "RMSNorm" else (1,)

    def key(self, num_inputs: int) -> tuple[str, int, int]:
        return self.module.cls, self.module.num_weight_bytes, num_inputs

    def inputs(self, rng: np.random.Generator, num_tokens: int, num_inputs: int) -> list[Array]:
        """Rows of very different magnitude, some with outliers as real hidden states have."""
        largest = 1.5 if self.module.cls == "RMSNorm" else 0.5  # others get what a norm let through
        shape = num_tokens, self.width
        return [_hidden_states(rng, shape, largest) for _ in range(num_inputs)]

    def sizes(self, rng: np.random.Generator, most: int) -> list[int]:
        """Inside the guard, at its edges, and one past them."""
        low, high = (
            self.guard.min_tokens,
            max(self.guard.min_tokens, min(self.guard.max_tokens, most)),
        )
        inside = int(rng.integers(low, high + 1))
        if not self.is_first:
            return sorted({inside, high})
        primes = [p for p in (2, 7, 31, 61, 127) if p in self.guard and p <= high]
        around = {low - 1, self.guard.max_tokens + 1} - {0}
        wanted = {low, inside, high, *primes[-2:], *(n for n in around if n <= most)}
        return sorted(wanted)


@dataclass(frozen=True, slots=True)
class Lap:
    """Stock and candidate, side by side on the same salted workload."""

    workload: Workload
    stock: Replay
    candidate: Replay
    stock_s: float
    candidate_s: float


class Court:
    """Tries portfolios on one tuning engine against one reference. `clock` in seconds."""

    def __init__(
        self,
        setup: Setup,
        clock: Callable[[], float] = time.perf_counter,
        mint: Callable[[], int] = lambda: secrets.randbits(128),
    ) -> None:
        self._policy, self._workloads = setup.policy, setup.workloads
        self._clock, self._mint = clock, mint
        self._reference = setup.connect(setup.reference_address)
        self._truth = self._reference.info()
        tuning = setup.connect(setup.tuning_address)
        self._dock = Dock(tuning, setup.trial_key, setup.policy.deadline_s)
        self._spreads: dict[tuple[str, int, int], tuple[tuple[ErrorSpread, str], ...]] = {}
        self._calibration: Calibration | None = None

    def validate(self, portfolio: Portfolio) -> ValidationReport:
        golden = self._calibrate()
        cases = self._cases(portfolio)
        for case in cases:
            self._learn_spreads(case, golden)  # before the candidate is there to touch them
        failures: list[str] = []
        found: Distance | None = None
        faulted = False
        try:
            self._dock.run(portfolio)
            rng = self._rng()  # after the load
            failures += self._module_failures(cases, golden, rng)
            found, why = self._model_failures(golden, rng)
            failures += why
        except CandidateError as e:
            failures.append(f"it raised: {e}")
            faulted = True
        recycle = self._is_soiled(golden)
        if recycle:
            failures.append(f"state left behind: {self._dock.why_lost}")
        return _report(found, golden, tuple(failures), faulted, recycle)

    def screen(self, portfolio: Portfolio) -> Trial:
        work, layers = self._workloads.screen, self._num_fast_layers
        return self._trial(portfolio, work, layers, self._policy.screen_s)

    def confirm(self, portfolio: Portfolio) -> Trial:
        work, later = self._workloads.confirm, self._workloads.held_out
        return self._trial(portfolio, work, None, self._policy.confirm_s, later)

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self._mint())

    def _calibrate(self) -> Calibration:
        if self._calibration is not None:
            return self._calibration
        self._dock.empty()
        rng, dtype = self._rng(), self._dock.info().dtype
        bands = []
        for _ in range(2):  # the first also warms lazy state up, before the fingerprint
            found = self._probe_distance(rng)
            if isinstance(found, str):
                raise RuntimeError(f"the stock tuning engine does not fit the reference: {found}")
            bands.append(found.band)
        work = self._workloads
        races = ((work.screen, self._num_fast_layers), (work.confirm, None))
        times = {_name(w, layers): self._fresh_s(w, layers) for w, layers in races}
        self._calibration = Calibration(dtype, self._dock.mark(), widest(bands), times)
        return self._calibration

    @property
    def _num_fast_layers(self) -> int | None:
        wanted = self._policy.num_fast_layers
        return None if wanted is None else min(wanted, self._truth.num_layers)

    def _fresh_s(self, workload: Workload, layers: int | None) -> float:
        rng = self._rng()
        runs = [salted(workload, rng, self._truth) for _ in range(2)]
        return min(self._dock.measure(w, layers, self._clock)[1] for w in runs)

    def _is_soiled(self, golden: Calibration) -> bool:
        """Goes back to stock first. A soiled engine takes no further candidate."""
        self._dock.leave()
        if not self._dock.why_lost and self._dock.mark() != golden.fingerprint:
            self._dock.condemn("its fingerprint is not what it was before the swap")
        return bool(self._dock.why_lost)

    # module level

    def _cases(self, portfolio: Portfolio) -> list[Case]:
        """First, last and a middle module of each targeted class and size."""
        groups: dict[tuple[str, int], list[tuple[ModuleInfo, Guard]]] = {}
        for module in self._truth.modules:
            guard = _guard_of(module, portfolio)
            if guard is not None:
                groups.setdefault((module.cls, module.num_weight_bytes), []).append((module, guard))
        cases = []
        for members in groups.values():
            width = _width(members[0][0], self._truth)
            if not self._is_callable(members[0][0], width):
                continue
            for i in sorted({0, len(members) // 2, len(members) - 1}):
                cases.append(Case(*members[i], width, is_first=i == 0))
        return cases

    def _is_callable(self, module: ModuleInfo, width: int) -> bool:
        """Modules that need a step cannot be called alone; the model level covers them."""
        try:
            self._reference.call(module.path, [np.ones((1, width), np.float32)])
        except CandidateError:
            return False
        return True

    def _learn_spreads(self, case: Case, golden: Calibration) -> None:
        """Stock's own error on inputs like the trial's, once a class and size."""
        if case.key(1) in self._spreads:
            return
        rng = self._rng()
        most = self._policy.max_call_tokens
        for num_inputs in case.arities:
            errors: list[list[gate.Floats]] = []
            dtypes: list[str] = []
            for num_tokens in [n for n in (1, 7, 61, most) for _ in range(2)]:
                inputs = case.inputs(rng, num_tokens, num_inputs)
                want, steady = self._expected(case, inputs, golden)
                got = self._dock.call(case.module.path, inputs)
                dtypes = [a.dtype.name for a in got]
                pairs = zip(got, want, strict=True)
                errors.append([gate.row_errors(g, w)[steady] for g, w in pairs])
            spreads = [ErrorSpread.of(np.concatenate(one)) for one in zip(*errors, strict=True)]
            if not all(np.isfinite(s.worst) for s in spreads):
                raise RuntimeError(f"stock {case.module.path} overflows; it cannot be judged")
            self._spreads[case.key(num_inputs)] = tuple(zip(spreads, dtypes, strict=True))

    def _expected(
        self, case: Case, inputs: Sequence[Array], golden: Calibration
    ) -> tuple[tuple[Array, ...], np.ndarray[Any, np.dtype[np.bool_]]]:
        """The reference's outputs, and the rows where they do not hang on a rounding."""
        nudge = 8 * gate.EPS[golden.dtype]
        signs = np.random.default_rng(0)
        moved = [
            a.astype(np.float64) * (1 + nudge * signs.choice((-1, 1), a.shape)) for a in inputs
        ]
        want = self._reference.call(case.module.path, inputs)
        nudged = self._reference.call(case.module.path, moved)
        if not all(np.isfinite(w).all() for w in want):
            raise ValueError(f"the reference's {case.module.path} returns NaN or infinity")
        steady = [gate.steady_rows(w, n, nudge) for w, n in zip(want, nudged, strict=True)]
        return want, np.logical_and.reduce(steady)

    def _module_failures(
        self, cases: Sequence[Case], golden: Calibration, rng: np.random.Generator
    ) -> list[str]:
        failures: list[str] = []
        for case in cases:
            for n in case.sizes(rng, self._policy.max_call_tokens):
                whys = (self._call_failure(case, n, k, golden, rng) for k in case.arities)
                why = next((w for w in whys if w is not None), None)
                if why is not None:
                    failures.append(f"{case.module.path} on {n} tokens: {why}")
                    break  # one a module says enough
        return failures

    def _call_failure(
        self, case: Case, n: int, num_inputs: int, golden: Calibration, rng: np.random.Generator
    ) -> str | None:
        """Twice with the same shapes and other contents: what was kept from a call shows."""
        own = self._spreads[case.key(num_inputs)]
        for _ in range(2):
            inputs = case.inputs(rng, n, num_inputs)
            given = [a.copy() for a in inputs]
            got = self._dock.call(case.module.path, inputs)
            if not all(np.array_equal(a, b) for a, b in zip(inputs, given, strict=True)):
                return "it changed its inputs"
            want, steady = self._expected(case, given, golden)
            why = gate.shape_failure(got, want, [dtype for _, dtype in own])
            if why is not None:
                return why
            for g, w, (spread, _) in zip(got, want, own, strict=True):
                errors = gate.row_errors(g, w)[steady]
                why = gate.error_failure(errors, spread, gate.EPS[golden.dtype], self._policy)
                if why is not None:
                    return why
        return None

    # model level

    def _probe_distance(self, rng: np.random.Generator) -> Distance | str:
        workload = salted(probed(self._workloads.confirm, self._policy, rng), rng, self._truth)
        answer = self._dock.probe(workload)
        return gate.distance(answer, self._reference.probe(workload), workload)

    def _model_failures(
        self, golden: Calibration, rng: np.random.Generator, is_second: bool = False
    ) -> tuple[Distance | None, tuple[str, ...]]:
        """A router's tie can move one honest run out of the band's tail, not two: a run that
        fails at the tail alone is run again on a fresh nonce."""
        found = self._probe_distance(rng)
        if isinstance(found, str):
            return None, (found,)
        eps = gate.EPS[golden.dtype]
        why = gate.band_failures(found.band, golden.band, eps, self._policy)
        if not is_second and why and not any("p50" in w for w in why):
            return self._model_failures(golden, rng, is_second=True)
        return found, why

    # speed

    def _trial(
        self,
        portfolio: Portfolio,
        workload: Workload,
        layers: int | None,
        limit_s: float,
        later: Workload | None = None,
    ) -> Trial:
        golden = self._calibrate()
        laps: list[Lap] = []
        later_laps: list[Lap] = []
        failure, faulted = None, False
        try:
            self._race(laps, portfolio, workload, layers, limit_s)
            if later is not None and gate.is_faster(_effect(laps, self._policy), self._policy):
                self._race(later_laps, portfolio, later, layers, limit_s)
            failure = self._laps_failure([*laps, *later_laps], golden, layers)
            self._watch_stock(laps, golden.stock_s[_name(workload, layers)])
        except CandidateError as e:
            failure, faulted = f"it raised: {e}", True
        recycle = self._is_soiled(golden)
        if recycle:
            failure = failure or f"state left behind: {self._dock.why_lost}"
        return gate.decide(_trial(laps, later_laps, failure, faulted, recycle), self._policy)

    def _race(
        self,
        laps: list[Lap],
        portfolio: Portfolio,
        workload: Workload,
        layers: int | None,
        limit_s: float,
    ) -> None:
        """Fills `laps` until the answer is settled, so that an error keeps what was measured."""
        for side in (portfolio, STOCK):
            self._dock.run(side)
            self._dock.measure(salted(workload, self._rng(), self._truth), layers, self._clock)
        rng, start = self._rng(), self._clock()  # after the load
        while True:
            lap = salted(workload, rng, self._truth)
            laps.append(self._lap(portfolio, lap, layers, bool(rng.integers(2))))
            spent_s = self._clock() - start
            if len(laps) >= 2 and gate.is_over(
                _effect(laps, self._policy), len(laps), spent_s, limit_s, self._policy
            ):
                return

    def _lap(
        self, portfolio: Portfolio, workload: Workload, layers: int | None, is_candidate_first: bool
    ) -> Lap:
        sides = (portfolio, STOCK) if is_candidate_first else (STOCK, portfolio)
        first, second = [self._timed(side, workload, layers) for side in sides]
        stock, candidate = (second, first) if is_candidate_first else (first, second)
        return Lap(workload, stock[0], candidate[0], stock[1], candidate[1])

    def _timed(
        self, side: Portfolio, workload: Workload, layers: int | None
    ) -> tuple[Replay, float]:
        if self._dock.run(side):  # both sides warm up alike after a switch
            self._dock.measure(_warm_up(workload), layers, self._clock)
        return self._dock.measure(workload, layers, self._clock)

    def _laps_failure(
        self, laps: Sequence[Lap], golden: Calibration, layers: int | None
    ) -> str | None:
        """Outputs of the timed runs: all against stock's, some against the reference's."""
        eps, policy = gate.EPS[golden.dtype], self._policy
        rate = 1.0 if layers is None else layers / self._truth.num_layers
        for lap in laps:
            floor = gate.roofline_floor_s(lap.workload, self._truth.modules, rate, policy)
            if lap.candidate_s < floor:
                return f"impossible: {lap.candidate_s:.2e} s, under the roofline's {floor:.2e} s"
        mine = [o for lap in laps for o in lap.candidate.outputs]
        of_stock = [o for lap in laps for o in lap.stock.outputs]
        why = gate.output_failure(mine, of_stock, golden.band, eps, policy)
        if why is not None:
            return f"the timed runs disagree with stock: {why}"
        checked, truth = self._checked(laps, layers)
        why = gate.output_failure(checked, truth, golden.band, eps, policy)
        return f"the timed runs disagree with the reference: {why}" if why else None

    def _watch_stock(self, laps: Sequence[Lap], fresh_s: float) -> None:
        """Who cannot be fast can make stock slow."""
        now_s = min(lap.stock_s for lap in laps)
        if now_s > self._policy.max_stock_slowdown * fresh_s:
            self._dock.condemn(f"stock takes {now_s:.2e} s, {fresh_s:.2e} s when it was fresh")

    def _checked(
        self, laps: Sequence[Lap], layers: int | None
    ) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Random requests of the last lap and of random others: got, and expected."""
        rng = self._rng()
        got: list[RequestOutput] = []
        want: list[RequestOutput] = []
        others = rng.permutation(len(laps) - 1)[: self._policy.num_checked_repeats - 1]
        for lap in [laps[-1], *(laps[i] for i in others)]:
            requests = lap.workload.requests
            picked = rng.permutation(len(requests))[: self._policy.num_checked_requests]
            some = replace(lap.workload, requests=tuple(requests[i] for i in picked))
            got += [lap.candidate.outputs[i] for i in picked]
            want += self._reference.measure(some, layers).outputs
        return got, want


# --- inputs and summaries -------------------------------------------------------------------------


def salted(workload: Workload, rng: np.random.Generator, info: EngineInfo) -> Workload:
    """The same work with other contents: every prompt starts with one fresh token, which moves
    every hidden state behind it and keeps shared prefixes shared."""
    nonce = int(rng.integers(info.vocab_size))
    requests = tuple(
        replace(r, prompt_token_ids=(nonce, *r.prompt_token_ids[1:])) for r in workload.requests
    )
    return replace(workload, requests=requests)


def probed(workload: Workload, policy: GatePolicy, rng: np.random.Generator) -> Workload:
    """A few requests of it, cut to what a probe needs."""
    picked = sorted(rng.permutation(len(workload.requests))[: policy.num_probe_requests])
    requests = tuple(
        WorkloadRequest(
            workload.requests[i].prompt_token_ids[: policy.max_probe_prompt_tokens],
            workload.requests[i].output_token_ids[: policy.num_probe_tokens],
        )
        for i in picked
    )
    return replace(workload, requests=requests)


def _name(workload: Workload, layers: int | None) -> str:
    return f"{workload.digest}/{layers}"


def _warm_up(workload: Workload) -> Workload:
    requests = [replace(r, output_token_ids=r.output_token_ids[:2]) for r in workload.requests[:2]]
    return replace(workload, requests=tuple(requests))


def _hidden_states(rng: np.random.Generator, shape: tuple[int, int], largest: float) -> Array:
    x = rng.standard_normal(shape) * 10 ** rng.uniform(-3, largest, (shape[0], 1))
    x[:, rng.integers(shape[1])] *= np.where(rng.random(shape[0]) < 0.25, 10.0, 1.0)
    return x.astype(np.float32)


def _guard_of(module: ModuleInfo, portfolio: Portfolio) -> Guard | None:
    """Of the first forward pass that targets the module."""
    for forward in portfolio.forwards:
        for pattern, _ in forward.targets:
            kind, _, rest = pattern.partition(":")
            if module.cls == rest if kind == "cls" else fnmatchcase(module.path, rest):
                return forward.guard
    return None


def _width(module: ModuleInfo, truth: EngineInfo) -> int:
    """Of a module's input: a norm's weight says its own, the widest norm is the hidden size."""
    itemsize = 8 if truth.dtype == "float64" else 4
    if module.cls == "RMSNorm":
        return module.num_weight_bytes // itemsize
    norms = [m.num_weight_bytes // itemsize for m in truth.modules if m.cls == "RMSNorm"]
    return max(norms, default=1)


def widest(bands: Sequence[Band]) -> Band:
    return Band(
        max(b.kl_p50 for b in bands),
        max(b.kl_p99 for b in bands),
        max(b.gap_p50 for b in bands),
        max(b.gap_p99 for b in bands),
    )


def _report(
    found: Distance | None,
    golden: Calibration,
    failures: tuple[str, ...],
    faulted: bool,
    recycle: bool,
) -> ValidationReport:
    band = found.band if found else None
    return ValidationReport(
        passed=not failures,
        kl_p50=band.kl_p50 if band else float("inf"),
        kl_p99=band.kl_p99 if band else float("inf"),
        logprob_gap=float(found.gap.max()) if found else float("inf"),
        first_divergence=found.first_divergence if found else None,
        band=golden.band.kl_p99,
        failures=failures,
        faulted=faulted,
        recycle=recycle,
    )


def _effect(laps: Sequence[Lap], policy: GatePolicy) -> gate.Effect:
    return gate.effect([x.stock_s for x in laps], [x.candidate_s for x in laps], policy)


def _measurements(laps: Sequence[Lap]) -> tuple[Measurement, Measurement]:
    tokens = gate.num_tokens(laps[0].workload) if laps else 0
    stock = Measurement(tuple(x.stock_s for x in laps), tokens)
    return stock, Measurement(tuple(x.candidate_s for x in laps), tokens)


def _trial(
    laps: Sequence[Lap],
    later: Sequence[Lap],
    failure: str | None,
    faulted: bool,
    recycle: bool,
) -> Trial:
    """What was measured; `gate.decide` fills in what follows from it."""
    stock, candidate = _measurements(laps)
    held_out = _measurements(later) if later else (None, None)
    return Trial(
        stock=stock,
        candidate=candidate,
        aa_band=0.0,
        gain=0.0,
        held_out_gain=None,
        faster=False,
        reason=failure or "",
        num_orig_calls=sum(x.candidate.num_orig_calls for x in laps),
        num_candidate_calls=sum(x.candidate.num_candidate_calls for x in laps),
        agrees=failure is None,
        faulted=faulted,
        recycle=recycle,
        held_out_stock=held_out[0],
        held_out_candidate=held_out[1],
    )
