"""Q#: leave the reference as it is, learn how its rollouts end, and tilt its next token towards the good ends.

    π*(a | s) = π_ref(a | s) exp(Q*(s, a) / η) / Z(s)       maximises E[R] − η KL(π‖π_ref)   Zhou et al. 2025, section 2
    Q*(s, a) = η ln E_{π_ref}[ exp(R / η) | s, a ]          R: outcome of a row that π_ref writes to its end after a
    R in {0, 1}, p = P(R = 1 | s, a):  Q* = η ln(1 − p + p e^{1/η})

The expectation is under the *reference*, so learning Q* is supervised: predict outcomes. In each round (algorithm 1)
the guided policy writes the first h actions, the reference the rest, and the steps from h on join the data.
Left out against the paper: its V-type guide, which reads each candidate token before it judges (better, and slower).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from minirl.algorithms.optimize import Stateful, trainable
from minirl.algorithms.settings import Count, NonNegative, Positive, Range, Settings
from minirl.functional.masked import check_same_shape, masked_mean
from minirl.models.gpt import next_token
from minirl.models.policies import check_whole_rows, without_dropout


@dataclass(frozen=True)
class QSharpConfig(Settings):
    """Settings of Q#."""

    eta: Positive = 0.1
    """Weight of the KL against the reward: the smaller, the further from the reference (paper: 0.1)."""
    bins: Annotated[int, Range(2)] = 2
    """Grid points of the outcome distribution; 2 for rewards 0 and 1 (the paper's Bernoulli), more for real ones."""
    rounds: Count = 2
    """How often the guided policy collects data that join what there is (paper: 2)."""
    lr: NonNegative = 1e-3
    """AdamW step size of the outcome model."""
    lr_decay: bool = True
    """Let the step size fall linearly to 0 over each round."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""


def optimal_q(probs, support, eta):
    """The value of an outcome distribution: near its mean for large η, near its best end for small η.

        Q = η ln Σ_k p_k exp(z_k / η)                                                      Zhou et al. 2025, section 2

    Args:
        probs: (..., bins), adding up to 1.
        support, eta: (bins,) outcomes z, and η > 0, both in units of reward.
    Returns:
        (...), from logarithms: exp(1/η) overflows float32 from η = 0.011 down. A probability of 0 has gradient 0.
    """
    log_probs = torch.where(probs > 0, probs, 1).log().masked_fill(probs <= 0, -torch.inf)
    return eta * torch.logsumexp(log_probs + support / eta, dim=-1)


def project_to_support(probs, values, support):
    """Lay masses on a grid: each is shared by the two grid points beside it, the nearer one getting more.

        p̂_j = Σ_k p_k · max(0, 1 − |clip(v_k) − z_j| / Δ)                               Bellemare et al. 2017, eq. 7

    Args:
        probs, values: (..., K) masses and where they are.
        support: (bins,) increasing; Δ is the gap that the value lies in, so the grid may be uneven.
    Returns:
        (..., bins) of the same total mass and, inside the grid, the same mean; what lies beyond an end goes to it.
    Raises:
        ValueError: if the shapes differ or the support does not increase.
    """
    check_same_shape(probs=probs, values=values)
    if support.dim() != 1 or len(support) < 2 or not (support.diff() > 0).all():
        raise ValueError(f"support has shape {tuple(support.shape)}; it must hold at least 2 values that increase")
    values = torch.minimum(torch.maximum(values, support[0]), support[-1]).contiguous()
    upper = torch.searchsorted(support, values).clamp(min=1)  # the first grid point not below the value
    share = (values - support[upper - 1]) / (support[upper] - support[upper - 1])  # exactly 1 on the upper point
    out = probs.new_zeros(*probs.shape[:-1], len(support))
    return out.scatter_add(-1, upper - 1, probs * (1 - share)).scatter_add(-1, upper, probs * share)


def outcome_loss(log_probs, outcomes, support, mask):
    """Cross-entropy between what came of each step, laid on the grid, and the predicted distribution.

        L = −mean_mask( Σ_k p̂_k log p_θ(z_k | s_t, a_t) )                             Zhou et al. 2025, algorithm 1
          = −mean_mask( R log p + (1 − R) log(1 − p) )       on the grid 0, 1

    Args:
        log_probs: (B, T, bins) nats, of the actions taken; carries the gradient.
        outcomes, support: (B,) constants, and the grid (bins,), increasing; both in units of reward.
        mask: (B, T), 1 on the reference's actions: the outcome of an earlier step is not the reference's alone.
    Returns:
        (loss, stats) with `loss`, `count` (steps), and `outcome_mean` and `predicted_mean` over these steps.
    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(**{"log_probs of one bin": log_probs[..., 0], "mask": mask})
    check_same_shape(**{"outcomes": outcomes, "rows of mask": mask[:, 0]})
    outcomes = outcomes.detach().to(log_probs.dtype).unsqueeze(1)
    targets = project_to_support(torch.ones_like(outcomes), outcomes, support)  # (B, bins)
    loss = -masked_mean((targets.unsqueeze(1) * log_probs).sum(-1), mask)
    return loss, {
        "loss": loss.detach(),
        "outcome_mean": masked_mean(outcomes.expand(mask.shape), mask),
        "predicted_mean": masked_mean(log_probs.detach().exp() @ support, mask),
        "count": mask.bool().sum(),
    }


