"""The commands that make a language model, pretrain, sft and generate, and how models and samples lie in a folder.

A run that ends in a language model keeps it in OUT/model: GPT-2's config.json and model.safetensors, which other
libraries load too, and tokenizer.json, which says by name and fingerprint what vocabulary its ids mean.
"""

import copy
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minirl.algorithms.settings import Count, NonNegative, PositiveShare
from minirl.algorithms.sft import SFT, SFTConfig
from minirl.checkpoint import replacing
from minirl.experiments.settings import ArithmeticSettings, Machine
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import TokenPolicy
from minirl.models.tokenizer import default_tokenizer, named_tokenizer
from minirl.tracking import Tracker, say, write_config
from minirl.training import fit
from minirl.worlds.text import TokenWorld, allowed_ids, pack_completions


def save_model(folder, gpt, tokenizer):
    """Write gpt and the identity of its tokenizer to folder/model."""
    folder = Path(folder) / "model"
    gpt.save_pretrained(folder)
    with replacing(folder / "tokenizer.json") as temporary:
        identity = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
        temporary.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def load_model(path, device="cpu"):
    """The model that a run wrote, and its tokenizer.

    Args:
        path: a run's folder, or a model folder itself. One without tokenizer.json is taken for OpenAI's GPT-2.
        device: where the model goes.
    Returns:
        (gpt, tokenizer).
    Raises:
        FileNotFoundError: if there is no model.
        ValueError: if the tokenizer of this name has another vocabulary than the one the model was trained with.
    """
    path = Path(path)
    folder = path / "model" if (path / "model").is_dir() else path
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {path}; make one with python -m minirl pretrain, then sft; or see --init")
    gpt = GPT.from_pretrained(folder)
    identity = folder / "tokenizer.json"
    if not identity.is_file():
        return gpt.to(device), named_tokenizer("gpt2")
    saved = json.loads(identity.read_text(encoding="utf-8"))
    tokenizer = default_tokenizer()
    if saved["name"] != tokenizer.name:
        tokenizer = named_tokenizer(saved["name"])
    if saved["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was trained with another vocabulary called {saved['name']!r} (fingerprint "
            f"{saved['fingerprint'][:12]}, here {tokenizer.fingerprint[:12]}); its ids would mean other text"
        )
    return gpt.to(device), tokenizer


def write_samples(folder, **samples):
    """Write lists of sample completions to folder/samples.json, by name (`before`, `after`)."""
    with replacing(Path(folder) / "samples.json") as temporary:
        temporary.write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Pretrain(Machine):
    """Train a tiny GPT from nothing on sums of mixed quality: right ones, forgotten carries, and noise."""

    out: Path = Path("runs/pretrain")
    """Folder for the model, metrics.csv, config.json and TensorBoard files; an earlier run there is replaced."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    n_layer: Count = 2
    """Transformer blocks."""
    n_head: Count = 4
    """Attention heads of each."""
    n_embd: Count = 64
    """Width."""
    block_size: Count = 64
    """Longest text in tokens."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(lr=3e-3, lr_decay=True))
    """The optimiser."""
    steps: Count = 1600
    """Optimiser steps."""
    batch_size: Count = 64
    """Texts in each."""
    documents: Count = 20_000
    """Texts to learn from."""
    evaluate_every: Count = 100
    """Steps between evaluations."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Pretrain, save, and return a summary."""
        device = self.prepare()
        tokenizer, task = default_tokenizer(), self.arithmetic.task()
        config = GPTConfig(tokenizer.vocab_size, self.block_size, self.n_layer, self.n_head, self.n_embd)
        gpt = GPT(config).to(device)
        texts = task.pretraining_texts(self.documents, torch.Generator().manual_seed(self.seed))
        records = pack_completions(tokenizer, *zip(*texts, strict=True), device=device)
        return imitate(self, gpt, tokenizer, task, records, device)


