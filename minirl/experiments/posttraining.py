"""The command posttraining: every way from one fine-tuned model to a better one, judged by a truth that is known.

    pretrain -> sft -> comparisons -> reward model -> { reinforce, trpo, ppo, grpo, rejection sampling, Q# }
                                   -> { dpo, for several beta }         base model -> orpo;  base that thinks -> r1-zero

The annotator is simulated, and that is the point: where the true score of every text is known, one can see what a
reward model is worth and where more of its score is no longer more of the real thing.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from minirl.algorithms.dpo import DPOConfig
from minirl.algorithms.settings import Seed, Settings, Whole
from minirl.experiments.comparisons import Comparisons
from minirl.experiments.costs import cost_table
from minirl.experiments.guided import QSharpRun
from minirl.experiments.judging import win_rate
from minirl.experiments.language import Finetune, Pretrain
from minirl.experiments.methods import GuidedMethod, Method, OnPolicyMethod, PairsMethod, Story, best_of, judge_folder
from minirl.experiments.parallel import run_jobs
from minirl.experiments.preferences import DPORun, ORPORun, RewardModelRun
from minirl.experiments.reasoning import Reasoning, Supervision
from minirl.experiments.story_report import write_story
from minirl.tracking import read_rows, say, write_config, write_rows
from minirl.training import resolve_device

BETAS = (0.03, 0.1, 0.3, 1.0)
COMPARED = ("sft", "ppo", "trpo", "reinforce", "grpo", "dpo beta=0.3", "rejection-sampling", "q-sharp", "orpo")
TULU = {  # a PPO run with one of the five details of Tulu 3, section 6.2, undone: config, world
    "all five": ({}, {}),
    "value model from the policy": ({}, {"critic_from": "policy"}),
    "dropout on": ({}, {"keep_dropout": 0.1}),
    "prompts drawn with replacement": ({}, {"reshuffle": False}),
    "no penalty for a missing end": ({}, {"missing_end_penalty": 0.0}),
    "advantages not whitened": ({"whiten": False}, {}),
}


@dataclass(frozen=True)
class PostTraining(Settings):
    """Reward model, RLHF, DPO, ORPO, rejection sampling, Q# and R1-Zero on one tiny model; a table and a report."""

    quick: bool = False
    """A short version with few updates, to see that it works; its numbers mean nothing."""
    rejudge: bool = False
    """Train nothing: judge the models that are in --out again, and write tables, figures and report anew."""
    ablation: bool = False
    """Also PPO with each of the five details of Tulu 3 undone."""
    out: Path = Path("runs/posttraining")
    """Folder for results.csv, wins.csv, the figures, report.html and the runs; an earlier story there is replaced."""
    workers: Whole = 0
    """Runs side by side; 0 for one per core."""
    seed: Seed = 0
    """Of everything random."""
    device: str = "cpu"
    """Networks as small as these are fastest on the CPU."""
    quiet: bool = False
    """No progress bars."""

    def run(self):
        """Tell the story.

        Returns (rows, failed): those of results.csv, and title of a method -> its error in one line.
        """
        if self.rejudge and not (self.out / "sft-reviews").is_dir():
            raise ValueError(f"{self.out} holds no story to judge again; leave out --rejudge to make one there")
        if not self.rejudge:
            write_config(self.out, replace(self, device=resolve_device(self.device)))
        story, done = Story(self.out, self.seed, self.device), Results(self)
        done.summaries = summaries_in(self.out) if self.rejudge else self.prologue(story)
        done.take("sft", judge_folder(story, "sft", story.sft) | {"seconds": done.summaries["sft"]["seconds"]})
        jobs = [Again(job) for job in self.jobs(story) if job.out.is_dir()] if self.rejudge else self.jobs(story)
        failed = run_jobs(
            jobs, self.workers, "methods", quiet=self.quiet,
            finished=lambda job, result: done.take(job.title, result),
        )  # fmt: skip
        try:
            done.take("costs", {"rows": cost_table(story, updates=1 if self.quick else 3)})
        except RuntimeError as error:  # the report is worth having without this table
            failed["costs"] = str(error)
        for n, result in best_of(story, (2, 4) if self.quick else (2, 4, 16)).items():
            done.take(f"best of {n}", result)
        done.write()
        say(done.table())
        say(f"\nopen {self.out / 'report.html'} in a browser")
        if failed:
            say(f"{len(failed)} of the methods failed: {', '.join(failed)}")
        return done.rows(), failed

    def prologue(self, story):
        """Pretrain, fine-tune, compare and learn to score, in this process; their summaries by name."""
        common = {"seed": self.seed, "device": self.device, "quiet": self.quiet}
        few, some = ({"steps": 20}, {"pairs": 300, "held_out_pairs": 60}) if self.quick else ({}, {})
        comparisons = Comparisons(samples_from=story.sft, **some)
        stages = {
            "pretrain": replace(Pretrain(), out=story.base, **common, **few),
            "sft": replace(Finetune.of("reviews"), out=story.sft, init=story.base, **common, **few),
            "reward-model": replace(
                RewardModelRun(), out=story.reward_model, init=story.sft, comparisons=comparisons, **common, **few
            ),
        }  # fmt: skip
        return {name: stage.run() for name, stage in stages.items()}

    def jobs(self, story):
        """The methods, the longest first."""
        updates, steps = ({"updates": 2}, {"steps": 5}) if self.quick else ({}, {})
        free = {"lr": 7e-5, "lr_decay": False}  # slowly, for a dense curve
        long = {"updates": 4} if self.quick else {"updates": 90, "evaluate_every": 2}
        guided = replace(QSharpRun(), **({"steps": 5, "rollouts": 256} if self.quick else {}))
        jobs = [
            OnPolicyMethod("ppo without KL", story, 140, config=free, world={"kl_coef": 0.0}, **long),
            OnPolicyMethod("ppo with KL", story, 140, config=free, world={"kl_coef": 0.2}, **long),
            *(OnPolicyMethod(name, story, 90, algorithm=name, **updates)
              for name in ("ppo", "trpo", "reinforce", "grpo", "rejection-sampling")),
            GuidedMethod("q-sharp", story, 90, command=guided),
            PairsMethod("orpo", story, 60, command=replace(ORPORun(), **steps)),
            *(PairsMethod(f"dpo beta={beta}", story, 40, command=replace(
                DPORun(), algorithm=DPOConfig(dpo_beta=beta), **steps)) for beta in BETAS),
            OnPolicyMethod("rules", story, 60, world={"reward": "rules", "reward_scale": 10.0}, **updates),
            Reasoning("r1-zero", story, 110, start="base", quick=self.quick),
            Reasoning("r1-zero from random", story, 40, start="random", quick=self.quick),
            Supervision("supervision", story, 120, quick=self.quick),
        ]  # fmt: skip
        if self.ablation:
            jobs += [OnPolicyMethod(f"tulu {name}", story, 60, config=config, world=world, **updates)
                     for name, (config, world) in TULU.items()]  # fmt: skip
        return sorted(jobs, key=lambda job: -job.size)


