"""PPO with a KL penalty: the loss by hand, the rule for beta, and the exact KL of an update."""

import math

import pytest
import torch
from torch.distributions import kl_divergence

from minirl.algorithms.ppo_kl import PPOKL, PPOKLConfig, adapt_beta, kl_penalty_loss
from minirl.functional.returns import gae

NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-12):
    expected = tensor(expected) if isinstance(expected, (list, float, int)) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_loss_by_hand(evidence):
    # ratios 2 and 0.5, advantages 1 and −2, KL 0.1 and 0.3, β 4: −(2 − 0.4 − 1 − 1.2) / 2 = 0.3
    logprobs, old = tensor([[math.log(2), -math.log(2), NAN]]).requires_grad_(), torch.zeros(1, 3, requires_grad=True)
    kl, advantages = tensor([[0.1, 0.3, NAN]]).requires_grad_(), tensor([[1, -2, NAN]]).requires_grad_()
    loss, stats = kl_penalty_loss(logprobs, old, advantages, kl, torch.tensor([[1, 1, 0]]), beta=4.0)
    loss.backward()
    paper = "Schulman et al. 2017, eq. 8"
    evidence(paper, kl_penalty_loss, "two actions by hand", loss, 0.3, 1e-12)
    gradients = [[-1, 0.5, 0], [2.0, 2.0, 0]]  # −r A / 2: no clip takes it away; β / 2
    found = torch.cat([logprobs.grad, kl.grad])
    evidence(paper, kl_penalty_loss, "its gradients by hand", found, gradients, 1e-12)
    assert old.grad is None and advantages.grad is None
    close(stats["kl_old_new"], 0.2)
    close(stats["ratio_max"], 2.0)
    close(stats["clip_fraction"], 1.0)
    close(stats["policy_loss"], 0.3)
    assert stats["count"] == 2 and not any(value.requires_grad for value in stats.values())


def test_beta_is_one_where_nothing_else_is_said():
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    close(kl_penalty_loss(zeros, zeros, zeros, zeros + 0.3, torch.ones(1, 1))[0], 0.3)


@pytest.mark.parametrize("wrong", [1, 2, 3, 4])
def test_shapes_that_would_broadcast_are_refused(wrong):
    inputs = [torch.zeros(2, 3)] * 5
    inputs[wrong] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"has shape \(2, 1\), but logprobs has shape \(2, 3\)"):
        kl_penalty_loss(*inputs)


@pytest.mark.parametrize(
    "kl, beta", [(0.0066, 1.0), (0.0067, 2.0), (0.01, 2.0), (0.0149, 2.0), (0.0151, 4.0), (0.0, 1.0), (1.0, 4.0)]
)
def test_the_rule_for_beta(kl, beta, evidence):
    # target 0.01: halved below 0.006667, doubled above 0.015
    paper = "Schulman et al. 2017, section 4"
    evidence(paper, adapt_beta, "the rule's two edges by hand", adapt_beta(2.0, kl, 0.01), beta, 0)


def test_one_update_by_hand(make_control):
    config = PPOKLConfig(epochs=2, minibatches=1, kl_beta=3.0, lr=0.02, gamma=0.9, gae_lambda=0.8)
    batch, policy, critic = make_control(episodes=True)
    _, other, _ = make_control(episodes=True)
    advantages, _ = gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.9, 0.8)
    counted = advantages[batch.mask]
    advantages = (advantages - counted.mean()) / (counted.std() + 1e-8)
    with torch.no_grad():
        old = other(batch.obs)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.02 * 0.5, eps=1e-5)
    losses = []
    for _ in range(2):
        new = other(batch.obs)
        gain = (new.log_prob(batch.actions) - batch.logprobs).exp() * advantages - 3.0 * kl_divergence(old, new)
        losses.append(-gain[batch.mask].mean())
        optimizer.zero_grad()
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
    algorithm = PPOKL(policy, critic, config)
    stats = algorithm.update(batch, progress=0.5)
    for found, wanted in zip(policy.parameters(), other.parameters(), strict=True):
        close(found, wanted, 1e-10)
    with torch.no_grad():
        kl = kl_divergence(old, other(batch.obs))[batch.mask].mean()
    close(stats["kl_old_new"], kl, 1e-10)
    close(stats["policy_loss"], sum(losses).detach() / 2, 1e-10)
    assert float(stats["kl_beta"]) == 3.0 and algorithm.beta == adapt_beta(3.0, float(kl), 0.01) != 3.0


def test_a_fixed_beta_stays(make_control):
    batch, policy, critic = make_control()
    algorithm = PPOKL(policy, critic, PPOKLConfig(adaptive=False, kl_beta=0.3, epochs=2, minibatches=2))
    algorithm.update(batch)
    assert algorithm.beta == 0.3


def test_a_larger_beta_holds_the_policy_back(make_control):
    moved = []
    for beta in (1e-9, 100.0):
        batch, policy, critic = make_control()
        config = PPOKLConfig(adaptive=False, kl_beta=beta, epochs=20, minibatches=1, lr=0.01)
        moved.append(float(PPOKL(policy, critic, config).update(batch)["kl_old_new"]))
    assert moved[1] < 0.2 * moved[0]


def test_beta_adapts_from_update_to_update_and_is_saved(make_control):
    batch, policy, critic = make_control()
    algorithm = PPOKL(policy, critic, PPOKLConfig(kl_target=1e-12, epochs=1, minibatches=1))
    betas = [float(algorithm.update(batch)["kl_beta"]) for _ in range(3)]
    assert betas == [1, 2, 4] and algorithm.state_dict()["beta"] == 8


def test_the_critic_learns_too(make_control):
    batch, policy, critic = make_control()
    config = PPOKLConfig(epochs=1, minibatches=1, critic_epochs=40, critic_minibatches=1, critic_lr=0.01)
    algorithm = PPOKL(policy, critic, config)
    first = algorithm.update(batch)["value_loss"]
    assert algorithm.update(batch)["value_loss"] < 0.8 * first
