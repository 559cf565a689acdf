"""The built-in agent: tries known rewrites, keeps what wins, composes it, turns the knobs.

It needs no model and is the same for the same seed and verdicts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from compiler.agents.rewrites import (
    ALL,
    DECODE,
    NOTHING,
    PREFILL,
    REWRITES,
    Idea,
    Rewrite,
    batches,
    idea,
)
from compiler.agents.vllm_rewrites import VLLM_REWRITES
from compiler.bench import Agent, Bench, Remaining, Verdict
from compiler.candidates import Event, Stage
from engines.engine import ForwardPass, Guard, Portfolio

GUARDS = (DECODE, PREFILL, ALL, Guard(1, 8), Guard(9), Guard(1, 32), Guard(33))
KNOWN = (*VLLM_REWRITES, *REWRITES)
OPENING_SHARE = 0.5  # of the budget, for single rewrites before they are composed

Slot = tuple[str, Guard]


def agent_named(name: str, seed: int = 0) -> Agent:
    """`search`, or `no-effect` for one that cannot win. Raises `ValueError`, naming both."""
    match name:
        case "search":
            return SearchAgent(seed)
        case "no-effect":
            return NoEffectAgent()
    raise ValueError(f"there is no agent {name!r}; write search or no-effect")


class SearchAgent:
    """Singles by headroom, what won as one portfolio, then variations of it."""

    name = "search"

    def __init__(self, seed: int = 0, rewrites: Sequence[Rewrite] = KNOWN) -> None:
        self._seed, self._rewrites = seed, rewrites

    def run(self, bench: Bench) -> None:
        """Until there is nothing left to try. Lets `SearchOver` pass."""
        found = _Findings(random.Random(self._seed), total=bench.remaining())
        rewrites = [r for r in self._rewrites if r.fits(bench.source)]
        for opening in _openings(rewrites, bench):
            if _share_left(bench, found.total) <= 1 - OPENING_SHARE:
                break
            found.add(opening, _tried(bench, opening))
        _compose(bench, found)
        while (variation := found.variation(rewrites)) is not None:
            if found.add(variation, _tried(bench, variation)):
                _compose(bench, found)


class NoEffectAgent:
    """Submits forward passes that only call stock: a search that must end without a winner."""

    name = "no-effect"

    def run(self, bench: Bench) -> None:
        for rewrite in NOTHING:
            if rewrite.fits(bench.source):
                _tried(bench, idea(rewrite, rewrite.first(), rewrite.guards[0]))


@dataclass(slots=True)
class _Findings:
    """What one run of the agent has learned."""

    random: random.Random
    total: Remaining
    tried: set[Idea] = field(default_factory=set)
    wins: dict[Slot, tuple[Idea, Verdict]] = field(default_factory=dict)
    near: dict[Slot, tuple[Idea, Verdict]] = field(default_factory=dict)  # not clearly slower
    has_portfolio: bool = False  # a composed one was confirmed

    def add(self, one: Idea, verdict: Verdict) -> bool:
        """True when it is the best of its slot now."""
        self.tried.add(one)
        if verdict.is_faster:
            return _keep_better(self.wins, one, verdict)
        if _is_lost_in_noise(verdict):
            self.near.setdefault(one.slot, (one, verdict))  # the first is the likelier one
        return False

    @property
    def company(self) -> list[tuple[Idea, Verdict]]:
        """For the winners: what may be faster but cannot be told from noise alone."""
        return [near for slot, near in self.near.items() if slot not in self.wins]

    def variation(self, rewrites: Sequence[Rewrite]) -> Idea | None:
        """Something untried: a neighbour of a winner, else any setting at all."""
        winners = [w for w, _ in (self.wins or self.near).values()]
        beside = [v for w in winners for v in _neighbours(w) if v not in self.tried]
        rest = (idea(r, k, g) for r in rewrites for k in r.settings() for g in r.guards)
        untried = beside or [v for v in rest if v not in self.tried]
        return self.random.choice(untried) if untried else None


def _keep_better(slots: dict[Slot, tuple[Idea, Verdict]], one: Idea, verdict: Verdict) -> bool:
    kept = slots.get(one.slot)
    if kept is not None and _rank(kept[1]) >= _rank(verdict):
        return False
    slots[one.slot] = one, verdict
    return True


def _openings(rewrites: Sequence[Rewrite], bench: Bench) -> Iterator[Idea]:
    """First settings; each class has a turn, most headroom first, before one has a second."""
    headroom = bench.headroom()
    by_class: dict[str, list[Idea]] = {}
    for rewrite in rewrites:
        ideas = [idea(rewrite, rewrite.first(), guard) for guard in rewrite.guards[:1]]
        by_class.setdefault(rewrite.cls, []).extend(ideas)
    for rewrite in rewrites:
        by_class[rewrite.cls] += [idea(rewrite, rewrite.first(), g) for g in rewrite.guards[1:]]
    ordered = sorted(by_class, key=lambda cls: -headroom.get(cls, 0.0))
    turns = itertools.zip_longest(*(by_class[cls] for cls in ordered))
    return (one for turn in turns for one in turn if one is not None)


def _neighbours(one: Idea) -> Iterator[Idea]:
    """One knob or the guard turned."""
    knobs = dict(one.knobs)
    for name, values in one.rewrite.knobs.items():
        for value in values:
            yield idea(one.rewrite, {**knobs, name: value}, one.guard)
    for guard in GUARDS:
        yield replace(one, guard=guard)


def _tried(bench: Bench, one: Idea) -> Verdict:
    verdict = bench.submit(one.forward_pass(), one.summary)
    if verdict.is_faster:
        bench.board.post(
            f"{one.summary} gains {_gain(verdict):+.1%} alone ({verdict.candidate.id})",
            evidence=verdict.evidence,
            scope=f"{one.rewrite.cls} {batches(one.guard)}",
        )
    return verdict


def _compose(bench: Bench, found: _Findings) -> None:
    """The winners together; and in company. While no portfolio wins, with one member less: the
    one that spoils it may be any."""
    winners, company = list(found.wins.values()), found.company
    if company:
        found.has_portfolio |= _submit_portfolio(bench, winners + company)
    if len(winners) > 1 or not company:
        found.has_portfolio |= _submit_portfolio(bench, winners)
    for left_out in found.random.sample(company, len(company)):
        if not found.has_portfolio:
            rest = [one for one in company if one is not left_out]
            found.has_portfolio |= _submit_portfolio(bench, winners + rest)


def _submit_portfolio(bench: Bench, members: Sequence[tuple[Idea, Verdict]]) -> bool:
    if len(members) < 2:
        return False
    best = max(members, key=lambda m: _rank(m[1]))[1].candidate
    ordered = sorted((one for one, _ in members), key=_breadth)
    forwards: tuple[ForwardPass, ...] = tuple(one.forward_pass() for one in ordered)
    names = " + ".join(sorted({one.rewrite.name for one in ordered}))
    verdict = bench.submit(Portfolio(forwards), f"together: {names}", best.id)
    says = f"gains {_gain(verdict):+.1%}" if verdict.is_faster else f"fails: {verdict.reason}"
    bench.board.post(
        f"{len(forwards)} rewrites together {says} ({verdict.candidate.id})",
        evidence=verdict.evidence,
        scope=", ".join(f"{one.rewrite.cls} {batches(one.guard)}" for one in ordered),
    )
    return verdict.candidate.stage is Stage.CONFIRMED


def _breadth(one: Idea) -> tuple[int, str, int]:
    """The first that fits serves a batch, so narrow guards come first."""
    guard = one.guard
    return guard.max_tokens - guard.min_tokens, one.rewrite.cls, guard.min_tokens


def _is_lost_in_noise(verdict: Verdict) -> bool:
    """Valid, and neither faster nor clearly slower: a gain is zero when noise could explain it."""
    story = verdict.candidate.story
    is_valid = bool(story) and story[-1].event is Event.NO_EFFECT
    return is_valid and verdict.seen is not None and _gain(verdict) >= 0


def _share_left(bench: Bench, total: Remaining) -> float:
    left = bench.remaining()
    pairs = ((left.seconds, total.seconds), (left.experiments, total.experiments))
    return min((now / first for now, first in pairs if first != float("inf")), default=1.0)


def _gain(verdict: Verdict) -> float:
    return verdict.gain if verdict.gain is not None else 0.0


def _rank(verdict: Verdict) -> float:
    return verdict.gain or verdict.seen or 0.0
