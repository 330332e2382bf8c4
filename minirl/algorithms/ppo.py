"""Proximal policy optimisation: several passes over a batch, with no reward for moving a ratio far from 1.

    L_CLIP(θ) = E[ min( r A, clip(r, 1 − ε, 1 + ε) A ) ],   r = π_θ(a|s) / π_old(a|s)      Schulman et al. 2017, eq. 7
    maximise  L_CLIP + c₂ H[π_θ];  the critic minimises L_VF                                                    eq. 9

Clipping takes the gradient away from an action whose ratio has already left the interval in the direction its advantage
wants. It does not keep the ratio inside: the other actions' gradients still move it.

Left out against the paper: parameters shared between policy and critic (there on Atari only), and with them c₁ (a
weight on a loss of its own would only rescale what Adam divides out). Stated choices: advantages are whitened over the
whole batch; the norm of each gradient is limited to 0.5 (as OpenAI baselines do).
"""

from dataclasses import dataclass

import torch

from minirl.algorithms.optimize import Stateful, anneal, average_stats, descend, kl_old_new, trainable
from minirl.algorithms.settings import Count, NonNegative, Positive, Settings, Share
from minirl.functional.kl import k3
from minirl.functional.masked import check_same_shape, masked_mean, masked_whiten, zero_outside
from minirl.functional.returns import explained_variance, gae


@dataclass(frozen=True)
class PPOConfig(Settings):
    """Settings of PPO."""

    clip: Positive = 0.2
    """Epsilon of the clipped surrogate (paper, table 1 and section 6.2: 0.2)."""
    epochs: Count = 10
    """Passes over each batch (paper, table 3: 10)."""
    minibatches: Count = 32
    """Parts that each pass is cut into (paper, table 3: 2,048 steps / 64)."""
    gamma: Share = 0.99
    """Discount (paper, table 3: 0.99; use 1 for text)."""
    gae_lambda: Share = 0.95
    """Lambda of GAE (paper, table 3: 0.95)."""
    value_clip: Positive | None = None
    """Keep new values this close to old ones inside the value loss; None for off."""
    entropy_coef: NonNegative = 0.0
    """c2, weight of the entropy bonus (paper: 0 on MuJoCo, 0.01 on Atari)."""
    target_kl: Positive | None = None
    """Stop after a pass whose last mini-batch has an estimated KL(old || new) above this, nats; None for never."""
    lr: NonNegative = 3e-4
    """Adam step size (paper, table 3: 3e-4)."""
    critic_lr: NonNegative = 3e-4
    """Adam step size of the critic (paper: the policy's)."""
    lr_decay: bool = True
    """Let the step sizes fall linearly to 0 over the run (paper: on Atari)."""
    max_grad_norm: Positive = 0.5
    """The gradient is scaled down to this norm (OpenAI baselines: 0.5)."""


