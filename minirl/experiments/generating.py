"""The command generate: let a trained model complete prompts."""

from dataclasses import dataclass
from pathlib import Path

import torch

from minirl.algorithms.settings import Count, NonNegative, PositiveShare
from minirl.experiments.models import load_model, write_samples
from minirl.experiments.settings import ArithmeticSettings, Machine
from minirl.tracking import say


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
                start, limit = prompt if len(prompt) <= 40 else prompt[:37] + "...", gpt.config.block_size - 1
                raise ValueError(f"prompt {start!r} has {ids.shape[1]} tokens; the model takes 1 to {limit}")
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
