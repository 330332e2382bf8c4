"""REINFORCE against the true gradient, by enumerating every trajectory of a two-token language.

Ids are 0, 1 and 2 = end. A trajectory is [2], or an id 0 or 1 and then any id: seven in all, of one or two tokens.
"""

import itertools

import pytest
import torch

from minirl.algorithms.ppo import value_loss
from minirl.algorithms.reinforce import REINFORCE, EMABaseline, REINFORCEConfig, leave_one_out, policy_gradient_loss
from minirl.functional.returns import gae, rewards_to_go
from minirl.worlds.batch import Batch

TRAJECTORIES = [(2,)] + list(itertools.product((0, 1), (0, 1, 2)))
MASK = torch.tensor([[1] * len(path) + [0] * (2 - len(path)) for path in TRAJECTORIES])
REWARDS = torch.tensor([[0.3, 0], [1, 2], [1, -1], [1, 0.5], [-2, 4], [-2, 1], [-2, 0.7]], dtype=torch.float64)
SCORES = REWARDS.sum(1)
THETA = torch.sin(1.7 * torch.arange(12.0, dtype=torch.float64)).view(4, 3)  # logits: first token, then after 0, 1, (2)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def logprobs_of(theta):
    """(7, 2): log-probabilities of every trajectory's tokens; the second column of the one-token path is 0."""
    table = theta.log_softmax(-1)
    rows = [[table[0, path[0]], table[path[0] + 1, path[1]] if len(path) == 2 else 0 * table[0, 0]]
            for path in TRAJECTORIES]
    return torch.stack([torch.stack(row) for row in rows])


def true_gradient(values=SCORES):
    """∇ Σ_τ p(τ) R(τ) by autograd."""
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad((logprobs_of(theta).sum(1).exp() * values).sum(), theta)[0]


def expected_gradient(advantages, reduction="trajectory"):
    """E[−∇L] over batches of one trajectory."""
    theta = THETA.clone().requires_grad_()
    logprobs = logprobs_of(theta)
    probabilities = logprobs.detach().sum(1).exp()
    losses = [policy_gradient_loss(logprobs[i : i + 1], advantages[i : i + 1], MASK[i : i + 1], reduction)[0]
              for i in range(7)]
    return torch.autograd.grad(-(probabilities * torch.stack(losses)).sum(), theta)[0]


PAPER, TRUE = "Williams 1992, eq. 11 and theorem 2", "autograd of J over all seven trajectories"


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def whole_returns():
    return SCORES.unsqueeze(1).expand(7, 2)


def test_the_trajectory_reduction_is_unbiased(evidence):
    assert true_gradient().abs().max() > 0.1
    evidence(PAPER, policy_gradient_loss, TRUE, expected_gradient(whole_returns()), true_gradient(), 1e-12)


def test_so_is_the_return_to_go(evidence):
    zeros = torch.zeros(7, 2)
    found = expected_gradient(rewards_to_go(REWARDS, zeros, zeros, 1.0))
    evidence(PAPER + ", return to go", policy_gradient_loss, TRUE, found, true_gradient(), 1e-12)


def test_a_baseline_leaves_the_expected_gradient_unchanged(evidence):
    close(expected_gradient(whole_returns() - 3.7), true_gradient())
    value = tensor([[0.4, 0.0]] + [[0.4, -1.2]] * 3 + [[0.4, 2.5]] * 3)  # depends on the prefix only
    found = expected_gradient(whole_returns() - value)
    evidence(PAPER + ", a baseline of the state", policy_gradient_loss, TRUE, found, true_gradient(), 1e-12)


def test_a_baseline_that_sees_the_action_does_not():
    assert (expected_gradient(0.5 * whole_returns()) - true_gradient()).abs().max() > 0.05


def test_the_token_reduction_rescales_a_batch_by_its_length():
    # so in one batch the direction stays, but over batches of different lengths it does not
    close(expected_gradient(whole_returns(), "token"), expected_gradient(whole_returns() / MASK.sum(1, keepdim=True)))
    found, true = expected_gradient(whole_returns(), "token"), true_gradient()
    assert (found / found.norm() - true / true.norm()).norm() > 0.05


def test_leave_one_out_is_unbiased(evidence):
    theta = THETA.clone().requires_grad_()
    logprobs = logprobs_of(theta)
    probabilities, total = logprobs.detach().sum(1).exp(), 0.0
    for pair in itertools.product(range(7), repeat=2):
        pair = list(pair)
        advantages = leave_one_out(SCORES[pair], 2).unsqueeze(1).expand(2, 2)
        loss, _ = policy_gradient_loss(logprobs[pair], advantages, MASK[pair], "trajectory")
        total = total - probabilities[pair].prod() * loss
    found = torch.autograd.grad(total, theta)[0]
    reference = "autograd of J, over all 49 pairs of trajectories"
    evidence("Ahmadian et al. 2024, section 2.3", leave_one_out, reference, found, true_gradient(), 1e-12)


