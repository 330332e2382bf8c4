"""What every algorithm with a critic does alike: advantages from its values, and a regression of its own.

The critic has its own trunk and optimiser, so fitting it never moves the policy.
"""

from minirl.algorithms.optimize import anneal, average_stats, descend
from minirl.functional.masked import check_same_shape, masked_mean, masked_whiten, zero_outside
from minirl.functional.returns import explained_variance, gae


def with_advantages(batch, gamma, lam, whiten=True):
    """The batch with `returns` (the critic's targets) and `advantages` from GAE, 0 outside the mask.

    Args:
        batch: a Batch that carries values.
        gamma, lam: discount γ, and λ of GAE.
        whiten: shift and scale the advantages to mean 0 and deviation 1 over the whole batch (not over a mini-batch);
            without it they stay in units of reward.
    Returns:
        A Batch.
    Raises:
        ValueError: if the batch was collected without a critic.
    """
    if batch.values is None:
        raise ValueError("the batch has no values; collect it with the critic: world.collect(policy, critic)")
    advantages, returns = gae(
        batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, gamma, lam
    )
    advantages = masked_whiten(advantages, batch.mask) if whiten else zero_outside(batch.mask, advantages)[0]
    return batch.with_(advantages=advantages, returns=returns)


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
        error = error.max((clipped - returns).square())
    loss = 0.5 * masked_mean(error, mask)
    return loss, {"value_loss": loss.detach(), "count": mask.bool().sum()}


def fit_critic(critic, optimizer, batch, config, progress, value_clip=None):
    """Regress the critic on the batch's returns by several passes of mini-batches.

    Args:
        critic, optimizer: what learns.
        batch: a Batch with values and returns.
        config: with critic_lr, critic_epochs, critic_minibatches, lr_decay, max_grad_norm.
        progress: in [0, 1], drives the step size.
        value_clip: see value_loss.
    Returns:
        stats: `value_loss`, mean over the passes, and `explained_variance` of the values before them.
    """
    anneal(optimizer, config.critic_lr, progress, config.lr_decay)
    seen = []
    for _ in range(config.critic_epochs):
        for part in batch.minibatches(config.critic_minibatches):
            loss, stats = value_loss(critic(part.obs), part.values, part.returns, part.mask, value_clip)
            seen.append(descend(optimizer, [(loss, stats)], config.max_grad_norm))
    return {
        "value_loss": average_stats(seen)["value_loss"],
        "explained_variance": explained_variance(batch.values, batch.returns, batch.mask),
    }
