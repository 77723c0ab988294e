"""Ridge regression with cross-validation, from sums that each fold contributes."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Float, Int

PENALTIES = tuple(10.0**n for n in range(-5, 2))
"""Of standardised features, whose correlation matrix has ones on its diagonal."""
STRONG = 4
"""The penalty where two folds leave no third to choose by."""
FOLDS = 5


@dataclass(frozen=True)
class Moments:
    """What least squares needs to know of some rows."""

    count: float
    x: Float[np.ndarray, " F"]
    y: float
    xx: Float[np.ndarray, "F F"]
    xy: Float[np.ndarray, " F"]
    yy: float

    @classmethod
    def of(cls, x: Float[np.ndarray, "N F"], y: Float[np.ndarray, " N"]) -> "Moments":
        """Σ over the rows."""
        x = x.astype(np.float64)
        return cls(float(len(y)), x.sum(0), float(y.sum()), x.T @ x, x.T @ y, float(y @ y))

    def __sub__(self, other: "Moments") -> "Moments":
        return Moments(
            self.count - other.count,
            self.x - other.x,
            self.y - other.y,
            self.xx - other.xx,
            self.xy - other.xy,
            self.yy - other.yy,
        )


@dataclass(frozen=True)
class Head:
    """V = w·x + b."""

    weight: Float[np.ndarray, " F"]
    bias: float

    def squared_error(self, rows: Moments) -> float:
        """Σ (y − V)² over the rows, from their sums."""
        w, b = self.weight, self.bias
        return float(
            rows.yy
            - 2 * (w @ rows.xy + b * rows.y)
            + w @ rows.xx @ w
            + 2 * b * (w @ rows.x)
            + b * b * rows.count
        )


def fit(rows: Moments, penalties: tuple[float, ...] = PENALTIES) -> list[Head]:
    """One head per penalty: features standardised, the intercept free."""
    mean, y_mean = rows.x / rows.count, rows.y / rows.count
    covariance = rows.xx / rows.count - np.outer(mean, mean)
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.where(spread > 1e-8 * max(spread.max(initial=0.0), 1e-300), spread, np.inf)
    values, vectors = np.linalg.eigh(covariance / np.outer(scale, scale))
    target = vectors.T @ ((rows.xy / rows.count - mean * y_mean) / scale)
    heads = []
    for penalty in penalties:
        weight = vectors @ (target / (np.maximum(values, 0.0) + penalty)) / scale
        heads.append(Head(weight, float(y_mean - weight @ mean)))
    return heads


def folds_by_group(
    group: Int[np.ndarray, " N"], num: int = FOLDS, seed: int = 0
) -> Int[np.ndarray, " N"]:
    """A fold for every row, so that all rows of a group share one."""
    groups, which = np.unique(group, return_inverse=True)
    if len(groups) < 2:
        raise ValueError(f"cross-validation needs at least 2 prompts; got {len(groups)}.")
    order = np.random.default_rng(seed).permutation(len(groups))
    return (order % min(num, len(groups)))[which]


def out_of_fold(
    x: Float[np.ndarray, "N F"], y: Float[np.ndarray, " N"], fold: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, " N"], list[float]]:
    """V of each row by a head that has not seen its fold, and the penalty of each fold's head.

    The penalty too is chosen without the fold: among the others, by leaving out one at a time.
    """
    num = int(fold.max()) + 1
    centre = x.mean(axis=0, dtype=np.float64)
    x = x - centre.astype(x.dtype)  # sums of squares about zero lose digits
    parts = [Moments.of(x[fold == n], y[fold == n]) for n in range(num)]
    whole = Moments.of(x, y)
    errors = np.zeros((num, len(PENALTIES)))
    for one, other in combinations(range(num), 2) if num > 2 else ():
        heads = fit(whole - parts[one] - parts[other])
        errors[one] += [head.squared_error(parts[other]) for head in heads]
        errors[other] += [head.squared_error(parts[one]) for head in heads]
    best = errors.argmin(axis=1) if num > 2 else np.full(num, STRONG)
    value = np.empty(len(y))
    for n in range(num):
        head = fit(whole - parts[n])[best[n]]
        here = fold == n
        value[here] = x[here] @ head.weight + head.bias
    return value, [PENALTIES[n] for n in best]


def r_squared(y: Float[np.ndarray, " N"], value: Float[np.ndarray, " N"]) -> float:
    """1 − Σ (y − V)² / Σ (y − ȳ)²; below 0 it is worse than the mean."""
    off, spread = y - value, y - y.mean()
    return float(1.0 - (off @ off) / (spread @ spread)) if (spread @ spread) > 0 else float("nan")
