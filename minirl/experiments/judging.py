"""What an evaluation counts: who wins against whom, and what a reward model is worth.

In the spirit of Preference Proxy Evaluation (Frick et al. 2024): accuracy on held-out pairs, calibration, rank
correlation, and the best of K by the model's choice. Here the truth is known, so each is measured against it.
"""

import math

import torch
from scipy.stats import spearmanr


def win_rate(first, second):
    """How often the first of two wins, ties counting half, with the 95 % interval of Wilson (1927).

        centre = (p + z²/2n) / (1 + z²/n),   half width = z √( p(1−p)/n + z²/4n² ) / (1 + z²/n),   z = 1.96

    Args:
        first, second: lists of scores of equal length, of answers to the same prompts.
    Returns:
        (rate, low, high, n).
    """
    n, z = len(first), 1.959963984540054
    rate = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(first, second, strict=True)) / n
    centre, half = rate + z * z / (2 * n), z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return rate, (centre - half) / scale, (centre + half) / scale, n


def rank_correlation(first, second):
    """Spearman's correlation of two lists of scores; nan where one does not vary."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(spearmanr(first, second).statistic)


def best_of_k(scores, truth, k):
    """Mean truth of the best of k samples by `scores`, over all subsets of k of the n samples of each prompt.

        E[truth of the best] = Σ_i C(i−1, k−1) / C(n, k) · truth_(i),   truth_(i): of the i-th lowest score
                                                                                     Nakano et al. 2021, appendix I
    Args:
        scores, truth: (prompts, n).
        k: 1 to n.
    Returns:
        A float; unbiased, and without the noise of drawing the subsets.
    Raises:
        ValueError: if k is not 1 to n.
    """
    scores, truth = torch.as_tensor(scores, dtype=torch.float64), torch.as_tensor(truth, dtype=torch.float64)
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; it must be 1 to {n}, the samples of each prompt")
    weights = torch.tensor([math.comb(rank, k - 1) / math.comb(n, k) for rank in range(n)], dtype=torch.float64)
    return float((truth.gather(1, scores.argsort(dim=1)) * weights).sum(1).mean())


def kl_of_best_of(n):
    """Nats per completion between the best of n and what it was chosen from, where no two scores are equal.

        KL = ln n − (n − 1)/n                                                         Stiennon et al. 2020, appendix G.3
    """
    return math.log(n) - (n - 1) / n


def calibration(margins):
    """Brier score of P(chosen ≻ rejected) = σ(margin) on pairs whose chosen one is known: mean (1 − σ)².

    Args:
        margins: (B,) score of the chosen minus score of the rejected, in the units of Bradley and Terry's model.
    Returns:
        A float; 0.25 is a coin toss that says so.
    """
    return float((1 - torch.sigmoid(torch.as_tensor(margins, dtype=torch.float64))).square().mean())
