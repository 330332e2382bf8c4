"""Statistics of a comparison against tables, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from minirl.experiments.statistics import (
    area_under_curve,
    detectable_difference,
    difference,
    first_passing,
    interquartile_mean,
    iqm_interval,
    mean_interval,
    probability_of_improvement,
    verdict,
    wrong_winner_share,
)  # fmt: skip


def test_the_mean_has_students_interval():
    # 1 to 5: deviation sqrt(2.5), over sqrt(5) gives sqrt(0.5) = 0.70710678; t with 4 degrees of freedom is 2.77644511.
    mean, low, high = mean_interval([1, 2, 3, 4, 5])
    assert mean == 3 and high - mean == pytest.approx(0.70710678 * 2.77644511, rel=1e-7) == mean - low
    assert mean_interval([7.0])[0] == 7 and math.isnan(mean_interval([7.0])[1])
    assert all(math.isnan(number) for number in mean_interval([]))


def test_the_interquartile_mean_drops_a_quarter_at_either_end():
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -50]) == (2 + 3 + 4 + 5) / 4
    assert interquartile_mean([1, 2, 6]) == 3  # a quarter of three, rounded down, is none


def test_the_bootstrap_interval_covers_what_it_says():
    # 300 samples of 10 normal numbers, whose interquartile mean is 0: BCa at 95 % covers 0.90 to 0.95 of the time.
    draw, hits = np.random.default_rng(0), 0
    for seed in range(300):
        _, low, high = iqm_interval(draw.normal(size=10), resamples=499, seed=seed)
        hits += low < 0 < high
    assert 0.87 < hits / 300 < 0.97


def test_the_bootstrap_is_repeatable_and_knows_its_limits():
    values = [1.0, 5.0, 2.0, 9.0, 4.0]
    assert iqm_interval(values) == iqm_interval(values)
    values = np.random.default_rng(0).normal(size=9)
    assert iqm_interval(values, resamples=99) != iqm_interval(values, resamples=99, seed=1)
    assert iqm_interval([2.0] * 5) == (2.0, 2.0, 2.0)
    assert math.isnan(iqm_interval([1.0, 2.0])[1])


def test_the_difference_has_welchs_interval():
    first, second = [1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0]
    # Variances 5/3 and 100: standard error² = 5/12 + 100/3; Welch-Satterthwaite by hand.
    a, b = (5 / 3) / 4, 100 / 3
    freedom = (a + b) ** 2 / (a**2 / 3 + b**2 / 2)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(a + b)
    gap, low, high = difference(first, second)
    assert gap == -17.5 and (low, high) == pytest.approx((-17.5 - half, -17.5 + half), rel=1e-9)
    assert difference([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0, 2.0)
    assert math.isnan(difference([1.0], [1.0, 2.0])[1])


@pytest.mark.parametrize("first, second", [([1, 5, 3], [2, 3, 3, 0]), ([1, 1], [1, 1]), ([9], [1, 2])])
def test_probability_of_improvement_counts_pairs(first, second):
    pairs = [(a > b) + (a == b) / 2 for a, b in itertools.product(first, second)]
    assert probability_of_improvement(first, second) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_the_detectable_difference_is_found_as_often_as_it_says():
    draw, n, found = np.random.default_rng(0), 10, 0
    gap = detectable_difference(draw.normal(size=4000) * 770, draw.normal(size=4000) * 770) * math.sqrt(4000 / n)
    assert gap == pytest.approx(2.8016 * 770 * math.sqrt(2 / n), rel=0.05)  # 1.96 + 0.8416 for very many runs
    for _ in range(2000):
        _, low, _ = difference(draw.normal(gap, 770, n), draw.normal(0, 770, n))
        found += low > 0
    assert found / 2000 == pytest.approx(0.77, abs=0.03)  # a little below 0.8: t of 18 degrees of freedom, not of 7998
    assert detectable_difference([1.0, 1.0], [2.0, 2.0]) == 0 and math.isnan(detectable_difference([1.0], [2.0, 3.0]))


def test_verdicts():
    assert [verdict(*pair) for pair in [(1, 2), (-2, -1), (-1, 1), (0, 1), (math.nan, math.nan)]] == [
        "yes", "no", "undecided", "undecided", "undecided"]


def test_area_and_first_passing():
    assert area_under_curve([0, 10, 30], [0, 10, 20]) == (50 + 300) / 30
    assert area_under_curve([5], [7]) == 7
    assert first_passing([0, 10, 20], [1, 5, 9], 5) == 10 and first_passing([0, 10], [3, 2], 3) == 0
    assert math.isnan(first_passing([0, 10], [1, 2], 3))


def test_small_studies_err_as_often_as_enumeration_says():
    first, second = [0.0, 4.0, 5.0], [1.0, 2.0]  # means 3 and 1.5: the first is better
    pairs = [(a < b) + (a == b) / 2 for a, b in itertools.product(first, second)]
    assert wrong_winner_share(first, second, 1) == pytest.approx(sum(pairs) / len(pairs), abs=0.01)
    means = [[np.mean(two) for two in itertools.product(values, repeat=2)] for values in (first, second)]
    twos = [a - b for a, b in itertools.product(*means)]
    expected = np.mean([(gap < 0) + (gap == 0) / 2 for gap in twos])
    assert wrong_winner_share(first, second, 2) == pytest.approx(expected, abs=0.01)
    assert wrong_winner_share(second, first, 2) == pytest.approx(expected, abs=0.01)
