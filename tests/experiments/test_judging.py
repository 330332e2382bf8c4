"""What evaluations count, against enumeration of subsets, hand values and exact divergences."""

import itertools
import math

import pytest
import torch
from scipy.integrate import quad

from minirl.experiments.judging import best_of_k, calibration, kl_of_best_of, rank_correlation, win_rate


def test_win_rate_counts_ties_half():
    # two wins, one tie, one loss of four: 2.5/4
    rate, low, high, n = win_rate([3, 2, 1, 0], [1, 1, 1, 1])
    assert (rate, n) == (0.625, 4) and 0 < low < rate < high < 1
    assert win_rate([1, 1, 1, 1], [3, 2, 1, 0])[0] == 0.375


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [
        (5, 10, 0.236593, 0.763407),  # centre 1/2; half width 1.96 √(0.025 + 0.0096036)/1.38415 = 0.263407
        (0, 10, 0.0, 0.277533),  # p = 0: high = (z²/n)/(1 + z²/n) = 0.384146/1.384146
        (10, 10, 0.722467, 1.0),  # its mirror image
    ],
)
def test_wilsons_interval_by_hand(wins, n, low, high):
    first = [1.0] * wins + [0.0] * (n - wins)
    assert win_rate(first, [0.5] * n) == pytest.approx((wins / n, low, high, n), abs=1e-6)


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_as_published(wins, n, low, high):
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3: four digits
    first = [1.0] * wins + [0.0] * (n - wins)
    assert win_rate(first, [0.5] * n)[1:3] == pytest.approx((low, high), abs=5e-5)


def test_wilsons_bounds_are_where_the_score_test_turns():
    # its definition: the shares p whose test statistic (p̂ − p)/√(p(1−p)/n) is ±z
    rate, low, high, n = win_rate([1, 1, 0, 1, 0, 1, 1], [0, 0, 1, 1, 1, 0, 0])
    for bound, sign in ((low, 1), (high, -1)):
        assert (rate - bound) / math.sqrt(bound * (1 - bound) / n) == pytest.approx(sign * 1.959963984540054, abs=1e-12)


def test_win_rate_needs_pairs():
    with pytest.raises(ValueError):
        win_rate([1, 2], [1])


def test_best_of_k_by_hand():
    # scores rank the truths 5, 1, 3 from low to high; best of 2 is 1, 3 or 3: mean 7/3
    assert best_of_k([[0.1, 0.2, 0.3]], [[5.0, 1.0, 3.0]], 2) == pytest.approx(7 / 3, abs=1e-15)


@pytest.mark.parametrize("k", range(1, 7))
def test_best_of_k_is_the_mean_over_all_subsets(k):
    generator = torch.Generator().manual_seed(k)
    scores, truth = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    subsets = list(itertools.combinations(range(6), k))
    wanted = [float(truth[row, max(s, key=lambda i: scores[row, i])]) for row in range(4) for s in subsets]  # noqa: B023
    assert best_of_k(scores, truth, k) == pytest.approx(sum(wanted) / len(wanted), abs=1e-12)
    assert best_of_k(scores.tolist(), truth.tolist(), k) == best_of_k(scores, truth, k)


def test_best_of_one_is_the_mean_and_of_all_the_best():
    scores, truth = [[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]], [[1.0, 2.0, 6.0], [0.0, 4.0, 5.0]]
    assert best_of_k(scores, truth, 1) == pytest.approx(3.0, abs=1e-15)
    assert best_of_k(scores, truth, 3) == pytest.approx((1 + 4) / 2, abs=1e-15)
    assert best_of_k(truth, truth, 3) == pytest.approx((6 + 5) / 2, abs=1e-15)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_best_of_more_than_there_are(k):
    with pytest.raises(ValueError, match=f"k is {k}; it must be 1 to 3"):
        best_of_k([[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]], k)


def best_of_uniform(m, n):
    """P(i is the best of n) of m equally likely outcomes, drawn without replacement so that no two are equal."""
    counts = [0] * m
    for subset in itertools.combinations(range(m), n):
        counts[max(subset)] += 1
    return [count / math.comb(m, n) for count in counts]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_kl_of_best_of_n_is_the_limit_of_enumerations(n):
    # KL = Σ_i P(i) ln(m P(i)); no ties, so only the grid of m outcomes is between it and the formula, an error of
    # order 1/m: from 20 outcomes to 40 it must about halve, and the extrapolation 2·KL(40) − KL(20) must be far closer
    def kl(m):
        return sum(p * math.log(m * p) for p in best_of_uniform(m, n) if p)

    coarse, fine = kl(20), kl(40)
    wanted = kl_of_best_of(n)
    assert abs(fine - wanted) <= 0.55 * abs(coarse - wanted) + 1e-12
    assert 2 * fine - coarse == pytest.approx(wanted, abs=0.006)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ties_only_lower_the_kl_of_best_of_n(n):
    # every n-tuple of m outcomes, drawn with replacement: equal ones tie, and the formula is an upper bound
    for m in (2, 3, 5):
        draws = list(itertools.product(range(m), repeat=n))
        shares = [sum(max(draw) == i for draw in draws) / len(draws) for i in range(m)]
        assert 0 < sum(p * math.log(m * p) for p in shares) < kl_of_best_of(n)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_the_kl_of_best_of_n_is_its_integral(n):
    # the quantile u of the best of n has density n uⁿ⁻¹ on [0, 1], that of one sample has density 1
    integral, _ = quad(lambda u: n * u ** (n - 1) * math.log(n * u ** (n - 1)) if u else 0.0, 0, 1, epsabs=1e-12)
    assert kl_of_best_of(n) == pytest.approx(integral, abs=1e-8)


def test_calibration_by_hand():
    # σ(0) = 1/2, σ(ln 3) = 3/4, σ(−ln 3) = 1/4: squares of 1/2, 1/4, 3/4
    assert calibration([0.0]) == 0.25
    assert calibration([0.0, math.log(3), -math.log(3)]) == pytest.approx((4 + 1 + 9) / 16 / 3, abs=1e-15)
    assert calibration(torch.tensor([1e6, 1e6])) == 0.0 and calibration([-1e6]) == 1.0


def test_rank_correlation_by_hand():
    # without ties ρ = 1 − 6 Σd²/(n(n² − 1)); ranks 1 2 3 4 against 2 1 4 3: d² = 1 each, ρ = 1 − 24/60
    assert rank_correlation([1, 5, 6, 100], [0.2, 0.1, 9.0, 0.3]) == pytest.approx(0.6, abs=1e-12)
    assert rank_correlation([1, 2, 3], [1, 8, 27]) == pytest.approx(1.0, abs=1e-12)
    assert rank_correlation([1, 2, 3], [-1, -8, -27]) == pytest.approx(-1.0, abs=1e-12)
    # ties share their ranks: 1, 2.5, 2.5, 4 against 1 2 3 4; Pearson: 4.5/√(4.5 · 5) = √0.9
    assert rank_correlation([0, 1, 1, 2], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9), abs=1e-12)


def test_no_correlation_with_what_does_not_vary():
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3])) and math.isnan(rank_correlation([1, 2, 3], [0, 0, 0]))
    assert math.isnan(rank_correlation([], [])) and math.isnan(rank_correlation([1], [2]))
