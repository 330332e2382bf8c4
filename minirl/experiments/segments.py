"""Comparisons of segments: who makes them, when, of what, and a world whose rewards are predicted from them.

The labeller is simulated: of two segments it prefers the one with the larger sum of true reward, as the "synthetic
feedback" of Christiano et al. 2017 does. That says nothing about how people would answer.
"""

from dataclasses import dataclass

import torch

from minirl.algorithms.settings import Settings, Share
from minirl.models.normalizer import RewardScaler

FIRST_LABELS = 0.25  # share of the labels that the untrained policy gets (Christiano et al. 2017, appendix A.1)
HALF, PAPER_STEPS = 2e6, 1e7  # label rate ~ HALF / (T + HALF) (ibid.); its runs are about that long (figure 2)


def label_schedule(labels, rollouts, first):
    """How many labels are asked for after each rollout: a quarter while the policy is untrained, then fewer and fewer.

        rate ∝ h / (T + h),   h = 2·10⁶ frames; scaled to the run: a fifth of it          Christiano et al. 2017, A.1

    Args:
        labels, rollouts: in all.
        first: rollouts of the untrained policy.
    Returns:
        list of `rollouts` ints that sum to `labels`.
    """
    early, half = round(FIRST_LABELS * labels), HALF / PAPER_STEPS
    share = torch.linspace(0, 1, rollouts - first + 1, dtype=torch.float64)  # of the run that is over
    later = (1 + share / half).log() / torch.tensor(1 + 1 / half, dtype=torch.float64).log()  # the rate's integral
    total = torch.cat([early * torch.linspace(0, 1, first + 1, dtype=torch.float64)[:-1],
                       early + (labels - early) * later])  # fmt: skip
    return total.round().diff().int().tolist()


def steps_of(batch):
    """(B, T, D): what the predictor sees of each step, its observation followed by its action as sampled."""
    return torch.cat([batch.obs, batch.actions], -1)


def draw_pairs(batch, length, count):
    """Pairs of segments from one rollout, at random; none runs across the end of an episode.

    Returns:
        (pairs, true_sums): (count, 2, length, D), and (count, 2) sums of the batch's rewards.
    Raises:
        ValueError: if no segment is as long as that.
    """
    ended = (batch.terminated | batch.truncated).long()
    episode = ended.cumsum(1) - ended  # (B, T) number of the episode that a step belongs to
    fits = episode[:, length - 1 :] == episode[:, : max(0, episode.shape[1] - length + 1)]
    starts = fits.nonzero()
    if not len(starts):
        raise ValueError(f"no episode of this rollout has a segment of {length} steps; lower --segment-steps")
    row, begin = starts[torch.randint(len(starts), (2 * count,), device="cpu").to(starts.device)].T
    times = begin[:, None] + torch.arange(length, device=begin.device)  # (2 count, length)
    pairs = steps_of(batch)[row[:, None], times].unflatten(0, (count, 2))
    return pairs, batch.rewards[row[:, None], times].sum(-1).view(count, 2)


@dataclass(frozen=True)
class Labeller(Settings):
    """The simulated labeller."""

    label_error: Share = 0.0
    """Probability that an answer is turned round (the paper's synthetic labeller: 0)."""

    def __call__(self, true_sums):
        """(N, 2) sums of true reward -> (N,) μ: 1 the first segment is better, 0 the second, ½ a tie."""
        mu = ((true_sums[:, 0] - true_sums[:, 1]).sign() + 1) / 2
        wrong = torch.rand(len(mu), device="cpu").to(mu.device) < self.label_error
        return torch.where(wrong, 1 - mu, mu)


class PredictedRewardWorld:
    """A ControlWorld whose batches carry predicted rewards, and which has its segments labelled as it goes.

    `scores` and the metrics of episodes stay those of the true reward, which only the labeller sees.

    Args:
        world: ControlWorld with raw rewards.
        predictor: SegmentReward.
        labeller: Labeller.
        schedule: labels to ask for after each rollout.
        segment_steps: length of a segment.
        gamma: discount of the scale that ControlWorld gives to its rewards, and this world to the predicted ones.
    """

    def __init__(self, world, predictor, labeller, schedule, segment_steps, gamma):
        self.world, self.predictor, self.labeller, self.segment_steps = world, predictor, labeller, segment_steps
        self._schedule, self._scaler = iter(schedule), RewardScaler(world.num_envs, gamma)

    def collect(self, policy, critic=None):
        """Act, ask for labels, train the predictor, and reward the rollout with it; a Batch."""
        batch = self.world.collect(policy, critic)
        steps = steps_of(batch)
        self.predictor.normalizer.update(steps)
        if wanted := next(self._schedule, 0):
            drawn = wanted * self.predictor.config.candidates
            pairs, true_sums = draw_pairs(batch, self.segment_steps, drawn)
            chosen = self.predictor.choose(pairs, wanted)
            self.predictor.add(pairs[chosen], self.labeller(true_sums[chosen]))
        learned = self.predictor.fit() if len(self.predictor) else {}
        with torch.no_grad():
            predicted = self.predictor(steps)  # (B, T)
        alike = torch.corrcoef(torch.stack([predicted.flatten(), batch.rewards.flatten()]))[0, 1]
        scaled = self._scaler(predicted.double().cpu(), (batch.terminated | batch.truncated).cpu(), batch.mask.cpu())
        learned |= {"labels": len(self.predictor), "reward_correlation": float(alike.nan_to_num())}
        return batch.with_(rewards=scaled.to(predicted), metrics=batch.metrics | learned)
