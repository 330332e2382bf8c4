"""The path-star graph of Q#'s paper with real, tiny transformers: a reference, REINFORCE and a guide, equal budgets.

G(d, l): d arms of l nodes leave one start. The prompt lists the edges in random order, then start and goal; the answer
is the arm that ends in the goal (Zhou et al. 2025, section 3.1; Bachmann & Nagarajan 2024). A model trained on next
tokens for a short while names any first node and follows its arm, right in 1 of d. From there REINFORCE and Q# each see
as many of the reference's (or policy's) own completions, all on fresh graphs.

    python data/star_graph/star_graph.py --length 4 --seeds 1 2 3
    python data/star_graph/star_graph.py --length 5 --sft-steps 500 --updates 2500 --seeds 1 2 3

append to results.csv. What makes it learnable at this size, and is no part of the paper: an edge is one token, whose
embedding starts as the sum of its ends', and weights start larger than GPT-2's. Longer SFT solves G(2, 4) by itself.
"""

import csv
import time
from pathlib import Path

import torch
import tyro

from minirl.algorithms.optimize import descend
from minirl.algorithms.q_sharp import GuidedPolicy, OutcomeModel, Outcomes, QSharp
from minirl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from minirl.algorithms.sft import sft_loss
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import TokenPolicy
from minirl.worlds.batch import Batch

ROWS, WARM_UP, LR, REINFORCE_LR = 128, 100, 1e-3, 3e-4
FILE = Path(__file__).with_name("results.csv")


class Star:
    """Graphs of one kind: ids below `nodes` are nodes, the others edges."""

    def __init__(self, degree, length, seed):
        self.degree, self.length = degree, length
        self.nodes, self.edges = degree * (length - 1) + 1, degree * (length - 1)
        self.prompt_length, self.answer_length = self.edges + 2, length - 1
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def draw(self, rows):
        """(prompts (rows, edges + 2), arms (rows, degree, length - 1), the right arm (rows, length - 1))."""
        ids = torch.rand(rows, self.nodes, generator=self.generator).argsort(1)
        start, arms = ids[:, :1], ids[:, 1:].view(rows, self.degree, -1)
        whole = torch.cat([start[:, None].expand(-1, self.degree, -1), arms], dim=2)
        edges = (self.nodes + whole[:, :, :-1] * self.nodes + whole[:, :, 1:]).flatten(1)
        edges = edges.gather(1, torch.rand(rows, self.edges, generator=self.generator).argsort(1))
        right = arms[torch.arange(rows), torch.randint(self.degree, (rows,), generator=self.generator)]
        return torch.cat([edges, start, right[:, -1:]], dim=1), arms, right

    def gpt(self, node_deviation):
        """A fresh transformer whose edges start as the sum of their ends, each in its role."""
        gpt = GPT(GPTConfig(self.nodes + self.nodes**2, self.prompt_length + self.answer_length, 2, 4, 64))
        with torch.no_grad():
            for name, weight in gpt.named_parameters():
                if name.startswith("h.") and weight.dim() == 2:
                    weight.normal_(std=weight.shape[1] ** -0.5)
            sources, targets = torch.randn(2, self.nodes, 64)
            gpt.wte.weight[: self.nodes].normal_(std=node_deviation)
            gpt.wte.weight[self.nodes :] = (sources[:, None] + targets[None]).flatten(0, 1)
        return gpt

    def mask(self, rows):
        """(rows, T) bool: the answer's tokens."""
        mask = torch.zeros(rows, self.prompt_length + self.answer_length - 1, dtype=torch.bool)
        mask[:, self.prompt_length - 1 :] = True
        return mask

    @torch.no_grad()
    def measure(self, policy, rows=2000):
        """Shares of sampled answers to fresh graphs: (right, some whole arm)."""
        prompts, arms, right = self.draw(rows)
        answers = policy.generate(prompts, self.answer_length)[:, self.prompt_length :]
        whole = (answers[:, None] == arms).all(-1).any(1)
        return float((answers == right).all(1).float().mean()), float(whole.float().mean())


