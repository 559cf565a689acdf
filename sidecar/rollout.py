"""Shadow, canary, live, and the way back: what to do next, without I/O.

`decide` is asked again and again with fresh figures and acts on nothing; the controller carries the
action out and reports it to the candidate's table. The guard rules are the same in every stage that
meets traffic, LIVE included, and they come first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median, quantiles

from compiler.candidates import Event, Stage
from profiler.samples import Outcome, RequestSample
from sidecar.comparison import Agreement, AgreementPolicy, MirrorResult, agreement, excess
from sidecar.config import Autonomy

FAILURES = frozenset(
    {Outcome.SERVER_ERROR, Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_UNREACHABLE}
)  # not what clients did: their errors and hang-ups say nothing of a forward pass
MEETS_TRAFFIC = frozenset({Stage.SHADOW, Stage.CANARY, Stage.LIVE})


class Do(StrEnum):
    ADMIT = "admit"  # swap it onto the shadow, mirror on, weight 0
    STEP = "step"  # leased table with `weight`
    COMMIT = "commit"  # weight 1, no lease
    ROLL_BACK = "roll_back"  # committed table with weight 0, drain, revert
    HOLD = "hold"  # as it is; `reason` says what is missing
    WAIT = "wait"  # as it is; nothing is missing but time


@dataclass(frozen=True, slots=True)
class Action:
    """What to do now. `event` is for the candidate's table, `reason` for people."""

    do: Do
    reason: str
    event: Event | None = None
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """How traffic moves and what stops it."""

    steps: tuple[float, ...] = (0.05, 0.25, 0.5, 1.0)  # rising, the last one is 1
    step_s: float = 10.0
    step_requests: int = 20  # of the canary, in each step
    shadow_s: float = 2.0  # at least, whatever was mirrored
    min_requests: int = 12  # before a median of latencies says anything
    allowed_failure_rate: float = 0.01  # of a canary beside a stable arm without failures
    false_alarm_rate: float = 0.01
    max_latency_ratio: float = 2.0  # over the stable arm's upper quartile
    mirror_up_to: float = 0.25  # above it, copies would load the canary beyond its share
    agreement: AgreementPolicy = field(default_factory=AgreementPolicy)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The one open rollout. Times are `time.monotonic` seconds."""

    candidate_id: str
    digest: str
    stage: Stage
    since_s: float  # when this stage, or this step of it, began
    until: Stage  # how far it may go without being asked again
    step: int = -1  # index into the policy's steps; -1 before the first

    def at(self, stage: Stage, now_s: float, step: int) -> Rollout:
        return replace(self, stage=stage, since_s=now_s, step=step)


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Recent requests of one arm, newest last."""

    samples: tuple[RequestSample, ...] = ()

    @property
    def counted(self) -> tuple[RequestSample, ...]:
        return tuple(s for s in self.samples if s.outcome is Outcome.OK or s.outcome in FAILURES)

    @property
    def num_failed(self) -> int:
        return sum(s.outcome in FAILURES for s in self.samples)

    def latencies_s(self, name: str) -> list[float]:
        """`tpot_s` or `e2e_s` of the good requests, where it is known."""
        values = (getattr(s, name) for s in self.samples if s.outcome is Outcome.OK)
        return [v for v in values if v is not None and v > 0]


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of both arms now. `baseline` is the stable arm while it had all traffic."""

    stable: ArmFigures = ArmFigures()
    canary: ArmFigures = ArmFigures()  # of this candidate's digest
    baseline: ArmFigures = ArmFigures()
    mirrored: tuple[MirrorResult, ...] = ()  # of this candidate's digest
    trouble: str | None = None  # of the engine that runs the candidate, in words


def furthest(autonomy: Autonomy) -> Stage | None:
    """How far a candidate goes by itself; None is nowhere."""
    return {
        Autonomy.SHADOW: Stage.SHADOW,
        Autonomy.CANARY: Stage.CANARY,
        Autonomy.AUTO: Stage.LIVE,
    }.get(autonomy)


def decide(rollout: Rollout, figures: Figures, now_s: float, policy: RolloutPolicy) -> Action:
    """The next action. A breach wins over everything."""
    if rollout.stage in MEETS_TRAFFIC:
        broken = breach(figures, policy)
        if broken is not None:
            return Action(Do.ROLL_BACK, broken, Event.BREACHED)
    match rollout.stage:
        case Stage.CONFIRMED:
            return Action(Do.ADMIT, "confirmed by the judge", Event.ADMITTED)
        case Stage.SHADOW:
            return _after_shadow(rollout, figures, now_s, policy)
        case Stage.CANARY:
            return _after_step(rollout, figures, now_s, policy)
    return Action(Do.WAIT, str(rollout.stage))


def _after_shadow(
    rollout: Rollout, figures: Figures, now_s: float, policy: RolloutPolicy
) -> Action:
    if now_s < rollout.since_s + policy.shadow_s:
        return Action(Do.WAIT, f"{policy.shadow_s:g} s in the shadow")
    if agreement(figures.mirrored, policy.agreement) is not Agreement.AGREES:
        num = sum(r.outcome in ("ok", "diff", "error") for r in figures.mirrored)
        return Action(Do.HOLD, f"insufficient_data: {num} mirrored answers")
    if rollout.until is Stage.SHADOW:
        return Action(Do.HOLD, "the shadow agrees; autonomy ends here, promote to go on")
    return Action(Do.STEP, "the shadow agrees", Event.AGREES, policy.steps[0])


def _after_step(rollout: Rollout, figures: Figures, now_s: float, policy: RolloutPolicy) -> Action:
    step, wanted = policy.steps[rollout.step], policy.step_requests
    num = sum(s.finished_s >= rollout.since_s for s in figures.canary.counted)
    if now_s < rollout.since_s + policy.step_s:
        return Action(Do.WAIT, f"{policy.step_s:g} s at {step:g}")
    if num < wanted:
        return Action(Do.HOLD, f"insufficient_data: {num} of {wanted} requests at {step:g}")
    if rollout.step + 1 < len(policy.steps):
        return Action(Do.STEP, f"held at {step:g}", weight=policy.steps[rollout.step + 1])
    if rollout.until is Stage.CANARY:
        return Action(Do.HOLD, "the canary held; autonomy ends here, promote to go on")
    return Action(Do.COMMIT, f"held at {step:g}", Event.HELD, 1.0)


# --- guard rules ----------------------------------------------------------------------------------


def breach(figures: Figures, policy: RolloutPolicy) -> str | None:
    """The first rule that is broken, in words, or None."""
    if figures.trouble is not None:
        return figures.trouble
    if _fails_more(figures, policy):
        num, failed = len(figures.canary.counted), figures.canary.num_failed
        return f"{failed} of {num} canary requests failed"
    if agreement(figures.mirrored, policy.agreement) is Agreement.DISAGREES:
        return f"mirrored answers disagree with the primary's: {_counted(figures.mirrored)}"
    return _slower(figures, policy)


def _counted(results: Sequence[MirrorResult]) -> str:
    outcomes = Counter(r.outcome for r in results)
    said = ", ".join(f"{outcomes[o]} {o}" for o in ("ok", "diff", "error"))
    timed = [r for r in results if r.primary_e2e_s > 0 and r.shadow_e2e_s > 0]
    if not timed:
        return said
    shadow_s, primary_s = (
        median(r.shadow_e2e_s for r in timed),
        median(r.primary_e2e_s for r in timed),
    )
    return f"{said}, median {shadow_s:.3f} s against {primary_s:.3f} s"


def _fails_more(figures: Figures, policy: RolloutPolicy) -> bool:
    """A likelihood ratio, valid at any time: does the canary fail more than stable does?"""
    num, failed = len(figures.canary.counted), figures.canary.num_failed
    expected = max(policy.allowed_failure_rate, _failure_rate(figures))
    bad = min(0.99, expected + 0.1)
    evidence = failed * math.log(bad / expected) + (num - failed) * math.log(
        (1 - bad) / (1 - expected)
    )
    return evidence > math.log(1 / policy.false_alarm_rate)


def _failure_rate(figures: Figures) -> float:
    """Of the stable arm now; an arm without traffic says nothing. At most a half."""
    counted = len(figures.stable.counted)
    return min(0.5, figures.stable.num_failed / counted) if counted else 0.0


def _slower(figures: Figures, policy: RolloutPolicy) -> str | None:
    """Is the canary slower than `max_latency_ratio` allows, between tokens or end to end?

    Traffic is mixed, so medians of a few requests wander. What is counted instead is how many of
    the canary's requests take longer than the ratio times the stable arm's upper quartile, of the
    slower of stable now and stable alone: not more than a quarter of a harmless one's.
    """
    for name, words in (("tpot_s", "between tokens"), ("e2e_s", "end to end")):
        sides = [f.latencies_s(name) for f in (figures.stable, figures.baseline)]
        known = [quantiles(s, n=4)[2] for s in sides if len(s) >= policy.min_requests]
        canary = figures.canary.latencies_s(name)
        if not known or len(canary) < policy.min_requests:
            continue
        slow = sum(v > policy.max_latency_ratio * max(known) for v in canary)
        if excess(slow, len(canary), 0.25) >= math.log(1 / policy.false_alarm_rate):
            return (
                f"{slow} of {len(canary)} canary requests are over {policy.max_latency_ratio:g} "
                f"times as slow {words} as three of four on stable"
            )
    return None
