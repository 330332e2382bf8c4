"""The command compare: several algorithms on one environment, with equal steps and several seeds each.

A run leaves in OUT/ALGORITHM/seed-N what the single commands leave, and last of all summary.json: a folder that has it
is complete. OUT gets a table, summary.csv, and a figure. Runs of different environment ids, Walker2d-v4 and Walker2d-v5
say, never come into one table: their physics and rewards differ.
"""

import json
import math
import multiprocessing
import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from minirl.checkpoint import replacing
from minirl.experiments.on_policy import ALGORITHMS, Run, RunSettings
from minirl.experiments.summary import VERSIONS, report, summarise
from minirl.tracking import console_safe, machine, say, write_config
from minirl.training import resolve_device


@dataclass(frozen=True)
class Compare:
    """Train several algorithms on one environment with equal steps, and compare them over seeds."""

    algorithms: tuple[str, ...] = ("trpo", "ppo")
    """Any of those that learn from rollouts of fixed length: trpo, ppo, ppo-kl."""
    env: str = "Walker2d-v5"
    """Gymnasium id; without a version the newest is taken."""
    env_steps: int = 50_000
    """Steps of every run; rounded up to whole batches of all algorithms, so that each takes the same number."""
    seeds: str = "1-5"
    """A range (1-5), a list (1,3,7), or both (1-3,10)."""
    workers: int = 0
    """Runs side by side, each a process with one thread; 0 for one per core."""
    out: Path = Path("runs/compare")
    """Folder for runs, summary.csv, compare.png and config.json; an earlier comparison there is replaced."""
    evaluate_every: int = 0
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
                check_same_run(job)
            else:
                (job.settings.out / "summary.json").unlink(missing_ok=True)
        write_config(self.out, {"compare": self, "env_id": jobs[0].env_id, "env_steps": jobs[0].env_steps})
        failed = train_all([job for job in jobs if not job.complete], self.workers, self.quiet)
        rows = report([job.settings.out for job in jobs if job.complete], self.out)
        if failed:
            say(f"{len(failed)} of {len(jobs)} runs failed; --resume tries them again")
        return rows, failed

    def jobs(self):
        """The runs, seed by seed."""
        from minirl.worlds.control import make_env  # costs the import of a simulator

        able = [name for name, entry in ALGORITHMS.items() if not entry.control_world.whole_episodes]
        if not self.algorithms or not set(self.algorithms) <= set(able):
            raise ValueError(f"--algorithms is {' '.join(self.algorithms) or 'empty'}; it takes {', '.join(able)}")
        if self.env_steps < 1 or self.workers < 0 or self.evaluate_every < 0:
            raise ValueError("--env-steps must be at least 1; --workers and --evaluate-every at least 0")
        seeds, device = parse_seeds(self.seeds), resolve_device(self.device)
        env = make_env(self.env)
        env.close()
        worlds = {name: ALGORITHMS[name].control_world for name in self.algorithms}
        batches = {name: world.num_envs * world.steps for name, world in worlds.items()}
        unit = math.lcm(*batches.values())
        total = -(-self.env_steps // unit) * unit
        return [
            Job(name, env.spec.id, total, RunSettings(
                self.out / name / f"seed-{seed}", updates=total // batch, seed=seed, device=device,
                evaluate_every=self.evaluate_every, resume=self.resume, quiet=True,
            ))
            for seed in seeds for name, batch in batches.items()
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


class Job(NamedTuple):
    """One run of a comparison."""

    algorithm: str
    env_id: str
    env_steps: int
    settings: RunSettings

    @property
    def complete(self):
        """Whether it came to its end."""
        return (self.settings.out / "summary.json").is_file()


def check_same_run(job):
    """ValueError where the job's folder holds a run with other settings or versions."""
    path, entry, here = job.settings.out / "config.json", ALGORITHMS[job.algorithm], machine()
    if path.is_file():
        wanted = {"task": job.env_id, "updates": job.settings.updates, "config": asdict(entry.control),
                  "world": asdict(entry.control_world), **{name: here[name] for name in VERSIONS}}  # fmt: skip
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found["settings"] | found["settings"]["run"] | found["machine"]
        wrong = [name for name, value in json.loads(json.dumps(wanted)).items() if found.get(name) != value]
        if wrong:
            raise ValueError(f"{job.settings.out} holds a run with another {', '.join(wrong)}; "
                             "give another --out, or leave out --resume to replace it")


_counter = None  # in a worker: steps of all runs so far, shared with the process that draws the bar


def train_one(job):
    """Run to the end, and write summary.json."""
    entry = ALGORITHMS[job.algorithm]
    run = Run(job.algorithm, job.env_id, entry.control, entry.control_world, job.settings)
    world, collect, counted = run.world, run.world.collect, 0

    def collect_and_count(policy, critic):
        nonlocal counted
        batch = collect(policy, critic)
        with _counter.get_lock():
            _counter.value += world.env_steps - counted
        counted = world.env_steps
        return batch

    if _counter is not None:
        world.collect = collect_and_count
    seconds = run.start()["history"][-1]["seconds"]
    row = {"algorithm": job.algorithm, "seed": job.settings.seed, "env_id": world.env_id,
           **{name: version for name, version in machine().items() if name in VERSIONS}, "env_steps": world.env_steps,
           **summarise(world.finished), "env_steps_per_second": world.env_steps / seconds, "seconds": seconds}
    with replacing(job.settings.out / "summary.json") as temporary:
        temporary.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def _start_worker(counter):
    global _counter
    _counter = counter
    torch.set_num_threads(1)


def train_all(jobs, workers, quiet):
    """Train the jobs in processes, under one bar. Returns dict: title of each that failed -> its error in one line."""
    failed, context = {}, multiprocessing.get_context("spawn")
    if not jobs:
        return failed
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(min(workers or os.cpu_count() or 1, len(jobs)), context, _start_worker, (counter,))
    bar = tqdm(total=sum(job.env_steps for job in jobs), desc=f"{len(jobs)} runs", unit=" steps", unit_scale=True,
               disable=quiet, dynamic_ncols=True, ascii=True)  # fmt: skip
    try:
        titles = {pool.submit(train_one, job): f"{job.algorithm} seed {job.settings.seed}" for job in jobs}
        running = set(titles)
        while running:
            done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.update(counter.value - bar.n)
            for future in done:
                if error := future.exception():
                    failed[titles[future]] = " ".join(f"{type(error).__name__}: {error}".split())
                    tqdm.write(console_safe(f"{titles[future]} failed: {failed[titles[future]]}"))
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt nothing new may start
    return failed
