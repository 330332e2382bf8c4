"""The settings of a run that belong to no algorithm: the machine, the task, the worlds, and the run itself."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from minirl.algorithms.settings import Count, NonNegative, Positive, Seed, Settings, Share, Whole
from minirl.training import resolve_device, seed_everything
from minirl.worlds.arithmetic import Arithmetic

TEXT_TASKS = ("arithmetic", "reviews")


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
    """How completions are collected and judged, whatever the task."""

    init: Path | None = Path("runs/sft")
    """Run (or model folder) to start from: what python -m minirl sft wrote. (None, in r1-zero: a base made for it.)"""
    data: Path | None = None
    """JSON Lines of your own prompts: prompt, and columns for the reward (arithmetic's needs gold, the answer)."""
    prompts_per_batch: Count = 64
    """Different prompts in a batch."""
    group_size: Count = 1
    """Completions of each prompt."""
    max_new_tokens: Count | None = None
    """Longest completion, end token included; None for what the task needs (--data: what the model has room for)."""
    temperature: Positive = 1.0
    """Of sampling; training uses the same."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this (Tulu 3, section 6: a verified answer earns 10)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the starting model inside the reward, per token (GRPO has it in the loss, as kl_beta)."""
    missing_end_penalty: NonNegative = 0.0
    """Subtracted from the reward of a completion that did not end by itself."""
    reshuffle: bool = True
    """Walk through the training prompts in epochs, shuffled anew each time (Tulu 3); off: draw with replacement."""
    keep_dropout: Share = 0.0
    """Dropout rate left on in the policy while it learns. Tulu 3 turns it off; any other value is there to see why."""


@dataclass(frozen=True)
class SumsSettings(TextSettings):
    """The task arithmetic: the answer is checked by a rule."""

    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    format_weight: NonNegative = 0.0
    """Reward for think and answer tags, beside the 1 for a right answer (R1-Zero rewards both; it gives no weights)."""


@dataclass(frozen=True)
class ReviewsSettings(TextSettings):
    """The task reviews: completions are judged by a learned reward model, or by rules."""

    init: Path = Path("runs/sft-reviews")
    """Run (or model folder) to start from: what python -m minirl sft --task reviews wrote."""
    reward: Literal["learned", "rules", "true"] = "learned"
    """learned: --reward-model. rules: mentions what the prompt asks for, 8 to 20 words, a finished sentence at the end.
    true: the task's own score, which no real annotator could give."""
    reward_model: Path = Path("runs/reward-model")
    """What python -m minirl reward-model wrote."""
    critic_from: Literal["reward-model", "policy"] = "reward-model"
    """What the critic starts as (Tulu 3: the reward model); with another --reward it is the policy."""
    evaluate_prompts: Count = 150
    """Held-out prompts of an evaluation; more than the 15 that there are means several completions of each."""


@dataclass(frozen=True)
class ControlSettings(Settings):
    """How an environment is stepped."""

    init: Path | None = None
    """Run in the same environment whose policy and normaliser to start from; the critic starts anew."""
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
    backend: Literal["auto", "gymnasium"] = "auto"
    """auto steps Walker2d-v4 and -v5 without gymnasium's overhead, equal to it to the bit; gymnasium never does."""


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
    eval_every: Count | None = None
    """On control instead of --evaluate-every: environment steps between evaluations."""
    evaluate_episodes: Count = 5
    """Episodes of an evaluation on control: as many with the policy's mean action, and as many sampled."""
    compile: bool = False
    """Compile PPO's loss (torch.compile): pays on long control runs, after up to a minute; needs a C++ compiler."""
    save_every: Count = 50
    """Updates between checkpoints."""
    resume: bool = False
    """Go on from the checkpoint in --out, if there is one; what was given then is given again. More --updates are
    allowed: step sizes that fall to 0 over a run then rise again to what they are there in the longer one."""
    quiet: bool = False
    """No progress bar."""


def by_name(settings):
    """Settings in a dict, with those of its inner dicts beside them, as config.json has them."""
    found = {}
    for name, value in json.loads(json.dumps(settings, default=str)).items():
        found |= by_name(value) if isinstance(value, dict) else {name: value}
    return found
