"""The methods that `posttraining` compares: each a job that starts from the same models and ends in judged texts."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributions import kl_divergence

from minirl.algorithms.q_sharp import GuidedPolicy
from minirl.experiments.guided import QSharpRun
from minirl.experiments.models import load_guide, load_model, load_reward_model, policy_and_reference
from minirl.experiments.on_policy import Run
from minirl.experiments.settings import RunSettings
from minirl.experiments.table import ALGORITHMS
from minirl.functional.masked import masked_sum
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


@torch.no_grad()
def judge(story, policy, tokenizer, reference):
    """What a policy writes on held-out prompts, and how good it is.

    Returns:
        dict: completions (list), true (their true scores), learned (their learned scores), kl (exact
        KL(policy‖SFT), nats per completion, mean), length (tokens, mean).
    """
    task = Reviews()
    world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=story.device)
    prompts, _ = task.held_out(JUDGED)
    seed_everything(90_000 + story.seed)
    obs, _, mask, completions, _ = world.complete(policy, prompts)
    kl = torch.cat([
        masked_sum(kl_divergence(policy(rows), reference(rows)), counts, dim=1)
        for rows, counts in zip(obs.split(120), mask.split(120), strict=True)
    ])  # fmt: skip
    learned = load_reward_model(story.reward_model, story.device)(prompts, completions)
    return {"completions": completions, "true": task.reward(prompts, completions), "learned": learned,
            "kl": float(kl.mean()), "length": float(mask.sum(1).float().mean())}  # fmt: skip


def judge_folder(story, folder, eta=None):
    """`judge` of the model in a folder; with eta, of the SFT model steered by the guide in it."""
    gpt, tokenizer = load_model(story.sft, story.device)
    sft, reference = policy_and_reference(gpt, tokenizer)
    if eta is not None:
        return judge(story, GuidedPolicy(sft, load_guide(folder, story.device), eta), tokenizer, reference)
    policy, _ = policy_and_reference(load_model(folder, story.device)[0], tokenizer)
    return judge(story, policy, tokenizer, reference)


@dataclass(frozen=True)
class Method:
    """One way from the SFT model (ORPO: from the base) to a better one: a job for run_jobs."""

    title: str
    story: Story
    size: float
    """Rough seconds it takes: its share of the progress bar."""
    task: str = "reviews"

    @property
    def out(self):
        """Its folder."""
        return self.story.out / self.title.replace(" ", "-").replace("=", "-")

    def run(self, advance):
        """Train and judge; returns a dict for the report."""
        summary = self.train(advance)
        result = judge_folder(self.story, self.out, self.eta)
        return {"title": self.title, "seconds": summary["seconds"], "evaluations": evaluations(summary)} | result

    eta = None


def evaluations(summary):
    """Rows of a run's history that hold an evaluation."""
    return [row for row in summary.get("history", []) if "eval_true_score_sampled" in row]


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
        world = replace(world, init=self.story.sft, reward_model=self.story.reward_model, **self.world)
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
        init = self.story.base if "ORPO" in type(self.command).__name__ else self.story.sft
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
        world = replace(self.command.world, init=self.story.sft, reward_model=self.story.reward_model)
        summary = replace(
            self.command, out=self.out, world=world, seed=self.story.seed, device=self.story.device, quiet=True
        ).run()
        advance(self.size)
        return {key: summary[key] for key in ("seconds", "before", "after")}


def best_of_n(story, n):
    """`judge` of the best of n completions of the SFT model, by the reward model; nothing is trained."""
    gpt, tokenizer = load_model(story.sft, story.device)
    sft, _ = policy_and_reference(copy.deepcopy(gpt), tokenizer)
    task, reward = Reviews(), load_reward_model(story.reward_model, story.device)
    world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=story.device)
    prompts, _ = task.held_out(JUDGED)
    seed_everything(80_000 + story.seed)
    drawn = [world.complete(sft, prompts)[3] for _ in range(n)]
    scores = torch.tensor([reward(prompts, completions) for completions in drawn])
    best = [drawn[index][row] for row, index in enumerate(scores.argmax(0).tolist())]
    return {"completions": best, "true": task.reward(prompts, best), "learned": scores.amax(0).tolist()}