def slowly(optimizer, step, lr=LR):
    """Warm up."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, (step + 1) / WARM_UP)


def imitate(star, policy, steps):
    """Supervised fine-tuning on right answers."""
    optimizer, mask = torch.optim.AdamW(policy.parameters(), LR, betas=(0.9, 0.99)), star.mask(ROWS)
    for step in range(steps):
        prompts, _, right = star.draw(ROWS)
        ids = torch.cat([prompts, right], dim=1)
        slowly(optimizer, step)
        descend(optimizer, [sft_loss(policy.logits(ids[:, :-1]), ids[:, 1:], mask)])
    return policy


def guide(star, policy, updates):
    """Q#'s guide, from the reference's own answers."""
    outcome = OutcomeModel(star.gpt(node_deviation=1.0), [0.0, 1.0])
    learner, mask = QSharp(outcome), star.mask(ROWS)
    learner.optimizer = torch.optim.AdamW(outcome.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(updates):
        prompts, _, right = star.draw(ROWS)
        ids = policy.generate(prompts, star.answer_length)
        earned = (ids[:, star.prompt_length :] == right).all(1).float()
        slowly(learner.optimizer, step)
        descend(learner.optimizer, [learner.loss(Outcomes(ids[:, :-1], ids[:, 1:], mask, earned))], 1.0)
    return GuidedPolicy(policy, outcome, eta=0.1)


def reinforce(star, policy, updates):
    """REINFORCE with 1 for a right answer."""
    learner = REINFORCE(policy, None, REINFORCEConfig(baseline="ema", lr=REINFORCE_LR, lr_decay=False))
    mask = star.mask(ROWS)
    last = torch.zeros_like(mask)
    last[:, -1] = True
    for _ in range(updates):
        prompts, _, right = star.draw(ROWS)
        ids = policy.generate(prompts, star.answer_length)
        earned = (ids[:, star.prompt_length :] == right).all(1).float()
        obs, actions = ids[:, :-1], ids[:, 1:]
        with torch.no_grad():
            logprobs = policy(obs).log_prob(actions).masked_fill(~mask, 0.0)
        learner.update(Batch(
            obs=obs, actions=actions, logprobs=logprobs, rewards=last * earned[:, None], scores=earned,
            terminated=last, truncated=torch.zeros_like(last), mask=mask, rows_are_sequences=True,
        ))  # fmt: skip
    return policy


def main(
    degree: int = 2, length: int = 4, sft_steps: int = 300, updates: int = 800, seeds: tuple[int, ...] = (1, 2, 3),
):  # fmt: skip
    """Train reference, guide and REINFORCE; a row of results.csv for each.

    Args:
        degree: arms.
        length: nodes of an arm, the start included.
        sft_steps: of the reference.
        updates: of the guide, and of REINFORCE, on as many completions each.
        seeds: one after the other.
    """
    torch.set_num_threads(1)
    for seed in seeds:
        torch.manual_seed(seed)
        star = Star(degree, length, seed)
        reference = TokenPolicy(star.gpt(0.125), allowed=torch.arange(star.nodes + star.nodes**2) < star.nodes)
        stages = (("reference", imitate, sft_steps), ("q-sharp", guide, updates), ("reinforce", reinforce, updates))
        for name, train, count in stages:  # the last one moves the reference
            began = time.process_time()
            policy = train(star, reference, count)
            seconds = round(time.process_time() - began, 1)
            right, whole = star.measure(policy)
            append({"graph": f"G({degree},{length})", "seed": seed, "method": name, "steps": count, "right": right,
                    "whole_arm": whole, "cpu_seconds": seconds})  # fmt: skip


def append(row):
    """Print a row and add it to results.csv."""
    print(row, flush=True)
    fresh = not FILE.is_file()
    with FILE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    tyro.cli(main)
