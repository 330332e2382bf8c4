"""Direct preference optimisation: the policy is its own reward model, so preferences train it like a classifier.

    π*(y | x) = π_ref(y | x) exp(r(x, y) / β) / Z(x)          what RLHF with a KL penalty would find   Rafailov et al.
    r(x, y) = β log π*(y | x) / π_ref(y | x) + β log Z(x)     solved for the reward                    2023, eqs. 4, 5
    L(θ) = −E[ log σ( β log π_θ(y_w | x) / π_ref(y_w | x) − β log π_θ(y_l | x) / π_ref(y_l | x) ) ]    eq. 7

eq. 5 put into Bradley and Terry's model of a preference: log Z(x) is the same for both answers and cancels, and what is
left is the loss of reward_model.py with the *implicit reward* β log π_θ/π_ref as score. log π(y | x) is the *sum* over
the answer's tokens, end token included. At π_θ = π_ref the loss is ln 2. It asks for a difference only: the chosen
answer may become less probable, as long as the rejected one falls faster. So both log-probabilities are logged.

Changed against the paper: Adam without warm-up replaces RMSprop with 150 steps of it. Added: label smoothing.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F

from minirl.algorithms.optimize import Stateful, adam
from minirl.algorithms.settings import NonNegative, Positive, Range, Settings
from minirl.functional.masked import check_same_shape, masked_sum


@dataclass(frozen=True)
class DPOConfig(Settings):
    """Settings of DPO."""

    dpo_beta: Positive = 0.1
    """Beta, how dear a step away from the reference is (paper, appendix B: 0.1; 0.5 for summaries)."""
    label_smoothing: Annotated[float, Range(0, 0.5, open="high")] = 0.0
    """Share of pairs taken to be labelled the wrong way round (paper: 0; cDPO, Mitchell 2023: the share expected)."""
    reference_free: bool = False
    """Take a reference to which all answers are equally probable instead of the given one (paper: no)."""
    lr: NonNegative = 3e-4
    """Adam step size (paper, appendix B: 1e-6 for models of billions of parameters)."""
    lr_decay: bool = True
    """Let the step size fall linearly to 0 over the run."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm (official code: 10)."""


def dpo_loss(
    chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs, beta=0.1, label_smoothing=0.0
):
    """Logistic loss of the implicit rewards' difference.

        h = β (log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l))                      Rafailov et al. 2023, eq. 7 (ε = 0)
        L = mean( −(1 − ε) log σ(h) − ε log σ(−h) )                                Mitchell 2023 (cDPO), eq. 3

    With ε > 0 the loss is least at h = log((1 − ε)/ε): no pair is pushed apart for ever.

    Args:
        chosen_logprobs, rejected_logprobs: (B,) log π_θ(y | x) in nats, *summed* over each answer; carry the gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: (B,) nats, the same under the reference; constants.
        beta: β.
        label_smoothing: ε in [0, 0.5), the share of labels taken to be wrong.
    Returns:
        (loss, stats): a scalar in nats per pair, and the means over pairs `loss`, `accuracy` (chosen has the higher
        implicit reward; a tie is half), `chosen_reward`, `rejected_reward`, `margin` (nats, h), `chosen_logprob`,
        `rejected_logprob` (nats per answer), and `count` (pairs).
    Raises:
        ValueError: if the shapes differ or are not (B,).
    """
    check_same_shape(
        chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs,
        ref_chosen_logprobs=ref_chosen_logprobs, ref_rejected_logprobs=ref_rejected_logprobs,
    )  # fmt: skip
    if chosen_logprobs.dim() != 1:
        shape = tuple(chosen_logprobs.shape)
        raise ValueError(f"chosen_logprobs has shape {shape}; it must be (B,), one sum per answer")
    chosen_reward = beta * (chosen_logprobs - ref_chosen_logprobs.detach())
    rejected_reward = beta * (rejected_logprobs - ref_rejected_logprobs.detach())
    margin = chosen_reward - rejected_reward
    loss = -((1 - label_smoothing) * F.logsigmoid(margin) + label_smoothing * F.logsigmoid(-margin)).mean()
    means = {
        "accuracy": (1 + margin.sign()) / 2, "chosen_reward": chosen_reward, "rejected_reward": rejected_reward,
        "margin": margin, "chosen_logprob": chosen_logprobs, "rejected_logprob": rejected_logprobs,
    }  # fmt: skip
    stats = {"loss": loss.detach()} | {name: value.detach().mean() for name, value in means.items()}
    return loss, stats | {"count": torch.ones_like(margin, dtype=torch.long).sum()}


def sequence_logprobs(policy, records):
    """log π(y | x) of whole answers: Σ_t log π(y_t | x, y_<t) over the answer's tokens, without dropout.

    Args:
        policy: obs -> Distribution.
        records: Completions of B rows.
    Returns:
        (B,) nats. Prompt and padding do not count.
    """
    return masked_sum(policy(records.obs).log_prob(records.actions), records.mask, dim=1)


class DPO(Stateful):
    """DPO of a TokenPolicy on Pairs; training.fit drives it.

    The reference is part of the saved state: continued with another one, a run would optimise something else.

    Args:
        policy: TokenPolicy to train.
        reference: frozen TokenPolicy, usually a copy of the policy at the start; None where config.reference_free.
        config: DPOConfig.
    Raises:
        ValueError: if there is no reference where one is needed, or it is the policy itself.
    """

    def __init__(self, policy, reference=None, config=None):
        self.policy, self.config = policy, config or DPOConfig()
        if self.config.reference_free:
            reference = None
        elif reference is None:
            raise ValueError("reference is None; give DPO a frozen copy of the policy, or set reference_free")
        elif reference is policy:
            raise ValueError("reference is the policy itself and would move with it; give DPO a copy (copy.deepcopy)")
        self.reference = reference
        self.optimizer = adam(policy, self.config.lr, eps=1e-8)

    def loss(self, pairs):
        """(loss, stats) of Pairs."""
        sides = pairs.chosen, pairs.rejected
        logprobs = [sequence_logprobs(self.policy, side) for side in sides]
        if self.reference is None:
            ref_logprobs = [torch.zeros_like(side) for side in logprobs]
        else:
            with torch.no_grad():
                ref_logprobs = [sequence_logprobs(self.reference, side) for side in sides]
        return dpo_loss(*logprobs, *ref_logprobs, self.config.dpo_beta, self.config.label_smoothing)
