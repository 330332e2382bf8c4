"""Trust region policy optimisation: the largest improvement within a KL ball around the old policy.

    max_θ  E[ π_θ(a|s)/π_old(a|s) · A ]   subject to   E_s[ KL(π_old(·|s) ‖ π_θ(·|s)) ] ≤ δ
                                                                                    Schulman et al. 2015, eq. 14

To first order in the objective and second order in the constraint the step is  √(2δ / xᵀFx) · x  with  F x = g  solved
by conjugate gradient (appendix C), where F is the Hessian of the KL, the Fisher matrix. A line search then shrinks the
step until the true surrogate improves and the true KL is at most δ.

Left out against the paper: the vine sampling scheme. Advantages come from GAE (as in the authors' next paper) instead
of Q-values; a critic with an optimiser of its own supplies them.
"""

import copy
from dataclasses import dataclass

import torch
from torch.distributions import kl_divergence
from torch.nn.attention import SDPBackend, sdpa_kernel

from minirl.algorithms.critic import fit_critic, with_advantages
from minirl.algorithms.optimize import Stateful, adam, ratio_stats, trainable
from minirl.algorithms.settings import Count, NonNegative, Positive, PositiveShare, Settings, Share, Whole
from minirl.functional.masked import check_same_shape, masked_mean, zero_outside


@dataclass(frozen=True)
class TRPOConfig(Settings):
    """Settings of TRPO."""

    delta: Positive = 0.01
    """Largest mean KL(old || new) of a step, nats per action (paper, table 2: 0.01)."""
    damping: NonNegative = 0.1
    """Added to the Fisher matrix's diagonal (OpenAI baselines and Spinning Up: 0.1)."""
    cg_iterations: Count = 10
    """Conjugate-gradient iterations (paper, appendix C: k = 10)."""
    fisher_fraction: PositiveShare = 1.0
    """Share of the rows or steps that the Fisher matrix is measured on (paper, appendix C: about 0.1)."""
    backtrack: PositiveShare = 0.8
    """Factor of the line search (Spinning Up, SB3-contrib: 0.8)."""
    max_backtracks: Whole = 10
    """Most shrinkings before the step is given up."""
    delta_decay: bool = False
    """Let delta fall linearly to 0 over the run."""
    gamma: Share = 0.99
    """Discount (paper: 0.99; use 1 for text)."""
    gae_lambda: Share = 0.95
    """Lambda of GAE (PPO paper, table 3: 0.95)."""
    whiten: bool = True
    """Whiten advantages over the batch (Tulu 3, section 6.2: yes)."""
    critic_lr: NonNegative = 1e-3
    """Adam step size of the critic (OpenAI baselines: 1e-3)."""
    critic_epochs: Count = 10
    """Passes of the critic over each batch (PPO paper, table 3, and SB3-contrib's TRPO: 10)."""
    critic_minibatches: Count = 16
    """Parts that each of its passes is cut into (SB3-contrib: 2,048 steps / 128)."""
    lr_decay: bool = False
    """Let the step sizes fall linearly to 0 over the run."""
    max_grad_norm: Positive = 0.5
    """Each gradient is scaled down to this norm (OpenAI baselines: 0.5)."""


