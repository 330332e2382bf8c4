"""Kullback-Leibler divergences: exact ones, and the estimators k1, k2, k3 from samples.

KL(p‖q) = E_{x∼p}[log p(x) − log q(x)] is not symmetric, and an estimate of it is only right for samples from p. So the
names here say both: k1, k2 and k3 estimate KL(policy‖ref) from actions that the *policy* sampled. To watch how far an
update has moved a policy, on actions sampled by the old one, swap the roles: `k3(old_logprobs, logprobs)` estimates
KL(old‖new).

    k1 = log π − log π_ref            unbiased, single values may be negative
    k2 = k1² / 2                      biased value, never negative; its gradient is that of KL(π‖π_ref)
    k3 = e^(−k1) − 1 + k1             unbiased and never negative; its gradient is that of KL(π_ref‖π)

Schulman, "Approximating KL divergence" (2020). What each does as a *loss* is another matter: differentiated per sample,
E[∇k1] = 0, so k1 in a loss holds nothing back (see tests/functional/test_kl.py, which enumerates all three).
"""

import torch
import torch.nn.functional as F

from minirl.functional.masked import check_same_shape


def k1(logprobs, ref_logprobs):
    """k1 = log π − log π_ref, per action sampled from π. E[k1] = KL(π‖π_ref). (B, T) nats in and out."""
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs, ref_logprobs):
    """k2 = (log π − log π_ref)² / 2, per action sampled from π. (B, T) nats in and out, never negative."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs, ref_logprobs):
    """k3 = π_ref/π − 1 − log(π_ref/π), per action sampled from π. E[k3] = KL(π‖π_ref).

    DeepSeekMath (Shao et al. 2024), eq. 4. (B, T) nats in and out, never negative.
    """
    log_ratio = k1(logprobs, ref_logprobs)
    return torch.expm1(-log_ratio) + log_ratio


def categorical_kl(p_logits, q_logits):
    """KL(p‖q) = Σ_a p(a) (log p(a) − log q(a)) of two softmax distributions, exactly.

    Args:
        p_logits, q_logits: (..., V).
    Returns:
        (...) in nats.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(p_logits=p_logits, q_logits=q_logits)
    p, q = F.log_softmax(p_logits, dim=-1), F.log_softmax(q_logits, dim=-1)
    return (p.exp() * (p - q).masked_fill(p.isneginf(), 0.0)).sum(-1)


def gaussian_kl(p_mean, p_std, q_mean, q_std):
    """KL(p‖q) of two Gaussians with diagonal covariance, exactly, summed over the last dimension.

        Σ_d [ log σ_q/σ_p + (σ_p² + (μ_p − μ_q)²) / (2 σ_q²) − 1/2 ]

    Args:
        p_mean, p_std, q_mean, q_std: (..., D), deviations positive.
    Returns:
        (...) in nats.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(p_mean=p_mean, p_std=p_std, q_mean=q_mean, q_std=q_std)
    variance_and_shift = p_std.square() + (p_mean - q_mean).square()
    return ((q_std / p_std).log() + variance_and_shift / (2 * q_std.square()) - 0.5).sum(-1)
