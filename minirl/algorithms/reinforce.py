"""REINFORCE: raise the log-probability of what went better than expected.

    ∇J(θ) = E[ Σ_t (G_t − b) ∇ log π_θ(a_t | s_t) ]                     Williams 1992, eq. 11 and theorem 2 (section 5)

G_t is the return from step t on (the paper has that of the whole episode: also right, but noisier), b a baseline that
does not depend on a_t. Any such b leaves the expectation as it is and can lower the variance. Baselines here: `ema`, an
exponential moving average of past returns; `learned`, a critic V(s_t); `leave-one-out`, the mean score of the other
rows with the same prompt, where a row's whole score stands for G_t (Ahmadian et al. 2024, RLOO); `none`.

The equation is exact for γ = 1. With γ < 1 it lacks a factor γ^t before each term, as in nearly all implementations:
late steps count as much as early ones, and the result is no longer the gradient of the discounted return.

Changed against the paper: Adam replaces the plain gradient step.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from minirl.algorithms.critic import fit_critic
from minirl.algorithms.optimize import Stateful, adam, anneal, descend, movement, ratio_stats
from minirl.algorithms.settings import Count, NonNegative, Positive, Settings, Share, ShareBelowOne
from minirl.functional.masked import check_same_shape, masked_mean, masked_sum, zero_outside
from minirl.functional.returns import gae, rewards_to_go


@dataclass(frozen=True)
class REINFORCEConfig(Settings):
    """Settings of REINFORCE."""

    baseline: Literal["ema", "learned", "leave-one-out", "none"] = "ema"
    """What the return is compared with."""
    ema_decay: ShareBelowOne = 0.9
    """rho in b <- rho b + (1 - rho) R; about the last ten batches count."""
    gamma: Share = 1.0
    """Discount (1 for text, as in InstructGPT; 0.99 is usual on the walker)."""
    reduction: Literal["trajectory", "token"] = "token"
    """trajectory: sum over time, mean over rows (Williams); token: one mean over all actions."""
    lr: NonNegative = 3e-4
    """Adam step size of the policy."""
    lr_decay: bool = True
    """Let the step sizes fall linearly to 0 over the run."""
    critic_lr: NonNegative = 1e-3
    """Adam step size of the learned baseline."""
    critic_epochs: Count = 5
    """Passes of the learned baseline over each batch."""
    critic_minibatches: Count = 8
    """Parts that each pass is cut into."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""


