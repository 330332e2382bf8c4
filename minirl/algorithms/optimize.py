"""What every algorithm does around its loss: one optimiser step, one learning-rate schedule, one saved state."""

import torch

from minirl.functional.masked import check_same_shape


def trainable(module):
    """The parameters of a module that require gradients, as a list."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def adam(module, lr, eps=1e-5):
    """Adam (Kingma & Ba 2015) over what trains in a module, as one fused kernel: on small networks its loop would cost
    as much as the backward pass. eps: added to the root of the second moment (1e-5: OpenAI baselines, for RL).
    """
    return torch.optim.Adam(trainable(module), lr=lr, eps=eps, fused=True)


def anneal(optimizer, lr, progress, decay=True):
    """Set the learning rate to lr · (1 − progress), or to lr where decay is off. progress in [0, 1]."""
    for group in optimizer.param_groups:
        group["lr"] = lr * (1 - progress) if decay else lr


def average_stats(parts):
    """One dict from many: means weighted by `count`, the largest of every `*_max`, the sum of `count`.

    Args:
        parts: list of dicts of 0-d tensors with the same keys.
    Returns:
        dict of detached 0-d tensors.
    """
    if len(parts) == 1:
        return {name: value.detach() for name, value in parts[0].items()}
    counts = torch.stack([stats["count"] for stats in parts])
    out = {}
    for name in parts[0]:
        column = torch.stack([stats[name].detach() for stats in parts])
        if name == "count":
            out[name] = counts.sum()
        elif name.endswith("_max"):
            out[name] = column.amax()
        else:
            out[name] = (column * counts).sum() / counts.sum().clamp(min=1)
    return out


def descend(optimizer, parts, max_grad_norm=None):
    """One optimiser step on a batch that comes in one or more parts.

        ∇L = Σ_i count_i ∇L_i / Σ_i count_i

    A mean of the parts' means would weight a token by the size of its part; weighting by count makes the step that of
    the whole batch however it was split.

    Args:
        optimizer: whose parameters move.
        parts: iterable of (loss, stats); each loss is a mean over stats["count"] tokens, steps or rows. It may be a
            generator: a part's graph is freed before the next is built.
        max_grad_norm: scale the gradient down to this norm where it is larger; None for never.
    Returns:
        stats of the whole batch, with `grad_norm` as it was before scaling.
    """
    optimizer.zero_grad(set_to_none=True)
    seen = []
    for loss, stats in parts:
        (loss * stats["count"]).backward()
        seen.append(stats)
    stats = average_stats(seen)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    count = stats["count"].clamp(min=1)
    stats["grad_norm"] = torch.cat([gradient.flatten() for gradient in gradients]).norm() / count
    limit = float("inf") if max_grad_norm is None else max_grad_norm
    scale = (limit / (stats["grad_norm"] + 1e-6)).clamp(max=1) / count
    for gradient in gradients:
        gradient *= scale
    optimizer.step()
    return stats


def ratio_stats(logprobs, old_logprobs, mask, clip=0.2):
    """How far the policy has moved on the sampled actions: `ratio_max`, `clip_fraction`, `kl_old_new`, `count`.

    clip_fraction is the share of actions whose ratio lies outside the interval, whether or not their gradient is cut;
    kl_old_new is the mean of k3, which estimates KL(π_old‖π) from π_old's actions. All (B, T) inputs are constants.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    low, high = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    counts = mask.bool()
    count = counts.sum()
    log_ratio = (logprobs.detach() - old_logprobs.detach()).masked_fill(~counts, 0.0)
    ratio = log_ratio.exp()
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    return {
        "ratio_max": ratio.masked_fill(~counts, 0.0).amax(),
        "clip_fraction": (outside & counts).to(ratio.dtype).sum() / count.clamp(min=1),
        "kl_old_new": (ratio - 1 - log_ratio).sum() / count.clamp(min=1),  # k3, functional/kl.py
        "count": count,
    }


@torch.no_grad()
def movement(policy, batch):
    """`kl_old_new` of a whole update on a batch, estimated (k3) after it, and `count`, the batch's actions.

    What the losses saw, as an average over their passes, starts at 0 with the first pass and says too little.
    """
    stats = ratio_stats(policy(batch.obs).log_prob(batch.actions), batch.logprobs, batch.mask)
    return {name: stats[name] for name in ("kl_old_new", "count")}


class Stateful:
    """state_dict and load_state_dict over an algorithm's own modules, optimisers and plain numbers."""

    def state_dict(self):
        """Everything that training changes, by attribute name."""
        state = {}
        for name, value in vars(self).items():
            if hasattr(value, "state_dict"):
                state[name] = value.state_dict()
            elif isinstance(value, (int, float)):
                state[name] = value
        return state

    def load_state_dict(self, state):
        """Take back what state_dict gave.

        Raises:
            KeyError: if a part is missing.
        """
        for name, value in vars(self).items():
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(state[name])
            elif isinstance(value, (int, float)):
                setattr(self, name, state[name])
