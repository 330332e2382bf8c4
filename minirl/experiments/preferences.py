"""The commands that learn from comparisons: reward-model, dpo and orpo.

Without a file of your own the comparisons are made here: two completions of a model, and a simulated annotator who
prefers one with the Bradley-Terry probability of their true scores. They are kept in OUT/preferences.jsonl.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minirl.algorithms.dpo import DPO, DPOConfig, sequence_logprobs
from minirl.algorithms.orpo import ORPO, ORPOConfig
from minirl.algorithms.reward_model import LearnedReward, RewardModel, RewardModelConfig
from minirl.algorithms.settings import Count, Whole
from minirl.experiments.comparisons import Comparisons, complete_all, packed, rows_of
from minirl.experiments.judging import best_of_k, calibration, rank_correlation
from minirl.experiments.models import load_model, policy_and_reference, save_model, save_reward_model, write_samples
from minirl.experiments.settings import Machine
from minirl.models.policies import TokenCritic
from minirl.tracking import Tracker, write_config, write_rows
from minirl.training import fit
from minirl.worlds.jsonl import write_jsonl
from minirl.worlds.text import TokenWorld

BEST_OF, SAMPLES = (1, 2, 4, 8, 16), 64  # of n; completions of each prompt from which the best are chosen


@dataclass(frozen=True)
class PreferenceRun(Machine):
    """What the three commands have in common."""

    out: Path = Path("runs/preferences")
    """Folder for the model, preferences.jsonl, metrics.csv, config.json; an earlier run there is replaced."""
    init: Path = Path("runs/sft-reviews")
    """Run (or model folder) to start from."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    """The preferences."""
    steps: Count = 200
    """Optimiser steps."""
    batch_size: Count = 64
    """Pairs in each."""
    micro_batches: Count = 1
    """Pieces that each batch is cut into, to save memory; changes nothing else. It divides batch_size."""
    evaluate_every: Whole = 25
    """Steps between evaluations; 0 for one before and one after training."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Train, save, and return a summary."""
        if self.batch_size % self.micro_batches:
            raise ValueError(f"micro_batches is {self.micro_batches}; it must divide batch_size, {self.batch_size}")
        kept = self.out / "preferences.jsonl"
        if self.comparisons.data and self.comparisons.data.resolve() == kept.resolve():
            raise ValueError(f"--data is {kept}, which this run would replace; give another --out")
        device = self.prepare()
        gpt, tokenizer = load_model(self.init, device)
        training, held_out, ceiling = self.comparisons.training_and_held_out(self.seed, device)
        pairs, judged = (packed(texts, tokenizer, gpt.config.block_size, device) for texts in (training, held_out))
        algorithm, evaluate, save = self.prepared(gpt, tokenizer, judged, ceiling, device)
        before, samples = evaluate(0)
        latest = {"after": samples}
        write_config(self.out, replace(self, device=device))
        write_jsonl(kept, rows_of(training))
        began = time.perf_counter()

        def measure(step):
            row, latest["after"] = evaluate(step)
            return row

        with Tracker(self.out, self.steps, self.out.name, unit="step", quiet=self.quiet) as tracker:
            tracker.log(0, before)
            history = fit(
                algorithm, pairs, self.steps, self.batch_size // self.micro_batches, tracker,
                accumulate=self.micro_batches, seed=self.seed, evaluate=measure, evaluate_every=self.evaluate_every,
                save=lambda step: save(),
            )  # fmt: skip
        seconds = time.perf_counter() - began
        write_samples(self.out, before=samples, after=latest["after"])
        after = {name: history[-1][name] for name in before}
        return {"before": before, "after": after, "seconds": seconds, "steps_per_second": len(history) / seconds,
                "history": [{"step": 0} | before, *history], "pairs": len(pairs)}  # fmt: skip


@torch.no_grad()
def in_parts(function, records, size=256):
    """A function of records to (B,) values, applied to `size` rows at a time."""
    parts = torch.arange(len(records)).split(size)
    return torch.cat([function(records.rows(part)) for part in parts])


def share_right(margins):
    """The pair accuracy: share of positive margins (B,), ties counting half."""
    return float((1 + margins.sign()).double().mean() / 2)


