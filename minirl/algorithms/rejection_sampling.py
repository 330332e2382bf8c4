"""Rejection sampling: act several times from one start, keep the best, imitate it; over and over, expert iteration.

    improve:   y_1 … y_n ~ π_old(·|x),  keep y* = argmax R(x, y_i)                  RAFT (Dong et al. 2023), algorithm 1
    imitate:   L(θ) = −Σ log π_θ(y*_t | x, y*_<t) / Σ |y*|,  then sample from the new policy     Llama 2, section 3.2.3

The best of n is the expert, the policy its apprentice (Anthony et al. 2017, with tree search as the expert). Among n
independent completions with distinct scores, the best is y with probability F(y)ⁿ − F(y⁻)ⁿ, where F(y) is the policy's
probability of scoring at most R(x, y), and F(y⁻) of scoring less: better on average, but never a completion that the
policy would not write. With `min_score` a verifier filters, too. Compared with GRPO nothing is pushed down: what was
rejected has no gradient.

Left out against the papers: samples kept from earlier iterations (Llama 2) and a tree search as the expert.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from minirl.algorithms.optimize import Stateful, adam, anneal, average_stats, descend, movement, ratio_stats
from minirl.algorithms.settings import Count, NonNegative, Positive, Range, Settings
from minirl.algorithms.sft import likelihood_loss
from minirl.functional.masked import masked_mean


@dataclass(frozen=True)
class RejectionSamplingConfig(Settings):
    """Settings of rejection sampling."""

    keep: Count = 1
    """Best rows to keep of each group (RAFT; Llama 2, section 3.2.3: 1)."""
    min_score: Annotated[float, Range(-math.inf)] | None = None
    """Drop rows that score less (reward_scale counts), even the best of a group; None keeps it however bad."""
    epochs: Count = 1
    """Passes over the rows kept of each batch."""
    minibatches: Count = 1
    """Parts that each pass is cut into, whole rows."""
    lr: NonNegative = 3e-4
    """Adam step size."""
    lr_decay: bool = True
    """Let the step size fall linearly to 0 over the run."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""


def best_of_group(scores, group_size, keep=1, min_score=None):
    """Which rows to imitate: the best of each group, unless they are not good enough.

    Args:
        scores: (B,), the rows of a group contiguous.
        group_size: G ≥ 1.
        keep: k, 1 to G: how many of a group; of equal ones those that come first.
        min_score: leave out what scores less; None for no limit. A score that is NaN is always left out.
    Returns:
        (N,) row indices in ascending order, at most k from each group; possibly none.
    Raises:
        ValueError: if B is not a multiple of G, or keep is not 1 to G.
    """
    if group_size < 1 or len(scores) % group_size:
        raise ValueError(f"group_size is {group_size} with {len(scores)} rows; make the batch whole groups")
    if not 1 <= keep <= group_size:
        raise ValueError(f"keep is {keep} of groups of {group_size}; it must be 1 to {group_size}")
    lowest = -math.inf if min_score is None else min_score
    worth = torch.where(scores.isnan(), -math.inf, scores).view(-1, group_size)
    best = worth.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    first = torch.arange(0, len(scores), group_size, device=scores.device).unsqueeze(1)
    kept = (first + best).flatten().sort().values
    return kept[scores[kept] >= lowest]  # NaN is not


class RejectionSampling(Stateful):
    """One update = `epochs` passes over the best rows of a batch of groups; no critic."""

    learns_from_groups = True  # and from `scores`, which leave out a KL in the rewards

    def __init__(self, policy, config=None):
        self.policy, self.config = policy, config or RejectionSamplingConfig()
        self.optimizer = adam(policy, self.config.lr)

    def update(self, batch, progress=0.0):
        """One update on a Batch of whole rows in groups; progress in [0, 1] drives the step size.

        Returns:
            stats. `kept_fraction` of the rows, and `kept_score`, their mean score (0 where none is kept: then nothing
            moves); `policy_loss`, nats per action kept; ratios, `entropy` and `grad_norm` are means over the passes.
        """
        config = self.config
        if batch.kl_in_reward:
            raise ValueError("the batch has a KL penalty in its rewards; rejection sampling has no place for it")
        if config.min_score is None and config.keep >= batch.group_size:
            raise ValueError(f"keep is {config.keep} of groups of {batch.group_size}, so nothing would be rejected; "
                             "set the world's group_size above keep, or a min_score")
        kept = best_of_group(batch.scores, batch.group_size, config.keep, config.min_score)
        anneal(self.optimizer, config.lr, progress, config.lr_decay)

        seen = []
        for _ in range(config.epochs if len(kept) else 0):
            for part in batch.rows(kept).minibatches(config.minibatches, whole_rows=True):
                seen.append(descend(self.optimizer, [self._loss(part)], config.max_grad_norm))
        stats = average_stats(seen) if seen else self._nothing_kept(batch)
        stats["kept_fraction"] = batch.scores.new_tensor(len(kept) / len(batch.scores))
        stats["kept_score"] = batch.scores[kept].sum() / max(1, len(kept))
        return stats | movement(self.policy, batch)

    def _loss(self, part):
        policy = self.policy(part.obs)
        logprobs = policy.log_prob(part.actions)
        loss, _ = likelihood_loss(logprobs, part.mask)
        stats = ratio_stats(logprobs, part.logprobs, part.mask) | {"policy_loss": loss.detach()}
        return loss, stats | {"entropy": masked_mean(policy.entropy().detach(), part.mask)}

    @torch.no_grad()
    def _nothing_kept(self, batch):
        """The stats of an update that takes no step."""
        _, stats = self._loss(batch)
        zero = torch.zeros_like(stats["policy_loss"])
        return stats | {"policy_loss": zero, "grad_norm": zero}
