"""PPO with a KL penalty in the loss: the paper's other form, where β takes the place of the clip.

    L_KLPEN(θ) = E[ r A − β KL(π_old(·|s) ‖ π_θ(·|s)) ],   r = π_θ(a|s) / π_old(a|s)       Schulman et al. 2017, eq. 8

After each update d = E[KL(π_old‖π_θ)] is measured and β adapted: halved if d < d_targ / 1.5, doubled if d > 1.5 d_targ
(section 4). With `adaptive=False` β stays what it is. The KL is exact, from a frozen copy of the old policy, not an
estimate from the sampled actions.

Left out against the paper: as in ppo.py.
"""

import copy
from dataclasses import dataclass

import torch
from torch.distributions import kl_divergence

from minirl.algorithms.critic import fit_critic, with_advantages
from minirl.algorithms.optimize import Stateful, adam, anneal, average_stats, descend, movement, ratio_stats
from minirl.algorithms.settings import Count, NonNegative, Positive, Settings, Share
from minirl.functional.masked import check_same_shape, masked_mean, zero_outside


@dataclass(frozen=True)
class PPOKLConfig(Settings):
    """Settings of PPO with a KL penalty."""

    kl_target: Positive = 0.01
    """d_targ, nats per action (paper, table 1: 0.003, 0.01 (best) and 0.03)."""
    kl_beta: Positive = 1.0
    """Beta at the start (paper, table 1: 1)."""
    adaptive: bool = True
    """Adapt beta towards kl_target; off keeps it fixed (paper, table 1: 0.3, 1, 3, 10)."""
    epochs: Count = 10
    """Passes of the policy over each batch (paper, table 3: 10)."""
    minibatches: Count = 32
    """Parts that each of its passes is cut into (paper, table 3: 2,048 steps / 64)."""
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


def kl_penalty_loss(logprobs, old_logprobs, advantages, kl, mask, beta=1.0):
    """Minus the KL-penalised surrogate.

        L = −mean_mask( r A − β KL(π_old‖π_θ) )                                          Schulman et al. 2017, eq. 8

    Args:
        logprobs: (B, T) nats, carries the gradient.
        old_logprobs: (B, T) nats, of the policy that sampled; constants.
        advantages: (B, T); constants.
        kl: (B, T) exact KL(π_old(·|s_t)‖π_θ(·|s_t)) in nats, carries the gradient.
        mask: (B, T).
        beta: β, in units of advantage per nat.
    Returns:
        (loss, stats) with `policy_loss`, `ratio_max`, `clip_fraction` (share of ratios outside 1 ± 0.2, for comparison
        with the clipped form), `kl_old_new` (exact), `count` (actions).
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, kl=kl, mask=mask)
    logprobs, old_logprobs, advantages, kl = zero_outside(mask, logprobs, old_logprobs, advantages, kl)
    ratio = (logprobs - old_logprobs.detach()).exp()
    loss = -masked_mean(ratio * advantages.detach() - beta * kl, mask)
    stats = {"policy_loss": loss.detach()} | ratio_stats(logprobs, old_logprobs, mask)
    return loss, stats | {"kl_old_new": masked_mean(kl.detach(), mask)}


def adapt_beta(beta, kl, target):
    """β/2 where the measured KL is below target/1.5, 2β where it is above 1.5·target, else β (section 4)."""
    if kl < target / 1.5:
        return beta / 2
    return beta * 2 if kl > target * 1.5 else beta


class PPOKL(Stateful):
    """One update = `epochs` passes of mini-batch steps of policy and critic over one batch, then β is adapted."""

    def __init__(self, policy, critic, config=None):
        self.policy, self.critic, self.config = policy, critic, config or PPOKLConfig()
        self.optimizer = adam(policy, self.config.lr)
        self.critic_optimizer = adam(critic, self.config.critic_lr)
        self.beta = float(self.config.kl_beta)

    def loss(self, part, old_policy):
        """(loss, stats) of the policy on a mini-batch."""
        policy = self.policy(part.obs)
        logprobs, kl = policy.log_prob(part.actions), kl_divergence(old_policy(part.obs), policy)
        loss, stats = kl_penalty_loss(logprobs, part.logprobs, part.advantages, kl, part.mask, self.beta)
        return loss, stats | {"entropy": masked_mean(policy.entropy().detach(), part.mask)}

    def update(self, batch, progress=0.0):
        """One update on a Batch that carries values; progress in [0, 1] drives the step sizes. Returns stats."""
        config = self.config
        batch = with_advantages(batch, config.gamma, config.gae_lambda, config.whiten)

        anneal(self.optimizer, config.lr, progress, config.lr_decay)
        old_policy = copy.deepcopy(self.policy).requires_grad_(False)
        seen = []
        for _ in range(config.epochs):
            for part in batch.minibatches(config.minibatches):
                seen.append(descend(self.optimizer, [self.loss(part, old_policy)], config.max_grad_norm))
        with torch.no_grad():
            kl = masked_mean(kl_divergence(old_policy(batch.obs), self.policy(batch.obs)), batch.mask)
        stats = average_stats(seen) | movement(self.policy, batch) | {"kl_old_new": kl}
        stats["kl_beta"] = torch.tensor(self.beta, device=kl.device)
        if config.adaptive:
            self.beta = adapt_beta(self.beta, float(kl), config.kl_target)

        return stats | fit_critic(self.critic, self.critic_optimizer, batch, config, progress)
