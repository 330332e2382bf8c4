"""Segment reward: a reward for single steps, learned from which of two short stretches of behaviour was preferred.

    P[σ¹ ≻ σ²] = exp Σ r̂(s¹_t, a¹_t) / ( exp Σ r̂(s¹_t, a¹_t) + exp Σ r̂(s²_t, a²_t) )
    L(r̂) = −Σ_D  μ(1) log P[σ¹ ≻ σ²] + μ(2) log P[σ² ≻ σ¹],     μ ∈ {(1, 0), (½, ½), (0, 1)}

Christiano et al. 2017, "Deep reinforcement learning from human preferences" (arXiv 1706.03741), section 2.2.3.
The first RLHF. r̂ is the mean of an ensemble; where its members disagree a new label teaches most (section 2.2.4).

Stated choices, where the paper is silent: each member counts a label n ~ Poisson(1) times, what drawing |D| labels
with replacement comes to; n = 0, probability 1/e, holds it out from that member for good. State and action enter
shifted and scaled by their running moments. Rewards have mean 0 and deviation 1 over the steps of all labels: over the
latest rollout alone their scale would jump whenever the policy has learned something, and the critic with it.
Left out: dropout (used "in some domains"); labels "incomparable", which the paper drops; convolutions, for Atari.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from minirl.algorithms.optimize import average_stats
from minirl.algorithms.settings import Count, NonNegative, Positive, PositiveShare, Settings
from minirl.functional.masked import check_same_shape
from minirl.models.normalizer import ObservationNormalizer

LEAK = 0.01  # slope of the leaky ReLU (paper, appendix A.1)
RATIO_LOW, RATIO_HIGH = 1.1, 1.5  # wanted: validation loss / training loss (paper, section 2.2.3)


@dataclass(frozen=True)
class SegmentRewardConfig(Settings):
    """Settings of the reward predictor."""

    predictors: Count = 3
    """Members of the ensemble (paper, appendix A.1: 3)."""
    predictor_hidden: tuple[Count, ...] = (64, 64)
    """Widths of their hidden layers (paper, appendix A.1: two of 64)."""
    response_noise: PositiveShare = 0.1
    """Share of labels taken to be a coin's (paper, section 2.2.3: 0.1); keeps a label's loss finite."""
    predictor_lr: Positive = 1e-3
    """Adam step size (paper: not given; Adam's default)."""
    fit_steps: Count = 50
    """Optimiser steps after each rollout (paper: not given; there the predictor trains all the time)."""
    label_batch: Count = 64
    """Labels in each of them (paper: not given)."""
    l2: NonNegative = 1e-3
    """Weight of the l2 penalty to begin with; it adapts (paper: start not given)."""
    l2_factor: Positive = 1.1
    """By which it grows or shrinks after each rollout (paper: not given; 1.5 overshoots: the ratio follows slowly)."""
    selection: Literal["disagreement", "random"] = "disagreement"
    """Which pairs are shown to the labeller (paper: disagreement; its ablation: random)."""
    candidates: Count = 10
    """Pairs drawn for each one that the labeller sees (paper, appendix A: 10)."""


def segment_preference_loss(chosen_sums, other_sums, mu, noise=0.1):
    """Cross-entropy of a label and the predicted preference, for a labeller who sometimes throws a coin.

        L = −mean( μ log P + (1 − μ) log(1 − P) ),   P = (1 − noise) · σ(Σ r̂¹ − Σ r̂²) + noise / 2

    Christiano et al. 2017, section 2.2.3; the logistic σ of a difference is the softmax over two sums.

    Args:
        chosen_sums: (N,) Σ r̂ over the first segment of each pair, the one that μ = 1 prefers; carries the gradient.
        other_sums: (N,) over the second.
        mu: (N,) μ(1): 1 the first is better, 0 the second, ½ equally good; a constant.
        noise: share of answers at random, in (0, 1].
    Returns:
        (loss, stats): nats per label, and `loss`, `accuracy` (the sign is right; tie or ½: half), `count` (labels).
    Raises:
        ValueError: if the shapes differ or are not (N,).
    """
    check_same_shape(chosen_sums=chosen_sums, other_sums=other_sums, mu=mu)
    if chosen_sums.dim() != 1:
        raise ValueError(f"chosen_sums has shape {tuple(chosen_sums.shape)}; it must be (N,), one sum a segment")
    difference, mu = chosen_sums - other_sums, mu.detach()
    first, second = ((1 - noise) * side.sigmoid() + noise / 2 for side in (difference, -difference))
    loss = -(mu * first.log() + (1 - mu) * second.log()).mean()
    right = (1 + difference.sign() * (2 * mu - 1)).mean() / 2
    return loss, {"loss": loss.detach(), "accuracy": right, "count": torch.ones_like(mu, dtype=torch.long).sum()}


def disagreement(sums):
    """Variance over the ensemble of the predicted preference: (members, N, 2) sums -> (N,) in [0, ¼]."""
    return (sums[..., 0] - sums[..., 1]).sigmoid().var(0, unbiased=False)


def adapted_l2(l2, training_loss, validation_loss, factor):
    """The l2 weight after a look at both losses: larger where the predictor overfits, smaller where it underfits."""
    if validation_loss > RATIO_HIGH * training_loss:
        return l2 * factor
    return l2 / factor if validation_loss < RATIO_LOW * training_loss else l2


def ensemble(inputs, config):
    """`predictors` MLPs of leaky ReLUs from (..., inputs) to (..., 1), as a ModuleList."""
    sizes, members = [inputs, *config.predictor_hidden], nn.ModuleList()
    for _ in range(config.predictors):
        layers = []
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(fan_in, fan_out), nn.LeakyReLU(LEAK)]
        members.append(nn.Sequential(*layers, nn.Linear(sizes[-1], 1)))
    return members


