"""The runs of a comparison, ours and Stable-Baselines3's: jobs for run_jobs that leave the files of a complete run."""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minirl.experiments.on_policy import Run
from minirl.experiments.run_files import VERSIONS, write_json, write_run
from minirl.experiments.settings import ControlSettings, RunSettings
from minirl.tracking import machine

PEERS = ("sb3-ppo", "sb3-trpo")


@dataclass(frozen=True)
class PeerRun:
    """One run of Stable-Baselines3, by the same measures: a job for run_jobs."""

    algorithm: str
    env_id: str
    size: int
    """Environment steps."""
    out: Path
    seed: int
    eval_every: int
    eval_episodes: int

    @property
    def title(self):
        """Its name for people."""
        return f"{self.algorithm} seed {self.seed}"

    @property
    def summary(self):
        """The file that a complete run has."""
        return self.out / "summary.json"

    def check_folder(self):
        """Nothing: what is complete stays, what is not starts again."""

    def run(self, advance):
        """Train to the end, and leave the files of a complete run."""
        from minirl.experiments.peers import PeerJob

        PeerJob(**vars(self)).run(advance)
        write_json(self.summary, {
            "algorithm": self.algorithm, "variant": "", "seed": self.seed, "env_id": self.env_id,
            "env_steps": self.size, **{name: machine()[name] for name in VERSIONS},
        })  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run of a comparison: a job for run_jobs."""

    algorithm: str
    env_id: str
    size: int
    """Environment steps."""
    config: Any
    world: ControlSettings
    variant: str
    """What --set changed."""
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
            wanted = {"task": self.env_id, "env_steps": self.size, "eval_every": self.settings.eval_every,
                      "config": asdict(self.config), "world": asdict(self.world),
                      **{name: here[name] for name in VERSIONS}}  # fmt: skip
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found["settings"] | found["settings"]["run"] | found["machine"]
            found["world"] = asdict(ControlSettings()) | found["world"]  # what an older run lacks, it had as default
            wanted = json.loads(json.dumps(wanted, default=str))
            wrong = [name for name, value in wanted.items() if found.get(name) != value]
            if wrong:
                raise ValueError(f"{self.settings.out} holds a run with another {', '.join(wrong)}; "
                                 "give another --out, or leave out --resume to replace it")

    def run(self, advance):
        """Train to the end, and leave the files of a complete run."""
        run = Run(self.algorithm, self.env_id, self.config, self.world, self.settings)
        taken, evaluating = [0], {}

        def on_log(row):
            evaluating[row["step"]] = {"evaluation_seconds": round(run.evaluation_seconds, 3)}
            advance(min(run.world.env_steps, self.size) - taken[0])
            taken[0] = min(run.world.env_steps, self.size)

        history = run.start(on_log=on_log)["history"]
        write_run(self.settings.out, {
            "algorithm": self.algorithm, "variant": self.variant, "seed": self.settings.seed,
            "env_id": run.world.env_id, "env_steps": self.size,
        }, [row | evaluating.get(row["step"], {}) for row in history])  # fmt: skip

    def steps_per_second(self, updates=3):
        """Of a short run that leaves nothing: training, and evaluations at the rate of the whole run."""
        with tempfile.TemporaryDirectory() as folder:
            run = Run(self.algorithm, self.env_id, self.config, self.world,
                      replace(self.settings, out=Path(folder), env_steps=None, eval_every=None, updates=updates))
            began = time.perf_counter()
            run.start()
            seconds = time.perf_counter() - began
        evaluations = self.size / self.settings.eval_every if self.settings.eval_every else 2
        each = run.evaluation_seconds / 2  # of a policy that falls soon; a good one takes longer
        training = (seconds - run.evaluation_seconds) / run.world.env_steps
        return self.size / (self.size * training + evaluations * each)
