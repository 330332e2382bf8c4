"""Make the archived runs of this folder: six that are ill, each for one stated reason, and two healthy ones.

    python data/sick_runs/make_sick_runs.py [NAME ...]

Every run is a real one: a committed model of data/models, a TokenWorld, an algorithm, and `train`. It leaves NAME.csv,
a row an update, and NAME.json, completions of the same held-out prompts before, halfway and after. One thread, seed 0.
"""

import functools
import json
import sys
import time
from pathlib import Path

import torch

from minirl.algorithms.grpo import GRPO, GRPOConfig
from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.experiments.tasks import critic_of
from minirl.lesson import model, reward_model
from minirl.tracking import write_rows
from minirl.training import seed_everything, train
from minirl.worlds.arithmetic import Arithmetic
from minirl.worlds.reviews import Reviews
from minirl.worlds.rewards import WeightedRewards, each
from minirl.worlds.text import TokenWorld
from minirl.worlds.verifiers import answer_reward

HERE, SEED, UPDATES, SAMPLES = Path(__file__).resolve().parent, 0, 40, 8
COLUMNS = (
    "step", "score", "truth", "response_length", "ended_fraction", "kl_policy_ref", "kl_old_new", "entropy",
    "grad_norm", "clip_fraction", "ratio_max", "explained_variance", "value_loss", "group_deviation",
    "dead_group_fraction",
)  # fmt: skip


class Watched(TokenWorld):
    """A TokenWorld that also tells the mean deviation of the scores within a group, where there are groups."""

    def collect(self, policy, critic=None):
        """As TokenWorld's, with one more metric."""
        batch = super().collect(policy, critic)
        if self.group_size < 2:
            return batch
        deviation = float(batch.scores.view(-1, self.group_size).std(1).mean())
        return batch.with_(metrics=batch.metrics | {"group_deviation": deviation})


def words(completion):
    """How many words a text has."""
    return float(len(completion.split()))


def contains(completion, gold):
    """1 if the right answer stands anywhere in the text, else 0: a verifier that is too kind."""
    return float(str(gold) in completion)


def reviews_ppo(lr=3e-4, critic_lr=1e-3, kl=0.1, scale=1.0, per_word=0.0):
    """(world, PPO) on reviews, rewarded by scale · learned + per_word · words; the critic starts as reward model."""
    policy, reference, tokenizer = model("sft-reviews")
    learned = reward_model()
    parts = {"learned": (scale, learned), "truth": (0.0, Reviews().reward), "words": (per_word, each(words))}
    world = Watched(Reviews(), tokenizer, WeightedRewards(parts), Reviews.max_new_tokens, reference=reference,
                    kl_in_reward=kl, missing_end_penalty=3.0, prompts_per_batch=64, seed=SEED)  # fmt: skip
    config = PPOConfig(epochs=2, minibatches=2, lr=lr, critic_lr=critic_lr, critic_epochs=2, critic_minibatches=2,
                       gamma=1.0, gae_lambda=0.95)  # fmt: skip
    return world, PPO(policy, critic_of(policy.gpt, learned, scale, "cpu"), config)


def sums_grpo(lr=4e-4, largest=9, room=12, temperature=1.0, reward=answer_reward):
    """(world, GRPO) on sums of three numbers up to `largest`, groups of 8, no KL term. room: most tokens to answer."""
    policy, reference, tokenizer = model("sft")
    policy.temperature = reference.temperature = temperature
    task = Arithmetic(3, largest)
    parts = {"reward": (1.0, each(reward, "gold")), "truth": (0.0, each(answer_reward, "gold"))}
    world = Watched(task, tokenizer, WeightedRewards(parts), room, reference=reference,
                    group_size=8, prompts_per_batch=32, seed=SEED)  # fmt: skip
    return world, GRPO(policy, GRPOConfig(kl_beta=0.0, lr=lr))


RUNS = {
    "healthy-ppo": reviews_ppo,
    "healthy-grpo": sums_grpo,
    "kl-runaway": functools.partial(reviews_ppo, kl=0.0, lr=3e-3),
    "length-hacking": functools.partial(reviews_ppo, kl=0.03, scale=0.3, per_word=0.15),
    "critic-failure": functools.partial(reviews_ppo, critic_lr=3.0),
    "entropy-collapse": functools.partial(sums_grpo, lr=1e-2),
    "dead-groups": functools.partial(sums_grpo, largest=99),
    "missing-end": functools.partial(sums_grpo, lr=1e-3, room=16, temperature=2.0, reward=contains),
}


@torch.no_grad()
def samples(world, policy):
    """Completions of the first held-out prompts, sampled without touching the random state of training."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        prompts = world.task.held_out(SAMPLES)[0]
        return world.complete(policy, prompts)[3]


def make(name, folder=HERE):
    """Train one run and write its two files."""
    seed_everything(SEED)
    torch.set_num_threads(1)
    world, algorithm = RUNS[name]()
    record = {"prompts": world.task.held_out(SAMPLES)[0], "before": samples(world, algorithm.policy)}

    def look(update):
        if update in (UPDATES // 2, UPDATES):
            record["halfway" if update < UPDATES else "after"] = samples(world, algorithm.policy)
        return {}

    began = time.perf_counter()
    history = train(world, algorithm, UPDATES, evaluate=look, evaluate_every=UPDATES // 2)
    rows = [row | {"truth": row["reward_truth"]} for row in history]
    columns = [column for column in COLUMNS if column in rows[0]]
    rows = [{column: row[column] if column == "step" else float(f"{row[column]:.6g}") for column in columns}
            for row in rows]  # fmt: skip
    write_rows(folder / f"{name}.csv", rows, columns)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {time.perf_counter() - began:.0f} s")
    return rows


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RUNS:
        make(wanted)