def test_leave_one_out_by_hand(evidence):
    # group (1, 2, 6): 1 − 4, 2 − 3.5, 6 − 1.5; group (0, 0, 3): −1.5, −1.5, 3
    found = leave_one_out(tensor([1, 2, 6, 0, 0, 3]), 3)
    right = [-3, -1.5, 4.5, -1.5, -1.5, 3]
    evidence("Ahmadian et al. 2024, section 2.3", leave_one_out, "two groups by hand", found, right, 0)


@pytest.mark.parametrize("rows, size", [(4, 1), (5, 2)])
def test_leave_one_out_needs_whole_groups_of_two_or_more(rows, size):
    with pytest.raises(ValueError, match=f"group_size is {size} with {rows} scores"):
        leave_one_out(torch.zeros(rows), size)


def test_loss_by_hand():
    logprobs, advantages = tensor([[-1, -2], [-3, 0]]).requires_grad_(), tensor([[1, 2], [-1, 9]]).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss, stats = policy_gradient_loss(logprobs, advantages, mask)  # −(−1 − 4 + 3) / 3
    assert abs(loss - 2 / 3) < 1e-15 and stats["count"] == 3 and abs(stats["policy_loss"] - 2 / 3) < 1e-15
    loss.backward()
    close(logprobs.grad, tensor([[-1, -2], [1, 0]]) / 3)
    assert advantages.grad is None
    loss, stats = policy_gradient_loss(logprobs, advantages, mask, "trajectory")
    assert loss == 1 and stats["count"] == 2 and not stats["policy_loss"].requires_grad


def test_what_lies_outside_the_mask_does_not_matter():
    nan = float("nan")
    logprobs = tensor([[-1, nan], [-3, -float("inf")]]).requires_grad_()
    loss, _ = policy_gradient_loss(logprobs, tensor([[1, nan], [-1, 9]]), torch.tensor([[1, 0], [1, 0]]))
    loss.backward()
    assert loss == -1 and logprobs.grad.tolist() == [[-0.5, 0], [0.5, 0]]


def test_shapes_and_names_are_checked():
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\), but logprobs has shape \(2, 3\)"):
        policy_gradient_loss(zeros, zeros[:, :1], zeros)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\), but logprobs has shape \(2, 3\)"):
        policy_gradient_loss(zeros, zeros, zeros[:1])
    with pytest.raises(ValueError, match="'mean'; choose 'trajectory' or 'token'"):
        policy_gradient_loss(zeros, zeros, zeros, "mean")


def test_the_moving_average_forgets_and_is_not_dragged_to_zero(evidence):
    baseline = EMABaseline(0.9)
    assert baseline.value == 0
    baseline.update(torch.tensor(2.0))
    assert abs(baseline.value - 2) < 1e-12
    baseline.update(3.0)  # (0.9 · 0.1 · 2 + 0.1 · 3) / (1 − 0.81)
    evidence("Williams 1992, eq. 10", EMABaseline, "two updates by hand", baseline.value, 0.48 / 0.19, 1e-12)
    other = EMABaseline(0.9)
    other.load_state_dict(baseline.state_dict())
    assert other.value == baseline.value and other.updates == 2


# ---- the class


