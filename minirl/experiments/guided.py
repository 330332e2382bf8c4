"""The command q-sharp: learn how the reference's rollouts end, and steer it by that; the reference is never updated."""

import copy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minirl.algorithms.q_sharp import GuidedPolicy, OutcomeModel, Outcomes, QSharp, QSharpConfig, switch_points
from minirl.algorithms.settings import Count, Whole
from minirl.experiments.models import save_guide, write_samples
from minirl.experiments.settings import Machine, ReviewsSettings
from minirl.experiments.tasks import text_setup
from minirl.tracking import Tracker, write_config
from minirl.training import fit
from minirl.worlds.text import pack_rows


@torch.no_grad()
def roll_outs(world, roll_in, reference, generator):
    """Outcomes of one batch of prompts: `roll_in` writes up to a random point, the reference the rest (algorithm 1).

    Args:
        world: TokenWorld; gives prompts and reward.
        roll_in: the policy of the first actions, or None for the reference's own rollouts, of which every step counts.
        reference: TokenPolicy.
        generator: torch.Generator of the switch points.
    Returns:
        Outcomes on the world's device; the mask holds the reference's actions only.
    """
    prompts, columns = world.next_prompts()
    prompt_ids, begun = [world.tokenizer.encode(prompt) for prompt in prompts], [[] for _ in prompts]
    if roll_in is not None:
        written, _ = world.go_on(roll_in, prompt_ids, begun)
        points = switch_points(torch.tensor([len(row) for row in written]), generator)
        begun = [row[:point] for row, point in zip(written, points.tolist(), strict=True)]
    responses, ended = world.go_on(reference, prompt_ids, begun)
    scores = torch.tensor(world.reward(prompts, world.texts(responses), **columns))
    scores = scores - world.missing_end_penalty * (~torch.tensor(ended)).float()
    obs, actions, mask = pack_rows(prompt_ids, responses, world.tokenizer.pad_id)
    first = torch.tensor([len(p) + len(b) - 1 for p, b in zip(prompt_ids, begun, strict=True)])
    mask &= torch.arange(mask.shape[1]) >= first.unsqueeze(1)
    return Outcomes(*(tensor.to(world.device) for tensor in (obs, actions, mask, scores)))


def joined(parts, pad_id):
    """One Outcomes of many, padded to the longest row."""
    width = max(part.mask.shape[1] for part in parts)

    def wide(tensor, fill):
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=fill)

    columns = zip(*((wide(p.obs, pad_id), wide(p.actions, pad_id), wide(p.mask, False), p.outcomes) for p in parts),
                  strict=True)  # fmt: skip
    return Outcomes(*map(torch.cat, columns))


def check_room(world, block_size, rounds):
    """Refuse completions that do not fit behind a prompt and, from the second round on, behind a beginning."""
    read = max(len(world.tokenizer.encode(prompt)) for prompt in world.task.ask(range(len(world.task)))[0])
    room = (block_size - read + 1) // 2 if rounds > 1 else block_size - read
    if not 1 <= world.max_new_tokens <= room:
        raise ValueError(f"max_new_tokens is {world.max_new_tokens}; after a prompt of {read} tokens and a "
                         f"beginning as long as a completion the model, of {block_size}, has room for {room}")


@dataclass(frozen=True)
class QSharpRun(Machine):
    """Value-guided decoding: steer a frozen model token by token towards good outcomes."""

    out: Path = Path("runs/q-sharp")
    """Folder for the guide, metrics.csv, config.json and samples; an earlier run there is replaced."""
    world: ReviewsSettings = field(default_factory=lambda: ReviewsSettings(prompts_per_batch=256))
    """Where the reference acts and who rewards it."""
    algorithm: QSharpConfig = field(default_factory=lambda: QSharpConfig(eta=0.2, bins=21, lr=3e-3))
    """Q#."""
    rollouts: Count = 4096
    """Completions to learn from in each round, those of earlier rounds are kept."""
    steps: Count = 200
    """Optimiser steps of each round."""
    batch_size: Count = 64
    """Completions in each."""
    evaluate_every: Whole = 0
    """Steps between evaluations; 0 for one after each round."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Learn, save, and return a summary."""
        unused = [name for name, off in (("kl_coef", 0.0), ("keep_dropout", 0.0)) if getattr(self.world, name) != off]
        if unused:
            raise ValueError(f"{unused[0]} has no meaning here: eta weighs the KL, and nothing but a guide is trained")
        device, began = self.prepare(), time.perf_counter()
        world, reference, _ = text_setup("reviews", self.world, self.seed, device)
        if self.world.data and self.world.max_new_tokens is None:  # a beginning and a whole completion need room
            world.max_new_tokens //= 2
        check_room(world, reference.gpt.config.block_size, self.algorithm.rounds)
        reference.requires_grad_(False)
        generator, config = torch.Generator().manual_seed(self.seed), self.algorithm
        data = [roll_outs(world, None, reference, generator) for _ in range(self.batches(world))]
        scores = torch.cat([part.outcomes for part in data])
        model = OutcomeModel(copy.deepcopy(reference.gpt).requires_grad_(True), grid(scores, config.bins)).to(device)
        guided, latest = GuidedPolicy(reference, model, config.eta), {}

        def evaluate(step):
            metrics, latest["samples"] = world.evaluate(guided, self.world.evaluate_prompts, self.seed, reference)
            return {f"eval_{name}": value for name, value in metrics.items()}

        before, samples = evaluate(0), latest["samples"]
        write_config(self.out, replace(self, device=device))
        total, history = self.steps * config.rounds, []
        with Tracker(self.out, total, self.out.name, unit="step", quiet=self.quiet) as tracker:
            tracker.log(0, before)
            for round in range(config.rounds):
                if round:
                    data += [roll_outs(world, guided, reference, generator) for _ in range(self.batches(world))]
                history += fit(
                    QSharp(model, config), joined(data, world.tokenizer.pad_id), self.steps, self.batch_size,
                    Later(tracker, round * self.steps), seed=self.seed + round, evaluate=evaluate,
                    evaluate_every=self.evaluate_every,
                    save=lambda step: save_guide(self.out, model, world.tokenizer),
                )  # fmt: skip
        seconds = time.perf_counter() - began
        write_samples(self.out, before=samples, after=latest["samples"])
        after = {name: history[-1][name] for name in before}
        return {"before": before, "after": after, "seconds": seconds, "steps_per_second": total / seconds,
                "guided": guided, "world": world}  # fmt: skip

    def batches(self, world):
        """How many batches of prompts make a round."""
        return -(-self.rollouts // (world.prompts_per_batch * world.group_size))


class Later:
    """A tracker whose steps come after those of earlier rounds."""

    def __init__(self, tracker, offset):
        self.tracker, self.offset = tracker, offset

    def log(self, step, row):
        """Log a row under its step of the whole run."""
        self.tracker.log(step + self.offset, row)


def grid(scores, bins):
    """(bins,) equally spaced outcomes from the lowest of the reference's scores to a tenth of the range above the best.

    Two bins are the outcomes of a rule, right and wrong, with nothing above. A guide cannot promise more than the end
    of its grid, and guided rows are better than any that the reference wrote.

    Raises:
        ValueError: if the scores do not differ.
    """
    low, high = float(scores.min()), float(scores.max())
    if low == high:
        raise ValueError(f"every one of the reference's completions earned {low:g}; Q# learns from rewards that differ")
    return torch.linspace(low, high + (0.1 * (high - low) if bins > 2 else 0.0), bins)
