"""Sums, means and log-probabilities over the tokens or steps that count.

Every loss of this package averages over a mask: in text it is 0 on the prompt and on padding, on the walker it is 1
wherever a step really happened. An entry outside the mask never counts, not even when it is NaN.
"""

import torch
import torch.nn.functional as F


def check_same_shape(**tensors):
    """Raise ValueError naming the first two tensors whose shapes differ; None entries are skipped.

    torch would silently broadcast (B,) - (B, 1) to (B, B), and a loss built on that trains towards nothing.
    """
    present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = present[0]
    for name, tensor in present[1:]:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {first_name} has shape {tuple(first.shape)}; "
                "they must be equal"
            )


def zero_outside(mask, *tensors):
    """The tensors, each of the mask's shape, with zeros where mask is 0.

    A loss does this first: were exp(log-ratio) infinite on padding, its gradient there would be 0 · ∞ = NaN.

    Raises:
        ValueError: if the shapes differ.
    """
    for tensor in tensors:
        check_same_shape(tensor=tensor, mask=mask)
    outside = ~mask.bool()
    return [tensor.masked_fill(outside, 0) for tensor in tensors]


def masked_sum(x, mask, dim=None):
    """Σ of the entries of x where mask is 1.

    Args:
        x: any shape, say (B, T).
        mask: the shape of x, bool or 0/1.
        dim: the dimension to sum over; None sums over all.
    Returns:
        The sum, with `dim` removed. Entries outside the mask give neither value nor gradient, even if NaN or infinite.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(x=x, mask=mask)
    (kept,) = zero_outside(mask, x)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x, mask, dim=None):
    """Mean of the entries of x where mask is 1; an empty mask gives 0 with zero gradient.

    Args:
        x: any shape, say (B, T).
        mask: the shape of x, bool or 0/1.
        dim: the dimension to average over; None averages over all entries at once (not a mean of row means).
    Returns:
        The mean, with `dim` removed.
    Raises:
        ValueError: if the shapes differ.
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x, mask, eps=1e-8):
    """Shift and scale x to zero mean and unit sample deviation over the mask.

        x̂ = (x − mean) / (s + ε),   s² = Σ (x − mean)² / (N − 1)

    Args:
        x: (B, T) in any unit.
        mask: (B, T).
        eps: added to the deviation.
    Returns:
        (B, T), zeros outside the mask. All zeros where fewer than two entries count, or where the deviation is below
        1e-6 · max(1, largest absolute value): such a deviation is rounding noise, and dividing by it would blow the
        noise up to size 1.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(x=x, mask=mask)
    mask = mask.bool()
    count = mask.sum()
    centred = torch.where(mask, x - masked_mean(x, mask), torch.zeros_like(x))
    deviation = (centred.square().sum() / (count - 1).clamp(min=1)).sqrt()
    largest = torch.where(mask, x, torch.zeros_like(x)).abs().amax() if x.numel() else x.new_zeros(())
    usable = (count >= 2) & (deviation >= 1e-6 * largest.clamp(min=1.0))
    return torch.where(usable, centred / (deviation + eps), torch.zeros_like(x))


def token_logprobs(logits, actions, temperature=1.0):
    """log π(a_t | s_t) of given actions under a softmax policy: log_softmax(logits / temperature)[actions].

    No shift happens here: logits[b, t] must already be the prediction for actions[b, t].

    Args:
        logits: (B, T, V).
        actions: (B, T) integer ids in [0, V).
        temperature: the one the actions were sampled with; another one gives ratios that are not 1.
    Returns:
        (B, T) in nats.
    Raises:
        ValueError: if logits without its last dimension and actions differ in shape, or temperature is not positive.
    """
    if logits.shape[:-1] != actions.shape:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}, but actions has shape {tuple(actions.shape)}; "
            "logits must be actions' shape with the vocabulary added at the end"
        )
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be positive (log-probabilities do not exist at 0)")
    return F.log_softmax(logits / temperature, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(logits):
    """H[π(· | s_t)] = −Σ_a π(a | s_t) log π(a | s_t).

    Args:
        logits: (B, T, V); −inf forbids an id and contributes 0.
    Returns:
        (B, T) in nats.
    """
    logprobs = F.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
