"""The command compare: several algorithms on one environment, with equal steps and several seeds each.

A run leaves in OUT/ALGORITHM/seed-N what the single commands leave, and last of all summary.json: a folder that has it
is complete. OUT gets a table, summary.csv, and a figure. Runs of different environment ids, Walker2d-v4 and Walker2d-v5
say, never come into one table: their physics and rewards differ.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minirl.algorithms.settings import Count, Settings, Whole
from minirl.checkpoint import replacing
from minirl.experiments.on_policy import ALGORITHMS, Run
from minirl.experiments.parallel import run_jobs
from minirl.experiments.settings import ControlSettings, RunSettings
from minirl.experiments.summary import VERSIONS, report, summarise
from minirl.tracking import machine, say, write_config
from minirl.training import resolve_device


@dataclass(frozen=True)
class Compare(Settings):
    """Train several algorithms on one environment with equal steps, and compare them over seeds."""

    algorithms: tuple[str, ...] = ("trpo", "ppo")
    """Any of those that learn from rollouts of fixed length: trpo, ppo, ppo-kl."""
    env: str = "Walker2d-v5"
    """Gymnasium id; without a version the newest is taken."""
    env_steps: Count = 50_000
    """Steps of every run; rounded up to whole batches of all algorithms, so that each takes the same number."""
    seeds: str = "1-5"
    """A range (1-5), a list (1,3,7), or both (1-3,10)."""
    workers: Whole = 0
    """Runs side by side, each a process with one thread; 0 for one per core."""
    out: Path = Path("runs/compare")
    """Folder for runs, summary.csv, compare.png and config.json; an earlier comparison there is replaced."""
    evaluate_every: Whole = 0
    """Updates between greedy evaluations; 0 for one before and one after training."""
    device: str = "cpu"
    """auto, cpu, cuda or another torch device; networks as small as these are fastest on the CPU."""
    resume: bool = False
    """Keep the complete runs in --out and go on with the others."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Train what is missing, write summary.csv and compare.png, print the table.

        Returns (rows, failed): the dicts of summary.csv, and name of a run -> its error in one line. A setting that
        does not fit raises a ValueError before anything is trained or replaced.
        """
        jobs = self.jobs()
        for job in jobs:
            if self.resume:
                job.check_folder()
            else:
                job.summary.unlink(missing_ok=True)
        write_config(self.out, {"compare": self, "env_id": jobs[0].env_id, "env_steps": jobs[0].size})
        missing = [job for job in jobs if not job.summary.is_file()]
        failed = run_jobs(missing, self.workers, f"{len(missing)} runs", "step", self.quiet)
        rows = report([job.settings.out for job in jobs if job.summary.is_file()], self.out)
        if failed:
            say(f"{len(failed)} of {len(jobs)} runs failed; --resume tries them again")
        return rows, failed

    def jobs(self):
        """The runs, seed by seed."""
        from minirl.worlds.control import make_env  # costs the import of a simulator

        able = [name for name, entry in ALGORITHMS.items() if not entry.control_world.whole_episodes]
        if not self.algorithms or not set(self.algorithms) <= set(able):
            raise ValueError(f"--algorithms is {' '.join(self.algorithms) or 'empty'}; it takes {', '.join(able)}")
        seeds, device = parse_seeds(self.seeds), resolve_device(self.device)
        env = make_env(self.env)
        env.close()
        entries = {name: ALGORITHMS[name] for name in self.algorithms}
        batches = {name: entry.control_world.num_envs * entry.control_world.steps for name, entry in entries.items()}
        unit = math.lcm(*batches.values())
        total = -(-self.env_steps // unit) * unit
        return [
            Job(name, env.spec.id, total, entry.control, entry.control_world, RunSettings(
                self.out / name / f"seed-{seed}", updates=total // batches[name], seed=seed, device=device,
                evaluate_every=self.evaluate_every, resume=self.resume, quiet=True,
            ))
            for seed in seeds for name, entry in entries.items()
        ]  # fmt: skip


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


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a job for run_jobs."""

    algorithm: str
    env_id: str
    size: int
    """Environment steps."""
    config: Any
    world: ControlSettings
    settings: RunSettings

    @property
    def title(self):
        """Its name for people."""
        return f"{self.algorithm} seed {self.settings.seed}"

    @property
    def summary(self):
        """The file that a complete run has."""
        return self.settings.out / "summary.json"

    def check_folder(self):
        """ValueError if the folder holds a run with other settings, or of other versions."""
        path, here = self.settings.out / "config.json", machine()
        if path.is_file():
            wanted = {"task": self.env_id, "updates": self.settings.updates, "config": asdict(self.config),
                      "world": asdict(self.world), **{name: here[name] for name in VERSIONS}}  # fmt: skip
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found["settings"] | found["settings"]["run"] | found["machine"]
            wrong = [name for name, value in json.loads(json.dumps(wanted)).items() if found.get(name) != value]
            if wrong:
                raise ValueError(f"{self.settings.out} holds a run with another {', '.join(wrong)}; "
                                 "give another --out, or leave out --resume to replace it")

    def run(self, advance):
        """Train to the end, and write the row of summary.csv to summary.json."""
        run = Run(self.algorithm, self.env_id, self.config, self.world, self.settings)
        steps = self.size / self.settings.updates
        history = run.start(on_log=lambda row: advance(steps if row["step"] else 0))["history"]
        seconds, here = history[-1]["seconds"], machine()
        row = {"algorithm": self.algorithm, "seed": self.settings.seed, "env_id": run.world.env_id,
               **{name: here[name] for name in VERSIONS}, "env_steps": run.world.env_steps,
               **summarise(run.world.finished), "env_steps_per_second": run.world.env_steps / seconds,
               "seconds": seconds}  # fmt: skip
        with replacing(self.summary) as temporary:
            temporary.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
