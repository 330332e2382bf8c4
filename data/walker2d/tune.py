"""The search behind the preset mujoco-1m: as many random settings of PPO as of TRPO, on seeds that no result uses.

    python data/walker2d/tune.py --trials 16 --env-steps 300000        first round, a seed for each setting
    python data/walker2d/tune.py --again 3 --env-steps 300000          the best three of each, on two more seeds
    python data/walker2d/tune.py --both 10 --env-steps 300000          setting 10 of both, on the same two more seeds

writes a row a run to data/walker2d/trials.csv; what is there already is not run again.
"""

import csv
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from minirl.algorithms.ppo import PPOConfig
from minirl.algorithms.trpo import TRPOConfig
from minirl.experiments.on_policy import Run
from minirl.experiments.parallel import run_jobs
from minirl.experiments.settings import ControlSettings, RunSettings

FILE = Path(__file__).with_name("trials.csv")
FIRST_SEED = 1000
NUM_ENVS, EVALUATIONS = 4, 5  # walkers; evaluations of a run, the last three of which count
COMMON = {  # both algorithms; mini-batches are given as their size
    "batch": (1024, 2048, 4096), "gae_lambda": (0.9, 0.95, 0.97), "gamma": (0.99, 0.995), "decay": (True, False),
    "critic_lr": (3e-4, 1e-3), "critic_epochs": (10, 20), "critic_minibatch": (64, 128),
}  # fmt: skip
OWN = {
    "ppo": {"lr": (1e-4, 2e-4, 3e-4, 6e-4), "clip": (0.1, 0.2), "minibatch": (64, 128)},
    "trpo": {"delta": (0.01, 0.02, 0.04, 0.06), "cg_iterations": (10, 20), "damping": (0.1, 0.01)},
}
COLUMNS = ("algorithm", "trial", "seed", "env_steps", *COMMON, *OWN["ppo"], *OWN["trpo"],
           "final_return", "last_100_return", "seconds")  # fmt: skip


def config_of(algorithm, chosen):
    """The algorithm's config for one point of the space."""
    common = {"gamma": chosen["gamma"], "gae_lambda": chosen["gae_lambda"], "critic_lr": chosen["critic_lr"],
              "critic_epochs": chosen["critic_epochs"], "lr_decay": chosen["decay"],
              "critic_minibatches": chosen["batch"] // chosen["critic_minibatch"]}  # fmt: skip
    if algorithm == "ppo":
        return PPOConfig(lr=chosen["lr"], clip=chosen["clip"], minibatches=chosen["batch"] // chosen["minibatch"],
                         **common)  # fmt: skip
    return TRPOConfig(delta=chosen["delta"], cg_iterations=chosen["cg_iterations"], damping=chosen["damping"],
                      delta_decay=chosen["decay"], **common)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One run of one setting: a job for run_jobs."""

    algorithm: str
    trial: int
    seed: int
    size: int
    """Environment steps."""
    chosen: dict

    @property
    def title(self):
        """For people."""
        return f"{self.algorithm} {self.trial} seed {self.seed}"

    def run(self, advance):
        """Train; returns the row."""
        batch = self.chosen["batch"]
        world = ControlSettings(num_envs=NUM_ENVS, steps=batch // NUM_ENVS)
        updates = self.size // batch
        with tempfile.TemporaryDirectory() as folder:
            run = Run(self.algorithm, "Walker2d-v5", config_of(self.algorithm, self.chosen), world, RunSettings(
                Path(folder), updates=updates, evaluate_every=-(-updates // EVALUATIONS), evaluate_episodes=10,
                save_every=10**6, seed=self.seed, device="cpu", quiet=True,
            ))  # fmt: skip
            summary = run.start(on_log=lambda row: advance(batch if row["step"] else 0))
        returns = [row["eval_return"] for row in summary["history"] if "eval_return" in row]
        last = [episode["return"] for episode in run.world.finished[-100:]]
        return {"algorithm": self.algorithm, "trial": self.trial, "seed": self.seed, "env_steps": run.world.env_steps,
                **self.chosen, "final_return": round(statistics.fmean(returns[-3:]), 1),
                "last_100_return": round(statistics.fmean(last), 1), "seconds": round(summary["seconds"])}  # fmt: skip


def read():
    """Rows of trials.csv."""
    return list(csv.DictReader(FILE.open(encoding="utf-8"))) if FILE.is_file() else []


def main(trials: int = 0, again: int = 0, both: tuple[int, ...] = (), env_steps: int = 300_000, workers: int = 2):
    """Run the search, or run its best again.

    Args:
        trials: random settings of each algorithm.
        again: the best settings of each, by the mean over their seeds so far, to run on two more seeds.
        both: settings by their number, to run on two more seeds with both algorithms. A number stands for the same
            shared settings (batch, critic, discount, lambda) with both.
        env_steps: of a run.
        workers: processes.
    """
    done, jobs = read(), []
    for algorithm, own in OWN.items():
        draw = random.Random(0)
        points = [{name: draw.choice(values) for name, values in (COMMON | own).items()} for _ in range(64)]
        mine = [row for row in done if row["algorithm"] == algorithm and int(row["env_steps"]) > 0.98 * env_steps]
        wanted = [(trial, FIRST_SEED + trial) for trial in range(trials)]
        if again or both:
            scores = {}
            for row in mine:
                scores.setdefault(int(row["trial"]), []).append(float(row["final_return"]))
            best = sorted(scores, key=lambda trial: -statistics.fmean(scores[trial]))[:again]
            wanted = [(trial, FIRST_SEED + 100 * k + trial) for trial in {*best, *both} for k in (1, 2)]
        had = {(int(row["trial"]), int(row["seed"])) for row in mine}
        jobs += [Trial(algorithm, *pair, env_steps, points[pair[0]]) for pair in wanted if pair not in had]
    jobs.sort(key=lambda job: job.trial)  # both algorithms side by side, should it be interrupted

    def write(_job, row):
        fresh = not FILE.is_file()
        with FILE.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)

    failed = run_jobs(jobs, workers, "trials", finished=write)
    sys.exit(f"{len(failed)} failed" if failed else 0)


if __name__ == "__main__":
    tyro.cli(main)
