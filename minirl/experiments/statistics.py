"""What several runs of two algorithms say, and what they do not: declared before the runs were made.

Each run is one number. A mean comes with its t interval, an interquartile mean with a BCa bootstrap interval (a
percentile bootstrap of five runs covers 83 % where it says 95 %), a difference with Welch's interval. scipy does the
statistics.
"""

import math

import numpy as np
from scipy import integrate, stats

LEVEL = 0.95


def mean_interval(values):
    """(mean, low, high) of independent values: Student's t; low and high are nan for fewer than two."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        return (float(values.mean()) if len(values) else math.nan), math.nan, math.nan
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def interquartile_mean(values, axis=0):
    """Mean of the middle half: a quarter of the values (rounded down) is cut off at either end."""
    return stats.trim_mean(values, 0.25, axis=axis)


def iqm_interval(values, resamples=9_999, seed=0):
    """(interquartile mean, low, high): bias-corrected and accelerated bootstrap (Efron 1987); nan for fewer than three.

    Where all values are equal, so are low and high.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 3:
        return (float(interquartile_mean(values)) if len(values) else math.nan), math.nan, math.nan
    found = float(interquartile_mean(values))
    if np.ptp(values) == 0:
        return found, found, found
    interval = stats.bootstrap(
        (values,), interquartile_mean, confidence_level=LEVEL, n_resamples=resamples, method="BCa", vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return found, float(interval.low), float(interval.high)


def difference(first, second):
    """(mean(first) − mean(second), low, high): Welch's t, for unequal variances; nan for fewer than two."""
    gap = float(np.mean(first) - np.mean(second))
    if min(len(first), len(second)) < 2:
        return gap, math.nan, math.nan
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return gap, gap, gap
    interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(LEVEL)
    return gap, float(interval.low), float(interval.high)


def probability_of_improvement(first, second):
    """P(a run of `first` > a run of `second`), ties half: Mann and Whitney's U over the number of pairs."""
    return float(stats.mannwhitneyu(first, second).statistic) / (len(first) * len(second))


def detectable_difference(first, second, power=0.8):
    """The difference of means that runs like these, as many and as scattered, show at 95 % with this power.

        (t_{0.975} + t_{power}) · √(s₁²/n₁ + s₂²/n₂),   degrees of freedom by Welch
    """
    if min(len(first), len(second)) < 2:
        return math.nan
    parts = [np.var(values, ddof=1) / len(values) for values in (first, second)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (first, second), strict=True))
    return float((stats.t.ppf((1 + LEVEL) / 2, freedom) + stats.t.ppf(power, freedom)) * math.sqrt(sum(parts)))


def verdict(low, high):
    """Whether a claimed difference is there: "yes", "no" (it is there the other way round), "undecided"."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "undecided"
    return "yes" if low > 0 else "no" if high < 0 else "undecided"


def area_under_curve(steps, returns):
    """Mean height of a curve over its steps, by trapezoids: the area in units of return."""
    steps, returns = np.asarray(steps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if len(steps) < 2:
        return float(returns.mean())
    return float(integrate.trapezoid(returns, steps) / (steps[-1] - steps[0]))


def first_passing(steps, returns, threshold):
    """The first of `steps` whose return is at least the threshold; nan where none is."""
    reached = np.flatnonzero(np.asarray(returns) >= threshold)
    return float(steps[reached[0]]) if len(reached) else math.nan


def wrong_winner_share(first, second, seeds, draws=20_000, seed=0):
    """The share of studies, with so many seeds of each, that name the wrong winner; a tie counts half.

    Studies are drawn from the runs, with replacement; the means of all runs are taken for the truth.
    """
    draw, truth = np.random.default_rng(seed), np.mean(first) - np.mean(second)
    gaps = (draw.choice(first, (draws, seeds)).mean(1) - draw.choice(second, (draws, seeds)).mean(1)) * np.sign(truth)
    return float(np.mean(gaps < 0) + np.mean(gaps == 0) / 2)
