"""Confidence intervals: Wilson's for rates, Student's t for means, the percentile bootstrap for either; of differences
Newcombe's and Welch's; and the sign test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]

RESAMPLES = 10_000
_SEED = 20_250_101  # the same data give the same interval
_CHUNK = 1 << 22  # numbers drawn at a time


def wilson(successes: float, n: int, confidence: float) -> Interval | None:
    """The score interval of a rate (Wilson 1927, doi:10.1080/01621459.1927.10502953); None for n = 0.

    It stays within 0 and 1, and says something also where all or none succeeded.
    """
    if n <= 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / n
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At the ends the two terms are equal but for rounding.
    return (0.0 if successes == 0 else max(0.0, middle - half), 1.0 if successes == n else min(1.0, middle + half))


def student(mean: float | None, stderr: float | None, n: int, confidence: float) -> Interval | None:
    """mean ± t · stderr, t of n - 1 degrees of freedom; None where there are not two values, or all are equal: then
    nothing is known of the error."""
    if mean is None or not stderr or n < 2:
        return None
    half = t_quantile(0.5 + confidence / 2, n - 1) * stderr
    return (mean - half, mean + half)


def newcombe(rate_a: float, n_a: int, rate_b: float, n_b: int, confidence: float) -> Interval | None:
    """The interval of rate_b - rate_a from Wilson's of either (Newcombe 1998, method 10, doi:10.1002/(SICI)1097-0258(
    19980430)17:8<873::AID-SIM779>3.0.CO;2-I); None where a side has no value."""
    of_a, of_b = wilson(rate_a * n_a, n_a, confidence), wilson(rate_b * n_b, n_b, confidence)
    if of_a is None or of_b is None:
        return None
    difference = rate_b - rate_a
    return (
        difference - math.hypot(rate_b - of_b[0], of_a[1] - rate_a),
        difference + math.hypot(of_b[1] - rate_b, rate_a - of_a[0]),
    )


def welch(
    mean_a: float,
    variance_a: float | None,
    n_a: int,
    mean_b: float,
    variance_b: float | None,
    n_b: int,
    confidence: float,
) -> Interval | None:
    """The t interval of mean_b - mean_a (Welch 1947; variances with ddof 1); None where a side has fewer than two
    values, or no value differs from the others of its side: then nothing is known of the error."""
    if variance_a is None or variance_b is None or not variance_a + variance_b > 0:
        return None
    parts = variance_a / n_a, variance_b / n_b
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / (n_a - 1) + parts[1] ** 2 / (n_b - 1))
    half = t_quantile(0.5 + confidence / 2, degrees) * math.sqrt(sum(parts))
    return (mean_b - mean_a - half, mean_b - mean_a + half)


def sign_test(better: int, worse: int) -> float:
    """The chance of a split at least as uneven where better and worse are equally likely: exact, two-sided."""
    n = better + worse
    ways, sum_of_ways = 1, 0
    for k in range(min(better, worse) + 1):
        sum_of_ways += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, sum_of_ways / 2 ** (n - 1)) if n else 1.0


def bootstrap(values: Sequence[float], confidence: float) -> Interval | None:
    """The percentile interval of the mean over 10,000 resamples (Efron 1979); None for no values, or NaN among them."""
    given = np.asarray(values, np.float64)
    if not len(given) or np.isnan(given).any():
        return None
    random = np.random.default_rng(_SEED)
    at_once = max(1, min(RESAMPLES, _CHUNK // len(given)))
    means: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        means.append(given[random.integers(0, len(given), (count, len(given)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return (float(low), float(high))


def t_quantile(probability: float, degrees: float) -> float:
    """The quantile of Student's t above 0.5, by Newton's method from the normal one: the distribution function is
    concave there, so that every step stays below the quantile and comes nearer."""
    front = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    t = NormalDist().inv_cdf(probability)
    for _ in range(200):
        density = front * (1 + t * t / degrees) ** (-(degrees + 1) / 2)
        step = (probability - _t_cdf(t, degrees)) / density
        t += step
        if step <= 1e-14 * t:
            break
    return t


def _t_cdf(t: float, degrees: float) -> float:
    return 1 - 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(500):
        m = step // 2
        if step == 0:
            numerator = 1.0
        elif step % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + numerator * d)
        c = _away_from_zero(1 + numerator / c)
        fraction *= c * d
        if abs(1 - c * d) < 1e-16:
            break
    return front * (fraction - 1)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