def clipped_surrogate(ratio, advantages, clip=0.2):
    """min( r A, clip(r, 1 − ε_low, 1 + ε_high) A ) of every action.

    Args:
        ratio: (B, T) π/π_old, carries the gradient.
        advantages: (B, T); constants.
        clip: ε, or (ε_low, ε_high).
    Returns:
        (B, T).
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    advantages = advantages.detach()
    return torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def ratio_stats(logprobs, old_logprobs, mask, clip):
    """How far the policy has moved on the sampled actions: `ratio_max`, `clip_fraction`, `kl_old_new`, `count`.

    clip_fraction is the share of actions whose ratio lies outside the interval, whether or not their gradient is cut;
    kl_old_new is the mean of k3, which estimates KL(π_old‖π) from π_old's actions. All (B, T) inputs are constants.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    logprobs, old_logprobs = logprobs.detach(), old_logprobs.detach()
    ratio = (logprobs - old_logprobs).exp()
    outside = ((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype)
    return {
        "ratio_max": ratio.masked_fill(~mask.bool(), 0.0).amax(),
        "clip_fraction": masked_mean(outside, mask),
        "kl_old_new": masked_mean(k3(old_logprobs, logprobs), mask),
        "count": mask.bool().sum(),
    }


def clipped_surrogate_loss(logprobs, old_logprobs, advantages, mask, clip=0.2):
    """Minus PPO's clipped surrogate objective.

        L = −mean_mask( min( r A, clip(r, 1 − ε, 1 + ε) A ) )                            Schulman et al. 2017, eq. 7

    Args:
        logprobs: (B, T) nats, carries the gradient.
        old_logprobs: (B, T) nats, of the policy that sampled; constants.
        advantages: (B, T); constants.
        mask: (B, T).
        clip: ε, or (ε_low, ε_high).
    Returns:
        (loss, stats) with `policy_loss`, `ratio_max`, `clip_fraction`, `kl_old_new`, `count` (actions).
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs, old_logprobs, advantages = zero_outside(mask, logprobs, old_logprobs, advantages)
    ratio = (logprobs - old_logprobs.detach()).exp()
    loss = -masked_mean(clipped_surrogate(ratio, advantages, clip), mask)
    return loss, {"policy_loss": loss.detach()} | ratio_stats(logprobs, old_logprobs, mask, clip)


def value_loss(values, old_values, returns, mask, clip=None):
    """Half the squared error of the critic.

        L = ½ mean_mask( (V − R)² ),   with clip:  ½ mean_mask( max( (V − R)², (V_clip − R)² ) ),
        V_clip = V_old + clamp(V − V_old, −clip, clip)                                  OpenAI baselines, ppo2

    Args:
        values: (B, T), carries the gradient.
        old_values: (B, T) when the batch was collected; only used with clip.
        returns: (B, T) targets; constants.
        mask: (B, T).
        clip: largest rewarded move of a value, in units of reward; None for off.
    Returns:
        (loss, stats) with `value_loss`, `count` (steps).
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = zero_outside(mask, values, old_values, returns.detach())
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values.detach() + (values - old_values.detach()).clamp(-clip, clip)
        error = torch.max(error, (clipped - returns).square())
    loss = 0.5 * masked_mean(error, mask)
    return loss, {"value_loss": loss.detach(), "count": mask.bool().sum()}


class PPO(Stateful):
    """One update = `epochs` passes of mini-batch steps of policy and critic over one batch."""

    def __init__(self, policy, critic, config=None):
        self.policy, self.critic, self.config = policy, critic, config or PPOConfig()
        self.optimizer = torch.optim.Adam(trainable(policy), lr=self.config.lr, eps=1e-5)
        self.critic_optimizer = torch.optim.Adam(trainable(critic), lr=self.config.critic_lr, eps=1e-5)

    def update(self, batch, progress=0.0):
        """One update on a Batch that carries values; progress in [0, 1] drives the step sizes. Returns stats."""
        config = self.config
        anneal(self.optimizer, config.lr, progress, config.lr_decay)
        anneal(self.critic_optimizer, config.critic_lr, progress, config.lr_decay)
        advantages, returns = gae(
            batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated,
            config.gamma, config.gae_lambda,
        )  # fmt: skip
        batch = batch.with_(advantages=masked_whiten(advantages, batch.mask), returns=returns)

        seen, critic_seen = [], []
        for _ in range(config.epochs):
            for part in batch.minibatches(config.minibatches):
                policy = self.policy(part.obs)
                logprobs, entropy = policy.log_prob(part.actions), masked_mean(policy.entropy(), part.mask)
                loss, stats = clipped_surrogate_loss(
                    logprobs, part.logprobs, part.advantages, part.mask, config.clip
                )
                stats["entropy"] = entropy.detach()
                loss = loss - config.entropy_coef * entropy
                seen.append(descend(self.optimizer, [(loss, stats)], config.max_grad_norm))
                loss, critic_stats = value_loss(
                    self.critic(part.obs), part.values, part.returns, part.mask, config.value_clip
                )
                critic_seen.append(descend(self.critic_optimizer, [(loss, critic_stats)], config.max_grad_norm))
            if config.target_kl is not None and seen[-1]["kl_old_new"] > config.target_kl:
                break
        stats = average_stats(seen) | {"kl_old_new": kl_old_new(self.policy, batch), "count": batch.mask.sum()}
        stats["value_loss"] = average_stats(critic_seen)["value_loss"]
        stats["explained_variance"] = explained_variance(batch.values, batch.returns, batch.mask)
        return stats