@dataclass(frozen=True)
class RewardModelRun(PreferenceRun):
    """Learn from comparisons to score whole answers: the reward of RLHF."""

    out: Path = Path("runs/reward-model")
    """Folder for the reward model, preferences.jsonl, metrics.csv, config.json; an earlier run there is replaced."""
    algorithm: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model."""
    steps: Count = 300
    """Optimiser steps."""
    evaluate_every: Whole = 100
    """Steps between evaluations; 0 for one before and one after training."""

    def prepared(self, gpt, tokenizer, judged, ceiling, device):
        """(algorithm, evaluate, save) for `run`."""
        model = RewardModel(TokenCritic(gpt).to(device), self.algorithm)
        reward = LearnedReward(model, tokenizer)
        samples = self.samples_to_rank(device)

        def evaluate(step):
            margins = in_parts(lambda part: margin_of(model, part), judged).double().cpu()
            metrics = {"eval_accuracy": share_right(margins), "eval_brier": calibration(margins)}
            if not self.comparisons.data:
                metrics |= {"eval_accuracy_of_the_truth": ceiling}
                metrics |= self.ranking(reward, *samples)
            return metrics, []

        def save():
            reward.calibrate(reward.raw(*samples[:2]) if samples else in_parts(
                lambda part: model.score(part.chosen.obs, part.chosen.actions, part.chosen.mask), judged).tolist())
            save_reward_model(self.out, reward)
            if samples:
                write_rows(self.out / "best_of.csv", self.best_of(reward, *samples))

        return model, evaluate, save

    def samples_to_rank(self, device, repeats=SAMPLES):
        """(prompts, completions, truth): `repeats` completions of every held-out prompt, by who is compared."""
        if self.comparisons.data:
            return None
        gpt, tokenizer = load_model(self.comparisons.samples_from, device)
        task = self.comparisons.made()
        world = TokenWorld(task, tokenizer, task.reward, task.max_new_tokens, device=device)
        prompts, columns = task.held_out(20)
        prompts = [prompt for prompt in prompts for _ in range(repeats)]
        columns = {name: [x for x in column for _ in range(repeats)] for name, column in columns.items()}
        completions = complete_all(world, policy_and_reference(gpt, tokenizer)[0], prompts)
        return prompts, completions, task.reward(prompts, completions, **columns)

    def ranking(self, reward, prompts, completions, truth):
        """Metrics of a reward model on samples whose truth is known."""
        rows = self.best_of(reward, prompts, completions, truth)
        start, best = rows[0]["true_score_by_truth"], rows[-1]
        gain, possible = best["true_score_by_model"] - start, best["true_score_by_truth"] - start
        scores = reward.raw(prompts, completions)
        return {"eval_rank_correlation": rank_correlation(scores, truth),
                "eval_best_of_16_gain_kept": gain / possible if possible else float("nan")}  # fmt: skip

    def best_of(self, reward, prompts, completions, truth):
        """Rows of best_of.csv: mean true score of the best of k, chosen by the model and by the truth."""
        scores = torch.tensor(reward.raw(prompts, completions), dtype=torch.float64).view(-1, SAMPLES)
        truth = torch.tensor(truth, dtype=torch.float64).view(-1, SAMPLES)
        return [
            {"k": k, "true_score_by_model": best_of_k(scores, truth, k),
             "learned_score_by_model": best_of_k(scores, (scores - scores.mean()) / scores.std(), k),
             "true_score_by_truth": best_of_k(truth, truth, k)}
            for k in BEST_OF
        ]  # fmt: skip


def margin_of(model, pairs):
    """(B,) scores of the chosen minus scores of the rejected."""
    chosen, rejected = (model.score(side.obs, side.actions, side.mask) for side in (pairs.chosen, pairs.rejected))
    return chosen - rejected


class PolicyRun(PreferenceRun):
    """DPO or ORPO: what they evaluate and save."""

    def judged_policy(self, policy, tokenizer, reference, accuracy, device):
        """(evaluate, save) of a policy: the task's true score, and its implicit accuracy on held-out pairs."""
        task = self.comparisons.made()
        name = "true_score" if self.comparisons.task == "reviews" else "accuracy"
        world = TokenWorld(
            task, tokenizer, task.reward, task.max_new_tokens, reference=reference, device=device,
            judges={name: task.reward},
        )  # fmt: skip

        def evaluate(step):
            metrics, samples = {}, []
            if self.comparisons.made_here:
                count = 150 if self.comparisons.task == "reviews" else None
                metrics, samples = world.evaluate(policy, count, seed=self.seed)
            metrics["pair_accuracy"] = accuracy()
            return {f"eval_{name}": value for name, value in metrics.items()}, samples

        return evaluate, lambda: save_model(self.out, policy.gpt, tokenizer)


@dataclass(frozen=True)
class DPORun(PolicyRun):
    """Learn from comparisons directly, without a reward model and without sampling."""

    out: Path = Path("runs/dpo")
    """Folder for the model, preferences.jsonl, metrics.csv, config.json; an earlier run there is replaced."""
    algorithm: DPOConfig = field(default_factory=lambda: DPOConfig(dpo_beta=0.3))
    """DPO."""
    steps: Count = 120
    """Optimiser steps."""

    def prepared(self, gpt, tokenizer, judged, ceiling, device):
        """(algorithm, evaluate, save) for `run`."""
        policy, reference = policy_and_reference(gpt, tokenizer)

        def implicit(part):
            sides = (part.chosen, part.rejected)
            chosen, rejected = (sequence_logprobs(policy, s) - sequence_logprobs(reference, s) for s in sides)
            return chosen - rejected

        accuracy = lambda: share_right(in_parts(implicit, judged))  # noqa: E731
        evaluate, save = self.judged_policy(policy, tokenizer, reference, accuracy, device)
        return DPO(policy, reference, self.algorithm), evaluate, save


@dataclass(frozen=True)
class ORPORun(PolicyRun):
    """Learn from comparisons in one stage, straight from the base model: no fine-tuning before, no reference model."""

    out: Path = Path("runs/orpo")
    """Folder for the model, preferences.jsonl, metrics.csv, config.json; an earlier run there is replaced."""
    init: Path = Path("runs/pretrain")
    """Run (or model folder) to start from: the base model."""
    algorithm: ORPOConfig = field(default_factory=lambda: ORPOConfig(orpo_lambda=2.0, lr=3e-3))
    """ORPO."""
    steps: Count = 300
    """Optimiser steps."""

    def prepared(self, gpt, tokenizer, judged, ceiling, device):
        """(algorithm, evaluate, save) for `run`. Only the evaluation looks at the SFT model, to tell the KL to it."""
        policy, reference = policy_and_reference(gpt, tokenizer)
        if self.comparisons.made_here:
            reference = policy_and_reference(*load_model(self.comparisons.samples_from, device))[1]
        learner = ORPO(policy, self.algorithm)

        def per_token(part):
            sides = (part.chosen, part.rejected)
            chosen, rejected = (sequence_logprobs(policy, side) / side.mask.sum(1) for side in sides)
            return chosen - rejected

        accuracy = lambda: share_right(in_parts(per_token, judged))  # noqa: E731
        evaluate, save = self.judged_policy(policy, tokenizer, reference, accuracy, device)
        return learner, evaluate, save
