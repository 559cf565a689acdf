"""A candidate's whole life in one table: every stage, every event, every exit. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from engines.engine import Portfolio


class Stage(StrEnum):
    PROPOSED = "proposed"
    VALID = "valid"  # same outputs as the reference
    SCREENED = "screened"  # faster with few layers
    CONFIRMED = "confirmed"  # faster with all of them, on a real workload
    SHADOW = "shadow"  # mirrored live requests, weight 0
    CANARY = "canary"
    LIVE = "live"
    REJECTED = "rejected"  # out before it met traffic
    ROLLED_BACK = "rolled_back"  # out after it met traffic
    SUPERSEDED = "superseded"  # a better one took its place


class Event(StrEnum):
    AGREES = "agrees"
    DISAGREES = "disagrees"
    FASTER = "faster"
    NO_EFFECT = "no_effect"
    FAULTED = "faulted"  # raised, hung, or took its engine down
    ADMITTED = "admitted"
    HELD = "held"  # a canary that kept every rule
    BREACHED = "breached"  # a rule was broken, or the operator said so
    OUTDONE = "outdone"


EXITS = frozenset({Stage.REJECTED, Stage.ROLLED_BACK, Stage.SUPERSEDED})


def _next() -> dict[tuple[Stage, Event], Stage]:
    table = {
        (Stage.PROPOSED, Event.AGREES): Stage.VALID,
        (Stage.VALID, Event.FASTER): Stage.SCREENED,
        (Stage.SCREENED, Event.FASTER): Stage.CONFIRMED,
        (Stage.CONFIRMED, Event.ADMITTED): Stage.SHADOW,
        (Stage.SHADOW, Event.AGREES): Stage.CANARY,
        (Stage.CANARY, Event.HELD): Stage.LIVE,
        (Stage.LIVE, Event.OUTDONE): Stage.SUPERSEDED,
    }
    for stage in (Stage.PROPOSED, Stage.VALID, Stage.SCREENED, Stage.CONFIRMED):
        for event in (Event.DISAGREES, Event.NO_EFFECT, Event.FAULTED, Event.BREACHED):
            table[stage, event] = Stage.REJECTED
        table[stage, Event.OUTDONE] = Stage.SUPERSEDED
    for stage in (Stage.SHADOW, Stage.CANARY, Stage.LIVE):
        for event in (Event.DISAGREES, Event.FAULTED, Event.BREACHED):
            table[stage, event] = Stage.ROLLED_BACK
    return table


NEXT: Mapping[tuple[Stage, Event], Stage] = MappingProxyType(_next())


class WrongEvent(ValueError):
    """The candidate is in a stage that does not know this event."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a candidate's story. `at` is Unix seconds; `note` says why, without user text."""

    at: float
    event: Event
    stage: Stage
    note: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A proposal. `change` is a portfolio, mostly of one forward pass."""

    id: str  # c-0142
    search_id: str
    parent_id: str | None
    author: str
    summary: str  # what it does, in one line
    change: Portfolio
    stage: Stage = Stage.PROPOSED
    story: tuple[Line, ...] = ()
    gain: float | None = (
        None  # 0.12: 12 % more tokens/s than stock in the last timing; None before it
    )

    def after(self, event: Event, at: float, note: str = "") -> Candidate:
        """The candidate one event later. Raises `WrongEvent`, naming what happened so far."""
        stage = NEXT.get((self.stage, event))
        if stage is None:
            so_far = " → ".join(line.event for line in self.story) or "nothing yet"
            raise WrongEvent(
                f"candidate {self.id} is {self.stage} and cannot take {event.value!r} "
                f"(so far: {so_far})"
            )
        return replace(self, stage=stage, story=(*self.story, Line(at, event, stage, note)))