def policy_gradient_loss(logprobs, advantages, mask, reduction="token"):
    """A scalar whose gradient is minus the score-function estimate of ∇J.

        trajectory:  L = −(1/B) Σ_i Σ_t A_it log π(a_it | s_it)       unbiased for ∇J, long rows weigh more
        token:       L = −(1/N) Σ_i Σ_t A_it log π(a_it | s_it)       N = all actions

    On one batch the two differ by the factor B/N only. N varies with the sampled rows, so `token` is not unbiased; its
    direction becomes that of ∇J as the batch grows.

    Args:
        logprobs: (B, T) nats, of the policy that sampled; carries the gradient.
        advantages: (B, T) in units of reward; constants.
        mask: (B, T).
        reduction: `trajectory` or `token`.
    Returns:
        (loss, stats) with `policy_loss` and `count` (rows or actions, whatever the mean divides by).
    Raises:
        ValueError: if the shapes differ or the reduction is unknown.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    logprobs, advantages = zero_outside(mask, logprobs, advantages.detach())
    weighted = advantages * logprobs
    if reduction == "trajectory":
        count = torch.ones_like(mask[:, 0], dtype=torch.long).sum()
        loss = -masked_sum(weighted, mask) / count
    elif reduction == "token":
        count = mask.bool().sum()
        loss = -masked_mean(weighted, mask)
    else:
        raise ValueError(f"reduction is {reduction!r}; choose 'trajectory' or 'token'")
    return loss, {"policy_loss": loss.detach(), "count": count}


def leave_one_out(scores, group_size):
    """Score of a row minus the mean score of the other rows of its group.

        A_i = R_i − (1/(G−1)) Σ_{j≠i} R_j                                  Ahmadian et al. 2024, section 2.3

    Args:
        scores: (B,), the rows of a group contiguous.
        group_size: G ≥ 2.
    Returns:
        (B,) in units of the score.
    Raises:
        ValueError: if G < 2 or B is not a multiple of G.
    """
    if group_size < 2 or len(scores) % group_size:
        raise ValueError(
            f"group_size is {group_size} with {len(scores)} scores; leave-one-out needs at least 2 rows of the same "
            "prompt in each group (the world's group_size)"
        )
    groups = scores.view(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


class EMABaseline:
    """b ← ρ b + (1 − ρ) R̄ (Williams 1992, eq. 10), divided by 1 − ρⁿ so that the start at 0 does not drag it down.

    `value` is what past batches say; it never contains the batch it is subtracted from, so the gradient stays unbiased.
    """

    def __init__(self, decay=0.9):
        self.decay, self.total, self.updates = decay, 0.0, 0

    @property
    def value(self):
        """The baseline, 0 before the first update."""
        return self.total / (1 - self.decay**self.updates) if self.updates else 0.0

    def update(self, mean_return):
        """Take in the mean return of a batch (a float or 0-d tensor)."""
        self.total = self.decay * self.total + (1 - self.decay) * float(mean_return)
        self.updates += 1

    def state_dict(self):
        """The running sum and how many updates it holds."""
        return {"total": self.total, "updates": self.updates}

    def load_state_dict(self, state):
        """Take back what state_dict gave."""
        self.total, self.updates = state["total"], state["updates"]


class REINFORCE(Stateful):
    """One update = one gradient step on a batch that the current policy collected."""

    def __init__(self, policy, critic=None, config=None):
        self.policy, self.critic, self.config = policy, critic, config or REINFORCEConfig()
        if self.config.baseline == "learned" and critic is None:
            raise ValueError("baseline 'learned' needs a critic; give one or choose another baseline")
        if self.config.baseline == "leave-one-out" and self.config.gamma != 1:
            raise ValueError(f"gamma is {self.config.gamma}; leave-one-out compares whole scores, so it must be 1")
        self.optimizer = adam(policy, self.config.lr)
        self.ema = EMABaseline(self.config.ema_decay)
        if self.config.baseline == "learned":
            self.critic_optimizer = adam(critic, self.config.critic_lr)

    def advantages(self, batch):
        """(advantages, returns), both (B, T): the return of every step minus the baseline, and the return itself.

        Raises:
            ValueError: if a row stops inside an episode and no critic says what the rest of it is worth.
        """
        if self.config.baseline == "learned":
            return gae(
                batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated,
                self.config.gamma, lam=1.0,
            )  # fmt: skip
        ended = batch.terminated.bool() | batch.truncated.bool()
        last = batch.mask.bool() & (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))
        if (last & ~ended).any():
            raise ValueError("a row stops inside an episode; collect whole episodes, or use the learned baseline")
        returns = rewards_to_go(batch.rewards, batch.terminated, batch.truncated, self.config.gamma)
        if self.config.baseline == "leave-one-out":
            totals = masked_sum(batch.rewards, batch.mask, dim=1)
            return leave_one_out(totals, batch.group_size).unsqueeze(1).expand_as(returns), returns
        if self.config.baseline == "ema":
            advantages = returns - self.ema.value
            self.ema.update(masked_mean(returns, batch.mask))
            return advantages, returns
        return returns, returns

    def update(self, batch, progress=0.0):
        """One step on a Batch; progress in [0, 1] drives the step sizes. Returns stats."""
        config = self.config
        advantages, returns = self.advantages(batch)
        batch = batch.with_(advantages=advantages, returns=returns)

        anneal(self.optimizer, config.lr, progress, config.lr_decay)
        policy = self.policy(batch.obs)
        logprobs = policy.log_prob(batch.actions)
        loss, stats = policy_gradient_loss(logprobs, batch.advantages, batch.mask, config.reduction)
        stats = ratio_stats(logprobs, batch.logprobs, batch.mask) | stats
        stats["entropy"] = masked_mean(policy.entropy().detach(), batch.mask)
        stats = descend(self.optimizer, [(loss, stats)], config.max_grad_norm)
        stats["kl_old_new"] = movement(self.policy, batch)["kl_old_new"]

        if config.baseline == "learned":
            stats |= fit_critic(self.critic, self.critic_optimizer, batch, config, progress)
        return stats