@dataclass(frozen=True)
class Again:
    """A method that was trained before: a job that only judges it."""

    job: Method

    @property
    def title(self):
        """The method's."""
        return self.job.title

    @property
    def size(self):
        """A tenth of training it."""
        return self.job.size / 10

    def run(self, advance):
        """Judge; what has no judged texts reads its curves again."""
        result = self.job.again()
        advance(self.size)
        return result


def summaries_in(out):
    """What a story that ran before said of its first stages."""
    summaries = {}
    for name, folder in (("pretrain", "pretrain"), ("sft", "sft-reviews"), ("reward-model", "reward-model")):
        last = read_rows(out / folder / "metrics.csv")[-1]
        after = {key: value for key, value in last.items() if key.startswith("eval_")}
        summaries[name] = {"after": after, "seconds": last["seconds"]}
    rows = (out / "reward-model" / "preferences.jsonl").read_text(encoding="utf-8")
    summaries["reward-model"]["pairs"] = rows.count("\n")
    return summaries


class Results:
    """What has been finished so far, and the tables that come of it."""

    def __init__(self, command):
        self.command, self.methods, self.others, self.summaries = command, {}, {}, {}

    def take(self, title, result):
        """Take in what a job gave; texts that were judged, or something else to show."""
        (self.methods if "true" in result else self.others)[title] = result

    def wins(self, first, second):
        """(rate, low, high, n) of one method's texts against another's, by the true score."""
        return win_rate(self.methods[first]["true"], self.methods[second]["true"])

    def rows(self):
        """Of results.csv: a dict for each method."""
        rows = []
        for title, result in self.methods.items():
            rate, low, high, n = self.wins(title, "sft")
            rows.append({
                "method": title, "seconds": result.get("seconds", ""),
                "true_score": mean(result["true"]), "learned_score": mean(result["learned"]), "kl_to_sft": result["kl"],
                "response_length": result.get("length", ""), "wins_against_sft": rate, "wins_low": low,
                "wins_high": high, "comparisons": n,
            })  # fmt: skip
        return rows

    def matrix(self):
        """Of wins.csv: how often the method of the row beats that of the column."""
        names = [name for name in COMPARED if name in self.methods]
        return [{"method": first} | {second: self.wins(first, second)[0] for second in names} for first in names]

    def write(self):
        """Write results.csv, wins.csv, the figures and report.html."""
        out = self.command.out
        write_rows(out / "results.csv", self.rows())
        write_rows(out / "wins.csv", self.matrix())
        for title, result in self.others.items():
            write_rows(out / f"{title.replace(' ', '-')}.csv", result["rows"])
        write_story(self)

    def table(self):
        """results.csv as lines of plain characters."""
        lines = [f"{'method':<34}{'true score':>11}{'learned':>9}{'KL, nats':>10}{'wins against sft':>26}"]
        for row in sorted(self.rows(), key=lambda row: -row["true_score"]):
            wins = f"{row['wins_against_sft']:.0%} [{row['wins_low']:.0%}, {row['wins_high']:.0%}]"
            lines.append(f"{row['method']:<34}{row['true_score']:>11.2f}{row['learned_score']:>9.2f}"
                         f"{row['kl_to_sft']:>10.2f}{wins:>26}")  # fmt: skip
        return "\n".join(lines)


def mean(values):
    """Mean of a list."""
    return sum(values) / len(values)
