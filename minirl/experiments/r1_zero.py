"""The command r1-zero: GRPO straight from a base model that sometimes thinks, without any fine-tuning.

The base has read sums that are mostly answered at once, and then mostly with any number at all, and a few that are
worked out in think tags and right. Reward for right answers (and, if asked, for the tags) makes thinking pay.
DeepSeek-R1 (2025), section 2.2; the two complaints about R1-Zero there, that it was hard to read and mixed languages,
are followed as `format` (share of answers in the tags) and `off_vocabulary` (share of pieces that no sum has).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from minirl.algorithms.grpo import GRPOConfig
from minirl.algorithms.settings import Count, Settings, Share
from minirl.experiments.language import Pretrain
from minirl.experiments.models import save_model
from minirl.experiments.on_policy import Run, check_groups
from minirl.experiments.settings import ArithmeticSettings, Machine, RunSettings, SumsSettings
from minirl.experiments.tasks import check_data
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.tokenizer import default_tokenizer
from minirl.plotting import learning_curves, read_metrics

PANELS = ("reward_accuracy", "reward_format", "response_length", "reward_off_vocabulary")


@dataclass(frozen=True)
class Base(Settings):
    """What the base model has read, where r1-zero makes it itself."""

    thinking: Share = 0.27
    """Share of the documents that think."""
    random_answers: Share = 1.0
    """Share of the direct answers that are any number."""
    base_steps: Count = 2_200
    """Optimiser steps of its training."""


@dataclass(frozen=True)
class R1Zero(Machine):
    """Reasoning from reward alone: GRPO from a base model that thinks now and then, no fine-tuning before."""

    out: Path = Path("runs/r1-zero")
    """Folder for base, model, metrics.csv, r1_zero.png and config.json; an earlier run there is replaced."""
    start: Literal["base", "random"] = "base"
    """base: --init, or without one a base made in OUT/base; random: an untrained model, which has nothing to
    reinforce."""
    base: Base = field(default_factory=Base)
    """The base model."""
    world: SumsSettings = field(default_factory=lambda: SumsSettings(
        init=None, arithmetic=ArithmeticSettings(terms=4, format="think"), format_weight=0.2, group_size=8,
        prompts_per_batch=32,
    ))  # fmt: skip
    """The sums and their rewards."""
    algorithm: GRPOConfig = field(default_factory=lambda: GRPOConfig(kl_beta=0.001, lr=5e-4))
    """GRPO (R1-Zero: beta 0.001)."""
    updates: Count = 50
    """Batches to learn from."""
    evaluate_every: Count = 4
    """Updates between evaluations."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Make the base where there is none, learn, draw, and return a summary."""
        if self.start == "random" and self.world.init is not None:
            raise ValueError("--start random makes an untrained model; leave out --init, or --start")
        check_groups("grpo", self.algorithm, self.world)  # before minutes go into a base, and anything is written
        check_data(self.world, "arithmetic")
        init = self.world.init or self.out / "base"
        if self.start == "random":
            self.prepare()
            like, tokenizer = Pretrain(), default_tokenizer()
            shape = GPTConfig(tokenizer.vocab_size, like.block_size, like.n_layer, like.n_head, like.n_embd)
            save_model(init, GPT(shape), tokenizer)
        elif self.world.init is None:
            self.pretrain(init).run()
        run = Run("grpo", "arithmetic", self.algorithm, replace(self.world, init=init), RunSettings(
            out=self.out, updates=self.updates, evaluate_every=self.evaluate_every, seed=self.seed, device=self.device,
            threads=self.threads, quiet=self.quiet,
        ))  # fmt: skip
        summary = run.start()
        curves = read_metrics(self.out / "metrics.csv")
        panels = [name for name in PANELS if name in curves]  # sums that are answered at once have no form
        learning_curves({"GRPO": curves}, panels=panels, path=self.out / "r1_zero.png")
        return summary

    def pretrain(self, out):
        """The command that makes the base."""
        return Pretrain(
            out=out, arithmetic=self.world.arithmetic, thinking=self.base.thinking, forgetful=0.0, wrong=0.0,
            random_answers=self.base.random_answers, wrong_thinking=0.0, reviews=0, steps=self.base.base_steps,
            evaluate_every=self.base.base_steps, seed=self.seed, device=self.device, threads=self.threads,
            quiet=self.quiet,
        )  # fmt: skip
