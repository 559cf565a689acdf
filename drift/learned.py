"""A classifier that tries to tell now from before: the better it can, the more has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from drift.watch import TRAFFIC_FEATURES, Comparison, Sensitivity, Watch

Floats = npt.NDArray[np.float64]


class LearnedDetector(Watch):
    """Score is 2 * AUC - 1 of a logistic regression on requests that it was not fitted to.

    Sees levels, spreads and pairs of features at once, so also a change that no feature shows
    alone. An update fits a few hundred rows: tens of milliseconds, off the event loop.
    """

    def __init__(
        self,
        sensitivity: Sensitivity | None = None,
        features: Sequence[str] = TRAFFIC_FEATURES,
        seed: int = 0,
    ) -> None:
        super().__init__(_Classifier(seed), sensitivity or Sensitivity(), features)


class _Classifier:
    def __init__(self, seed: int, num_folds: int = 5) -> None:
        self._seed, self._num_folds = seed, num_folds

    def compare(self, before: Floats, now: Floats) -> Comparison:
        rows = np.concatenate([before, now])
        is_now = np.repeat([0, 1], [len(before), len(now)])
        folds = StratifiedKFold(self._num_folds, shuffle=True, random_state=self._seed)
        auc = cross_val_score(_model(), rows, is_now, cv=folds, scoring="roc_auc").mean()
        chance = 2 * math.sqrt((len(rows) + 1) / (12 * len(before) * len(now)))  # Mann-Whitney
        return Comparison(float(2 * auc - 1), chance, _model().fit(rows, is_now).decision_function)


def _model() -> Pipeline:
    return make_pipeline(
        SimpleImputer(strategy="median", keep_empty_features=True),
        StandardScaler(),
        PolynomialFeatures(degree=2, include_bias=False),
        LogisticRegression(class_weight="balanced", C=0.3, max_iter=1000),
    )
