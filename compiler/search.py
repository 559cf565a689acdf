"""The search: agents propose, the judge decides, the store remembers.

`run` tells the story. A verdict is in the store before the next step is taken, so that a search
that was killed goes on where it was: finished verdicts stand, the running one is void.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from compiler import evidence
from compiler.bench import Agent, Remaining, SearchOver, Verdict
from compiler.board import Board, plain
from compiler.candidates import EXITS, Candidate, Event, Stage
from compiler.gate import GatePolicy, Trial, ValidationReport
from compiler.judge import VerdictVoid
from compiler.store import Store
from engines.engine import EngineGone, ForwardPass, Measurement, Portfolio
from profiler.window import TrafficProfile

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_STRIKES = 5  # of one author: faulted candidates
MAX_JUDGE_FAILURES = 3  # in a row; then it is not the candidates
MAX_CLOSING_TRIALS = 3  # confirmations after the budget is spent, until one holds
GRACE_S = 5.0  # for agents to notice that the search is over
GATE = "gate"  # author of the posts that carry evidence
SETTLED = EXITS | {Stage.SCREENED, Stage.CONFIRMED}


class Judging(Protocol):
    """`compiler.judge.Judge`, as the search sees it. Every verdict raises `EngineGone` when the
    tuning engine hangs or dies."""

    def validate(self, portfolio: Portfolio) -> ValidationReport: ...
    def screen(self, portfolio: Portfolio) -> Trial: ...
    def confirm(self, portfolio: Portfolio) -> Trial: ...
    def use(self, tuning_address: str) -> None: ...


class EngineSupply(Protocol):
    """Where tuning engines come from."""

    def source(self, target: str) -> str:
        """`Engine.source` of the present tuning engine."""

    def recycle(self) -> str:
        """Throw the tuning engine away; the address of a fresh, stock one. Raises `EngineGone`."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """What may be spent on proposals; None is no limit of that kind. Confirming the best one at
    the end comes on top."""

    max_s: float | None = None
    max_experiments: int | None = None


@dataclass(frozen=True, slots=True)
class Exhibits:
    """What every evidence bundle of one search says of its circumstances."""

    workloads: Mapping[str, str]  # name to digest
    environment: Mapping[str, str]
    policy: GatePolicy = field(default_factory=GatePolicy)


@dataclass(frozen=True, slots=True)
class Progress:
    """One line for whoever watches. No user text."""

    kind: str  # experiment | stage | engine
    text: str
    candidate_id: str = ""


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What a search came to. Counts are of finished verdicts, this run's only."""

    search_id: str
    winner_id: str | None  # CONFIRMED
    best: Candidate | None  # the winner, or the best that was at least SCREENED
    num_experiments: int
    num_known: int  # candidates that an earlier run of this search had finished
    rejections: Mapping[str, int]  # event to how many
    seconds: float
    ended: str

    @property
    def experiments_per_hour(self) -> float:
        return 3600 * self.num_experiments / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What agents are told of the traffic."""

    profile: TrafficProfile | None = None
    headroom: Mapping[str, float] = field(default_factory=dict)


def run(
    *,
    search_id: str,
    store: Store,
    judge: Judging,
    engines: EngineSupply,
    agents: Sequence[Agent],
    budget: SearchBudget,
    exhibits: Exhibits,
    assignment: Assignment | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    on_event: Callable[[Progress], None] = lambda progress: None,
) -> SearchReport:
    """Search until the budget is spent or every agent is done. Blocks; call it again with the same
    `search_id` and store to resume. `clock` counts seconds, `now` is Unix seconds.

    Raises `EngineGone` when no engine can be had any more, `RuntimeError` when the judge fails
    whatever it is asked, `PermissionError` when the engine does not take the judge's signature.
    """
    trials = Trials(search_id, store, judge, engines, budget, exhibits, clock, now, on_event)
    trials.resume()
    _let_them_work(agents, trials, assignment or Assignment(), engines)
    trials.confirm_the_best()
    trials.crown()
    return trials.report()


def _let_them_work(
    agents: Sequence[Agent], trials: Trials, assignment: Assignment, engines: EngineSupply
) -> None:
    """Side by side, one verdict at a time. An agent that does not stop is left behind."""
    threads = [
        threading.Thread(
            target=_work,
            args=(agent, Place(agent.name, trials, assignment, engines)),
            name=f"agent-{agent.name}",
            daemon=True,
        )
        for agent in agents
    ]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) and not trials.is_over:
        for thread in threads:
            thread.join(timeout=0.05)
    trials.settle()
    for thread in threads:
        thread.join(timeout=GRACE_S)
    trials.end()


def _work(agent: Agent, place: Place) -> None:
    try:
        agent.run(place)
    except SearchOver:
        return
    except Exception:  # an agent's crash is never the search's
        log.exception("agent crashed", extra={"agent": agent.name})


class Place:
    """One agent's `Bench`."""

    def __init__(
        self, author: str, trials: Trials, assignment: Assignment, engines: EngineSupply
    ) -> None:
        self._author, self._trials, self._engines = author, trials, engines
        self._assignment = assignment
        self.board = trials.board(author)

    def source(self, target: str) -> str:
        return self._engines.source(target)

    def profile(self) -> TrafficProfile | None:
        return self._assignment.profile

    def headroom(self) -> Mapping[str, float]:
        return self._assignment.headroom

    def submit(
        self, change: ForwardPass | Portfolio, summary: str, parent_id: str | None = None
    ) -> Verdict:
        portfolio = change if isinstance(change, Portfolio) else Portfolio((change,))
        return self._trials.submit(portfolio, self._author, summary, parent_id)

    def remaining(self) -> Remaining:
        return self._trials.remaining()


