"""The methods that `posttraining` compares: each a job that starts from the same models and ends in judged texts."""

import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributions import kl_divergence

from minirl.algorithms.q_sharp import GuidedPolicy
from minirl.experiments.guided import QSharpRun
from minirl.experiments.judging import kl_of_best_of
from minirl.experiments.models import load_guide, load_model, load_reward_model, policy_and_reference
from minirl.experiments.on_policy import Run
from minirl.experiments.preferences import ORPORun
from minirl.experiments.settings import RunSettings
from minirl.experiments.table import ALGORITHMS
from minirl.functional.masked import masked_sum
from minirl.tracking import read_rows
from minirl.training import seed_everything
from minirl.worlds.reviews import Reviews
from minirl.worlds.text import TokenWorld

JUDGED = 480  # completions of the held-out prompts by which a policy is judged


@dataclass(frozen=True)
class Story:
    """The folders of a story: what all methods start from."""

    out: Path
    seed: int
    device: str = "cpu"

    @property
    def base(self):
        """The pretrained model."""
        return self.out / "pretrain"

    @property
    def sft(self):
        """The fine-tuned model, from which all but ORPO start."""
        return self.out / "sft-reviews"

    @property
    def reward_model(self):
        """The reward model, and the comparisons."""
        return self.out / "reward-model"

    def world(self, settings):
        """ReviewsSettings that start from these models."""
        return replace(settings, init=self.sft, reward_model=self.reward_model)


@torch.no_grad()
def judge(story, title, policy, tokenizer, reference):
    """What a policy writes on held-out prompts, and how good it is.

    Returns:
        dict: completions (list), true (their true scores), learned (their learned scores), kl (exact
        KL(policy‖SFT), nats per completion, mean), length (tokens, mean).
    """
    task = Reviews()
    world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=story.device)
    prompts, _ = task.held_out(JUDGED)
    seed_everything(seed_of(story, title))
    obs, _, mask, completions, _ = world.complete(policy, prompts)
    kl = torch.cat([
        masked_sum(kl_divergence(policy(rows), reference(rows)), counts, dim=1)
        for rows, counts in zip(obs.split(120), mask.split(120), strict=True)
    ])  # fmt: skip
    learned = load_reward_model(story.reward_model, story.device)(prompts, completions)
    return {"completions": completions, "true": task.reward(prompts, completions), "learned": learned,
            "kl": float(kl.mean()), "length": float(mask.sum(1).float().mean())}  # fmt: skip


def seed_of(story, title):
    """Of a method's judged texts: apart from training, and apart from each other's, or equal numbers would tie."""
    return 1_000_000 * (story.seed + 1) + zlib.crc32(title.encode()) % 1_000_000


def judge_folder(story, title, folder, eta=None):
    """`judge` of the model in a folder; with eta, of the SFT model steered by the guide in it."""
    gpt, tokenizer = load_model(story.sft, story.device)
    sft, reference = policy_and_reference(gpt, tokenizer)
    if eta is not None:
        return judge(story, title, GuidedPolicy(sft, load_guide(folder, story.device), eta), tokenizer, reference)
    policy, _ = policy_and_reference(load_model(folder, story.device)[0], tokenizer)
    return judge(story, title, policy, tokenizer, reference)


@dataclass(frozen=True)
class Method:
    """One way from the SFT model (ORPO: from the base) to a better one: a job for run_jobs."""

    title: str
    story: Story
    size: float
    """Rough seconds it takes: its share of the progress bar."""

    @property
    def eta(self):
        """Of the guide that steers the SFT model; None where a model of its own was trained."""
        return None

    @property
    def out(self):
        """Its folder."""
        return self.story.out / self.title.replace(" ", "-").replace("=", "-")

    def run(self, advance):
        """Train and judge; returns a dict for the report."""
        seconds = self.train(advance)["seconds"]
        return judge_folder(self.story, self.title, self.out, self.eta) | {"seconds": seconds}

    def again(self):
        """Judge what was trained before."""
        seconds = read_rows(self.out / "metrics.csv")[-1]["seconds"]
        return judge_folder(self.story, self.title, self.out, self.eta) | {"seconds": seconds}


@dataclass(frozen=True)
class OnPolicyMethod(Method):
    """An on-policy algorithm against the reward model."""

    algorithm: str = "ppo"
    config: dict = field(default_factory=dict)
    world: dict = field(default_factory=dict)
    updates: int | None = None
    evaluate_every: int = 5

    def train(self, advance):
        """Run it."""
        config, world, updates = ALGORITHMS[self.algorithm].of("reviews")
        world = replace(self.story.world(world), **self.world)
        updates = self.updates or updates
        run = Run(self.algorithm, "reviews", replace(config, **self.config), world, RunSettings(
            self.out, updates=updates, evaluate_every=self.evaluate_every, seed=self.story.seed,
            device=self.story.device, quiet=True,
        ))  # fmt: skip
        return run.start(on_log=lambda row: advance(self.size / updates if row["step"] else 0))


@dataclass(frozen=True)
class PairsMethod(Method):
    """DPO or ORPO on the comparisons that the reward model learned from."""

    command: Any = None

    def train(self, advance):
        """Run it."""
        pairs = replace(
            self.command.comparisons, data=self.story.reward_model / "preferences.jsonl",
            samples_from=self.story.sft,
        )  # fmt: skip
        init = self.story.base if isinstance(self.command, ORPORun) else self.story.sft
        summary = replace(
            self.command, out=self.out, init=init, comparisons=pairs, seed=self.story.seed, device=self.story.device,
            quiet=True,
        ).run()  # fmt: skip
        advance(self.size)
        return summary


@dataclass(frozen=True)
class GuidedMethod(Method):
    """Q#: the SFT model, steered."""

    command: QSharpRun = field(default_factory=QSharpRun)

    @property
    def eta(self):
        """Of the guide."""
        return self.command.algorithm.eta

    def train(self, advance):
        """Run it."""
        world = self.story.world(self.command.world)
        summary = replace(
            self.command, out=self.out, world=world, seed=self.story.seed, device=self.story.device, quiet=True
        ).run()
        advance(self.size)
        return {key: summary[key] for key in ("seconds", "before", "after")}


def best_of(story, counts):
    """For each n of counts, `judge` of the best of n texts of the SFT model by the reward model; nothing is trained."""
    gpt, tokenizer = load_model(story.sft, story.device)
    sft, _ = policy_and_reference(gpt, tokenizer)
    task, reward = Reviews(), load_reward_model(story.reward_model, story.device)
    world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=story.device)
    prompts, _ = task.held_out(JUDGED)
    seed_everything(seed_of(story, "best of n"))
    drawn = [world.complete(sft, prompts)[3] for _ in range(max(counts))]
    scores, results = torch.tensor([reward(prompts, completions) for completions in drawn]), {}
    for n in counts:
        best = [drawn[index][row] for row, index in enumerate(scores[:n].argmax(0).tolist())]
        results[n] = {"completions": best, "true": task.reward(prompts, best), "learned": scores[:n].amax(0).tolist(),
                      "kl": kl_of_best_of(n)}  # fmt: skip
    return results
