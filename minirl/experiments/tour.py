"""The command tour: the whole package in minutes. One tiny GPT learns sums, one walker learns to walk, by one code.

    pretrain -> sft -> { reinforce, trpo, ppo, grpo } on sums, each from that same checkpoint, with the rule as reward
             -> sft on reviews -> comparisons -> { reward-model, dpo },  orpo without that sft; short versions
                       { trpo, ppo } on Walker2d, from nothing

What comes after the first two is independent, so it runs side by side, a process with one thread for each core.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from minirl.algorithms.settings import Count, Seed, Settings, Whole
from minirl.experiments.comparisons import Comparisons
from minirl.experiments.language import Finetune, Pretrain
from minirl.experiments.on_policy import Run, RunSettings
from minirl.experiments.parallel import run_jobs
from minirl.experiments.preferences import DPORun, ORPORun, RewardModelRun
from minirl.experiments.report import write_report
from minirl.experiments.table import ALGORITHMS
from minirl.plotting import read_metrics, save_figure, tour_figure
from minirl.tracking import read_rows, say, write_config, write_rows
from minirl.training import resolve_device

COLUMNS = {  # of results.csv -> heading in the tables
    "stage": "stage", "seconds": "seconds",
    "accuracy_greedy_before": "greedy before", "accuracy_greedy_after": "after",
    "accuracy_sampled_before": "sampled before", "accuracy_sampled_after": "after", "kl_to_sft": "KL to SFT (nats)",
    "pair_accuracy_before": "pairs right before", "pair_accuracy_after": "after",
    "true_score_before": "true score before", "true_score_after": "after",
    "return_before": "return before", "return_after": "after", "steps_per_second": "steps/s",
}  # fmt: skip
ORDER = ("pretrain", "sft", "reinforce", "trpo", "ppo", "grpo")  # of the rows, sums before reviews before control
REVIEWS = ("sft reviews", "reward-model", "dpo", "orpo")
LAST = 3  # evaluations, or fewer where there were fewer, that "after" is the mean of


@dataclass(frozen=True)
class Stage:
    """One algorithm of the tour in one world: a job for run_jobs."""

    algorithm: str
    task: str
    size: float
    """Rough seconds it takes: its share of the progress bar."""
    settings: RunSettings
    init: Path
    """The SFT run that text starts from."""

    @property
    def title(self):
        """Its name in tables and figures."""
        return self.algorithm if self.task == "arithmetic" else f"{self.algorithm} {self.task}"

    def run(self, advance):
        """Train; returns the row of results.csv."""
        entry = ALGORITHMS[self.algorithm]
        if self.task == "arithmetic":
            run = Run(self.algorithm, self.task, entry.text, replace(entry.text_world, init=self.init), self.settings)
        else:
            run = Run(self.algorithm, self.task, entry.control, entry.control_world, self.settings)
        summary = run.start(on_log=lambda row: advance(self.size / run.updates if row["step"] else 0))
        return result_row(self.title, summary)


@dataclass(frozen=True)
class Preferences:
    """Four short stages on reviews, one after the other: a job for run_jobs whose result is a list of rows."""

    tour: "Tour"
    base: Path
    size: float = 100.0
    title = "reviews"

    def run(self, advance):
        """Fine-tune, learn to score, DPO, and ORPO from the base; returns their rows of results.csv."""
        out, common = self.tour.out, {"seed": self.tour.seed, "device": self.tour.device, "quiet": True}
        sft, model = out / "sft-reviews", out / "reward-model"
        made = Comparisons(samples_from=sft, pairs=3_000, held_out_pairs=500)
        kept = replace(made, data=model / "preferences.jsonl")
        commands = {
            "sft reviews": replace(Finetune.of("reviews"), out=sft, init=self.base, steps=150, **common),
            "reward-model": RewardModelRun(out=model, init=sft, comparisons=made, steps=120, **common),
            "dpo": DPORun(out=out / "dpo", init=sft, comparisons=kept, steps=60, **common),
            "orpo": ORPORun(out=out / "orpo", init=self.base, comparisons=kept, steps=120, **common),
        }  # fmt: skip
        rows = []
        for title, command in commands.items():
            rows.append(result_row(title, command.run()))
            advance(self.size / len(commands))
        return rows


def result_row(stage, summary):
    """A row of results.csv from a run's summary; `after` is the mean of its last evaluations."""
    before, after = summary["before"], dict(summary["after"])
    evaluations = [row for row in summary.get("history", []) if row["step"] and any(name in row for name in before)]
    for name in before:
        if last := evaluations[-LAST:]:
            after[name] = sum(row[name] for row in last) / len(last)
    row = {"stage": stage, "seconds": summary["seconds"]}
    sources = {"accuracy_greedy": "accuracy_greedy", "accuracy_sampled": "accuracy_sampled", "return": "return",
               "pair_accuracy": "accuracy" if stage == "reward-model" else "pair_accuracy",
               "true_score": "true_score_sampled"}  # fmt: skip
    for name, source in sources.items():
        row[f"{name}_before"], row[f"{name}_after"] = before.get(f"eval_{source}", ""), after.get(f"eval_{source}", "")
    row["kl_to_sft"] = after.get("eval_kl_policy_ref", "") if stage in (*ALGORITHMS, "dpo", "orpo") else ""
    return row | {"steps_per_second": summary["steps_per_second"]}


