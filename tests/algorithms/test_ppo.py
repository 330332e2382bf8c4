"""PPO: where the clip takes the gradient away and where it does not, the value loss, and one update step by step."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from minirl.algorithms.critic import with_advantages
from minirl.algorithms.ppo import PPO, PPOConfig, clipped_surrogate, clipped_surrogate_loss, ratio_stats, value_loss
from minirl.algorithms.ppo_kl import PPOKL, PPOKLConfig
from minirl.algorithms.reinforce import policy_gradient_loss
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.functional.returns import explained_variance, gae
from minirl.models.policies import GaussianPolicy

NAN, INF = float("nan"), float("inf")
FEW = dict(critic_epochs=1, critic_minibatches=1)
ONCE = dict(epochs=1, minibatches=1, **FEW)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-12):
    expected = tensor(expected) if isinstance(expected, (list, float, int)) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def surrogate(ratios, advantages, mask=None, clip=0.2):
    """(loss, stats, logprobs) for given ratios; old log-probs are −1 everywhere."""
    logprobs = (tensor([ratios]).log() - 1).requires_grad_()
    mask = torch.ones(1, len(ratios)) if mask is None else torch.tensor([mask])
    loss, stats = clipped_surrogate_loss(logprobs, torch.full_like(logprobs, -1.0), tensor([advantages]), mask, clip)
    return loss, stats, logprobs


# ---- the clipped surrogate

RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]


@pytest.mark.parametrize(
    "advantage, objective, moves",
    [  # moves: whether the gradient −r A survives. Cut only where the ratio left in the direction the advantage wants
        (2.0, [1.0, 1.8, 2.0, 2.2, 2.4], [1, 1, 1, 1, 0]),
        (-2.0, [-1.6, -1.8, -2.0, -2.2, -3.0], [0, 1, 1, 1, 1]),
    ],
)
def test_values_and_gradients_by_hand(advantage, objective, moves, evidence):
    paper, found = "Schulman et al. 2017, eq. 7", clipped_surrogate(tensor([RATIOS]), tensor([[advantage] * 5]))
    evidence(paper, clipped_surrogate, "five ratios by hand", found, [objective], 1e-12)
    loss, stats, logprobs = surrogate(RATIOS, [advantage] * 5)
    loss.backward()
    evidence(paper, clipped_surrogate_loss, "five ratios by hand", loss, -sum(objective) / 5, 1e-12)
    right = [[-r * advantage * m / 5 for r, m in zip(RATIOS, moves, strict=True)]]
    evidence(paper, clipped_surrogate_loss, "its gradient by hand", logprobs.grad, right, 1e-12)
    assert (logprobs.grad[0] == 0).tolist() == [not m for m in moves]
    close(stats["policy_loss"], loss.detach())


def test_the_two_bounds_may_differ(evidence):
    # 1.25 is outside 1 + 0.2 but inside 1 + 0.28; 0.75 is outside 1 − 0.2
    loss, stats, logprobs = surrogate([1.25, 1.26, 1.3, 0.75, 0.85], [1, 1, 1, -1, -1], clip=(0.2, 0.28))
    loss.backward()
    right = -(1.25 + 1.26 + 1.28 - 0.8 - 0.85) / 5
    evidence("Yu et al. 2025 (DAPO): two bounds", clipped_surrogate_loss, "five ratios by hand", loss, right, 1e-12)
    assert (logprobs.grad[0] != 0).tolist() == [True, True, False, False, True]
    close(stats["clip_fraction"], 0.4)


def test_what_the_stats_say():
    loss, stats, _ = surrogate([0.5, 1.0, 1.5, 9.0], [1, 1, 1, 1], mask=[1, 1, 1, 0])
    close(stats["ratio_max"], 1.5)
    close(stats["clip_fraction"], 2 / 3)  # 0.5 lies outside too, though its gradient is not cut
    close(stats["kl_old_new"], (0.5 - 1 - math.log(0.5) + 1.5 - 1 - math.log(1.5)) / 3)  # r − 1 − log r
    assert stats["count"] == 3 and not any(value.requires_grad for value in stats.values())
    _, stats, _ = surrogate([0.5, 0.7, 9.0], [1, 1, 1], mask=[1, 1, 0])
    close(stats["ratio_max"], 0.7)


def test_the_interval_of_the_stats_is_that_of_the_paper():
    logprobs = tensor([[0.79, 0.81, 1.19, 1.21]]).log()
    close(ratio_stats(logprobs, torch.zeros_like(logprobs), torch.ones(1, 4))["clip_fraction"], 0.5)


def test_at_the_policy_that_sampled_it_is_the_policy_gradient(evidence):
    logprobs, advantages = -torch.rand(3, 4).double() - 0.1, torch.randn(3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]])
    gradients = []
    for function in (lambda x: clipped_surrogate_loss(x, logprobs, advantages, mask)[0],
                     lambda x: policy_gradient_loss(x, advantages, mask)[0]):
        x = logprobs.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(x), x)[0])
    paper, reference = "Schulman et al. 2017, eq. 7, at π = π_old", "the policy gradient (Williams 1992, eq. 11)"
    evidence(paper, clipped_surrogate_loss, reference, gradients[0], gradients[1], 1e-12)


def test_gradient_agrees_with_finite_differences():
    old, advantages = torch.zeros(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    x = tensor([[0.1, 0.3, -0.4], [-0.1, 0.05, 0.5]]).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate_loss(x, old, advantages, mask)[0], x)


def test_only_the_new_policy_gets_a_gradient():
    inputs = [torch.rand(1, 3).double().requires_grad_() for _ in range(3)]
    clipped_surrogate_loss(inputs[0], inputs[1], inputs[2], torch.ones(1, 3))[0].backward()
    assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_a_clipped_ratio_can_still_leave_further():
    # action 0 has ratio 1.3 and A = 1: clipped, no gradient. Pushing action 1 down lifts it all the same.
    logits = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    actions, old = torch.tensor([[0, 1]]), tensor([[math.log(1 / 3 / 1.3), math.log(1 / 3 / 0.9)]])

    def ratios():
        return (Categorical(logits=logits.expand(1, 2, 3)).log_prob(actions) - old).exp()

    before = ratios()[0, 0].item()
    optimizer = torch.optim.SGD([logits], lr=0.5)
    logprobs = Categorical(logits=logits.expand(1, 2, 3)).log_prob(actions)
    clipped_surrogate_loss(logprobs, old, tensor([[1, -1]]), torch.ones(1, 2))[0].backward()
    optimizer.step()
    assert 1.2 < before < ratios()[0, 0].item()


def test_what_lies_outside_the_mask_does_not_matter():
    # a ratio that overflows on padding: its gradient would be 0 · inf
    logprobs = tensor([[0.0, 1e9, NAN, 0.0]]).requires_grad_()
    old, advantages = tensor([[0, -1e9, 0, NAN]]), tensor([[1, 1, 1, INF]])
    loss, stats = clipped_surrogate_loss(logprobs, old, advantages, torch.tensor([[1, 0, 0, 0]]))
    loss.backward()
    close(logprobs.grad, [[-1.0, 0, 0, 0]])
    assert loss == -1 and stats["ratio_max"] == 1 and stats["kl_old_new"] == 0


# ---- the value loss


def test_value_loss_is_half_the_squared_error(evidence):
    values, returns = tensor([[1, 2, NAN]]).requires_grad_(), tensor([[3, 1, 0]]).requires_grad_()
    loss, stats = value_loss(values, torch.zeros(1, 3), returns, torch.tensor([[1, 1, 0]]))
    loss.backward()
    evidence("Schulman et al. 2017, eq. 9: L_VF, halved", value_loss, "two errors by hand", loss, 0.5 * (4 + 1) / 2, 0)
    assert stats["count"] == 2 and stats["value_loss"] == loss
    close(values.grad, [[-1.0, 0.5, 0]])
    assert returns.grad is None and not stats["value_loss"].requires_grad


def test_value_clip_takes_the_larger_error(evidence):
    # old 0, clip 0.2. V 1, R 2: max(1, 1.8²), constant. V −1, R 2: max(9, 2.2²), moves. V 0.1, R 2: 1.9² both, moves.
    values, old = tensor([[1, -1, 0.1]]).requires_grad_(), torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    loss, _ = value_loss(values, old, torch.full((1, 3), 2.0).double(), torch.ones(1, 3), clip=0.2)
    loss.backward()
    right = 0.5 * (3.24 + 9 + 3.61) / 3
    evidence("OpenAI baselines, ppo2: value clipping", value_loss, "three values by hand", loss, right, 1e-12)
    close(values.grad, [[0.0, -1.0, -1.9 / 3]])
    assert old.grad is None


def test_the_clip_is_around_the_old_value():
    # old 5, V 6, R 7, clip 0.5: (5.5 − 7)² = 2.25 > 1; from below: old 5, V 4, R 3 the same
    for value, target in ((6.0, 7.0), (4.0, 3.0)):
        loss, _ = value_loss(tensor([[value]]), tensor([[5.0]]), tensor([[target]]), torch.ones(1, 1), clip=0.5)
        close(loss, 1.125)


# ---- doors


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_shapes_that_would_broadcast_are_refused(wrong):
    for function, first in ((clipped_surrogate_loss, "logprobs"), (value_loss, "values")):
        inputs = [torch.zeros(2, 3)] * 4
        inputs[wrong] = torch.zeros(2, 1)
        with pytest.raises(ValueError, match=rf"has shape \(2, 1\), but {first} has shape \(2, 3\)"):
            function(*inputs)


def test_so_are_they_in_the_parts():
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\), but ratio has shape \(2, 3\)"):
        clipped_surrogate(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"mask has shape \(1, 3\), but logprobs has shape \(2, 3\)"):
        ratio_stats(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 3), 0.2)


# ---- the ratio of a torque (B13)


def gaussian(dimensions, mean=0.0, std=1.0):
    policy = GaussianPolicy(1, dimensions, hidden=()).double()
    with torch.no_grad():
        policy.body[0].weight.zero_()
        policy.body[0].bias.fill_(mean)
        policy.log_std.fill_(math.log(std))
    return policy


def test_density_is_that_of_the_action_that_was_sampled():
    obs, policy = torch.zeros(1, 1, 1, dtype=torch.float64), gaussian(1)
    stored = policy(obs).log_prob(tensor([[[2.5]]]))
    close(stored, [[-4.043939]], 1e-6)
    clipped = policy(obs).log_prob(tensor([[[1.0]]]))  # what a buffer of clipped actions would compare with
    close((clipped - stored).exp(), [[13.804574]], 1e-6)


def test_densities_sum_over_dimensions():
    obs, raw = torch.zeros(1, 1, 1, dtype=torch.float64), tensor([[[0.5, -1.5, 2.5, 0, 1, -0.2]]])
    old, new = gaussian(6, std=0.6)(obs), gaussian(6, mean=0.1, std=0.6)(obs)
    close(old.log_prob(raw), [[-16.045900]], 1e-6)
    close(old.entropy(), [[5.448677]], 1e-6)
    close((new.log_prob(raw) - old.log_prob(raw)).exp(), [[1.742909]], 1e-6)
    close(kl_divergence(old, new), [[0.083333]], 1e-6)


# ---- the class


def targets(batch, gamma=0.99, lam=0.95):
    advantages, returns = gae(
        batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, gamma, lam
    )
    counted = advantages[batch.mask]
    return (advantages - counted.mean()) / (counted.std() + 1e-8), returns


def test_one_update_is_one_step_of_each_optimizer(make_control):
    batch, policy, critic = make_control(episodes=True)
    once = dict(epochs=1, minibatches=1, critic_epochs=1, critic_minibatches=1)
    config = PPOConfig(**once, entropy_coef=0.2, lr=0.02, critic_lr=0.05, gamma=0.9, gae_lambda=0.8)
    _, other, other_critic = make_control(episodes=True)
    advantages, returns = targets(batch, 0.9, 0.8)
    new, mask = other(batch.obs), batch.mask
    loss = -(new.log_prob(batch.actions) - batch.logprobs).exp().mul(advantages)[mask].mean()
    entropy = new.entropy()[mask].mean()
    critic_loss = 0.5 * (other_critic(batch.obs) - returns)[mask].square().mean()
    for value, module, lr in ((loss - 0.2 * entropy, other, 0.02), (critic_loss, other_critic, 0.05)):
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        if module is other:
            policy_norm = norm
        torch.optim.Adam(module.parameters(), lr=lr * 0.6, eps=1e-5).step()
    stats = PPO(policy, critic, config).update(batch, progress=0.4)
    for ours, reference in ((policy, other), (critic, other_critic)):
        for found, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
            close(found, wanted, 1e-10)
    close(stats["policy_loss"], loss.detach())
    close(stats["entropy"], entropy.detach())
    close(stats["value_loss"], critic_loss.detach())
    close(stats["grad_norm"], policy_norm, 1e-10)
    assert stats["explained_variance"] == explained_variance(batch.values, returns, mask)
    assert stats["count"] == mask.sum() and 0 < stats["kl_old_new"] < 1


def test_without_whitening_advantages_stay_in_units_of_reward(make_control):
    batch, _, _ = make_control(episodes=True)
    raw, returns = gae(
        batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.9, 0.8
    )
    plain, white = (with_advantages(batch, 0.9, 0.8, whiten=whiten) for whiten in (False, True))
    close(plain.advantages, torch.where(batch.mask, raw, 0))
    close(white.advantages, torch.where(batch.mask, targets(batch, 0.9, 0.8)[0], 0), 1e-9)
    assert plain.returns.equal(returns) and white.returns.equal(returns)
    assert with_advantages(batch, 0.9, 0.8).advantages.equal(white.advantages)
    assert raw[~batch.mask].any()


@pytest.mark.parametrize("make", [
    lambda policy, critic, whiten: PPO(policy, critic, PPOConfig(**ONCE, lr=0.0, whiten=whiten)),
    lambda policy, critic, whiten: PPOKL(policy, critic, PPOKLConfig(**ONCE, lr=0.0, whiten=whiten)),
    lambda policy, critic, whiten: TRPO(policy, critic, TRPOConfig(**FEW, whiten=whiten)),
])  # fmt: skip
def test_all_three_leave_advantages_alone_if_told_so(make, make_control):
    # at the policy that sampled, the loss is minus the mean advantage: 0 if whitened
    for whiten in (True, False):
        batch, policy, critic = make_control(episodes=True)
        raw = with_advantages(batch, 0.99, 0.95, whiten=False).advantages[batch.mask].mean()
        stats = make(policy, critic, whiten).update(batch)
        close(stats["policy_loss"], torch.zeros_like(raw) if whiten else -raw, 1e-9)
        assert abs(raw) > 0.05


def steps_of(optimizer):
    return int(next(iter(optimizer.state.values()))["step"])


def test_it_takes_the_steps_that_the_config_says(make_control):
    batch, policy, critic = make_control()
    steps = dict(epochs=3, minibatches=4, critic_epochs=3, critic_minibatches=4)
    algorithm = PPO(policy, critic, PPOConfig(**steps, lr_decay=False))
    assert algorithm.update(batch, progress=0.5)["count"] == 20
    assert steps_of(algorithm.optimizer) == steps_of(algorithm.critic_optimizer) == 12
    assert algorithm.optimizer.param_groups[0]["lr"] == algorithm.critic_optimizer.param_groups[0]["lr"] == 3e-4


def test_the_value_loss_is_a_mean_over_the_passes(make_control):
    losses = []
    for passes in (1, 2):
        batch, policy, critic = make_control()
        config = PPOConfig(epochs=1, minibatches=1, critic_epochs=passes, critic_minibatches=1, critic_lr=0.05)
        losses.append(float(PPO(policy, critic, config).update(batch)["value_loss"]))
        if passes == 1:
            _, returns = targets(batch)
            second = value_loss(critic(batch.obs).detach(), batch.values, returns, batch.mask)[0].item()
    assert abs(losses[1] - (losses[0] + second) / 2) < 1e-9 and second < losses[0]


def test_a_batch_without_values_is_refused(make_control):
    batch, policy, critic = make_control()
    with pytest.raises(ValueError, match="the batch has no values; collect it with the critic"):
        PPO(policy, critic).update(batch.with_(values=None, next_values=None))


def test_it_stops_once_the_policy_has_moved_too_far(make_control):
    # the first pass starts at the policy that sampled, KL 0; the second sees what the first did
    for target, passes in ((1e-9, 2), (None, 5), (1e9, 5)):
        batch, policy, critic = make_control()
        algorithm = PPO(policy, critic, PPOConfig(epochs=5, minibatches=1, target_kl=target))
        algorithm.update(batch)
        assert steps_of(algorithm.optimizer) == passes


@pytest.mark.parametrize("minibatches", [2, 5, 9])
def test_small_mini_batches_leave_finite_parameters(minibatches, make_control):
    # B07: five steps in parts of three and two, or of one each: the deviation is the batch's, not the part's
    batch, policy, critic = make_control()
    algorithm = PPO(policy, critic, PPOConfig(epochs=2, minibatches=minibatches))
    algorithm.update(batch.rows(slice(0, 1)))
    algorithm.update(batch.rows(slice(1, 2)).with_(mask=torch.tensor([[0, 0, 1, 0, 0]]).bool()))
    assert all(p.isfinite().all() for module in (policy, critic) for p in module.parameters())


def test_values_are_clipped_where_the_config_says(make_control):
    found = []
    for value_clip in (None, 1e-6, 1e6):
        batch, policy, critic = make_control()
        torch.manual_seed(0)
        PPO(policy, critic, PPOConfig(epochs=3, minibatches=1, value_clip=value_clip, critic_lr=0.01)).update(batch)
        found.append(critic(batch.obs).detach())
    close(found[0], found[2])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_the_clip_of_the_config_is_used(make_control):
    found = []
    for clip in (0.01, 0.2):
        batch, policy, critic = make_control()
        stats = PPO(policy, critic, PPOConfig(epochs=6, minibatches=1, clip=clip, lr=0.02)).update(batch)
        found.append((float(stats["kl_old_new"]), float(stats["clip_fraction"])))
    assert found[0][0] < found[1][0] and found[0][1] > found[1][1]
