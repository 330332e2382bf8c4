"""From rewards to what a policy should be told: returns, advantages, token rewards.

Two flags end an episode and they mean different things. `terminated`: the task is over, nothing follows, the value of
what follows is 0. `truncated`: we stopped watching (a time limit), the walker would have walked on, so the value of
the state that followed still counts. Neither lets anything leak from one episode into the next. Where both are set,
`terminated` wins.
"""

import torch

from minirl.functional.kl import k1
from minirl.functional.masked import check_same_shape


def rewards_to_go(rewards, terminated, truncated, gamma):
    """G_t = r_t + γ r_{t+1} + γ² r_{t+2} + … up to the end of t's own episode, or of the row if that comes first.

    Args:
        rewards: (B, T), in units of reward.
        terminated, truncated: (B, T) bool; either one ends the sum.
        gamma: discount γ in [0, 1].
    Returns:
        (B, T), in units of reward.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(rewards=rewards, terminated=terminated, truncated=truncated)
    ended = terminated.bool() | truncated.bool()
    out, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * following.masked_fill(ended[:, t], 0.0)
        out[:, t] = following
    return out


def gae(rewards, values, next_values, terminated, truncated, gamma, lam):
    """Generalised advantage estimation.

        δ_t = r_t + γ V(s_{t+1}) [not terminated_t] − V(s_t)
        Â_t = δ_t + γ λ [episode goes on after t] Â_{t+1}                Schulman et al. 2016, section 3, eq. 16

    λ = 1 gives Â = return − V (the noise of all rewards to come; V biases it only where a time limit or the row's end
    cuts the return), λ = 0 gives Â = δ (the noise of one reward, and all of V's bias).

    Args:
        rewards: (B, T).
        values: (B, T) V(s_t).
        next_values: (B, T) V of the state that really followed step t, before any reset.
        terminated: (B, T) bool, a true end: V(s_{t+1}) counts as 0.
        truncated: (B, T) bool, a time limit: V(s_{t+1}) counts, but the trace stops.
        gamma: discount γ.
        lam: λ.
    Returns:
        (advantages, returns), both (B, T) in units of reward; returns = advantages + values, the critic's targets.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(
        rewards=rewards, values=values, next_values=next_values, terminated=terminated, truncated=truncated
    )
    terminated = terminated.bool()
    ended = terminated | truncated.bool()
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    advantages, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = deltas[:, t] + gamma * lam * following.masked_fill(ended[:, t], 0.0)
        advantages[:, t] = following
    return advantages, advantages + values


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """The rewards of a completion: a KL penalty on every token, the score of the whole on its last real token.

        r_t = −β (log π(a_t|s_t) − log π_ref(a_t|s_t)) + [t is the last real token] · score
                                                              Ziegler et al. 2019, eq. 2; InstructGPT (2022), eq. 2

    The papers write the sum over the row; log π of a row is the sum over its tokens.

    Args:
        scores: (B,) outcome of each row.
        logprobs, ref_logprobs: (B, T) nats; no gradient flows through a reward.
        mask: (B, T), 1 on completion tokens, the end token included.
        kl_coef: β, in units of reward per nat.
    Returns:
        (B, T), 0 outside the mask. A row without any real token receives nothing.
    Raises:
        ValueError: if shapes do not fit.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    check_same_shape(scores=scores, **{"rows of mask": mask[:, 0]})
    mask = mask.bool()
    penalty = -kl_coef * k1(logprobs, ref_logprobs).detach()
    rewards = torch.where(mask, penalty, torch.zeros_like(penalty))
    rows = mask.any(dim=1)
    last = mask.shape[1] - 1 - mask.long().flip(1).argmax(dim=1)  # (B,) column of the last 1
    rewards[rows, last[rows]] += scores[rows].to(rewards.dtype)
    return rewards


def explained_variance(values, returns, mask=None):
    """1 − Var[returns − values] / Var[returns]: 1 for a perfect critic, 0 for one that knows only the mean.

    Args:
        values, returns: (B, T).
        mask: (B, T) or None for all.
    Returns:
        A float, at most 1; nan where the returns do not vary.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    keep = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask.bool()
    values, returns = values.detach()[keep], returns.detach()[keep]
    if not returns.numel():
        return float("nan")
    variance = returns.var(unbiased=False)
    if variance <= 1e-12 * returns.square().mean().clamp(min=1e-30):
        return float("nan")
    return float(1 - (returns - values).var(unbiased=False) / variance)