@dataclass(frozen=True)
class Tour(Settings):
    """See everything once: pretrain, fine-tune, four algorithms on sums, preferences on reviews, two on a walker."""

    quick: bool = False
    """One learning curve only: PPO in both worlds, within 90 seconds."""
    out: Path = Path("runs/tour")
    """Folder for results.csv, metrics.csv, tour.png, report.html and the runs; an earlier tour there is replaced."""
    env: str = "Walker2d-v5"
    """Environment of the second world."""
    env_steps: Count = 50_000
    """Its steps for each algorithm (--quick: at most 16384)."""
    workers: Whole = 0
    """Runs side by side; 0 for one per core."""
    seed: Seed = 0
    """Of everything random."""
    device: str = "cpu"
    """Of the language model; networks as small as these are fastest on the CPU."""
    quiet: bool = False
    """No progress bars."""

    def run(self):
        """Take the tour.

        Returns (rows, failed): those of results.csv, and title of a stage -> its error in one line. A setting that does
        not fit raises a ValueError before anything is written.
        """
        from minirl.worlds.control import make_env  # costs the import of a simulator

        make_env(self.env).close()
        write_config(self.out, replace(self, device=resolve_device(self.device)))
        done = Progress(self)
        pretrain = Pretrain(
            out=self.out / "pretrain", seed=self.seed, device=self.device, quiet=self.quiet,
            **({"steps": 1000} if self.quick else {}),
        )  # fmt: skip
        done.add("pretrain", pretrain.out, pretrain.run())
        sft = Finetune(
            out=self.out / "sft", init=pretrain.out, seed=self.seed, device=self.device, quiet=self.quiet
        )
        done.add("sft", sft.out, sft.run())
        failed = run_jobs(
            self.stages(sft.out, pretrain.out), self.workers, "stages", quiet=self.quiet, finished=done.take,
        )  # fmt: skip
        say(done.table())
        say(f"\nopen {self.out / 'report.html'} in a browser, or look at {self.out / 'tour.png'}")
        if failed:
            say(f"{len(failed)} of the stages failed: {', '.join(failed)}")
        return done.rows, failed

    def stages(self, init, base):
        """What comes after fine-tuning, the longest first."""
        if self.quick:
            plan = [("ppo", self.env, 20), ("ppo", "arithmetic", 15)]
            updates, env_steps = 40, min(self.env_steps, 16_384)
        else:
            plan = [("trpo", "arithmetic", 60), ("ppo", self.env, 60), ("ppo", "arithmetic", 50),
                    ("trpo", self.env, 40), ("reinforce", "arithmetic", 40), ("grpo", "arithmetic", 40)]  # fmt: skip
            updates, env_steps = None, self.env_steps
        reviews = [] if self.quick else [Preferences(self, base)]
        return reviews + [
            Stage(algorithm, task, size, init=init, settings=RunSettings(
                self.out / (algorithm if task == "arithmetic" else f"{algorithm}-{task}"),
                updates=updates if task == "arithmetic" else None,
                env_steps=None if task == "arithmetic" else env_steps,
                seed=self.seed, device=self.device if task == "arithmetic" else "cpu", quiet=True,
            ))
            for algorithm, task, size in plan
        ]  # fmt: skip


