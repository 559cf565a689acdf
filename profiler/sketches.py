"""Small summaries of many numbers: percentiles of a window, and who the experts' tokens went to.

A window is bounded, so numpy on all of it is exact and enough. Sketches that merge across machines
are the business of `datasketches`, where it is installed; nothing here stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def percentiles(values: Floats, at: Sequence[float]) -> tuple[float, ...]:
    """Exact percentiles (0-100), linear between ranks. NaN is not known and left out; NaN comes
    back when nothing is known."""
    known = values[~np.isnan(values)]
    if not known.size:
        return (math.nan,) * len(at)
    return tuple(float(p) for p in np.percentile(known, at))


def imbalance(load: Counts | None) -> float:
    """Busiest expert over the mean, averaged over the layers that saw tokens; 1 with none.

    `load` is int64[num_moe_layers, num_experts].
    """
    if load is None or not load.sum():
        return 1.0
    busy = load[load.sum(axis=1) > 0]
    return float((busy.max(axis=1) / busy.mean(axis=1)).mean())


def entropy(load: Counts) -> Floats:
    """Bits a layer, float64[num_moe_layers]: log2(num_experts) is even, 0 is one expert only."""
    return _bits(_shares(load))


def distance(before: Counts, now: Counts) -> Floats:
    """Jensen-Shannon distance a layer, float64[num_moe_layers]: 0 is the same shares, 1 disjoint.

    Square root of the divergence in bits. Raises `ValueError` when the shapes differ.
    """
    if before.shape != now.shape:
        raise ValueError(f"expert loads are {before.shape} and {now.shape}: not the same model")
    p, q = _shares(before), _shares(now)
    divergence = _bits((p + q) / 2) - (_bits(p) + _bits(q)) / 2
    return np.sqrt(np.clip(divergence, 0.0, 1.0))


def _shares(load: Counts) -> Floats:
    """A layer without tokens counts as even."""
    total = load.sum(axis=1, keepdims=True)
    even = np.full(load.shape, 1.0 / load.shape[1])
    return np.where(total > 0, load / np.maximum(total, 1), even)


def _bits(share: Floats) -> Floats:
    logs = np.log2(np.where(share > 0, share, 1.0))
    return np.asarray(-(share * logs).sum(axis=1), dtype=np.float64)