def guided_logits(logits, q, eta):
    """Logits of π ∝ π_ref exp(q / η), from those of π_ref: logits + (q − max_a q) / η; all (..., V).

    No softmax sees the shift. With it an equal q leaves the logits alone to the last bit, and a forbidden id stays so.
    """
    return logits + (q - q.amax(-1, keepdim=True)) / eta


def switch_points(lengths, generator=None):
    """(B,) lengths -> (B,) index h of the reference's first action, uniform in {0, …, length − 1}; algorithm 1."""
    if (lengths < 1).any():
        raise ValueError(f"lengths holds {int(lengths.min())}; a row needs an action that the reference can choose")
    return (torch.rand(lengths.shape, dtype=torch.float64, device=lengths.device, generator=generator) * lengths).long()


@dataclass(frozen=True)
class Outcomes:
    """Rows and what came of them. The record of Q#."""

    obs: torch.Tensor       # (B, T) ids
    actions: torch.Tensor   # (B, T) ids, the next token at each position
    mask: torch.Tensor      # (B, T) bool, 1 on the reference's actions
    outcomes: torch.Tensor  # (B,) reward of the whole row

    def __post_init__(self):
        check_same_shape(obs=self.obs, actions=self.actions, mask=self.mask)
        check_same_shape(**{"outcomes": self.outcomes, "rows of mask": self.mask[:, 0]})

    def __len__(self):
        return self.mask.shape[0]

    def rows(self, index):
        """The rows at `index` (a slice or a 1-d tensor) as Outcomes."""
        return Outcomes(self.obs[index], self.actions[index], self.mask[index], self.outcomes[index])


class OutcomeModel(nn.Module):
    """p(R = z_k | prefix, a): how a row will end, for every next token a, if the reference writes the rest. No dropout.

    A fresh one says the same of every token. It takes the GPT over, so pass a copy; support: (bins,) increasing.
    """

    def __init__(self, gpt, support):
        super().__init__()
        self.trunk = gpt
        like = {"dtype": gpt.wte.weight.dtype, "device": gpt.wte.weight.device}
        self.register_buffer("support", torch.as_tensor(support, **like))
        self.head = nn.Linear(gpt.config.n_embd, gpt.config.vocab_size * len(self.support), bias=False, **like)
        nn.init.zeros_(self.head.weight)

    def log_probs(self, obs):
        """(B, T) ids -> (B, T, V, bins) nats, of every next token."""
        return self._read(self._states(obs))

    def log_probs_of(self, obs, actions):
        """(B, T) ids, (B, T) next ids -> (B, T, bins) nats, from these ids' rows of the head alone."""
        weight = self.head.weight.unflatten(0, (-1, len(self.support)))[actions]  # (B, T, bins, C)
        return F.log_softmax(torch.einsum("btkc,btc->btk", weight, self._states(obs)), dim=-1)

    def q(self, obs, eta):
        """(B, T) ids -> (B, T, V) in units of reward."""
        return self._q(self._states(obs), eta)

    def _states(self, obs):
        check_whole_rows(obs)
        with without_dropout(self):
            return self.trunk.hidden(obs)

    def _read(self, states):  # (..., C) -> (..., V, bins)
        return F.log_softmax(self.head(states).unflatten(-1, (-1, len(self.support))), dim=-1)

    def _q(self, states, eta):  # optimal_q without leaving the logarithms: e^{1/η} can outweigh a p that rounds to 0
        return eta * torch.logsumexp(self._read(states) + self.support / eta, dim=-1)


