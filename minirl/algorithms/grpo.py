"""Group relative policy optimisation: PPO's clipped surrogate with the group's mean in the critic's place.

    A_i = (R_i − mean(R)) / std(R)   over the G rows that answer the same prompt     Shao et al. 2024, section 4.1.2
    J = E[ 1/G Σ_i 1/|o_i| Σ_t { min(r A, clip(r, 1−ε, 1+ε) A) − β k3_t } ],  k3 = π_ref/π − log π_ref/π − 1   eqs. 3, 4

On the first step after collecting every ratio is 1, so the `sequence` loss is minus the mean advantage, 0 (plus β KL),
while its gradient is not 0. Reductions: `sequence` is the paper's; `token` divides by all tokens (DAPO, Yu et al.
2025); `constant` by a fixed length (Dr. GRPO, Liu et al. 2025), so that long rows do not water down their own gradient.

With `supervision="process"` advantages come from a reward per reasoning step (section 4.1.3) instead of one per row.

Left out against the paper: replacing the reference during training, and the reward model's replay.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from minirl.algorithms.optimize import Stateful, adam, anneal, average_stats, descend, movement, ratio_stats
from minirl.algorithms.ppo import clipped_surrogate
from minirl.algorithms.settings import Count, NonNegative, Positive, Settings
from minirl.functional.kl import k1, k2, k3
from minirl.functional.masked import check_same_shape, masked_mean, masked_sum, zero_outside


@dataclass(frozen=True)
class GRPOConfig(Settings):
    """Settings of GRPO."""

    clip: Positive = 0.2
    """Epsilon of the clipped surrogate, lower bound (PPO paper: 0.2; the GRPO paper gives none)."""
    clip_high: Positive | None = None
    """Upper bound where it differs (DAPO: 0.28); None for the same."""
    kl_beta: NonNegative = 0.04
    """Beta, weight of the KL to the reference in the loss (paper, section 4.2: 0.04); 0 for none."""
    kl_estimator: Literal["k3", "k2", "k1", "k3_weighted"] = "k3"
    """k3 is the paper's; k3_weighted has the gradient of KL(policy || ref); k1 holds nothing back, here to see it."""
    reduction: Literal["sequence", "token", "constant"] = "sequence"
    """How token losses become one number (paper: sequence)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """A reward per row, or one per reasoning step; only the first sees penalties for format or a missing end."""
    scale: bool = True
    """Divide advantages by the group's deviation (paper: yes; Dr. GRPO: no)."""
    epochs: Count = 1
    """Passes over each batch (paper, section 4.2: one update per rollout)."""
    minibatches: Count = 1
    """Parts that each pass is cut into."""
    micro_batches: Count = 1
    """Pieces that each part's gradient is summed over, to save memory; changes nothing else."""
    lr: NonNegative = 3e-4
    """Adam step size (paper: 1e-6 for a model of 7 billion parameters)."""
    lr_decay: bool = True
    """Let the step size fall linearly to 0 over the run."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""


def _groups(scores, group_size):
    if group_size < 2 or len(scores) % group_size:
        raise ValueError(
            f"group_size is {group_size} with {len(scores)} rows; GRPO compares at least 2 rows of the same prompt in "
            "each group, so set the world's group_size to 2 or more and a batch to a multiple of it"
        )
    return scores.view(-1, group_size, *scores.shape[1:])


def _scaled(centred, deviation, largest, eps, scale=True):
    """centred / (deviation + eps), but 0 where the deviation is no more than rounding noise of the largest value."""
    noise = deviation < 1e-6 * largest.clamp(min=1.0)
    return torch.where(noise, torch.zeros_like(centred), centred / (deviation + eps) if scale else centred)


def group_advantages(scores, group_size, scale=True, eps=1e-4):
    """Scores of a group, centred and scaled within the group.

        A_i = (R_i − mean(R)) / (s(R) + ε),   s² = Σ (R − mean)² / (G − 1)       Shao et al. 2024, section 4.1.2

    The sample deviation as most trainers have it; the population deviation would give √(G/(G−1)) times as much.

    Args:
        scores: (B,), the rows of a group contiguous.
        group_size: G ≥ 2.
        scale: divide by the deviation; without it the advantage is (G−1)/G times that of leave-one-out.
        eps: added to the deviation.
    Returns:
        (B,). With `scale`, 0 where the deviation is below 1e-6 · max(1, largest absolute score): the scores are equal
        then, but for rounding noise, which must not be blown up.
    Raises:
        ValueError: if G < 2 or B is not a multiple of G.
    """
    groups = _groups(scores, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if scale:
        centred = _scaled(centred, groups.std(1, keepdim=True), groups.abs().amax(1, keepdim=True), eps)
    return centred.flatten()


def process_supervision_advantages(step_rewards, step_ends, group_size, scale=True, eps=1e-4):
    """Advantages from a reward per reasoning step: what is still to come, normalised over the group's steps.

        A_t = Σ_{steps j ending at or after t} (r_j − mean(R)) / (s(R) + ε),   R = all step rewards of the group
                                                                                  Shao et al. 2024, section 4.1.3

    Args:
        step_rewards: (B, T), read only where step_ends is 1.
        step_ends: (B, T) bool, 1 at the last token of each step.
        group_size: G ≥ 2, the rows of a group contiguous.
        scale: divide by the deviation; without it the rewards are centred only.
        eps: added to the sample deviation.
    Returns:
        (B, T); 0 after the last step's end. A group with fewer than two steps, or with equal rewards, gives 0.
    Raises:
        ValueError: if shapes differ, G < 2 or B is not a multiple of G.
    """
    check_same_shape(step_rewards=step_rewards, step_ends=step_ends)
    rewards, ends = _groups(step_rewards, group_size).flatten(1), _groups(step_ends.bool(), group_size).flatten(1)
    (rewards,) = zero_outside(ends, rewards)
    (centred,) = zero_outside(ends, rewards - masked_mean(rewards, ends, dim=1).unsqueeze(1))
    variance = centred.square().sum(1, keepdim=True) / (ends.sum(1, keepdim=True) - 1).clamp(min=1)
    normalised = _scaled(centred, variance.sqrt(), rewards.abs().amax(1, keepdim=True), eps, scale)
    return normalised.view_as(step_rewards).flip(1).cumsum(1).flip(1)


def kl_in_loss(logprobs, old_logprobs, ref_logprobs, kind="k3"):
    """The KL(π‖π_ref) term of a loss, per token of a completion sampled from π_old, by one of four estimators.

    Args:
        logprobs: (B, T) nats, carries the gradient.
        old_logprobs, ref_logprobs: (B, T) nats; constants.
        kind: at π = π_old the expected gradient, given the token's prefix, is 0 for `k1`, that of KL(π‖π_ref) for `k2`
            and `k3_weighted` (ratio · k3; this one at any π), and that of KL(π_ref‖π) for `k3`.
    Returns:
        (B, T) nats.
    Raises:
        ValueError: if kind is unknown or the shapes differ.
    """
    estimators = {"k1": k1, "k2": k2, "k3": k3, "k3_weighted": k3}
    if kind not in estimators:
        raise ValueError(f"kl is {kind!r}; choose one of {', '.join(estimators)}")
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    estimate = estimators[kind](logprobs, ref_logprobs.detach())
    return (logprobs - old_logprobs.detach()).exp() * estimate if kind == "k3_weighted" else estimate


def grpo_loss(
    logprobs, old_logprobs, ref_logprobs, advantages, mask,
    clip=0.2, beta=0.0, reduction="sequence", normalizer_length=None, kl="k3",
):  # fmt: skip
    """Minus GRPO's objective.

        sequence:  L = −(1/B) Σ_i (1/|o_i|) Σ_t l_it          token:  L = −Σ l_it / Σ_i |o_i|
        constant:  L = −Σ l_it / (B · normalizer_length),     l = min(r A, clip(r) A) − β KL     Shao et al. 2024, eq. 3

    Args:
        logprobs: (B, T) nats, carries the gradient.
        old_logprobs: (B, T) nats, of the policy that sampled; constants.
        ref_logprobs: (B, T) nats, of the reference; may be None where beta is 0.
        advantages: (B,) per row, or (B, T) per token; constants.
        mask: (B, T).
        clip: ε, or (ε_low, ε_high).
        beta: weight of the KL.
        reduction: `sequence`, `token` or `constant`.
        normalizer_length: tokens, for `constant`; None for T.
        kl: estimator, see kl_in_loss.
    Returns:
        (loss, stats) with `policy_loss`, `ratio_max`, `clip_fraction`, `kl_old_new`, `kl_policy_ref` (k3; 0 where there
        is no reference) and `count`: rows for `sequence` and `constant`, tokens for `token`.
    Raises:
        ValueError: if shapes differ, a name is unknown, or beta > 0 without reference.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, mask=mask)
    if advantages.dim() == 1:
        check_same_shape(advantages=advantages, **{"rows of mask": mask[:, 0]})
        advantages = advantages.unsqueeze(1).expand_as(logprobs)
    check_same_shape(advantages=advantages, logprobs=logprobs)
    if beta and ref_logprobs is None:
        raise ValueError(f"beta is {beta} but ref_logprobs is None; give the world a reference or set beta to 0")
    logprobs, old_logprobs, advantages = zero_outside(mask, logprobs, old_logprobs, advantages)
    ratio = (logprobs - old_logprobs.detach()).exp()
    objective = clipped_surrogate(ratio, advantages, clip)
    stats = ratio_stats(logprobs, old_logprobs, mask, clip) | {"kl_policy_ref": logprobs.new_zeros(())}
    if ref_logprobs is not None:
        stats["kl_policy_ref"] = masked_mean(k3(logprobs.detach(), ref_logprobs.detach()), mask)
    if beta:
        objective = objective - beta * kl_in_loss(logprobs, old_logprobs, ref_logprobs, kl)
    if reduction == "token":
        loss = -masked_mean(objective, mask)
    elif reduction == "sequence":
        loss = -masked_mean(objective, mask, dim=1).mean()
    elif reduction == "constant":
        loss = -masked_sum(objective, mask) / (mask.shape[0] * (normalizer_length or mask.shape[1]))
    else:
        raise ValueError(f"reduction is {reduction!r}; choose 'sequence', 'token' or 'constant'")
    count = stats["count"] if reduction == "token" else torch.ones_like(mask[:, 0], dtype=torch.long).sum()
    return loss, stats | {"policy_loss": loss.detach(), "count": count}


