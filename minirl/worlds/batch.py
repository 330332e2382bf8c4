"""The records that pass from a world or a file to an algorithm.

`Batch` is experience: what was seen, done and earned. `Pairs` is preference data. Both are plain tensors; neither knows
whether it came from a walker or from a language model.
"""

import copy
from dataclasses import dataclass, field, fields, replace

import torch

from minirl.functional.masked import check_same_shape

_PER_STEP = ("logprobs", "rewards", "terminated", "truncated", "mask", "values", "next_values", "ref_logprobs",
             "step_rewards", "step_ends")
_BY_ALGORITHM = ("advantages", "returns")


@dataclass(frozen=True)
class Batch:
    """B completions of T tokens, or B environments for T steps, or B whole episodes with a mask.

    Raises:
        ValueError: if the per-step fields differ in shape.
    """

    obs: torch.Tensor           # (B, T, ...) token prefix, or raw joint state
    actions: torch.Tensor       # (B, T, ...) next token, or torque as sampled (never clipped)
    logprobs: torch.Tensor      # (B, T) nats, under the policy that sampled
    rewards: torch.Tensor       # (B, T) per step
    scores: torch.Tensor        # (B,) raw outcome of the row: text reward, or an episode's return
    terminated: torch.Tensor    # (B, T) bool, a true end
    truncated: torch.Tensor     # (B, T) bool, a time or length limit
    mask: torch.Tensor          # (B, T) bool, 1 where the action counts
    values: torch.Tensor | None = None        # (B, T) V(s_t)
    next_values: torch.Tensor | None = None   # (B, T) V of the state that really followed
    ref_logprobs: torch.Tensor | None = None  # (B, T) nats, under the frozen reference
    step_rewards: torch.Tensor | None = None  # (B, T) reward of the reasoning step that ends here; read where one does
    step_ends: torch.Tensor | None = None     # (B, T) bool, the last token of each reasoning step
    advantages: torch.Tensor | None = None    # (B, T) filled in by the algorithm
    returns: torch.Tensor | None = None       # (B, T) filled in by the algorithm: the critic's targets
    rows_are_sequences: bool = False          # text: True
    group_size: int = 1                       # neighbouring rows that share one prompt or initial state
    max_length: int | None = None             # most actions a row can have (a world's max_new_tokens)
    kl_in_reward: float = 0.0                 # β of a KL penalty that the rewards already contain
    metrics: dict = field(default_factory=dict)  # what the world saw while collecting, name -> float

    def __post_init__(self):
        check_same_shape(**{name: getattr(self, name) for name in _PER_STEP + _BY_ALGORITHM})
        check_same_shape(scores=self.scores, **{"one step of rewards": self.rewards[:, 0]})
        for name in ("obs", "actions"):
            shape = tuple(getattr(self, name).shape)
            if shape[:2] != tuple(self.rewards.shape):
                raise ValueError(f"{name} has shape {shape}, but rewards has shape {tuple(self.rewards.shape)}; "
                                 "the first two dimensions must be equal")

    def with_(self, **changes):
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def to(self, device):
        """A copy with every tensor on `device`."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, torch.Tensor)})

    def rows(self, index):
        """The rows at `index` (a slice or a 1-d tensor) as a Batch."""
        chosen = copy.copy(self)  # not `replace`: what was checked once is not checked again for every mini-batch
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                object.__setattr__(chosen, name, value[index])
        return chosen

    def steps(self):
        """Every masked-in step as a row of its own: (N, 1, ...). Order: row by row, in time."""
        row, column = self.mask.bool().nonzero(as_tuple=True)
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {
            name: value[row] if name == "scores" else value[row, column].unsqueeze(1)
            for name, value in chosen.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **picked)

    def split(self, count):
        """The rows in `count` consecutive parts of nearly equal size, for micro-batches."""
        for index in torch.arange(self.mask.shape[0], device=self.mask.device).tensor_split(count):
            if len(index):
                yield self.rows(index)

    def minibatches(self, count, whole_rows=None):
        """Yield `count` shuffled parts of nearly equal size that together hold every unit once.

        A unit is a whole row where rows are sequences (a token's log-probability needs its whole prefix), and a single
        masked-in step otherwise, so that one walker still gives 2,048 units. Shuffled with torch's global generator.

        Args:
            count: how many parts; never more than there are units.
            whole_rows: True or False overrides `rows_are_sequences`.
        """
        keep_rows = self.rows_are_sequences if whole_rows is None else whole_rows
        units = self if keep_rows else self.steps()
        total = units.mask.shape[0]
        units = units.rows(torch.randperm(total, device="cpu").to(units.mask.device))
        for index in torch.arange(total, device="cpu").tensor_split(min(count, total)):
            yield units.rows(slice(int(index[0]), int(index[-1]) + 1))  # a view: gathering rows costs more than a step


@dataclass(frozen=True)
class Completions:
    """Rows to imitate: (B, T) token ids and what of them counts. The record of supervised fine-tuning."""

    obs: torch.Tensor      # (B, T) ids
    actions: torch.Tensor  # (B, T) ids, the next token at each position
    mask: torch.Tensor     # (B, T) bool, 1 on the completion and its end token

    def __post_init__(self):
        check_same_shape(obs=self.obs, actions=self.actions, mask=self.mask)

    def __len__(self):
        return self.mask.shape[0]

    def rows(self, index):
        """The rows at `index` (a slice or a 1-d tensor) as Completions."""
        return Completions(self.obs[index], self.actions[index], self.mask[index])


@dataclass(frozen=True)
class Pairs:
    """Preference data: row i of `chosen` was preferred to row i of `rejected`; both answer the same prompt."""

    chosen: Completions
    rejected: Completions
    margin: torch.Tensor | None = None  # (B,) by how much the chosen one should lead, in units of the reward model

    def __post_init__(self):
        if len(self.chosen) != len(self.rejected):
            raise ValueError(f"chosen has {len(self.chosen)} rows, but rejected has {len(self.rejected)}")
        if self.margin is not None and tuple(self.margin.shape) != (len(self.chosen),):
            raise ValueError(f"margin has shape {tuple(self.margin.shape)}, but there are {len(self.chosen)} pairs; it "
                             "must be one number a pair")

    def __len__(self):
        return len(self.chosen)

    def rows(self, index):
        """The pairs at `index` (a slice or a 1-d tensor) as Pairs."""
        margin = None if self.margin is None else self.margin[index]
        return Pairs(self.chosen.rows(index), self.rejected.rows(index), margin)