@dataclass(slots=True)
class Proof:
    """What the judge said of one candidate, as far as it got."""

    validation: ValidationReport | None = None
    screen: Trial | None = None
    confirm: Trial | None = None
    digest: str = ""  # of the last bundle


class Trials:
    """One search's candidates on their way through the gate, one verdict at a time."""

    def __init__(
        self,
        search_id: str,
        store: Store,
        judge: Judging,
        engines: EngineSupply,
        budget: SearchBudget,
        exhibits: Exhibits,
        clock: Callable[[], float],
        now: Callable[[], float],
        on_event: Callable[[Progress], None],
    ) -> None:
        self._search_id, self._store = search_id, store
        self._judge, self._engines = judge, engines
        self._budget, self._exhibits = budget, exhibits
        self._clock, self._now, self._on_event = clock, now, on_event
        self._started_s = clock()
        self._lock = threading.RLock()
        self._known = {c.change.digest: c for c in store.candidates(search_id)}
        self._proofs = _recall(store, search_id)
        self._num_known = sum(c.stage in SETTLED for c in self._known.values())
        self._num_judge_failures = 0
        self._broken: Exception | None = None
        self._is_ended = False

    def board(self, author: str) -> Board:
        return Board(self._store, self._search_id, author)

    # --- what agents reach ------------------------------------------------------------------------

    def submit(
        self, change: Portfolio, author: str, summary: str, parent_id: str | None
    ) -> Verdict:
        """Raises `SearchOver`. The same digest is never judged twice."""
        with self._lock:
            self._check_open(author)
            candidate = self._known.get(change.digest)
            if candidate is None:
                candidate = self._propose(change, author, summary, parent_id)
            try:
                candidate = self._prove(candidate)
            except Exception as e:  # the search is broken, not the agent
                self._broken = e
                raise SearchOver(f"the search failed: {e}") from e
            return self._verdict(candidate)

    def remaining(self) -> Remaining:
        spent_s, inf = self._clock() - self._started_s, float("inf")
        max_s, most = self._budget.max_s, self._budget.max_experiments
        return Remaining(
            inf if max_s is None else max_s - spent_s,
            inf if most is None else most - self._num_settled,
        )

    @property
    def is_over(self) -> bool:
        return self._is_ended or self._broken is not None or self.remaining().is_spent

    @property
    def _num_settled(self) -> int:
        return sum(c.stage in SETTLED for c in [*self._known.values()])

    def _check_open(self, author: str) -> None:
        if self.is_over:
            raise SearchOver(f"search {self._search_id} is over: its budget is spent")
        mine = [c for c in self._known.values() if c.author == author and c.story]
        strikes = sum(c.story[-1].event is Event.FAULTED for c in mine)
        if strikes >= MAX_STRIKES:
            raise SearchOver(f"agent {author} is out: {strikes} of its candidates faulted")

    def _propose(
        self, change: Portfolio, author: str, summary: str, parent_id: str | None
    ) -> Candidate:
        candidate = Candidate(
            self._store.next_candidate_id(),
            self._search_id,
            parent_id,
            plain(author, 64),
            plain(summary, 200),
            change,
        )
        return self._keep(candidate)

    # --- the story of a search --------------------------------------------------------------------

    def resume(self) -> None:
        """Finish what an earlier run left in the middle."""
        with self._lock:
            for candidate in [c for c in self._known.values() if c.stage not in SETTLED]:
                self._tell(candidate, "was under way when the search ended; it is tried again")
                self._prove(candidate)

    def settle(self) -> None:
        """Wait for the verdict that is under way, and take no further one."""
        with self._lock:
            self._is_ended = True

    def end(self) -> None:
        """Raises what broke the search."""
        if self._broken is not None:
            raise self._broken

    def confirm_the_best(self) -> None:
        """Of those that were only screened, while one looks better than any that was confirmed."""
        for _ in range(MAX_CLOSING_TRIALS):
            best, held = self._best(Stage.SCREENED), self._best(Stage.CONFIRMED)
            if best is None or (held is not None and _gain(held) >= _gain(best)):
                return
            self._confirm(best)

    def crown(self) -> None:
        """The best confirmed candidate wins; the other confirmed ones are outdone."""
        winner = self._best(Stage.CONFIRMED)
        for other in [c for c in self._known.values() if c.stage is Stage.CONFIRMED]:
            if winner is not None and other.id != winner.id:
                note = f"{winner.id} gains {_gain(winner):+.1%}, this one {_gain(other):+.1%}"
                self._keep(other.after(Event.OUTDONE, self._now(), note))
                self._tell(other, f"superseded by {winner.id}")

    def report(self) -> SearchReport:
        winner = self._best(Stage.CONFIRMED)
        rejected = [c for c in self._known.values() if c.stage is Stage.REJECTED]
        return SearchReport(
            search_id=self._search_id,
            winner_id=winner.id if winner else None,
            best=winner or self._best(Stage.SCREENED),
            num_experiments=self._num_settled - self._num_known,
            num_known=self._num_known,
            rejections=dict(Counter(c.story[-1].event.value for c in rejected)),
            seconds=self._clock() - self._started_s,
            ended="budget spent" if self.remaining().is_spent else "agents done",
        )

    def _best(self, stage: Stage) -> Candidate | None:
        of_stage = [c for c in self._known.values() if c.stage is stage]
        return max(of_stage, key=_gain, default=None)

    # --- through the gate -------------------------------------------------------------------------

    def _prove(self, candidate: Candidate) -> Candidate:
        """As far as it gets. A composed portfolio that screens well is confirmed at once."""
        if candidate.stage is Stage.PROPOSED:
            candidate = self._validate(candidate)
        if candidate.stage is Stage.VALID:
            candidate = self._screen(candidate)
        if candidate.stage is Stage.SCREENED and len(candidate.change.forwards) > 1:
            candidate = self._confirm(candidate)
        return candidate

    def _validate(self, candidate: Candidate) -> Candidate:
        report = self._ask(candidate, self._judge.validate)
        if isinstance(report, Candidate):
            return report
        self._proof(candidate).validation = report
        note = "; ".join(report.failures) or (
            f"KL p99 {report.kl_p99:.1e} nats, stock's own {report.band:.1e}"
        )
        return self._take(candidate, _event_of(report), note, report.recycle)

    def _screen(self, candidate: Candidate) -> Candidate:
        trial = self._ask(candidate, self._judge.screen)
        if isinstance(trial, Candidate):
            return trial
        self._proof(candidate).screen = trial
        return self._timed(candidate, trial)

    def _confirm(self, candidate: Candidate) -> Candidate:
        trial = self._ask(candidate, self._judge.confirm)
        if isinstance(trial, Candidate):
            return trial
        self._proof(candidate).confirm = trial
        return self._timed(candidate, trial)

    def _timed(self, candidate: Candidate, trial: Trial) -> Candidate:
        candidate = replace(candidate, gain=trial.gain)
        return self._take(candidate, _event_of_trial(trial), trial.reason, trial.recycle)

    def _ask(
        self, candidate: Candidate, question: Callable[[Portfolio], T], is_second: bool = False
    ) -> T | Candidate:
        """The judge's answer, or the candidate that faulted instead."""
        try:
            answer = question(candidate.change)
        except VerdictVoid as e:  # the judge died, which says nothing yet of the candidate
            if not is_second:
                self._recycle(f"the judge was lost with {candidate.id}")
                return self._ask(candidate, question, is_second=True)
            return self._take(candidate, Event.FAULTED, str(e), recycle=True)
        except EngineGone as e:
            return self._take(candidate, Event.FAULTED, str(e), recycle=True)
        except RuntimeError as e:
            self._num_judge_failures += 1
            if self._num_judge_failures >= MAX_JUDGE_FAILURES:
                raise
            return self._take(candidate, Event.FAULTED, str(e), recycle=True)
        self._num_judge_failures = 0
        return answer

    def _take(self, candidate: Candidate, event: Event, note: str, recycle: bool) -> Candidate:
        """Write the event down, evidence first, then deal with the engine."""
        candidate = candidate.after(event, self._now(), plain(note))
        self._exhibit(candidate)
        self._keep(candidate)
        self._tell(candidate, f"{candidate.stage}: {plain(note, 160)}{self._best_so_far()}")
        if recycle:
            self._recycle(f"{candidate.id} left the engine unfit")
        return candidate

    def _exhibit(self, candidate: Candidate) -> None:
        proof = self._proof(candidate)
        bundle = evidence.bundle(
            candidate,
            workloads=self._exhibits.workloads,
            environment=self._exhibits.environment,
            policy=self._exhibits.policy,
            validation=proof.validation,
            screen=proof.screen,
            confirm=proof.confirm,
        )
        proof.digest = self._store.put_evidence(bundle)
        line = candidate.story[-1]
        claim = f"{candidate.id} ({candidate.summary}) is {candidate.stage}: {line.note}"
        self.board(GATE).post(claim, evidence=proof.digest, scope=_scope(candidate.change))

    def _recycle(self, why: str) -> None:
        self._on_event(Progress("engine", f"tuning engine recycled: {why}"))
        self._judge.use(self._engines.recycle())

    def _proof(self, candidate: Candidate) -> Proof:
        return self._proofs.setdefault(candidate.id, Proof())

    def _keep(self, candidate: Candidate) -> Candidate:
        self._store.put_candidate(candidate)
        self._known[candidate.change.digest] = candidate
        return candidate

    def _tell(self, candidate: Candidate, text: str) -> None:
        kind = "stage" if candidate.stage in SETTLED else "experiment"
        line = f"{candidate.id} {candidate.summary}: {text}"
        self._on_event(Progress(kind, line, candidate.id))

    def _best_so_far(self) -> str:
        best = self._best(Stage.CONFIRMED) or self._best(Stage.SCREENED)
        return f"; best so far {best.id}, {best.stage} {_gain(best):+.1%}" if best else ""

    def _verdict(self, candidate: Candidate) -> Verdict:
        lines = [f"{line.event.value}: {line.note}" for line in candidate.story]
        reason = candidate.story[-1].note if candidate.story else ""
        proof = self._proof(candidate)
        seen = _seen(proof.confirm or proof.screen)
        return Verdict(candidate, reason, candidate.gain, seen, "\n".join(lines), proof.digest)


