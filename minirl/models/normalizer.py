"""Running statistics that put observations and rewards on a scale a network likes.

Both keep a plain count, mean and population variance of everything they saw, with no prior, and merge a whole batch at
once. Statistics are part of what was learned: the observation normaliser lives inside policy and critic and is saved
with their weights; the reward scaler is saved with the world. Neither is ever part of a reported return.
"""

import torch
from torch import nn

from minirl.functional.masked import check_same_shape

_EPSILON = 1e-8  # added to a variance, as in the VecNormalize wrapper of OpenAI baselines
_CLIP = 10.0     # bound of what comes out, observations and rewards alike (same source)


def merge_moments(count, mean, variance, values):
    """Statistics of two sets together, from those of the first and the members of the second.

        δ = mean_B − mean_A,   mean = mean_A + δ n_B / n
        n · variance = n_A variance_A + n_B variance_B + δ² n_A n_B / n        Chan, Golub & LeVeque 1979

    Args:
        count: n_A, how many were seen so far; 0 makes the other two irrelevant.
        mean, variance: (...) of those, population variance.
        values: (n_B, ...) the new ones, at least one.
    Returns:
        (count, mean, variance) of all n = n_A + n_B.
    """
    new = values.shape[0]
    total = count + new
    delta = values.mean(0) - mean
    spread = count * variance + new * values.var(0, unbiased=False) + delta.square() * (count * new / total)
    return total, mean + delta * (new / total), spread / total


class ObservationNormalizer(nn.Module):
    """Shift and scale observations by the mean and deviation of all that were ever fed to `update`.

        x̂ = clip( (x − mean) / √(variance + 1e-8), −10, 10 )

    Buffers `mean`, `variance` (population) and `count` are 0, 1 and 0 before the first update, so `normalize` only
    clips then. One instance is shared by policy and critic. It changes in `update` alone, which the world calls between
    rollouts: were it to move within one, the first probability ratio of an update would not be 1.

    Args:
        shape: shape of one observation, an int or a tuple.
    """

    def __init__(self, shape):
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, obs):
        """Count in every observation of obs (..., *shape). Sums run in float64 on the CPU, whatever the device.

        Raises:
            ValueError: if the trailing dimensions are not `shape`, or an entry is not finite (it would stay for ever).
        """
        shape = tuple(self.mean.shape)
        if tuple(obs.shape[obs.dim() - len(shape):]) != shape:
            raise ValueError(f"obs has shape {tuple(obs.shape)}, but mean has shape {shape}; obs must end in it")
        values = obs.detach().cpu().double().reshape(-1, *shape)
        if not torch.isfinite(values).all():
            raise ValueError("obs holds NaN or infinite entries; they would spoil the statistics for good")
        if len(values):
            old = int(self.count), self.mean.cpu().double(), self.variance.cpu().double()
            count, mean, variance = merge_moments(*old, values)
            self.count.fill_(count)
            self.mean.copy_(mean)
            self.variance.copy_(variance)

    def normalize(self, obs):
        """(..., *shape) raw -> (..., *shape), within ±10."""
        return ((obs - self.mean) / (self.variance + _EPSILON).sqrt()).clamp(-_CLIP, _CLIP)


class RewardScaler:
    """Divide rewards by the deviation of the discounted return that has run up so far, one accumulator a row.

        R_t = r_t + γ R_{t−1}, R = 0 after the end of an episode,      r̂_t = clip( r_t / √(Var[R] + 1e-8), −10, 10 )

    Engstrom et al. 2020, "Implementation matters in deep policy gradients", algorithm 1, with differences: the end of
    an episode, or a time limit, clears R (there nothing does); what comes out is clipped, as in OpenAI baselines; and
    a rollout has one scale, its own R counted in first, so that the first rewards are not divided by the deviation of
    a handful. Rewards pass unscaled while R does not vary (below 1e-8). The mean is never subtracted: that would
    change which behaviour is best.

    Args:
        rows: number of environments.
        gamma: discount γ of the accumulator.
    """

    def __init__(self, rows, gamma=0.99):
        self.gamma = gamma
        self.running = torch.zeros(rows, dtype=torch.float64)  # R after the last step of each row
        self.count, self.mean, self.variance = 0, *torch.zeros(2, dtype=torch.float64)

    def accumulate(self, rewards, ended):
        """R of every step: (B, T) rewards and (B, T) bool `terminated or truncated` -> (B, T) float64."""
        returns = torch.empty(rewards.shape, dtype=torch.float64)
        for t in range(rewards.shape[1]):
            returns[:, t] = rewards[:, t] + self.gamma * self.running
            self.running = torch.where(ended[:, t], 0.0, returns[:, t])
        return returns

    def __call__(self, rewards, ended, mask):
        """Count a rollout in, then scale it: (B, T) raw -> (B, T) scaled. Steps outside the mask do not count."""
        check_same_shape(rewards=rewards, ended=ended, mask=mask)
        returns = self.accumulate(rewards, ended)[mask]
        if len(returns):
            self.count, self.mean, self.variance = merge_moments(self.count, self.mean, self.variance, returns)
        if self.variance < _EPSILON:
            return rewards
        return (rewards / (self.variance + _EPSILON).sqrt()).clamp(-_CLIP, _CLIP)

    def state_dict(self):
        """All it knows, as numbers and a list."""
        numbers = {"count": self.count, "mean": self.mean.item(), "variance": self.variance.item()}
        return {"running": self.running.tolist(), **numbers}

    def load_state_dict(self, state):
        """Go on from what `state_dict` gave."""
        self.running = torch.tensor(state["running"], dtype=torch.float64)
        self.count = state["count"]
        self.mean, self.variance = torch.tensor([state["mean"], state["variance"]], dtype=torch.float64)
