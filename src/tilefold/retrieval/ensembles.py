"""One score from several teachers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tilefold.retrieval.training_rows import Floats, TrainingRows

__all__ = ["NORMALIZATIONS", "ensemble"]

NORMALIZATIONS = ("min_max", "none")
SCALE = 30.0
_EPSILON = 1e-6


def ensemble(
    rows: TrainingRows,
    teachers: Mapping[str, Floats],
    *,
    normalization: str = "min_max",
    scale: float | None = None,
    like: str | None = None,
) -> Floats:
    """One score per row from those of the teachers: float32 ``[N]``.

    ``min_max``: each teacher becomes ``(s - min) / (max - min + 1e-6)`` over all rows of a query; then the mean over
    the teachers times `scale`, as for inference-free sparse retrievers (arXiv 2411.04403). ``none``: the mean as they
    are, times `scale`. With `like`, as for SPLADE-v3 (arXiv 2403.06789).

    Args:
        rows: which rows are of one query.
        teachers: name -> float32 ``[N]``.
        normalization: ``"min_max"`` or ``"none"``.
        scale: by default 30 with ``min_max`` and 1 with ``none``.
        like: a teacher to whose mean and deviation over all rows their mean is mapped, instead of `scale`.
    """
    if not teachers:
        raise ValueError("teachers: expected at least one, got an empty mapping.")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization: expected min_max or none, got {normalization!r}.")
    if like is not None and scale is not None:
        raise ValueError("like, scale: expected one of them, got both.")
    if like is not None and like not in teachers:
        raise ValueError(f"like: expected one of the teachers {', '.join(teachers)}, got {like!r}.")
    if scale is not None and not 0 < scale < np.inf:
        raise ValueError(f"scale: expected a finite number above 0, got {scale!r}.")
    columns = [np.asarray(scores, np.float64) for scores in teachers.values()]
    if normalization == "min_max":
        columns = [_min_max(rows, scores) for scores in columns]
    mean = np.mean(columns, axis=0)
    if like is None:
        factor = scale if scale is not None else SCALE if normalization == "min_max" else 1.0
        return np.asarray(mean * factor, np.float32)
    if not np.ptp(mean):  # the deviation of equal scores may be a rounding
        raise ValueError("like: expected scores that differ, got equal ones, which have no deviation to map.")
    model = np.asarray(teachers[like], np.float64)
    return np.asarray((mean - mean.mean()) / mean.std() * model.std() + model.mean(), np.float32)


def _min_max(rows: TrainingRows, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    starts, of = rows.offsets[:-1], rows.query_of_row()  # no query is without rows
    low, high = np.minimum.reduceat(scores, starts), np.maximum.reduceat(scores, starts)
    normalized: npt.NDArray[np.float64] = (scores - low[of]) / (high - low + _EPSILON)[of]
    return normalized
