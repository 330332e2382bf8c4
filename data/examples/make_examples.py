"""Write the example files of this folder: `python data/examples/make_examples.py`. Seeded: always the same bytes."""

from pathlib import Path

import torch

from minirl.worlds.arithmetic import Arithmetic
from minirl.worlds.jsonl import write_jsonl
from minirl.worlds.reviews import DECENT, Annotator, Reviews

HERE = Path(__file__).resolve().parent
ROWS = 200


def main():
    generator, reviews, sums = torch.Generator().manual_seed(0), Reviews(), Arithmetic(terms=3, largest=9)
    demonstrations = zip(*reviews.demonstrations(ROWS, generator), strict=True)
    write_jsonl(HERE / "demonstrations.jsonl", [{"prompt": p, "completion": c} for p, c in demonstrations])

    first, second = reviews.pretraining_texts(ROWS, generator, DECENT), []
    for prompt, _ in first:
        second += [text for text in reviews.pretraining_texts(400, generator, DECENT) if text[0] == prompt][:1]
    prompts, a, b = [p for p, _ in first], [c for _, c in first], [c for _, c in second]
    wins, _ = Annotator(reviews.reward, 1.0, generator).prefers_first(prompts, a, b)
    write_jsonl(HERE / "preferences.jsonl", [
        {"prompt": p, "chosen": x if win else y, "rejected": y if win else x}
        for p, x, y, win in zip(prompts, a, b, wins.tolist(), strict=True) if x != y
    ])  # fmt: skip

    asked, columns = sums.sample(ROWS, generator)
    write_jsonl(HERE / "prompts.jsonl", [
        {"prompt": p, "gold": gold} for p, gold in zip(asked, columns["gold"], strict=True)
    ])  # fmt: skip

    questions, answers = sums.demonstrations(ROWS // 4, generator)
    write_jsonl(HERE / "messages.jsonl", [
        {"messages": [{"role": "user", "content": f"What is {q.rstrip('=')}?"}, {"role": "assistant", "content": a}]}
        for q, a in zip(questions, answers, strict=True)
    ])  # fmt: skip


if __name__ == "__main__":
    main()
