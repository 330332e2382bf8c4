"""Policies and critics: observation in, torch Distribution or value out.

`policy(obs)` is all an algorithm ever asks: from the distribution come `log_prob`, `entropy`, `sample` and the exact
KL divergence, whether an action is a token or a torque. `critic(obs)` gives V(s), and stands on a trunk of its own: on
a shared trunk every step of the critic would also move the policy, outside any trust region.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

_FORBIDDEN = -1e9  # finite, so that 0 · (log p − log q) is 0 and not NaN; its probability is exactly 0 in float32


@contextmanager
def without_dropout(module):
    """Evaluate a module in eval mode, whatever mode it is in, and put that mode back."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def check_whole_rows(obs):
    """Raise ValueError unless obs is (B, T) token ids that start at column 0 of the rows they were cut from.

    A view such as ids[:, 3:] would be read as a text that begins at its fourth token, and give other log-probabilities.
    (A view of every other row, ids[1::2], cannot be told from one and is refused too; `.contiguous()` settles it.)
    """
    if obs.dim() != 2 or obs.is_floating_point():
        raise ValueError(f"obs has shape {tuple(obs.shape)} and type {obs.dtype}; it must be (B, T) token ids")
    if obs.stride(0) > obs.shape[1] and obs.storage_offset() % obs.stride(0):
        raise ValueError("obs is a slice of columns that does not start at column 0; pass whole rows")


class TokenPolicy(nn.Module):
    """A GPT as a policy: the state is the prefix, the action the next token.

        π(a | s_t) = softmax(logits(s_t) / temperature)[a]     over the allowed ids

    A distribution never has dropout in it, or the two log-probabilities of a ratio would be of two functions. `logits`
    has it where the GPT's config has it and the module is in train mode: that is for supervised losses.

    Args:
        gpt: models.gpt.GPT, used as it is (not copied).
        temperature: sampling and training both use it, so ratios cannot drift apart.
        allowed: (V,) bool, ids that may be produced; None allows all. Padding belongs among the forbidden ones.
        keep_dropout: True leaves dropout in the distribution, where the GPT has some: the mistake, to look at.
    """

    def __init__(self, gpt, temperature=1.0, allowed=None, keep_dropout=False):
        super().__init__()
        self.keep_dropout = keep_dropout
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; a policy needs a positive one (greedy is `mode`)")
        self.gpt, self.temperature = gpt, temperature
        self.register_buffer("allowed", allowed, persistent=False)
        self.normalizer = None

    def adjust(self, logits):
        """Temper logits (..., V) and forbid ids: the only place where that happens."""
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        logits = logits / self.temperature
        return logits if self.allowed is None else logits.masked_fill(~self.allowed, _FORBIDDEN)

    def logits(self, obs):
        """(B, T) ids -> (B, T, V) adjusted logits."""
        check_whole_rows(obs)
        return self.adjust(self.gpt(obs))

    def forward(self, obs):
        """(B, T) ids -> Categorical over the next token at each of the B·T positions."""
        with nullcontext() if self.keep_dropout else without_dropout(self):
            return Categorical(logits=self.logits(obs), validate_args=False)

    def mode(self, obs):
        """(B, T) ids -> (B, T) most probable next tokens."""
        with without_dropout(self):
            return self.logits(obs).argmax(-1)

    def generate(self, ids, max_new_tokens, greedy=False, **options):
        """Continue (B, T) ids as this policy would act; options as in GPT.generate."""
        return self.gpt.generate(
            ids, max_new_tokens, temperature=0.0 if greedy else 1.0, adjust=self.adjust, **options
        )


class TokenCritic(nn.Module):
    """A GPT trunk of its own with one scalar per position: V(prefix), or a reward model read at the last real token.

    Like a policy's distribution, a value never has dropout in it.

    Args:
        gpt: the trunk; the critic takes it over, so pass a copy of the policy's.
    """

    def __init__(self, gpt):
        super().__init__()
        self.trunk = gpt
        self.head = nn.Linear(gpt.config.n_embd, 1)
        nn.init.zeros_(self.head.weight)  # a fresh critic predicts 0 everywhere
        nn.init.zeros_(self.head.bias)

    def forward(self, obs):
        """(B, T) ids -> (B, T) values in units of reward."""
        check_whole_rows(obs)
        with without_dropout(self):
            return self.head(self.trunk.hidden(obs)).squeeze(-1)


def mlp(sizes, last_gain):
    """Linear layers with tanh between; orthogonal weights, gain √2 inside and `last_gain` at the end, biases 0.

    As in the PPO of OpenAI baselines: 64-64 tanh (PPO paper, section 6.1); a last gain of 0.01 lets a policy start
    close to zero-mean or uniform, 1.0 suits a value head (Huang et al. 2022, "The 37 implementation details of PPO").
    """
    layers = []
    for index, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        last = index == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, last_gain if last else 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


class _StateModel(nn.Module):
    """An MLP over normalised raw states."""

    def __init__(self, obs_dim, outputs, hidden, normalizer, last_gain):
        super().__init__()
        self.normalizer = normalizer
        self.body = mlp([obs_dim, *hidden, outputs], last_gain)

    def features(self, obs):
        """(..., obs_dim) raw float32 -> (..., outputs)."""
        return self.body(obs if self.normalizer is None else self.normalizer.normalize(obs))


class GaussianPolicy(_StateModel):
    """π(a | s) = N(μ(s), diag σ²) with a log σ that does not depend on the state and starts at 0.

    Args:
        obs_dim, action_dim: sizes of state and action.
        hidden: widths of the hidden layers.
        normalizer: ObservationNormalizer shared with the critic, or None.
    """

    def __init__(self, obs_dim, action_dim, hidden=(64, 64), normalizer=None):
        super().__init__(obs_dim, action_dim, hidden, normalizer, last_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs):
        """(..., obs_dim) -> Independent Normal over (..., action_dim) actions, in the environment's unit."""
        mean = self.features(obs)
        return Independent(Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False), 1)

    def mode(self, obs):
        """(..., obs_dim) -> (..., action_dim) mean action."""
        return self.features(obs)


class CategoricalPolicy(_StateModel):
    """π(a | s) = softmax(f(s))[a] for discrete actions.

    Args:
        obs_dim, num_actions: size of the state, number of actions.
        hidden: widths of the hidden layers.
        normalizer: ObservationNormalizer shared with the critic, or None.
    """

    def __init__(self, obs_dim, num_actions, hidden=(64, 64), normalizer=None):
        super().__init__(obs_dim, num_actions, hidden, normalizer, last_gain=0.01)

    def forward(self, obs):
        """(..., obs_dim) -> Categorical over (...) actions."""
        return Categorical(logits=self.features(obs), validate_args=False)

    def mode(self, obs):
        """(..., obs_dim) -> (...) most probable action."""
        return self.features(obs).argmax(-1)


class ValueNetwork(_StateModel):
    """V(s) for states: an MLP with one output.

    Args:
        obs_dim: size of the state.
        hidden: widths of the hidden layers.
        normalizer: ObservationNormalizer shared with the policy, or None.
    """

    def __init__(self, obs_dim, hidden=(64, 64), normalizer=None):
        super().__init__(obs_dim, 1, hidden, normalizer, last_gain=1.0)

    def forward(self, obs):
        """(..., obs_dim) -> (...) values in units of (scaled) reward."""
        return self.features(obs).squeeze(-1)
