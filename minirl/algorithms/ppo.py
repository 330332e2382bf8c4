"""Proximal policy optimisation: several passes over a batch, with no reward for moving a ratio far from 1.

    L_CLIP(θ) = E[ min( r A, clip(r, 1 − ε, 1 + ε) A ) ],   r = π_θ(a|s) / π_old(a|s)      Schulman et al. 2017, eq. 7
    maximise  L_CLIP + c₂ H[π_θ];  the critic minimises L_VF                                                    eq. 9

Clipping takes the gradient away from an action whose ratio has already left the interval in the direction its advantage
wants. It does not keep the ratio inside: the other actions' gradients still move it.

Left out against the paper: parameters shared between policy and critic (there on Atari only), and with them c₁ (a
weight on a loss of its own would only rescale what Adam divides out). Stated choices: advantages are whitened over the
whole batch unless `whiten` is off; the norm of each gradient is limited to 0.5 (as OpenAI baselines do).
"""

from dataclasses import dataclass

import torch

from minirl.algorithms.critic import fit_critic, value_loss, with_advantages  # noqa: F401 (value_loss: public here)
from minirl.algorithms.optimize import Stateful, adam, anneal, average_stats, descend, movement, ratio_stats
from minirl.algorithms.settings import Count, NonNegative, Positive, Settings, Share
from minirl.functional.masked import check_same_shape, masked_mean, zero_outside


@dataclass(frozen=True)
class PPOConfig(Settings):
    """Settings of PPO."""

    clip: Positive = 0.2
    """Epsilon of the clipped surrogate (paper, table 1 and section 6.2: 0.2)."""
    epochs: Count = 10
    """Passes of the policy over each batch (paper, table 3: 10)."""
    minibatches: Count = 32
    """Parts that each of its passes is cut into (paper, table 3: 2,048 steps / 64)."""
    entropy_coef: NonNegative = 0.0
    """c2, weight of the entropy bonus (paper: 0 on MuJoCo, 0.01 on Atari)."""
    target_kl: Positive | None = None
    """Stop after a pass whose last mini-batch has an estimated KL(old || new) above this, nats; None for never."""
    value_clip: Positive | None = None
    """Keep new values this close to old ones inside the value loss; None for off."""
    lr: NonNegative = 3e-4
    """Adam step size of the policy (paper, table 3: 3e-4)."""
    gamma: Share = 0.99
    """Discount (paper: 0.99; use 1 for text)."""
    gae_lambda: Share = 0.95
    """Lambda of GAE (PPO paper, table 3: 0.95)."""
    whiten: bool = True
    """Whiten advantages over the batch (Tulu 3, section 6.2: yes)."""
    critic_lr: NonNegative = 3e-4
    """Adam step size of the critic (paper, table 3: the policy's, 3e-4)."""
    critic_epochs: Count = 10
    """Passes of the critic over each batch (PPO paper, table 3, and SB3-contrib's TRPO: 10)."""
    critic_minibatches: Count = 32
    """Parts that each of its passes is cut into (paper, table 3: 2,048 steps / 64)."""
    lr_decay: bool = True
    """Let the step sizes fall linearly to 0 over the run (paper: on Atari)."""
    max_grad_norm: Positive = 0.5
    """Each gradient is scaled down to this norm (OpenAI baselines: 0.5)."""


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


class PPO(Stateful):
    """One update = `epochs` passes of mini-batch steps of the policy, then several passes of the critic."""

    def __init__(self, policy, critic, config=None):
        self.policy, self.critic, self.config = policy, critic, config or PPOConfig()
        self.optimizer = adam(policy, self.config.lr)
        self.critic_optimizer = adam(critic, self.config.critic_lr)

    def loss(self, part):
        """(loss, stats) of the policy on a mini-batch."""
        policy = self.policy(part.obs)
        logprobs, entropy = policy.log_prob(part.actions), masked_mean(policy.entropy(), part.mask)
        loss, stats = clipped_surrogate_loss(logprobs, part.logprobs, part.advantages, part.mask, self.config.clip)
        if self.config.entropy_coef:
            loss = loss - self.config.entropy_coef * entropy
        return loss, stats | {"entropy": entropy.detach()}

    def update(self, batch, progress=0.0):
        """One update on a Batch that carries values; progress in [0, 1] drives the step sizes. Returns stats."""
        config = self.config
        batch = with_advantages(batch, config.gamma, config.gae_lambda, config.whiten)

        anneal(self.optimizer, config.lr, progress, config.lr_decay)
        seen = []
        for _ in range(config.epochs):
            for part in batch.minibatches(config.minibatches):
                seen.append(descend(self.optimizer, [self.loss(part)], config.max_grad_norm))
            if config.target_kl is not None and seen[-1]["kl_old_new"] > config.target_kl:
                break
        stats = average_stats(seen) | movement(self.policy, batch)

        return stats | fit_critic(self.critic, self.critic_optimizer, batch, config, progress, config.value_clip)