class Bandit(torch.nn.Module):
    """One distribution over three actions, whatever is observed."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(tensor([0.5, 0.0, -0.5]))

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.logits.expand(*obs.shape[:2], 3))


def bandit_batch(policy, rewards=((1, 0), (2, 5), (0, 3), (1, 1)), **changes):
    rewards = tensor(rewards)
    obs, actions = torch.zeros(4, 2, 1), torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2]])
    mask, end = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool(), torch.tensor([[0, 1], [1, 0], [0, 1], [0, 1]])
    with torch.no_grad():
        logprobs = policy(obs).log_prob(actions)
    fields = dict(
        obs=obs, actions=actions, logprobs=logprobs, rewards=rewards, scores=rewards.sum(1), terminated=end.bool(),
        truncated=torch.zeros_like(mask), mask=mask, values=0 * rewards + 0.5, next_values=0 * rewards + 0.25,
        group_size=2,
    )  # fmt: skip
    return Batch(**{**fields, **changes})


def algorithm(**settings):
    policy = Bandit()
    critic = torch.nn.Linear(1, 1) if settings.get("baseline") == "learned" else None
    return REINFORCE(policy, critic, REINFORCEConfig(**settings))


def test_returns_and_baselines_of_the_class():
    one = algorithm(baseline="none", gamma=0.5)
    advantages, returns = one.advantages(bandit_batch(one.policy))
    close(returns, tensor([[1, 0], [2, 5], [1.5, 3], [1.5, 1]]))  # the second row ends after its first step
    close(advantages, returns)

    one = algorithm(baseline="leave-one-out")
    advantages, returns = one.advantages(bandit_batch(one.policy))
    close(advantages, tensor([[-1, -1], [1, 1], [1, 1], [-1, -1]]))  # totals 1, 2 | 3, 2: the 5 is masked out
    close(returns, tensor([[1, 0], [2, 5], [3, 3], [2, 1]]))

    one = algorithm(baseline="learned", gamma=0.5)
    batch = bandit_batch(one.policy, truncated=torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0]]).bool(),
                         terminated=torch.zeros(4, 2).bool())
    expected = gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.5, 1.0)
    for found, wanted in zip(one.advantages(batch), expected, strict=True):
        close(found, wanted)


def test_the_moving_average_never_contains_the_batch_it_is_subtracted_from():
    one = algorithm(baseline="ema", ema_decay=0.5)
    batch = bandit_batch(one.policy)
    advantages, returns = one.advantages(batch)
    close(advantages, returns)
    mean = returns[batch.mask].mean()
    close(one.advantages(batch)[0], returns - mean)
    assert abs(one.ema.value - mean) < 1e-12 and one.ema.updates == 2
    one.ema.update(mean + 7)  # (0.5 · 0.75 m + 0.5 (m + 7)) / 0.875 = m + 4
    assert abs(one.ema.value - mean - 4) < 1e-12


def test_one_update_is_one_adam_step_on_the_loss():
    one = algorithm(baseline="none", reduction="trajectory", lr=0.1, max_grad_norm=1e9)
    batch = bandit_batch(one.policy)
    reference = Bandit()
    distribution = reference(batch.obs)
    returns = rewards_to_go(batch.rewards, batch.terminated, batch.truncated, 1.0)
    loss = -(returns * distribution.log_prob(batch.actions))[batch.mask].sum() / 4
    entropy = distribution.entropy()[0, 0]
    loss.backward()
    torch.optim.Adam(reference.parameters(), lr=0.1 * 0.75, eps=1e-5).step()
    stats = one.update(batch, progress=0.25)
    close(one.policy.logits, reference.logits)
    close(stats["grad_norm"], reference.logits.grad.norm())
    close(stats["policy_loss"], loss.detach())
    close(stats["entropy"], entropy.detach())
    assert stats["kl_old_new"] > 0 and stats["count"] == 4


def test_the_learned_baseline_approaches_the_returns():
    one = algorithm(baseline="learned", critic_lr=0.05, critic_epochs=40, critic_minibatches=2)
    one.critic = None  # a constant: V = bias
    bias = torch.nn.Parameter(tensor(0.0))
    one.critic = lambda obs: bias.expand(obs.shape[:2])
    one.critic_optimizer = torch.optim.Adam([bias], lr=0.05)
    batch = bandit_batch(one.policy)
    stats = one.update(batch)
    returns = gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 1.0, 1.0)[1]
    target = returns[batch.mask].mean()
    assert abs(bias - target) < 0.2 < abs(target)
    values = bias.detach().expand_as(returns)
    assert stats["value_loss"] > value_loss(values, values, returns, batch.mask)[0]  # an average over the passes
    assert abs(stats["explained_variance"]) < 1e-12  # of the values in the batch, which are all alike


def test_a_learned_baseline_needs_a_critic():
    with pytest.raises(ValueError, match="'learned' needs a critic"):
        REINFORCE(Bandit(), None, REINFORCEConfig(baseline="learned"))


def test_a_row_that_stops_inside_an_episode_needs_a_critic():
    for baseline, refused in (("ema", True), ("none", True), ("learned", False)):
        one = algorithm(baseline=baseline)
        batch = bandit_batch(one.policy)
        cut = batch.with_(terminated=torch.zeros_like(batch.terminated), truncated=torch.zeros_like(batch.truncated))
        if refused:
            with pytest.raises(ValueError, match="whole episodes"):
                one.advantages(cut)
        else:
            assert one.advantages(cut)[0].isfinite().all()


def test_leave_one_out_refuses_a_discount():
    with pytest.raises(ValueError, match="gamma"):
        algorithm(baseline="leave-one-out", gamma=0.9)
