"""The detector protocol and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from profiler.window import TrafficProfile, in_words


class DriftKind(StrEnum):
    BURST = "burst"
    SHIFT = "shift"
    TREND = "trend"
    SEASON = "season"


@dataclass(frozen=True, slots=True)
class Shift:
    """One feature that moved: its level in the reference and now, in the feature's own unit."""

    feature: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class DriftVerdict:
    """What moved, for whom, since when, and how sure. `str()` of it is the verdict in words."""

    drifted: bool
    score: float  # 0-1: held-out skill of telling now from before (0 is chance)
    threshold: float
    tenant: str  # "" is all traffic
    onset_s: float | None  # on the samples' clock; None when nothing drifted
    kind: DriftKind | None
    shifts: tuple[Shift, ...]  # strongest first
    expected_gain: tuple[float, float] | None = None  # relative, as an interval; None is not known
    at_s: float | None = None  # the judged window's end, on the samples' clock

    def __str__(self) -> str:
        who = f"traffic of {self.tenant}" if self.tenant else "traffic"
        if not self.drifted:
            return f"{who} is as before (score {self.score:.2f} ≤ {self.threshold:.2f})"
        moved = ", ".join(in_words(s.feature, s.before, s.after) for s in self.shifts)
        how_sure = f"{self.kind or 'shift'}, score {self.score:.2f} > {self.threshold:.2f}"
        return f"{who} drifted{self._ago()} ({how_sure}): {moved}"

    def _ago(self) -> str:
        """Counted back from the judged window's end."""
        if self.onset_s is None or self.at_s is None:
            return ""
        return f" {max(0.0, self.at_s - self.onset_s):.0f} s ago"


class DriftDetector(Protocol):
    """Fed one full window at a time, in order. `update` may fit: call it off the event loop."""

    def update(self, profile: TrafficProfile) -> DriftVerdict: ...
    def rebase(self) -> None:
        """Take the present traffic as the new reference (after a retune)."""