@dataclass(frozen=True)
class Finetune(Machine):
    """Supervised fine-tuning on right answers; stops at the first evaluation with enough held-out accuracy."""

    out: Path = Path("runs/sft")
    """Folder for the model, metrics.csv, config.json and TensorBoard files; an earlier run there is replaced."""
    init: Path = Path("runs/pretrain")
    """Run (or model folder) to start from."""
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    """The sums."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(lr=3e-5))
    """The optimiser."""
    stop_at: NonNegative = 0.3
    """Stop once greedy held-out accuracy reaches this, so that something is left to learn; above 1 to never stop."""
    steps: Count = 500
    """Most optimiser steps."""
    batch_size: Count = 64
    """Texts in each."""
    demonstrations: Count = 10_000
    """Right answers to learn from."""
    evaluate_every: Count = 2
    """Steps between evaluations."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Fine-tune, save, and return a summary."""
        device = self.prepare()
        gpt, tokenizer = load_model(self.init, device)
        task = self.arithmetic.task()
        texts = task.demonstrations(self.demonstrations, torch.Generator().manual_seed(self.seed))
        records = pack_completions(tokenizer, *texts, device=device)
        return imitate(self, gpt, tokenizer, task, records, device, stop_at=self.stop_at)


def imitate(settings, gpt, tokenizer, task, records, device, stop_at=None):
    """Supervised training of `gpt` on `records`, measured on the task's held-out prompts; what both commands share."""
    policy = TokenPolicy(gpt, allowed=allowed_ids(tokenizer, device))
    reference = TokenPolicy(copy.deepcopy(gpt), allowed=policy.allowed).requires_grad_(False)
    world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, reference=reference, device=device)
    latest = {}

    def evaluate(step):
        metrics, latest["samples"] = world.evaluate(policy, seed=settings.seed)
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
            save=lambda step: save_model(settings.out, gpt, tokenizer),
        )  # fmt: skip
    seconds = time.perf_counter() - began
    write_samples(settings.out, before=samples, after=latest["samples"])
    after = {name: history[-1][name] for name in before}
    return {"before": before, "after": after, "seconds": seconds, "steps_per_second": len(history) / seconds}


@dataclass(frozen=True)
class Generate(Machine):
    """Let a trained model complete prompts."""

    prompts: tuple[str, ...] = ()
    """Texts to complete, such as "3+4+8="; none: eight held-out sums."""
    init: Path = Path("runs/sft")
    """Run (or model folder) to load."""
    max_new_tokens: Count = 24
    """Longest completion."""
    temperature: NonNegative = 1.0
    """0 takes the most probable token each time."""
    top_k: Count | None = None
    """Sample among the k most probable tokens only."""
    top_p: PositiveShare | None = None
    """Sample among the fewest tokens that hold this probability."""
    samples: Count = 1
    """Completions of each prompt."""
    out: Path | None = None
    """Also write them to OUT/samples.json."""

    def run(self):
        """Print the completions, and return them."""
        device = self.prepare()
        gpt, tokenizer = load_model(self.init, device)
        prompts = list(self.prompts) or ArithmeticSettings().task().held_out(8)[0]
        results = []
        for prompt in prompts:
            ids = torch.tensor([tokenizer.encode(prompt)] * self.samples, device=device)
            room = min(self.max_new_tokens, gpt.config.block_size - ids.shape[1])
            if ids.shape[1] == 0 or room < 1:
                limit = gpt.config.block_size - 1
                raise ValueError(f"prompt {prompt!r} has {ids.shape[1]} tokens; the model takes 1 to {limit}")
            out = gpt.generate(
                ids, room, self.temperature, self.top_k, self.top_p,
                eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id,
            )  # fmt: skip
            for row in out[:, ids.shape[1] :].tolist():
                row = row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row
                results.append({"prompt": prompt, "completion": tokenizer.decode(row)})
                say(prompt + results[-1]["completion"])
        if self.out:
            write_samples(self.out, generated=results)
        return results