class Progress:
    """What has been finished so far; every new stage rewrites results.csv, metrics.csv, tour.png and report.html."""

    def __init__(self, tour):
        self.tour, self.rows, self.folders = tour, [], {}

    def take(self, job, result):
        """Take in what a job gave: a row, or several."""
        for row in result if isinstance(result, list) else [result]:
            place = job.settings.out if isinstance(job, Stage) else self.tour.out / row["stage"].replace(" ", "-")
            self.add(row["stage"], place, row)

    def add(self, stage, folder, summary):
        """Take in a finished stage: a run's summary, or the row made from it."""
        self.rows.append(summary if "stage" in summary else result_row(stage, summary))
        self.rows.sort(key=lambda row: place_of(row["stage"]))
        self.folders[stage] = Path(folder)
        self.folders = {row["stage"]: self.folders[row["stage"]] for row in self.rows}
        out = self.tour.out
        write_rows(out / "results.csv", self.rows)
        logs = [{"stage": name} | row for name, path in self.folders.items() for row in read_rows(path / "metrics.csv")]
        write_rows(out / "metrics.csv", logs, list(dict.fromkeys(column for row in logs for column in row)))
        curves = {name: read_metrics(path / "metrics.csv") for name, path in self.folders.items()}
        draw(curves, self.tour.env, self.tour.seed, out / "tour.png")
        write_report(self)

    def cells(self):
        """results.csv for people, but for columns that nothing is in: (headings, rows of texts)."""
        names = [name for name in COLUMNS if any(row[name] != "" for row in self.rows)]
        return [COLUMNS[name] for name in names], [[shown(name, row[name]) for name in names] for row in self.rows]

    def table(self):
        """The same as lines of plain characters, columns aligned."""
        headings, rows = self.cells()
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = ([f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in [headings, *rows])
        units = ("after: mean of the last three evaluations. return: greedy; tour.png has that of training, sampled\n"
                 "steps/s: optimiser steps, tokens, or environment steps")  # fmt: skip
        return "\n".join(["  ".join(line) for line in lines] + [units])


def draw(curves, env, seed, path):
    """Draw tour.png from curves: title of a stage -> columns of its metrics.csv."""
    text = {name: columns for name, columns in curves.items() if name in ORDER[2:]}
    walkers = {name.split()[0]: columns for name, columns in curves.items() if name.endswith(f" {env}")}
    sft = curves["sft"]["eval_accuracy_greedy"][-1] if "sft" in curves else None
    figure = tour_figure(text, walkers, accuracy="eval_accuracy_greedy", kl="eval_kl_policy_ref", sft_accuracy=sft)
    figure.suptitle(f"seed {seed}", x=0.01, ha="left", fontsize=10)
    save_figure(figure, path)


def place_of(stage):
    """Of a stage among the rows."""
    return 10 + REVIEWS.index(stage) if stage in REVIEWS else ORDER.index(stage.split()[0]) + 20 * (" " in stage)


def shown(column, value):
    """A cell of results.csv for people."""
    if isinstance(value, str):
        return value
    if "accuracy" in column:
        return f"{value:.0%}"
    return f"{value:.2f}" if column == "kl_to_sft" or "true_score" in column else f"{value:,.0f}"
