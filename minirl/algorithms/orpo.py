"""Odds ratio preference optimisation: fine-tuning and preferences in one loss, without a reference.

    log P(y | x) = (1/|y|) Σ_t log π_θ(y_t | x, y_<t)          the mean, not the sum            Hong et al. 2024, eq. 3
    odds(y | x) = P(y | x) / (1 − P(y | x))                                                     eq. 4
    L_OR = −log σ( log odds(y_w | x) − log odds(y_l | x) )                                      eqs. 5, 7
    L = E[ L_SFT + λ L_OR ],   L_SFT = −log P(y_w | x)                                          eq. 6

L_SFT teaches the chosen answer; L_OR holds down the rejected one, which fine-tuning alone would make more probable as
well. The slope of log odds is 1/(1 − P), so a wrong answer that is nearly certain is pushed hardest.

Choices that papers and code leave open. L_SFT is the mean over rows of each row's mean, as eqs. 3 and 6 say; official
code pools all tokens of a batch instead. A loss counted in pairs is then the same however a batch is split. L_SFT has
the completion's tokens only; official code counts the prompt's as well (likelihood_scope "all").

Changed against the paper: Adam with a linear schedule replaces AdamW with warm-up and an inverse square root one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from minirl.algorithms.optimize import Stateful, adam
from minirl.algorithms.settings import NonNegative, Positive, Settings
from minirl.functional.masked import check_same_shape, masked_mean

_CEILING = -1e-12  # nats; odds of 10¹², and a slope of 10¹² that float32 can still multiply


@dataclass(frozen=True)
class ORPOConfig(Settings):
    """Settings of ORPO."""

    orpo_lambda: NonNegative = 0.1
    """Lambda, weight of the odds ratio's loss (paper: 0.1 for Mistral-ORPO-beta); 0 is fine-tuning on the chosen."""
    likelihood_scope: Literal["completion", "all"] = "completion"
    """Whose tokens the fine-tuning loss has: the completion's (paper, eq. 6), or the prompt's as well (its code)."""
    lr: NonNegative = 1e-3
    """Adam step size (paper: 5e-6 for a model of 7 billion parameters)."""
    lr_decay: bool = True
    """Let the step size fall linearly to 0 over the run."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""


def log_odds(mean_logprobs):
    """log(P / (1 − P)) from log P, with all digits where P is nearly 1.

        log odds = log P − log(1 − e^{log P}),   log(1 − eˣ) computed as log(−expm1(x))        Hong et al. 2024, eq. 4

    1 − eˣ itself would lose every digit: in float32 it is 0 for any x above −3e-8, and in bfloat16 above −2e-3. Values
    above −1e-12 are read as −1e-12 and pass no gradient, for at P = 1 odds and slope 1/(1 − P) are infinite.

    Args:
        mean_logprobs: any shape, log P ≤ 0 in nats.
    Returns:
        The same shape, in nats; at least float32 and at most 27.64.
    """
    wide = mean_logprobs.float() if mean_logprobs.dtype in (torch.float16, torch.bfloat16) else mean_logprobs
    wide = wide.clamp(max=_CEILING)
    return wide - torch.log(-torch.expm1(wide))


def orpo_loss(chosen_mean_logprobs, rejected_mean_logprobs, chosen_nll, lam=0.1):
    """Fine-tuning loss of the chosen answers plus the logistic loss of the odds ratio.

        L = mean( NLL_w ) + λ mean( −log σ(log odds_w − log odds_l) )                     Hong et al. 2024, eqs. 6, 7

    Args:
        chosen_mean_logprobs, rejected_mean_logprobs: (B,) nats per token, *mean* over each answer; carry the gradient.
        chosen_nll: (B,) nats per token, negative log-likelihood of each chosen answer, or a scalar that is their mean;
            carries the gradient.
        lam: λ.
    Returns:
        (loss, stats): a scalar, at least float32, and the means over pairs `loss`, `nll`, `odds_loss`,
        `log_odds_ratio`, `accuracy` (chosen has the higher odds; a tie is half), `chosen_logprob`,
        `rejected_logprob` (nats per token), and `count` (pairs).
    Raises:
        ValueError: if the shapes differ or are not (B,).
    """
    check_same_shape(
        chosen_mean_logprobs=chosen_mean_logprobs, rejected_mean_logprobs=rejected_mean_logprobs,
        chosen_nll=chosen_nll if chosen_nll.dim() else None,
    )  # fmt: skip
    if chosen_mean_logprobs.dim() != 1:
        shape = tuple(chosen_mean_logprobs.shape)
        raise ValueError(f"chosen_mean_logprobs has shape {shape}; it must be (B,), one mean per answer")
    ratio = log_odds(chosen_mean_logprobs) - log_odds(rejected_mean_logprobs)
    nll, odds_loss = chosen_nll.to(ratio.dtype).mean(), -F.logsigmoid(ratio).mean()
    loss = nll + lam * odds_loss
    stats = {
        "loss": loss, "nll": nll, "odds_loss": odds_loss, "log_odds_ratio": ratio.mean(),
        "accuracy": (1 + ratio.sign()).mean() / 2,
        "chosen_logprob": chosen_mean_logprobs.to(ratio.dtype).mean(),
        "rejected_logprob": rejected_mean_logprobs.to(ratio.dtype).mean(),
    }  # fmt: skip
    stats = {name: value.detach() for name, value in stats.items()}
    return loss, stats | {"count": torch.ones_like(ratio, dtype=torch.long).sum()}


class ORPO(Stateful):
    """ORPO of a TokenPolicy on Pairs; training.fit drives it. There is no reference."""

    def __init__(self, policy, config=None):
        self.policy, self.config = policy, config or ORPOConfig()
        self.optimizer = adam(policy, self.config.lr, eps=1e-8)

    def loss(self, pairs):
        """(loss, stats) of Pairs."""
        chosen, rejected = (self.policy(side.obs).log_prob(side.actions) for side in (pairs.chosen, pairs.rejected))
        scope = pairs.chosen.mask.bool()
        if self.config.likelihood_scope == "all":
            scope = scope.flip(1).cumsum(1).flip(1) > 0  # (B, T) every token up to the last real one
        return orpo_loss(
            masked_mean(chosen, pairs.chosen.mask, dim=1), masked_mean(rejected, pairs.rejected.mask, dim=1),
            -masked_mean(chosen, scope, dim=1), self.config.orpo_lambda,
        )  # fmt: skip