def surrogate_loss(logprobs, old_logprobs, advantages, mask):
    """Minus the surrogate objective; at θ = θ_old its gradient is that of REINFORCE.

        L = −mean_mask( ratio · A ),   ratio = exp(log π − log π_old)                 Schulman et al. 2015, eq. 14

    Args:
        logprobs: (B, T) nats, carries the gradient.
        old_logprobs: (B, T) nats, of the policy that sampled; constants.
        advantages, mask: (B, T); constants.
    Returns:
        (loss, stats) with `policy_loss`, and `ratio_max`, `clip_fraction`, `kl_old_new`, `count` of ratio_stats.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs, old_logprobs, advantages = zero_outside(mask, logprobs, old_logprobs, advantages)
    ratio = (logprobs - old_logprobs.detach()).exp()
    loss = -masked_mean(ratio * advantages.detach(), mask)
    return loss, {"policy_loss": loss.detach()} | ratio_stats(logprobs, old_logprobs, mask)


def conjugate_gradient(matvec, b, iterations=10, tolerance=1e-10):
    """Solve F x = b for a symmetric positive definite F that is known only through its products.

    Hestenes and Stiefel 1952. In exact arithmetic it is done after as many iterations as F has distinct eigenvalues;
    the quadratic ½ xᵀFx − bᵀx falls at every one.

    Args:
        matvec, b: the map from a vector (n,) to F @ vector (n,), and the right side (n,).
        iterations: most products to spend.
        tolerance: stop once the squared residual |b − Fx|² is below it.
    Returns:
        x, (n,). b = 0 gives 0; a direction without positive curvature ends the search.
    """
    x, residual = torch.zeros_like(b), b.clone()
    direction, squared = residual.clone(), residual @ residual
    for _ in range(iterations):
        if squared <= tolerance:
            break
        product = matvec(direction)
        curvature = direction @ product
        if not curvature > 0:
            break
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * product
        squared, before = residual @ residual, squared
        direction = residual + (squared / before) * direction
    return x


def _flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def fisher_product(policy, obs, mask, damping=0.1):
    """The map v ↦ (F + damping · 1) v, where F is the Fisher matrix of the policy, averaged over the states.

        F = ∇²_θ mean_mask KL(π_old(·|s) ‖ π_θ(·|s))  at θ = θ_old                      Schulman et al. 2015, app. C

    The KL's gradient is built once and differentiated again for every v. Attention runs on its math kernel here, for
    the fused ones have no second derivative.

    Args:
        policy: obs -> Distribution; vectors run over those of its parameters that require gradients.
        obs: (B, T, ...).
        mask: (B, T).
        damping: added to the diagonal.
    Returns:
        A function (n,) -> (n,).
    """
    parameters = trainable(policy)
    with sdpa_kernel(SDPBackend.MATH):
        new = policy(obs)
        with torch.no_grad():
            old = policy(obs)
        kl = masked_mean(kl_divergence(old, new), mask)
        gradient = _flat(torch.autograd.grad(kl, parameters, create_graph=True))

    def matvec(vector):
        product = torch.autograd.grad(gradient @ vector, parameters, retain_graph=True, materialize_grads=True)
        return _flat(product).detach() + damping * vector

    return matvec


def fisher_vector_product(policy, obs, mask, vector, damping=0.1):
    """(F + damping · 1) v for one vector; see fisher_product, which is cheaper for many.

    Args:
        policy, obs, mask, damping: as in fisher_product.
        vector: (n,), n = number of parameters of the policy that require gradients; so is the result.
    """
    return fisher_product(policy, obs, mask, damping)(vector)


def _set_parameters(parameters, vector):
    with torch.no_grad():
        for parameter, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))


def trust_region_step(
    policy, obs, actions, old_logprobs, advantages, mask,
    delta=0.01, damping=0.1, iterations=10, backtrack=0.8, max_backtracks=10, fisher_fraction=1.0,
):  # fmt: skip
    """Move the policy by one TRPO step, or not at all.

    Tries the steps  backtrack^j · √(2δ / xᵀFx) · x  for j = 0, 1, …, and keeps the first with mean KL(old‖new) ≤ δ and
    a better surrogate. F has the damping in it, as in OpenAI baselines, so the first step usually stays below δ.

    Args:
        policy: obs -> Distribution; the one that sampled, so it is also π_old.
        obs, actions: (B, T, ...).
        old_logprobs, advantages, mask: (B, T).
        delta: δ, nats per action.
        damping, iterations: of the conjugate gradient.
        backtrack, max_backtracks: of the line search.
        fisher_fraction: share of the rows that F is measured on, evenly spaced.
    Returns:
        stats: `accepted`, `backtracks`, `kl_old_new` (exact, mean over actions), `policy_loss` before the step,
        `surrogate_gain`, `entropy` before it, `ratio_max`, `clip_fraction`, `grad_norm`, `count`. When rejected the
        parameters are bit for bit what they were and kl_old_new is 0.
    """
    parameters = trainable(policy)
    start = _flat([p.detach() for p in parameters]).clone()
    old = policy(obs)
    loss, stats = surrogate_loss(old.log_prob(actions), old_logprobs, advantages, mask)
    gradient = -_flat(torch.autograd.grad(loss, parameters, materialize_grads=True))
    rows = max(1, round(fisher_fraction * obs.shape[0]))
    index = torch.arange(rows, device=obs.device) * obs.shape[0] // rows
    matvec = fisher_product(policy, obs[index], mask[index], damping)
    unit = masked_mean(advantages.abs(), mask).clamp(min=1e-30)  # the step must not depend on the unit of reward
    x = conjugate_gradient(matvec, gradient / unit, iterations)
    full_step = (2 * delta / (x @ matvec(x)).clamp(min=1e-30)).sqrt() * x
    with torch.no_grad():
        old = copy.deepcopy(policy(obs))  # a policy may hand out views of its parameters, which are about to move
        stats |= {"entropy": masked_mean(old.entropy(), mask), "grad_norm": gradient.norm()}
        for backtracks in range(max_backtracks + 1):
            _set_parameters(parameters, start + backtrack**backtracks * full_step)
            new = policy(obs)
            new_loss, new_stats = surrogate_loss(new.log_prob(actions), old_logprobs, advantages, mask)
            kl = masked_mean(kl_divergence(old, new), mask)
            if kl <= delta and new_loss < loss:
                break
        else:
            _set_parameters(parameters, start)
            kl, new_loss, new_stats = torch.zeros_like(kl), loss.detach(), stats
    return stats | {
        "accepted": new_loss < loss.detach(),
        "backtracks": torch.tensor(backtracks, device=kl.device),
        "kl_old_new": kl,
        "surrogate_gain": loss.detach() - new_loss,
        "ratio_max": new_stats["ratio_max"],
        "clip_fraction": new_stats["clip_fraction"],
    }


class TRPO(Stateful):
    """One update = one trust-region step of the policy on the whole batch, then several passes of the critic."""

    def __init__(self, policy, critic, config=None):
        self.policy, self.critic, self.config = policy, critic, config or TRPOConfig()
        self.critic_optimizer = adam(critic, self.config.critic_lr)

    def update(self, batch, progress=0.0):
        """One update on a Batch that carries values; progress in [0, 1] drives the schedules. Returns stats."""
        config = self.config
        batch = with_advantages(batch, config.gamma, config.gae_lambda, config.whiten)

        units = batch if batch.rows_are_sequences else batch.steps()  # so that a share of the rows is one of the steps
        delta = config.delta * (1 - progress) if config.delta_decay else config.delta
        stats = trust_region_step(
            self.policy, units.obs, units.actions, units.logprobs, units.advantages, units.mask, delta,
            config.damping, config.cg_iterations, config.backtrack, config.max_backtracks, config.fisher_fraction,
        )  # fmt: skip

        return stats | fit_critic(self.critic, self.critic_optimizer, batch, config, progress)