class SegmentReward(nn.Module):
    """The reward predictor: it takes in labelled pairs of segments and gives out rewards of steps.

    A step is one vector, observation and then action, (..., D). A pair is two segments of k steps, (2, k, D).

    Args:
        obs_dim, action_dim: D is their sum.
        config: SegmentRewardConfig.
    """

    def __init__(self, obs_dim, action_dim, config=None):
        super().__init__()
        self.config = config = config or SegmentRewardConfig()
        self.normalizer = ObservationNormalizer(obs_dim + action_dim)
        self.members = ensemble(obs_dim + action_dim, config)
        groups = [{"params": list(member.parameters()), "weight_decay": config.l2} for member in self.members]
        self.optimizer = torch.optim.Adam(groups, lr=config.predictor_lr)  # Adam's weight decay is an l2 penalty
        for name, start in (("means", torch.zeros), ("deviations", torch.ones)):
            self.register_buffer(name, start(config.predictors))  # of each member's rewards
        self.register_buffer("deviation", torch.ones(()))         # of the mean of those, normalised
        self.pairs = self.mu = self.counts = None                 # the labels: (N, 2, k, D), (N,), (members, N)

    def __len__(self):
        return 0 if self.mu is None else len(self.mu)

    def raw(self, steps):
        """(..., D) -> (members, ...) rewards as each member learned them, in no particular unit."""
        steps = self.normalizer.normalize(steps)
        return torch.stack([member(steps).squeeze(-1) for member in self.members])

    def forward(self, steps):
        """r̂: (..., D) -> (...), the mean of the members' normalised rewards, itself of deviation 1."""
        each = self.raw(steps)
        shape = (-1, *(1,) * (each.dim() - 1))
        return ((each - self.means.view(shape)) / self.deviations.view(shape)).mean(0) / self.deviation

    @torch.no_grad()
    def normalise(self, steps):
        """Let each member, and then their mean, have mean 0 and deviation 1 over steps (N, D); section 2.2.1."""
        each, least = self.raw(steps), 1e-8  # least: a constant stays one
        self.means.copy_(each.mean(1))
        self.deviations.copy_(each.std(1, unbiased=False).clamp(min=least))
        self.deviation.fill_(1.0)
        self.deviation.copy_(self(steps).std(unbiased=False).clamp(min=least))

    @torch.no_grad()
    def choose(self, pairs, count):
        """Indices (count,) of those of the candidates (N, 2, k, D) that the labeller should see."""
        if self.config.selection == "random":
            return torch.randperm(len(pairs), device="cpu")[:count].to(pairs.device)
        return disagreement(self.raw(pairs).sum(-1)).topk(count).indices

    def add(self, pairs, mu):
        """Take in labelled pairs (N, 2, k, D), mu (N,); each member draws how often it counts each, or holds it out."""
        counts = torch.poisson(torch.ones(len(self.members), len(mu), device="cpu")).to(mu.device)
        if self.mu is not None:
            pairs, mu = torch.cat([self.pairs, pairs]), torch.cat([self.mu, mu])
            counts = torch.cat([self.counts, counts], 1)
        self.pairs, self.mu, self.counts = pairs, mu, counts

    def loss(self, member, index):
        """(loss, stats) of one member on the labels at `index`."""
        sums = self.members[member](self.normalizer.normalize(self.pairs[index])).squeeze(-1).sum(-1)  # (n, 2)
        return segment_preference_loss(sums[:, 0], sums[:, 1], self.mu[index], self.config.response_noise)

    def fit(self):
        """Train every member on the labels that it counts, normalise, adapt l2 weights; returns stats as floats."""
        trained = [member for member in range(len(self.members)) if self.counts[member].any()]
        for _ in range(self.config.fit_steps if trained else 0):
            self.optimizer.zero_grad(set_to_none=True)
            for member in trained:
                index = self.counts[member].multinomial(self.config.label_batch, replacement=True)
                self.loss(member, index)[0].backward()
            self.optimizer.step()
        self.normalise(self.pairs.flatten(0, -2))
        return self.judge()

    @torch.no_grad()
    def judge(self):
        """Means over the members of both losses, of the accuracy on held-out labels, and of the l2 weight, adapted."""
        seen = []
        for member, group in enumerate(self.optimizer.param_groups):
            used, held_out = ((self.counts[member] > 0) == kept for kept in (True, False))
            if not used.any() or not held_out.any():
                continue  # a handful of labels, all on one side
            training, validation = self.loss(member, used)[1], self.loss(member, held_out)[1]
            group["weight_decay"] = adapted_l2(
                group["weight_decay"], training["loss"], validation["loss"], self.config.l2_factor
            )
            seen.append({
                "predictor_loss": training["loss"], "predictor_validation_loss": validation["loss"],
                "predictor_accuracy": validation["accuracy"], "predictor_l2": torch.tensor(group["weight_decay"]),
                "count": torch.ones(()),
            })  # fmt: skip
        means = average_stats(seen) if seen else {}
        return {name: float(value) for name, value in means.items() if name != "count"}