class GRPO(Stateful):
    """One update = `epochs` passes over a batch of groups; no critic."""

    learns_from_groups = True  # and from `scores` or `step_rewards`, which leave out a KL in the rewards

    def __init__(self, policy, config=None):
        self.policy, self.config = policy, config or GRPOConfig()
        self.optimizer = adam(policy, self.config.lr)

    def update(self, batch, progress=0.0):
        """One update on a Batch of whole rows in groups; progress in [0, 1] drives the step size. Returns stats."""
        config = self.config
        if batch.kl_in_reward:
            raise ValueError("the batch has a KL penalty in its rewards; GRPO has it in the loss (kl_beta)")
        anneal(self.optimizer, config.lr, progress, config.lr_decay)
        advantages, dead = self._advantages(batch)
        batch = batch.with_(advantages=advantages)

        seen = []
        for _ in range(config.epochs):
            for part in batch.minibatches(config.minibatches, whole_rows=True):
                losses = (self._loss(piece) for piece in part.split(config.micro_batches))
                seen.append(descend(self.optimizer, losses, config.max_grad_norm))
        return average_stats(seen) | movement(self.policy, batch) | {"dead_group_fraction": dead.float().mean()}

    def _advantages(self, batch):
        """((B, T) advantages, (groups,) bool: whether a group teaches nothing)."""
        size, scale = batch.group_size, self.config.scale
        if self.config.supervision == "outcome":
            advantages = group_advantages(batch.scores, size, scale).unsqueeze(1).expand_as(batch.logprobs)
            groups = batch.scores.view(-1, size)
            return advantages, groups.amax(1) == groups.amin(1)
        if batch.step_rewards is None or batch.step_ends is None:
            raise ValueError("the batch has no step_rewards; give them to the world, or set supervision to outcome")
        ends = batch.step_ends.bool() & batch.mask.bool()
        advantages = process_supervision_advantages(batch.step_rewards, ends, size, scale)
        return advantages, ~advantages.view(-1, size * advantages.shape[1]).any(1)

    def _loss(self, part):
        config = self.config
        policy = self.policy(part.obs)
        loss, stats = grpo_loss(
            policy.log_prob(part.actions), part.logprobs, part.ref_logprobs, part.advantages, part.mask,
            (config.clip, config.clip if config.clip_high is None else config.clip_high), config.kl_beta,
            config.reduction, part.max_length, config.kl_estimator,
        )  # fmt: skip
        return loss, stats | {"entropy": masked_mean(policy.entropy().detach(), part.mask)}
