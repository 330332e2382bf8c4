"""Where preferences come from: a file, or two completions of a model and a simulated annotator.

The annotator prefers one of the two with the Bradley-Terry probability of their true scores, which the task knows.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from minirl.algorithms.settings import Count, NonNegative, Settings
from minirl.experiments.models import load_model, policy_and_reference
from minirl.experiments.settings import ArithmeticSettings
from minirl.tracking import say
from minirl.worlds.jsonl import PairTexts, pack_pairs, read_pairs, report_skipped
from minirl.worlds.reviews import Annotator, Reviews
from minirl.worlds.text import TokenWorld


@dataclass(frozen=True)
class Comparisons(Settings):
    """Where the preferences come from."""

    task: Literal["reviews", "arithmetic"] = "reviews"
    """Whose prompts are answered, and whose truth the simulated annotator knows."""
    data: Path | None = None
    """Your own preferences: JSON Lines with prompt, chosen, rejected; a tenth of the prompts is for evaluation."""
    samples_from: Path = Path("runs/sft-reviews")
    """Model whose completions are compared, where no file is given."""
    pairs: Count = 6_000
    """Comparisons to make."""
    held_out_pairs: Count = 1_000
    """More of them, on held-out prompts, for evaluation."""
    annotator_strength: NonNegative = 1.0
    """Of the simulated annotator, per point of the true score; 0 tosses coins."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums of task arithmetic."""

    @property
    def made_here(self):
        """Whether the truth is known: no file, or the one that python -m minirl reward-model left."""
        return self.data is None or (self.data.parent / "reward_model").is_dir()

    def made(self):
        """The task."""
        return Reviews() if self.task == "reviews" else self.arithmetic.task()

    def training_and_held_out(self, seed, device):
        """(PairTexts to learn from, PairTexts for evaluation, share that an all-knowing judge would get right)."""
        if self.data:
            pairs = read_pairs(self.data)
            if pairs.ties:
                say(f"{len(pairs.ties)} rows of {self.data} have chosen equal to rejected and were left out")
            training, away = split_by_prompt(pairs.prompts)
            return pick(pairs, training), pick(pairs, away), float("nan")
        gpt, tokenizer = load_model(self.samples_from, device)
        policy, _ = policy_and_reference(gpt, tokenizer)
        task, generator = self.made(), torch.Generator().manual_seed(seed)
        world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=device)
        annotator = Annotator(task.reward, self.annotator_strength, generator)
        training, _ = compare_samples(world, policy, annotator, *task.sample(self.pairs, generator))
        repeats = -(-self.held_out_pairs // len(task.held_out()[0]))
        prompts, columns = task.held_out()
        prompts, columns = prompts * repeats, {name: column * repeats for name, column in columns.items()}
        held_out, ceiling = compare_samples(world, policy, annotator, prompts, columns)
        return training, held_out, ceiling


def split_by_prompt(prompts, share=0.1):
    """(rows to learn from, rows for evaluation) of a file: a tenth of its different prompts, at least one, is kept.

    Raises:
        ValueError: if there is one prompt only.
    """
    different = list(dict.fromkeys(prompts))
    if len(different) < 2:
        raise ValueError("the data have one prompt only; training and evaluation need at least one each")
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0)).tolist()
    away = {different[index] for index in order[: max(1, int(share * len(different)))]}
    rows = range(len(prompts))
    return [row for row in rows if prompts[row] not in away], [row for row in rows if prompts[row] in away]


def pick(pairs, rows):
    """PairTexts of some rows."""
    margins = None if pairs.margins is None else [pairs.margins[row] for row in rows]
    return PairTexts(*([texts[row] for row in rows] for texts in pairs[:3]), margins, [])


def complete_all(world, policy, prompts, batch_size=512):
    """One sampled completion of each prompt, a list of strings."""
    completions = []
    for first in range(0, len(prompts), batch_size):
        completions += world.complete(policy, prompts[first : first + batch_size])[3]
    return completions


def compare_samples(world, policy, annotator, prompts, columns):
    """Two completions of each prompt, compared; equal texts are no comparison and are left out.

    Returns:
        (PairTexts, ceiling): the ceiling is the expected accuracy, on these pairs, of a judge who knows the truth.
    """
    first, second = (complete_all(world, policy, prompts) for _ in range(2))
    different = [index for index in range(len(prompts)) if first[index] != second[index]]
    if not different:
        raise ValueError("the two completions of every prompt were equal; there is nothing to compare")
    prompts, first, second = ([texts[index] for index in different] for texts in (prompts, first, second))
    columns = {name: [column[index] for index in different] for name, column in columns.items()}
    choices, probabilities = annotator.prefers_first(prompts, first, second, **columns)
    chosen = [a if wins else b for wins, a, b in zip(choices.tolist(), first, second, strict=True)]
    rejected = [b if wins else a for wins, a, b in zip(choices.tolist(), first, second, strict=True)]
    return PairTexts(prompts, chosen, rejected, None, []), float(torch.max(probabilities, 1 - probabilities).mean())


def packed(pairs, tokenizer, block_size, device):
    """Pairs of PairTexts; says how many have no room."""
    records, kept = pack_pairs(tokenizer, pairs, block_size, device)
    if skipped := report_skipped(len(pairs.prompts), kept, block_size):
        say(skipped)
    return records


def rows_of(pairs):
    """PairTexts as rows of JSON Lines."""
    columns = {"prompt": pairs.prompts, "chosen": pairs.chosen, "rejected": pairs.rejected}
    columns |= {} if pairs.margins is None else {"margin": pairs.margins}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
