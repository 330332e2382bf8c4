"""The commands that teach a language model to write like given texts: pretrain and sft."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from minirl.algorithms.settings import Count, NonNegative, Share, Whole
from minirl.algorithms.sft import SFT, SFTConfig
from minirl.experiments.comparisons import split_by_prompt
from minirl.experiments.models import load_model, policy_and_reference, save_model, write_samples
from minirl.experiments.settings import ArithmeticSettings, Machine
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.tokenizer import default_tokenizer
from minirl.tracking import Tracker, say, write_config
from minirl.training import fit
from minirl.worlds.jsonl import pack_within, read_completions, report_skipped
from minirl.worlds.reviews import Reviews
from minirl.worlds.rewards import each
from minirl.worlds.text import TokenWorld
from minirl.worlds.verifiers import answer_reward


@dataclass(frozen=True)
class Pretrain(Machine):
    """Train a tiny GPT from nothing on texts of mixed quality: sums, right and wrong, and reviews, good and bad."""

    out: Path = Path("runs/pretrain")
    """Folder for the model, metrics.csv, config.json and TensorBoard files; an earlier run there is replaced."""
    data: Path | None = None
    """Your own texts instead: JSON Lines with prompt and completion, or messages."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    documents: Whole = 20_000
    """Sums to read."""
    thinking: Share = 0.0
    """Share of them that are worked out in think tags before the answer."""
    forgetful: Share = 0.6
    """Share of the direct answers that forget every carry."""
    wrong: Share = 0.2
    """Share of the direct answers with one digit wrong."""
    random_answers: Share = 0.0
    """Share of the direct answers that are any number that a sum can be."""
    wrong_thinking: Share = 0.5
    """Share of the thinking documents with a digit of the answer wrong."""
    careless: Share = 0.0
    """Share of the steps of thinking documents that go wrong; what follows goes on from there."""
    reviews: Whole = 6_000
    """Reviews to read, cheerful and gloomy, polite and rude."""
    n_layer: Count = 2
    """Transformer blocks."""
    n_head: Count = 4
    """Attention heads of each."""
    n_embd: Count = 64
    """Width."""
    block_size: Count = 96
    """Longest text in tokens; q-sharp needs room for a prompt, a beginning and a whole completion."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(lr=3e-3, lr_decay=True))
    """The optimiser."""
    steps: Count = 2080
    """Optimiser steps."""
    warmup_steps: Whole = 100
    """Steps over which the step size rises from 0 (GPT-3: 375 million tokens); without them some seeds learn slowly."""
    batch_size: Count = 64
    """Texts in each."""
    evaluate_every: Whole = 400
    """Steps between evaluations; 0 for one before and one after training."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Pretrain, save, and return a summary."""
        device = self.prepare()
        tokenizer = default_tokenizer()
        config = GPTConfig(tokenizer.vocab_size, self.block_size, self.n_layer, self.n_head, self.n_embd)
        gpt = GPT(config).to(device)
        generator, task, texts = torch.Generator().manual_seed(self.seed), self.arithmetic.task(), []
        texts += task.pretraining_texts(
            self.documents, generator, thinking=self.thinking, forgetful=self.forgetful, wrong=self.wrong,
            wrong_thinking=self.wrong_thinking, random_answers=self.random_answers, careless=self.careless,
        )  # fmt: skip
        kinds = [texts] if texts else []  # direct and thinking ones together, or their shares would not be learned
        reviews = sorted(Reviews().pretraining_texts(self.reviews, generator), key=lambda text: len("".join(text)))
        third = -(-len(reviews) // 3)  # rows of like length are read together
        kinds += [reviews[first : first + third] for first in range(0, len(reviews), third)] if reviews else []
        return imitate(self, gpt, tokenizer, "arithmetic" if self.documents else "reviews", kinds, device)


@dataclass(frozen=True)
class Finetune(Machine):
    """Supervised fine-tuning on given answers; on sums it stops early, so that something is left to learn."""

    task: Literal["arithmetic", "reviews"] = "arithmetic"
    """Whose demonstrations to learn from; the defaults below are this task's."""
    out: Path = Path("runs/sft")
    """Folder for the model, metrics.csv, config.json and TensorBoard files; an earlier run there is replaced."""
    init: Path = Path("runs/pretrain")
    """Run (or model folder) to start from."""
    data: Path | None = None
    """Your own demonstrations instead: JSON Lines with prompt and completion, or messages."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(lr=3e-5))
    """The optimiser."""
    stop_at: NonNegative | None = 0.3
    """Stop once greedy held-out accuracy reaches this; None to never stop."""
    steps: Count = 500
    """Most optimiser steps."""
    warmup_steps: Whole = 0
    """Steps over which the step size rises from 0."""
    batch_size: Count = 64
    """Texts in each."""
    demonstrations: Count = 10_000
    """Answers to learn from."""
    evaluate_every: Whole = 2
    """Steps between evaluations; 0 for one before and one after training."""
    quiet: bool = False
    """No progress bar."""

    @classmethod
    def of(cls, task):
        """The defaults for a task."""
        if task != "reviews":
            return cls(task=task)
        return cls(
            task=task, out=Path("runs/sft-reviews"), sft=SFTConfig(lr=3e-3, lr_decay=True), stop_at=None, steps=250,
            demonstrations=12_000, evaluate_every=50,
        )  # fmt: skip

    def run(self):
        """Fine-tune, save, and return a summary."""
        if self.task == "reviews" and self.stop_at is not None:
            raise ValueError("stop_at is an accuracy on sums; reviews have none: leave it out")
        device = self.prepare()
        gpt, tokenizer = load_model(self.init, device)
        task, generator = Reviews() if self.task == "reviews" else self.arithmetic.task(), torch.Generator()
        texts = zip(*task.demonstrations(self.demonstrations, generator.manual_seed(self.seed)), strict=True)
        stop_at = None if self.data else self.stop_at
        return imitate(self, gpt, tokenizer, self.task, [list(texts)], device, stop_at)


class HeldOutTexts:
    """Prompts of a file that are kept for evaluation, with the right completions as the column `gold`."""

    def __init__(self, prompts, completions):
        self.prompts, self.gold = prompts, completions

    def held_out(self, n=None):
        """The first n (None: all): (prompts, columns)."""
        return self.prompts[:n], {"gold": self.gold[:n]}

    def within(self, tokenizer, block_size):
        """(HeldOutTexts whose prompts leave room for a token, tokens of the longest); ValueError if there is none."""
        lengths = [len(tokenizer.encode(prompt)) for prompt in self.prompts]
        kept = [row for row, length in enumerate(lengths) if length < block_size]
        if not kept:
            raise ValueError(f"no prompt kept for evaluation is shorter than the model's {block_size} tokens")
        texts = ([column[row] for row in kept] for column in (self.prompts, self.gold))
        return HeldOutTexts(*texts), max(lengths[row] for row in kept)


def own_texts(path, limit=64):
    """(texts, HeldOutTexts) of a JSON Lines file; a tenth of its prompts is kept, `limit` rows of it evaluated."""
    prompts, completions = read_completions(path)
    training, away = split_by_prompt(prompts)
    kept = [(prompts[row], completions[row]) for row in away[:limit]]
    return [(prompts[row], completions[row]) for row in training], HeldOutTexts(*map(list, zip(*kept, strict=True)))


def judged_world(settings, task, gpt, tokenizer, reference, held_out, device):
    """The world in which a supervised run is measured; texts that have no room in the model are not asked for."""
    if held_out is not None:
        made, longest = held_out.within(tokenizer, gpt.config.block_size)
        judge, room = each(answer_reward, "gold"), gpt.config.block_size - longest
        judges = {"match": judge}
    elif task == "reviews":
        made = Reviews()
        judge, room, judges = made.reward, made.max_new_tokens, {"true_score": made.reward}
    else:
        made = settings.arithmetic.task()
        judge, room, judges = made.reward, made.max_new_tokens, {"accuracy": made.reward}
    return TokenWorld(made, tokenizer, judge, room, reference=reference, device=device, judges=judges)


def imitate(settings, gpt, tokenizer, task, kinds, device, stop_at=None):
    """Supervised training of `gpt`, measured on held-out prompts; what both commands share.

    Args:
        settings: Pretrain or Finetune; its `data` replaces `kinds`.
        gpt, tokenizer, device: the model.
        task: `arithmetic` or `reviews`, which evaluations ask for.
        kinds: lists of (prompt, completion); one batch holds texts of one list.
        stop_at: end at the first evaluation with this greedy accuracy.
    """
    held_out = None
    if settings.data:
        texts, held_out = own_texts(settings.data)
        kinds = [texts]
    records = []
    for texts in kinds:
        packed, kept = pack_within(tokenizer, *map(list, zip(*texts, strict=True)), gpt.config.block_size, device)
        if skipped := report_skipped(len(texts), kept, gpt.config.block_size):
            say(skipped)
        records.append(packed)
    policy, reference = policy_and_reference(gpt, tokenizer)
    world = judged_world(settings, task, gpt, tokenizer, reference, held_out, device)
    latest = {}

    def evaluate(step):
        count = 150 if task == "reviews" and held_out is None else None
        metrics, latest["samples"] = world.evaluate(policy, count, seed=settings.seed)
        return {f"eval_{name}": value for name, value in metrics.items()}

    before, samples = evaluate(0), latest["samples"]
    write_config(settings.out, replace(settings, device=device))
    began = time.perf_counter()
    with Tracker(settings.out, settings.steps, settings.out.name, unit="step", quiet=settings.quiet) as tracker:
        tracker.log(0, before)
        history = fit(
            SFT(policy, settings.sft), records, settings.steps, settings.batch_size, tracker, seed=settings.seed,
            evaluate=evaluate, evaluate_every=settings.evaluate_every,
            stop=None if stop_at is None else lambda row: row["eval_accuracy_greedy"] >= stop_at,
            save=lambda step: save_model(settings.out, gpt, tokenizer), warmup_steps=settings.warmup_steps,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    write_samples(settings.out, before=samples, after=latest["samples"])
    after = {name: history[-1][name] for name in before}
    return {"before": before, "after": after, "seconds": seconds, "steps_per_second": len(history) / seconds}
