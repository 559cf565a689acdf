"""Cheap tests on one feature at a time, with nothing to fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drift.watch import TRAFFIC_FEATURES, Comparison, Sensitivity, Watch, ks

Floats = npt.NDArray[np.float64]


class KsDetector(Watch):
    """Score is the largest two-sample Kolmogorov-Smirnov distance of any feature."""

    def __init__(
        self, sensitivity: Sensitivity | None = None, features: Sequence[str] = TRAFFIC_FEATURES
    ) -> None:
        super().__init__(_KolmogorovSmirnov(), sensitivity or Sensitivity(), features)


class _KolmogorovSmirnov:
    def compare(self, before: Floats, now: Floats) -> Comparison:
        columns = range(before.shape[1])
        size = max(ks(before[:, c], now[:, c]) for c in columns)
        # standard deviation of a distance between two samples of one distribution
        chance = 0.26 * float(np.sqrt((len(before) + len(now)) / (len(before) * len(now))))
        votes = [_Vote(before[:, c], now[:, c]) for c in columns]

        def evidence(rows: Floats) -> Floats:
            votes_cast = [vote(rows[:, c]) for c, vote in enumerate(votes)]
            return np.asarray(np.sum(votes_cast, axis=0), dtype=np.float64)

        return Comparison(size, chance, evidence)


class _Vote:
    """Log-odds from which side of the widest gap between two distributions a value lies on."""

    def __init__(self, before: Floats, now: Floats) -> None:
        values = np.unique(np.concatenate([before, now]))
        values = values[~np.isnan(values)]
        gaps = [abs(_below(before, v) - _below(now, v)) for v in values]
        self._cut = float(values[int(np.argmax(gaps))]) if gaps else 0.0
        low_before, low_now = _below(before, self._cut), _below(now, self._cut)
        self._low = float(np.log(low_now / low_before))
        self._high = float(np.log((1 - low_now) / (1 - low_before)))

    def __call__(self, values: Floats) -> Floats:
        sides = np.where(values <= self._cut, self._low, self._high)
        return np.where(np.isnan(values), 0.0, sides)


def _below(values: Floats, cut: float) -> float:
    """Share at or below the cut, never quite 0 or 1."""
    known = values[~np.isnan(values)]
    return (float((known <= cut).sum()) + 0.5) / (known.size + 1)
