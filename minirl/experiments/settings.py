"""The settings of a run that belong to no algorithm: the machine, the task, the worlds, and the run itself."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from minirl.algorithms.settings import Count, NonNegative, Positive, Seed, Settings, Whole
from minirl.training import resolve_device, seed_everything
from minirl.worlds.arithmetic import Arithmetic


@dataclass(frozen=True, kw_only=True)
class Machine(Settings):
    """Where a run computes; every command has these."""

    seed: Seed = 0
    """Of everything random."""
    device: str = "auto"
    """auto, cpu, cuda or another torch device."""
    threads: Count = 1
    """CPU threads of torch. One suits models this small, and keeps the number of cores out of the results: runs are
    equal to the bit only where the threads are."""

    def prepare(self):
        """Set the threads, seed all generators, and return the device.

        Raises:
            ValueError: if the device is not available.
        """
        device = resolve_device(self.device)
        torch.set_num_threads(self.threads)
        seed_everything(self.seed)
        return device


@dataclass(frozen=True)
class ArithmeticSettings(Settings):
    """Which sums."""

    terms: Count = 3
    """Numbers that are added."""
    largest: Count = 9
    """Largest of them."""
    format: Literal["direct", "think"] = "direct"
    """Answer at once, or think in tags first."""
    held_out: Count = 256
    """Problems kept for evaluation; they never occur in training."""
    task_seed: Seed = 0
    """Of the split into training and held-out problems."""

    def task(self):
        """The Arithmetic task."""
        return Arithmetic(self.terms, self.largest, self.format, self.held_out, self.task_seed)


@dataclass(frozen=True)
class TextSettings(Settings):
    """How completions are collected and judged."""

    init: Path = Path("runs/sft")
    """Run (or model folder) to start from: what python -m minirl sft wrote."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    prompts_per_batch: Count = 64
    """Different prompts in a batch."""
    group_size: Count = 1
    """Completions of each prompt."""
    temperature: Positive = 1.0
    """Of sampling; training uses the same."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the starting model inside the reward, per token (GRPO has it in the loss, as kl_beta)."""
    missing_end_penalty: NonNegative = 0.0
    """Subtracted from the reward of a completion that did not end by itself."""


@dataclass(frozen=True)
class ControlSettings(Settings):
    """How an environment is stepped."""

    num_envs: Count = 4
    """Environments stepped side by side."""
    steps: Count = 250
    """Steps of each environment in a batch."""
    whole_episodes: bool = False
    """Collect one whole episode of each environment instead of a fixed number of steps."""
    group_size: Count = 1
    """Episodes from each initial state (GRPO)."""
    hidden: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers of policy and critic (PPO paper: 64 64)."""
    normalize_observations: bool = True
    """Shift and scale observations by what has been seen so far."""
    reward_scaling: bool = True
    """Divide rewards by the deviation of the discounted return."""
    warmup_steps: Whole = 512
    """Random steps that the normaliser sees before training (not counted as training steps)."""


@dataclass(frozen=True)
class RunSettings(Machine):
    """Length and place of a run."""

    out: Path
    """Folder for metrics.csv, config.json, checkpoint and TensorBoard files; an earlier run there is replaced."""
    updates: Count | None = None
    """Batches to learn from; None takes what suits algorithm and task."""
    env_steps: Count | None = None
    """On control instead of --updates: environment steps in all."""
    evaluate_every: Whole = 10
    """Updates between evaluations; 0 for one before and one after training."""
    evaluate_episodes: Count = 5
    """Episodes of an evaluation on control."""
    save_every: Count = 50
    """Updates between checkpoints."""
    resume: bool = False
    """Go on from the checkpoint in --out, if there is one."""
    quiet: bool = False
    """No progress bar."""