def _gain(candidate: Candidate) -> float:
    return candidate.gain if candidate.gain is not None else float("-inf")


def _seen(trial: Trial | None) -> float | None:
    """Median over pairs: each pair ran side by side."""
    if trial is None or not trial.candidate.num_repeats:
        return None
    pairs = zip(trial.stock.samples_s, trial.candidate.samples_s, strict=True)
    return statistics.median(stock / ours for stock, ours in pairs) - 1


def _scope(portfolio: Portfolio) -> str:
    return ", ".join(
        f"{pattern} {f.guard.min_tokens}-{f.guard.max_tokens}"
        for f in portfolio.forwards
        for pattern, _ in f.targets
    )


def _event_of(report: ValidationReport) -> Event:
    if report.faulted or report.recycle:
        return Event.FAULTED
    return Event.AGREES if report.passed else Event.DISAGREES


def _event_of_trial(trial: Trial) -> Event:
    if trial.faulted or trial.recycle:
        return Event.FAULTED
    if not trial.agrees:
        return Event.DISAGREES
    return Event.FASTER if trial.faster else Event.NO_EFFECT


# --- after a kill ---------------------------------------------------------------------------------


def _recall(store: Store, search_id: str) -> dict[str, Proof]:
    """Candidate id to what the gate's last bundle of it says."""
    proofs: dict[str, Proof] = {}
    for post in store.posts(search_id):
        bundle = store.evidence(post.evidence) if post.author == GATE else None
        if bundle is not None:
            document = json.loads(bundle)
            proofs[document["candidate"]["id"]] = _proof_of(document, post.evidence)
    return proofs


def _proof_of(document: Mapping[str, Any], digest: str) -> Proof:
    kept = document["validation"]
    validation = ValidationReport(**{**kept, "failures": tuple(kept["failures"])}) if kept else None
    return Proof(validation, _trial_of(document["screen"]), _trial_of(document["confirm"]), digest)


def _trial_of(kept: Mapping[str, Any] | None) -> Trial | None:
    if kept is None:
        return None
    timings = ("stock", "candidate", "held_out_stock", "held_out_candidate")
    return Trial(**{**kept, **{name: _measurement_of(kept[name]) for name in timings}})


def _measurement_of(kept: Mapping[str, Any] | None) -> Measurement | None:
    return Measurement(**{**kept, "samples_s": tuple(kept["samples_s"])}) if kept else None
