"""The files of one complete run of a comparison, as a researcher expects them.

    episodes.csv    a row an episode of training: end_step (environment steps so far), return, length, terminated,
                    truncated, seed; returns raw, of the sampled policy
    updates.csv     a row an update: env_steps and what the algorithm says of it (KL in nats)
    eval.csv        a row an evaluation: env_steps, return_greedy, length_greedy, return_sampled, length_sampled
    timing.csv      a row an update: env_steps, seconds since the start, of these evaluation_seconds
    config.json     settings as resolved        versions.json   commit, packages, processor, threads
    checkpoint      networks, normaliser, and all that a resumed run needs; not part of the archive

Lengths count environment steps. Two runs of one seed give the same bytes, timing.csv and the .json files apart.
"""

import json
from pathlib import Path

import numpy as np

from minirl.checkpoint import replacing
from minirl.tracking import machine, read_rows, write_rows

VERSIONS = ("gymnasium", "mujoco", "torch")
EVALUATION = {"eval_return": "return_greedy", "eval_length": "length_greedy", "eval_return_sampled": "return_sampled",
              "eval_length_sampled": "length_sampled"}  # fmt: skip
TIMING = ("seconds", "evaluation_seconds")


def write_run(folder, facts, history):
    """Write all but episodes.csv, which the run itself keeps, and at last summary.json, which says that it is complete.

    Args:
        folder: of the run.
        facts: dict of what summary.json shall say: algorithm, variant, seed, env_id, env_steps.
        history: the tracker's rows; what they say goes to the three tables, and metrics.csv away.
    """
    folder, here = Path(folder), machine()
    updates, evaluations, timing = [], [], []
    for row in history:
        taken = {"env_steps": row.get("env_steps", 0)}
        if row["step"]:
            updates.append(taken | {
                name: shortened(value) for name, value in row.items()
                if name not in (*TIMING, "env_steps", "step") and not name.startswith("eval_")
            })  # fmt: skip
            timing.append(taken | {name: row.get(name, 0.0) for name in TIMING})
        if "eval_return" in row:
            evaluations.append(taken | {name: shortened(row[key]) for key, name in EVALUATION.items()})
    for name, rows in (("updates", updates), ("eval", evaluations), ("timing", timing)):
        write_rows(folder / f"{name}.csv", rows)
    write_json(folder / "versions.json", here)
    (folder / "metrics.csv").unlink(missing_ok=True)
    write_json(folder / "summary.json", facts | {name: here[name] for name in VERSIONS})


def shortened(value):
    """A number with eight significant digits: more is noise, and a third of the file."""
    return float(f"{value:.8g}") if isinstance(value, float) else value


def write_json(path, record):
    """Write a dict in one step."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_json(path):
    """The dict in a file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def complete_runs(folder):
    """The folders of complete runs in or below a folder, in order of name and seed.

    Raises:
        ValueError: if there is none.
    """
    def order(path):
        name, _, number = path.name.rpartition("-")
        return str(path.parent), name, int(number) if number.isdigit() else 0

    found = sorted((path.parent for path in Path(folder).rglob("summary.json")), key=order)
    if not found:
        raise ValueError(f"there is no complete run of compare in {folder}; python -m minirl compare makes some")
    return found


def read_table(path):
    """A CSV file of numbers as columns: dict name -> float64 array, nan where a cell is empty."""
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}


class RunFiles:
    """One complete run, its tables as columns: `summary`, `episodes`, `updates`, `eval`, `timing`."""

    def __init__(self, folder):
        self.folder, self.summary = Path(folder), read_json(Path(folder) / "summary.json")
        tables = {name: Path(folder) / f"{name}.csv" for name in ("episodes", "updates", "eval", "timing")}
        self.episodes, self.updates, self.eval, self.timing = (
            read_table(path) if path.is_file() else {} for path in tables.values()
        )

    @property
    def label(self):
        """Algorithm, and what was changed."""
        return f"{self.summary['algorithm']} {self.summary.get('variant', '')}".strip()

    def final(self, name="return_greedy", last=5):
        """Mean of the last evaluations after training began, fewer where there are fewer; a column of eval.csv."""
        return float(self.eval[name][self.eval["env_steps"] > 0][-last:].mean())

    def curves(self):
        """Columns for plotting.draw_curves: those of updates.csv, steps_per_second, and seconds."""
        taken, seconds = self.timing["env_steps"], self.timing["seconds"] - self.timing["evaluation_seconds"]
        steps, time = np.diff(taken, prepend=0.0), np.diff(seconds, prepend=0.0)
        rate = np.divide(steps, time, out=np.full_like(steps, np.nan), where=time > 0)
        columns = dict(self.updates)
        if len(rate) == len(columns.get("env_steps", ())):
            columns["steps_per_second"] = rate
        return columns
