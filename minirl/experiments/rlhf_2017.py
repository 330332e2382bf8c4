"""The command rlhf-2017: TRPO on a reward learned from comparisons of short segments, beside TRPO on the true reward.

The labeller is simulated: who of two segments has the larger sum of true reward is preferred. That is what Christiano
et al. 2017 call synthetic feedback; it says nothing about people. As in their appendix A no episode ends by a fall: in
Hopper and Walker2d the reward for being healthy stops instead, else the end itself would tell what is good.
Left out against them: the entropy bonus of 0.01 (TRPO has none here); torque penalties stay in the true reward.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from minirl.algorithms.segment_reward import SegmentReward, SegmentRewardConfig
from minirl.algorithms.settings import Count, Settings, Whole
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.experiments.compare import parse_seeds
from minirl.experiments.comparison_report import cell
from minirl.experiments.on_policy import control_setup
from minirl.experiments.parallel import run_jobs
from minirl.experiments.segments import Labeller, PredictedRewardWorld, label_schedule
from minirl.experiments.settings import ControlSettings
from minirl.experiments.table import ALGORITHMS
from minirl.plotting import draw_curves, dress, read_metrics, save_figure
from minirl.tracking import Tracker, say, write_config, write_rows
from minirl.training import resolve_device, seed_everything, train

ARMS = {"predicted": "Reward predictor and TRPO", "true": "TRPO on the true reward"}
EPISODES = 20        # of a final evaluation
FIRST_STEPS = 0.05   # share of the steps that the untrained policy acts for, to be labelled (paper: not given)


def without_ends(env_id):
    """The id of the same environment in which a fallen walker goes on, registered if need be; others as they are."""
    import gymnasium

    if not env_id.startswith(("Hopper", "Walker2d")):
        return env_id
    spec, name = gymnasium.spec(env_id), f"minirl/{env_id}"
    if name not in gymnasium.registry:
        kwargs = {**spec.kwargs, "terminate_when_unhealthy": False}
        gymnasium.register(name, spec.entry_point, max_episode_steps=spec.max_episode_steps, kwargs=kwargs)
    return name


@dataclass(frozen=True)
class HumanPreferences(Settings):
    """TRPO on a reward predicted from a simulated labeller's comparisons, and on the true reward."""

    env: Literal["Pendulum-v1", "Hopper-v5", "Walker2d-v5"] = "Pendulum-v1"
    """Gymnasium id; Hopper and Walker2d without the end of an episode by a fall."""
    env_steps: Count = 100_000
    """Steps of every run, rounded up to whole rollouts; labelling the untrained policy takes 5 % of them."""
    labels: Count = 1400
    """Comparisons in all (paper: 350, 700 or 1400)."""
    segment_steps: Count = 30
    """Length of a segment (paper, appendix A.1: 1.5 seconds, 15 to 60 steps; 30 in Pendulum)."""
    seeds: str = "1-3"
    """A range (1-5), a list (1,3,7), or both (1-3,10)."""
    workers: Whole = 0
    """Runs side by side, each a process with one thread; 0 for one per core."""
    out: Path = Path("runs/rlhf-2017")
    """Folder for the runs, results.csv, rlhf_2017.png and config.json."""
    device: str = "cpu"
    """auto, cpu, cuda or another torch device."""
    quiet: bool = False
    """No progress bar."""
    labeller: Labeller = field(default_factory=Labeller)
    """Who compares."""
    predictor: SegmentRewardConfig = field(default_factory=SegmentRewardConfig)
    """The reward predictor."""
    trpo: TRPOConfig = field(default_factory=lambda: replace(ALGORITHMS["trpo"].control, gamma=0.995, gae_lambda=0.97))
    """TRPO (paper, appendix A.1: gamma 0.995, lambda 0.97), otherwise that of the command trpo."""
    world: ControlSettings = field(default_factory=lambda: ControlSettings(num_envs=8))
    """How the environment is stepped (batches of 2,000: in ones of 1,000 TRPO at times settles for half a swing-up)."""

    def run(self):
        """Train, write results.csv and the figure, print the table.

        Returns (rows, failed): the dicts of results.csv, and name of a run -> its error in one line. A setting that
        does not fit raises a ValueError before anything is trained.
        """
        self.check()
        settings = replace(self, device=resolve_device(self.device))
        jobs = [Job(settings, arm, seed) for seed in parse_seeds(self.seeds) for arm in ARMS]
        write_config(self.out, self)
        rows = []
        failed = run_jobs(jobs, self.workers, "runs", "step", self.quiet, lambda _, row: rows.append(row))
        if rows:
            rows.sort(key=lambda row: (row["seed"], row["arm"]))
            report(rows, settings)
        return rows, failed

    def check(self):
        """ValueError where labels, segments and rollouts do not fit together."""
        if self.world.whole_episodes:
            raise ValueError("whole_episodes is on; segments are cut from rollouts of fixed length, so leave it off")
        if self.segment_steps > self.world.steps:
            raise ValueError(f"segment_steps is {self.segment_steps}; a rollout has {self.world.steps} (--steps)")
        if self.env_steps <= self.world.num_envs * self.world.steps:
            raise ValueError(f"env_steps is {self.env_steps}; two rollouts are needed, and one takes "
                             f"{self.world.num_envs * self.world.steps} (--num-envs, --steps)")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run: a job for run_jobs."""

    settings: HumanPreferences
    arm: Literal["predicted", "true"]
    seed: int

    @property
    def title(self):
        """Its name for people."""
        return f"{self.arm} reward, seed {self.seed}"

    @property
    def rollouts(self):
        """How many there are in all."""
        return -(-self.settings.env_steps // (self.settings.world.num_envs * self.settings.world.steps))

    @property
    def size(self):
        """Environment steps."""
        return self.rollouts * self.settings.world.num_envs * self.settings.world.steps

    def run(self, advance):
        """Train to the end; returns the row of results.csv."""
        settings, began = self.settings, time.perf_counter()
        seed_everything(self.seed)
        gamma = settings.trpo.gamma
        scaled = replace(settings.world, reward_scaling=self.arm == "true")  # else the world around it does that
        inner, policy, make_critic = control_setup(
            without_ends(settings.env), scaled, self.seed, settings.device, gamma
        )
        algorithm, world, first, predictor = TRPO(policy, make_critic(), settings.trpo), inner, 0, ()
        untrained = inner.evaluate(policy, EPISODES, 10_000 + self.seed, greedy=False)["return_mean"]
        if self.arm == "predicted":
            predictor = SegmentReward(inner.obs_dim, inner.action_dim, settings.predictor).to(settings.device)
            first = max(1, round(FIRST_STEPS * self.rollouts))
            schedule = label_schedule(settings.labels, self.rollouts, first)
            world = PredictedRewardWorld(inner, predictor, settings.labeller, schedule, settings.segment_steps, gamma)
            for _ in range(first):
                world.collect(policy)
        unit = self.size / self.rollouts
        advance(first * unit)
        folder = settings.out / self.arm / f"seed-{self.seed}"
        with Tracker(folder, tensorboard=False, quiet=True, on_log=lambda _: advance(unit)) as tracker:
            history = train(world, algorithm, self.rollouts - first, tracker)
        final = inner.evaluate(policy, EPISODES, 10_000 + self.seed, greedy=False)["return_mean"]
        return {"arm": self.arm, "seed": self.seed, "env": settings.env, "env_steps": inner.env_steps,
                "labels": len(predictor), "labels_per_step": len(predictor) / inner.env_steps,
                "return_untrained": untrained, "return_final": final,
                "reward_correlation": history[-1].get("reward_correlation", 1.0),
                "seconds": time.perf_counter() - began}  # fmt: skip


def report(rows, settings):
    """Write results.csv and rlhf_2017.png, and print the table, from the rows of the runs."""
    out = Path(settings.out)
    write_rows(out / "results.csv", rows)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, x, arms in zip(figure.subplots(1, 2), ("env_steps", "labels"), (ARMS, ["predicted"]), strict=True):
        runs = {ARMS[arm]: [read_metrics(out / arm / f"seed-{row['seed']}" / "metrics.csv")
                            for row in rows if row["arm"] == arm] for arm in arms}  # fmt: skip
        draw_curves(axis, {label: found for label, found in runs.items() if found}, x, "episode_return")
        dress(axis, x, "episode_return")
        axis.legend(frameon=False)
    save_figure(figure, out / "rlhf_2017.png")
    say(f"{settings.env}, {rows[0]['env_steps']:,} environment steps a run; the labeller is simulated\n"
        "mean over the seeds +/- half the width of its 95 % t interval")  # fmt: skip
    say(f"{'':<27}runs{'labels':>8}{'of steps':>10}{'untrained':>22}{'final return':>22}")
    for arm, label in ARMS.items():
        if mine := [row for row in rows if row["arm"] == arm]:
            cells = [cell([row[name] for row in mine]) for name in ("return_untrained", "return_final")]
            say(f"{label:<27}{len(mine):>4}{mine[0]['labels']:>8}{mine[0]['labels_per_step']:>10.2%}"
                + "".join(f"{text:>22}" for text in cells))  # fmt: skip
    if shares := recovered(rows):
        say(f"recovered, (J - J_untrained) / (J_true - J_untrained), in %: {cell(shares)}")


def recovered(rows):
    """100 (J − J_untrained) / (J_true − J_untrained) of each seed with both runs: J of one, J_true of the other."""
    found = {(row["arm"], row["seed"]): row for row in rows}
    pairs = [(row, found["true", row["seed"]]) for row in rows
             if row["arm"] == "predicted" and ("true", row["seed"]) in found]  # fmt: skip
    return [100 * (mine["return_final"] - mine["return_untrained"]) / (true["return_final"] - true["return_untrained"])
            for mine, true in pairs]  # fmt: skip
