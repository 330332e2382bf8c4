"""The command compare: several algorithms on one environment, with equal steps and several seeds each.

A run leaves in OUT/ALGORITHM/seed-N what is listed in minirl.experiments.run_files, and last of all summary.json: a
folder that has it is complete. `report` draws and judges any such folders; compare ends with it. Networks, evaluation
episodes and, for TRPO and PPO, the advantage estimator are the same for all.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from minirl.algorithms.settings import Count, Settings, Whole
from minirl.experiments.comparison_jobs import PEERS, Job, PeerRun
from minirl.experiments.parallel import run_jobs
from minirl.experiments.presets import PRESETS, apply_changes, changes_of, entry_of
from minirl.experiments.settings import RunSettings
from minirl.experiments.table import ALGORITHMS
from minirl.tracking import say, write_config
from minirl.training import resolve_device


@dataclass(frozen=True)
class Compare(Settings):
    """Train several algorithms on one environment with equal steps, and compare them over seeds."""

    algorithms: tuple[str, ...] = ("trpo", "ppo")
    """Any of trpo, ppo, ppo-kl, reinforce, grpo, rejection-sampling (the last three learn from whole episodes); and
    sb3-ppo, sb3-trpo: Stable-Baselines3's at rl-zoo's settings, which need pip install -e ".[bench]"."""
    preset: Literal["none", "cleanrl-50k", "mujoco-1m"] = "none"
    """cleanrl-50k: Walker2d-v4, 50,000 steps, CleanRL's settings. mujoco-1m: Walker2d-v5, 1,000,000 steps,
    settings from an equal search for both. none: those of the single commands."""
    env: str | None = None
    """Gymnasium id; without a version the newest is taken. None: the preset's, or Walker2d-v5."""
    env_steps: Count | None = None
    """Steps of every run, rounded up to whole batches of all algorithms. None: the preset's, or 50,000."""
    seeds: str = "1-5"
    """A range (1-5), a list (1,3,7), or both (1-3,10)."""
    set: tuple[str, ...] = ()
    """Other settings: ppo.clip=0.1 of one algorithm, num-envs=8 of all that have it; several with blanks between.
    init=RUN starts from the policy of that run, which walks already."""
    eval_every: Whole | None = None
    """Steps between evaluations; 0 for one before and one after training. None: the preset's, or a twentieth of all."""
    eval_episodes: Count = 10
    """Episodes of an evaluation: as many with the mean action, and as many sampled; the same initial states for all."""
    threshold: float | None = None
    """The report times when an evaluation first reaches this return. None: the preset's, or half of the best."""
    workers: Whole = 0
    """Runs side by side, each a process with one thread; 0 for one per core."""
    out: Path = Path("runs/compare")
    """Folder for the runs and the report; an earlier comparison there is replaced, another kind of run is not."""
    backend: Literal["auto", "gymnasium"] = "auto"
    """auto steps Walker2d-v4 and -v5 without gymnasium's overhead, equal to it to the bit; gymnasium never does."""
    compile: bool = False
    """Compile PPO's loss: up to a minute before the first update, then about a quarter less time an update."""
    device: str = "cpu"
    """auto, cpu, cuda or another torch device; networks as small as these are fastest on the CPU."""
    resume: bool = False
    """Keep the complete runs in --out, go on with those that were interrupted, and do what is missing."""
    dry_run: bool = False
    """Only print the runs, and the hours that they would take here."""
    video: bool = False
    """Also write the best walker of each algorithm as ALGORITHM.gif."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Train what is missing, write the report, print the table.

        Returns (rows, failed): the dicts of summary.csv, and name of a run -> its error in one line. A setting that
        does not fit raises a ValueError before anything is trained or replaced.
        """
        from minirl.experiments.comparison_report import report

        jobs = self.jobs()
        if self.dry_run:
            return expect(jobs, self.workers), {}
        check_kind(self.out)
        if not self.resume:
            for summary in self.out.glob("*/seed-*/summary.json"):
                summary.unlink()
        for job in jobs if self.resume else ():
            job.check_folder()
        write_config(self.out, {"compare": self, "env_id": jobs[0].env_id, "env_steps": jobs[0].size})
        missing = [job for job in jobs if not job.summary.is_file()]
        failed = run_jobs(missing, self.workers, "runs", "step", self.quiet)
        rows = report([job.summary.parent for job in jobs if job.summary.is_file()], self.out, self.threshold_or_preset)
        if self.video and rows:
            from minirl.experiments.watch import record_best

            record_best(rows, self.out)
        if failed:
            say(f"{len(failed)} of {len(jobs)} runs failed; --resume tries them again")
        return rows, failed

    @property
    def threshold_or_preset(self):
        """What --threshold means."""
        preset = PRESETS.get(self.preset)
        return self.threshold if self.threshold is not None or preset is None else preset.threshold

    def jobs(self):
        """The runs, seed by seed."""
        from minirl.worlds.control import make_env  # costs the import of a simulator

        unknown = set(self.algorithms) - {*ALGORITHMS, *PEERS}
        if not self.algorithms or unknown:
            named = " ".join(self.algorithms) or "empty"
            raise ValueError(f"--algorithms is {named}; it takes {', '.join([*ALGORITHMS, *PEERS])}")
        seeds, device, preset = parse_seeds(self.seeds), resolve_device(self.device), PRESETS.get(self.preset)
        env_id, wanted, every = (
            given if given is not None else getattr(preset, name, default)
            for name, given, default in (("env", self.env, "Walker2d-v5"), ("env_steps", self.env_steps, 50_000),
                                         ("eval_every", self.eval_every, None))
        )  # fmt: skip
        env = make_env(env_id)
        env.close()
        ours = [name for name in self.algorithms if name not in PEERS]
        entries = apply_changes({name: entry_of(name, preset) for name in ours}, self.set)
        entries = {name: (config, replace(world, backend=self.backend)) for name, (config, world) in entries.items()}
        batches = [world.num_envs * world.steps for _, world in entries.values() if not world.whole_episodes]
        unit = math.lcm(*batches)
        total = -(-wanted // unit) * unit
        every = max(1, total // 20) if every is None else every
        theirs = [
            PeerRun(name, env.spec.id, total, self.out / name / f"seed-{seed}", seed, every, self.eval_episodes)
            for seed in seeds for name in self.algorithms if name in PEERS
        ]  # fmt: skip
        return theirs + [
            Job(name, env.spec.id, total, config, world, changes_of(name, (config, world), self.set), RunSettings(
                self.out / name / f"seed-{seed}", env_steps=total, seed=seed, device=device, evaluate_every=0,
                eval_every=every or None, evaluate_episodes=self.eval_episodes, save_every=200, resume=self.resume,
                compile=self.compile and name == "ppo", quiet=True,
            ))
            for seed in seeds for name, (config, world) in entries.items()
        ]  # fmt: skip


def expect(jobs, workers):
    """Print the runs and the time they would take, from a short run of each algorithm here; returns []."""
    seconds, measured, jobs = 0.0, {}, [job for job in jobs if isinstance(job, Job)]
    for job in jobs:
        if job.algorithm not in measured:
            measured[job.algorithm] = job.steps_per_second()
            say(f"{job.algorithm:<12}{measured[job.algorithm]:>8,.0f} steps/s here, evaluations included")
        seconds += job.size / measured[job.algorithm]
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    minutes = seconds / workers / 60
    length = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes" if minutes >= 2 else "a minute"
    say(f"{len(jobs)} runs of {jobs[0].size:,} steps on {jobs[0].env_id}, {workers} side by side: about {length} "
        "if the cores do not slow each other down")  # fmt: skip
    for job in jobs:
        say(f"  {job.title:<24}{job.summary.parent}")
    return []


def check_kind(folder):
    """ValueError if a folder holds another command's run, which a comparison would spoil."""
    path = folder / "config.json"
    if path.is_file() and "compare" not in json.loads(path.read_text(encoding="utf-8")).get("settings", {}):
        raise ValueError(f"{folder} holds another kind of run; give another --out")


def parse_seeds(text):
    """The seeds that "1-5", "1,3,7" or "1-3,10" names, in that order, each once; otherwise a ValueError of one line."""
    seeds = {}
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"seeds are {text!r}, and {part!r} is neither a number nor a range; write 1-5 or 1,3,7")
        seeds |= dict.fromkeys(range(int(first), int(last) + 1))
    return list(seeds)