class GuidedPolicy(nn.Module):
    """π ∝ π_ref exp(Q / η) of a TokenPolicy, whose temperature and allowed ids hold, and an OutcomeModel."""

    def __init__(self, reference, outcome, eta):
        super().__init__()
        self.reference, self.outcome, self.eta = reference, outcome, eta

    def logits(self, obs):
        """(B, T) ids -> (B, T, V)."""
        with without_dropout(self.reference):
            return guided_logits(self.reference.logits(obs), self.outcome.q(obs, self.eta), self.eta)

    def forward(self, obs):
        """(B, T) ids -> Categorical over the next token at each of the B·T positions."""
        return Categorical(logits=self.logits(obs), validate_args=False)

    def mode(self, obs):
        """(B, T) ids -> (B, T) most probable next tokens."""
        return self.logits(obs).argmax(-1)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, greedy=False, attention_mask=None, eos_id=None, pad_id=None,
                 generator=None, use_cache=True):  # fmt: skip
        """Continue (B, T) ids as this policy would act; see GPT.generate, of which this is the loop with two trunks."""
        temperature, pairs = 0.0 if greedy else 1.0, []
        for gpt in (self.reference.gpt, self.outcome.trunk):
            gpt._check_ids(ids, attention_mask)
            gpt._check_request(ids, max_new_tokens, temperature, None, None, attention_mask, eos_id, pad_id)
            c, (B, T) = gpt.config, ids.shape
            shape = (c.n_layer, 2, B, c.n_head, T + max_new_tokens, c.n_embd // c.n_head)
            pairs.append((gpt, gpt.wte.weight.new_empty(shape) if use_cache else None))
        fill = next((i for i in (pad_id, eos_id) if i is not None), 0)
        rows = F.pad(ids, (0, max_new_tokens), value=fill)
        real = None if attention_mask is None else F.pad(attention_mask.bool(), (0, max_new_tokens), value=True)
        ended, start = torch.zeros(B, dtype=torch.bool, device=ids.device), 0
        with without_dropout(self.reference), without_dropout(self.outcome):
            for t in range(T, rows.shape[1]):
                new, seen = rows[:, start:t], None if real is None else real[:, :t]
                states, outlook = (gpt._trunk(new, seen, cache, start)[:, -1] for gpt, cache in pairs)
                logits = self.reference.adjust(F.linear(states, self.reference.gpt.wte.weight))
                logits = guided_logits(logits, self.outcome._q(outlook, self.eta), self.eta)
                ask = ids.device.type == "cpu" or (t - T) % 8 == 0  # an answer makes a GPU wait
                if ask and not logits.amax(-1).isfinite().all():
                    raise ValueError("logits of a new token are NaN, infinite or all -inf; nothing to sample")
                rows[:, t] = next_token(logits, temperature, generator=generator).masked_fill(ended, fill)
                ended |= rows[:, t] == (-1 if eos_id is None else eos_id)
                if ask and ended.all():
                    break
                start = t if use_cache else 0
        return rows


class QSharp(Stateful):
    """The learner of an OutcomeModel; training.fit drives it, and whoever owns the data collects them in rounds."""

    def __init__(self, outcome, config=None):
        self.outcome, self.config = outcome, config or QSharpConfig()
        self.optimizer = torch.optim.AdamW(trainable(outcome), self.config.lr, weight_decay=self.config.weight_decay)

    def loss(self, records):
        """(loss, stats) of Outcomes."""
        log_probs = self.outcome.log_probs_of(records.obs, records.actions)
        return outcome_loss(log_probs, records.outcomes, self.outcome.support, records.mask)
