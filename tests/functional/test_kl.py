"""Divergences and their estimators, by enumeration: three actions, p = (0.7, 0.2, 0.1) and q = (0.5, 0.3, 0.2)."""

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from minirl.functional.kl import categorical_kl, gaussian_kl, k1, k2, k3

INF = float("inf")
BLOG = "Schulman, Approximating KL divergence (2020)"
PAPER = {k1: BLOG, k2: BLOG, k3: "Shao et al. 2024, eq. 4"}
P, Q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
KL = 0.085123  # 0.7 ln 1.4 + 0.2 ln(2/3) + 0.1 ln(1/2)
TRUE_GRADIENT = [0.175945, -0.098118, -0.077827]  # of KL(p‖q) on p's logits: p_a (log(p_a/q_a) − KL)
REVERSE_GRADIENT = [0.2, -0.1, -0.1]  # of KL(q‖p) on p's logits: p − q


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, tensor(expected) if isinstance(expected, list) else expected, rtol=0, atol=atol)


def test_values_of_each_action(evidence):
    # k1 = log(p/q); k3 = q/p − 1 − log(q/p), say 0.5/0.7 − 1 + 0.336472 = 0.050758
    for kind, right in (
        (k1, [0.336472, -0.405465, -0.693147]),
        (k2, [0.336472**2 / 2, 0.405465**2 / 2, 0.693147**2 / 2]),
        (k3, [0.050758, 0.094535, 0.306853]),
    ):
        evidence(PAPER[kind], kind, "three actions by hand", kind(P.log(), Q.log()), right, 1e-6)


def test_k1_and_k3_are_unbiased_and_k2_is_not(evidence):
    exact = (P * (P / Q).log()).sum()
    assert abs(exact.item() - KL) < 1e-6
    for kind in (k1, k3):
        mean = (P * kind(P.log(), Q.log())).sum()
        evidence(PAPER[kind] + ": E[k] = KL(π‖π_ref)", kind, "Σ p log(p/q), enumerated", mean, exact, 1e-15)
    assert abs((P * k2(P.log(), Q.log())).sum() - exact) > 1e-3


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    log_ratio = torch.linspace(-3, 3, 101, dtype=torch.float64)
    assert (k3(log_ratio, torch.zeros_like(log_ratio)) >= 0).all()
    tiny = torch.tensor([1e-4, -1e-4], dtype=torch.float32)  # k3 ≈ x²/2; exp(−x) − 1 would round most of it away
    close(k3(tiny, torch.zeros(2)).double(), [5e-9, 5e-9], 2e-9)


def test_orientation_of_k3(evidence):
    # at log π_ref − log π = x: e^x − 1 − x
    found = k3(tensor([-0.3, 0.3]), tensor([0.0, 0.0]))
    evidence(PAPER[k3], k3, "e^x − 1 − x at x = ±0.3", found, [0.049859, 0.040818], 1e-6)


def test_early_stop_sees_a_positive_number():
    # old actions, new − old = (0.5, 0.4, −0.1): k3 with the roles swapped is e^x − 1 − x
    old, new = tensor([-1.0, -1.0, -1.0]), tensor([-0.5, -0.6, -1.1])
    close(k3(old, new).mean(), tensor(0.081794))
    close(k1(old, new).mean(), tensor(-0.266667))  # what an early stop would wait for in vain


def expected_gradient(estimate):
    """Σ_a p(a) ∇ estimate(log p(a)): what a loss over samples from p moves the logits by, on average."""
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (P * estimate(logprobs, Q.log())).sum().backward()
    return logits.grad


def test_gradients_of_the_estimators_as_losses(evidence):
    nothing = [0.0, 0.0, 0.0]  # k1 holds nothing back
    evidence(BLOG + ": E[∇k1]", k1, "0: the score has mean 0", expected_gradient(k1), nothing, 1e-12)
    close(expected_gradient(k2), TRUE_GRADIENT)
    close(expected_gradient(k3), REVERSE_GRADIENT, 1e-12)
    close(expected_gradient(lambda p, q: (p - p.detach()).exp() * k3(p, q)), TRUE_GRADIENT)


def test_gradients_agree_with_autograd_of_the_exact_divergences(evidence):
    logits, q_logits = P.log().requires_grad_(), Q.log()
    true, reverse = (
        torch.autograd.grad(kl, logits)[0]
        for kl in (categorical_kl(logits, q_logits), categorical_kl(q_logits, logits))
    )
    close(true, TRUE_GRADIENT)
    evidence(BLOG + ": E[∇k2]", k2, "autograd of `categorical_kl(π, π_ref)`", expected_gradient(k2), true, 1e-12)
    evidence(BLOG + ": E[∇k3]", k3, "autograd of `categorical_kl(π_ref, π)`", expected_gradient(k3), reverse, 1e-12)
    close(expected_gradient(lambda p, q: (p - p.detach()).exp() * k3(p, q)), true, 1e-12)
    close(expected_gradient(lambda p, q: k1(p, q).detach() * p), true, 1e-12)  # KL in the reward


def test_categorical_kl_is_exact_and_directed(evidence):
    close(categorical_kl(P.log(), Q.log()), tensor(KL))
    close(categorical_kl(Q.log(), P.log()), (Q * (Q / P).log()).sum(), 1e-15)
    p, q = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    reference = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    torchs = "`torch.distributions.kl_divergence`"
    evidence("definition", categorical_kl, torchs, categorical_kl(p, q), reference, 1e-14)


def test_categorical_kl_where_ids_are_forbidden():
    both = tensor([0.0, 1.0, -INF])
    assert categorical_kl(both, both) == 0
    close(categorical_kl(both, tensor([1.0, 0.0, 5.0])).isfinite(), torch.tensor(True))
    assert categorical_kl(tensor([1.0, 0.0, 5.0]), both) == INF


def test_gaussian_kl_agrees_with_torch(evidence):
    mean, std = torch.randn(2, 4, 3, dtype=torch.float64), torch.rand(2, 4, 3, dtype=torch.float64) + 0.3
    p, q = Independent(Normal(mean[0], std[0]), 1), Independent(Normal(mean[1], std[1]), 1)
    found = gaussian_kl(mean[0], std[0], mean[1], std[1])
    evidence("definition", gaussian_kl, "`torch.distributions.kl_divergence`", found, kl_divergence(p, q), 1e-13)


def test_gaussian_kl_by_hand(evidence):
    # B13: six dimensions, deviation 0.6, every mean moved by 0.1: 6 · 0.01 / (2 · 0.36)
    zeros, std = torch.zeros(6, dtype=torch.float64), torch.full((6,), 0.6, dtype=torch.float64)
    found = gaussian_kl(zeros, std, zeros + 0.1, std)
    evidence("definition", gaussian_kl, "six torques moved by 0.1, by hand", found, 0.083333, 1e-6)


@pytest.mark.parametrize("function", [k1, k2, k3])
def test_estimators_refuse_shapes_that_would_broadcast(function):
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(2, 1\), but logprobs has shape \(2,\)"):
        function(torch.zeros(2), torch.zeros(2, 1))


def test_divergences_refuse_shapes_that_would_broadcast():
    with pytest.raises(ValueError, match=r"q_logits has shape \(1, 3\), but p_logits has shape \(2, 3\)"):
        categorical_kl(torch.zeros(2, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"q_std has shape \(3,\), but p_mean has shape \(2, 3\)"):
        gaussian_kl(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3))
