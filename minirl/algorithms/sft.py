"""Supervised fine-tuning: raise the likelihood of given completions.

    L(θ) = −Σ_i Σ_t log π_θ(y_it | x_i, y_i,<t) / Σ_i |y_i|         InstructGPT (Ouyang et al. 2022), section 3.5

one mean over all completion tokens of the batch, not a mean of row means. The prompt is not a target; the end token
is, or the model never learns to stop. With reward 1 on every demonstration it is REINFORCE on somebody else's actions.
"""

from dataclasses import dataclass

import torch

from minirl.algorithms.optimize import Stateful, trainable
from minirl.algorithms.settings import NonNegative, Positive, Settings
from minirl.functional.masked import check_same_shape, masked_mean, token_logprobs


@dataclass(frozen=True)
class SFTConfig(Settings):
    """Settings of supervised fine-tuning."""

    lr: NonNegative = 1e-3
    """AdamW step size (tiny models need about 100 times the 9.65e-6 of InstructGPT)."""
    lr_decay: bool = False
    """Let the step size fall linearly to 0 over the run."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm (GPT-3: 1.0)."""


def likelihood_loss(logprobs, mask):
    """Negative log-likelihood of the completion tokens, one mean over all of them.

        L = −mean_mask( log π_θ(a | s) )                                InstructGPT (Ouyang et al. 2022), section 3.5

    Args:
        logprobs: (B, T) log π_θ of the tokens, nats; carries the gradient.
        mask: (B, T), 1 on the tokens to imitate.
    Returns:
        (loss, stats): a scalar in nats per token, and `loss`, `count` (tokens).
    Raises:
        ValueError: if the shapes differ.
    """
    loss = -masked_mean(logprobs, mask)
    return loss, {"loss": loss.detach(), "count": mask.bool().sum()}


def sft_loss(logits, actions, mask):
    """Cross-entropy of the completion tokens, one mean over all of them.

        L = −mean_mask( log softmax(logits)[actions] )

    Args:
        logits: (B, T, V); logits[b, t] predicts actions[b, t].
        actions: (B, T) ids.
        mask: (B, T), 1 on completion tokens including the end token. Built from lengths, never from token values:
            padding may have the end token's id.
    Returns:
        (loss, stats): a scalar in nats per token, and `loss`, `token_accuracy`, `count` (tokens).
    Raises:
        ValueError: if the shapes do not fit.
    """
    check_same_shape(actions=actions, mask=mask)
    loss, stats = likelihood_loss(token_logprobs(logits, actions), mask)
    hits = (logits.argmax(-1) == actions).to(logits.dtype)
    return loss, {"loss": stats["loss"], "token_accuracy": masked_mean(hits, mask), "count": stats["count"]}


class SFT(Stateful):
    """Supervised fine-tuning of a TokenPolicy; training.fit drives it."""

    def __init__(self, policy, config=None):
        self.policy, self.config = policy, config or SFTConfig()
        self.optimizer = torch.optim.AdamW(
            trainable(policy), lr=self.config.lr, weight_decay=self.config.weight_decay
        )

    def loss(self, records):
        """(loss, stats) of Completions."""
        return sft_loss(self.policy.logits(records.obs), records.actions, records.mask)
