"""A judge that knows the truth of each source, a store in memory, agents with a script."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler.bench import Bench, Verdict
from compiler.candidates import Candidate
from compiler.gate import Trial, ValidationReport
from compiler.search import Exhibits, Progress, SearchBudget, SearchReport, run
from compiler.store import Post
from engines.embedded import model
from engines.engine import CandidateError, ForwardPass, Measurement, Portfolio

SEARCH = "s-1"


def forward(name: str, cls: str = "RMSNorm") -> ForwardPass:
    """A forward pass that the fake judge knows by `name`."""
    return ForwardPass.from_source(
        f'TARGETS = {{"cls:{cls}": "forward"}}\nNAME = "{name}"\ndef forward(self, x):\n    ...\n'
    )


def name_of(portfolio: Portfolio) -> str:
    return "+".join(_name(f.source) for f in portfolio.forwards)


def _name(source: str) -> str:
    """ "" for one that `forward` did not make."""
    return source.partition('NAME = "')[2].partition('"')[0]


def report(failures: Sequence[str] = (), recycle: bool = False) -> ValidationReport:
    return ValidationReport(
        not failures, 1e-9, 1e-8, 1e-6, None, 1e-8, tuple(failures), recycle=recycle
    )


def trial(gain: float, agrees: bool = True) -> Trial:
    stock, ours = (Measurement((t, t, t), 100) for t in (1.0, 1 / (1 + gain)))
    is_faster, reason = agrees and gain > 0.02, f"{gain:+.1%} tokens/s"
    return Trial(stock, ours, 0.01, gain, None, is_faster, reason, 0, 5, agrees=agrees)


@dataclass
class FakeJudge:
    """`gains` by name; `validations` and `raises` where a verdict is another. Keeps what it was
    asked."""

    gains: Mapping[str, float] = field(default_factory=dict)
    validations: Mapping[str, ValidationReport] = field(default_factory=dict)
    raises: dict[str, list[BaseException]] = field(default_factory=dict)
    confirmed: Mapping[str, float] = field(default_factory=dict)
    on_ask: Callable[[], None] = lambda: None
    asked: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def validate(self, portfolio: Portfolio) -> ValidationReport:
        return self.validations.get(self._ask("validate", portfolio), report())

    def screen(self, portfolio: Portfolio) -> Trial:
        return trial(self.gains.get(self._ask("screen", portfolio), 0.0))

    def confirm(self, portfolio: Portfolio) -> Trial:
        name = self._ask("confirm", portfolio)
        return trial(self.confirmed.get(name, self.gains.get(name, 0.0)))

    def use(self, tuning_address: str) -> None:
        self.addresses.append(tuning_address)

    def _ask(self, what: str, portfolio: Portfolio) -> str:
        name = name_of(portfolio)
        self.asked.append(f"{what} {name}")
        self.on_ask()
        if self.raises.get(f"{what} {name}"):
            raise self.raises[f"{what} {name}"].pop(0)
        return name


@dataclass
class FakeEngines:
    """Knows some of the embedded engine's classes; hands out addresses."""

    classes: Sequence[str] = ("RMSNorm",)
    num_recycled: int = 0

    def source(self, target: str) -> str:
        cls = target.removeprefix("cls:")
        if cls not in self.classes:
            raise CandidateError(f"no module matches {target}")
        return inspect.getsource(getattr(model, cls))

    def recycle(self) -> str:
        self.num_recycled += 1
        return f"tuning-{self.num_recycled}"


@dataclass
class MemoryStore:
    """`compiler.store.Store` in memory; `on_write` is called before each write of a candidate."""

    rows: dict[str, Candidate] = field(default_factory=dict)
    board: list[Post] = field(default_factory=list)
    bundles: dict[str, str] = field(default_factory=dict)
    on_write: Callable[[Candidate], None] = lambda candidate: None
    num_ids: int = 0

    def next_candidate_id(self) -> str:
        self.num_ids += 1
        return f"c-{self.num_ids:04d}"

    def put_candidate(self, candidate: Candidate) -> None:
        self.on_write(candidate)
        self.rows[candidate.id] = candidate

    def candidates(self, search_id: str | None = None) -> Sequence[Candidate]:
        return [c for c in self.rows.values() if search_id in (None, c.search_id)]

    def post(
        self, search_id: str, author: str, claim: str, evidence: str = "", scope: str = ""
    ) -> Post:
        self.board.append(Post(len(self.board) + 1, 5.0, search_id, author, claim, evidence, scope))
        return self.board[-1]

    def refute(self, seq: int, by: int) -> None:
        old = self.board[seq - 1]
        self.board[seq - 1] = Post(
            seq, old.at, old.search_id, old.author, old.claim, old.evidence, old.scope, by
        )

    def posts(self, search_id: str | None = None, after: int = 0) -> Sequence[Post]:
        return [p for p in self.board if p.seq > after and search_id in (None, p.search_id)]

    def put_evidence(self, bundle: str) -> str:
        digest = hashlib.sha256(bundle.encode()).hexdigest()
        self.bundles[digest] = bundle
        return digest

    def evidence(self, digest: str) -> str | None:
        return self.bundles.get(digest)


class Says:
    """An agent that submits what it was given, in order."""

    def __init__(self, *changes: ForwardPass | Portfolio, name: str = "says") -> None:
        self.name, self._changes = name, changes
        self.verdicts: list[Verdict] = []

    def run(self, bench: Bench) -> None:
        for change in self._changes:
            self.verdicts.append(bench.submit(change, "an idea"))


def search(
    judge: FakeJudge, *agents: Any, store: MemoryStore | None = None, **others: Any
) -> SearchReport:
    """`run` with everything that a test does not care about."""
    events: list[Progress] = []
    given = {
        "engines": FakeEngines(),
        "budget": SearchBudget(),
        "exhibits": Exhibits({"screen": "ab"}, {"engine": "fake"}),
        "now": lambda: 1000.0,
        "on_event": events.append,
        **others,
    }
    return run(
        search_id=SEARCH, store=store or MemoryStore(), judge=judge, agents=list(agents), **given
    )
