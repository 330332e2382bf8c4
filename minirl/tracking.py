"""What a run leaves behind to be looked at: metrics.csv, TensorBoard scalars, config.json, and a progress bar.

The CSV is the record that plots and tests read. Of its columns only `seconds` measures the machine's speed; without it,
two runs of one seed give the same text. Nothing here touches a random state.
"""

import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
import unicodedata
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

import minirl
from minirl.checkpoint import replacing

ON_THE_BAR = ("accuracy_greedy", "score", "episode_return", "kl_policy_ref", "kl_old_new", "loss")  # the first three
MAY_BE_NAN = ("explained_variance", "episode_return", "episode_length")  # returns that do not vary; no episode ended
PLAIN = str.maketrans({  # what symbols become on a console that lacks them; accents and ligatures need no table
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "eps", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "σ": "sigma", "Σ": "sum", "∇": "grad", "Δ": "Delta", "∞": "inf", "≤": "<=", "≥": ">=", "≠": "!=",
    "≈": "~", "→": "->", "←": "<-", "·": "*", "×": "x", "−": "-", "–": "-", "—": "-", "±": "+/-", "√": "sqrt",
    "‖": "||", "’": "'", "‘": "'", "“": '"', "”": '"',
})
ADVICE = {
    "kl_old_new": "one update moved the policy too far: lower the learning rate or the number of epochs",
    "kl_policy_ref": "the policy ran away from its reference: raise the KL coefficient or lower the learning rate",
    "value_loss": "the critic exploded: lower its learning rate or scale the rewards",
}


class TrainingDiverged(RuntimeError):
    """A metric stopped being a finite number. The message is one line: step, metric, and what to do."""

    def __init__(self, step, metric, advice, value=math.nan):
        super().__init__(step, metric, advice, value)  # the arguments themselves: survives the trip out of a worker
        self.step, self.metric, self.advice, self.value = step, metric, advice, value

    def __str__(self):
        return f"training diverged at step {self.step}: {self.metric} is {self.value}; {self.advice}"


def check_finite(step, metrics, may_be_nan=MAY_BE_NAN):
    """Stop a run that has broken before it trains on for hours.

    Raises TrainingDiverged, naming the first of `metrics` (name -> number or 0-d tensor) that is nan or infinite; those
    in `may_be_nan` may be nan, but not infinite.
    """
    for name, value in zip(metrics, map(float, metrics.values()), strict=True):
        if not math.isfinite(value) and not (math.isnan(value) and name in may_be_nan):
            raise TrainingDiverged(step, name, ADVICE.get(name, "lower the learning rate or clip gradients"), value)


def console_safe(text, stream=None):
    """`text` with each character that `stream` (standard output if None) cannot print replaced by plain ones."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"

    def printable(character):
        try:
            character.encode(encoding)
            return character
        except UnicodeEncodeError:
            plain = unicodedata.normalize("NFKD", character.translate(PLAIN))
            return plain.encode("ascii", "ignore").decode("ascii") or "?"

    return "".join(map(printable, str(text)))


def say(text="", stream=None):
    """Print a line that may hold Unicode, on any console."""
    print(console_safe(text, stream), file=stream)


class Tracker:
    """Writes a run's metrics while it runs: `with Tracker("runs/ppo", total=100) as tracker: tracker.log(1, loss=0.5)`.

    `history` holds all rows so far: dicts with `step`, `seconds` since the run began, and the metrics.

    Args:
        folder: gets metrics.csv and TensorBoard's event files; a fresh run replaces those of an earlier one there.
            None keeps the history in memory only.
        total: the last step, for the bar's time left; None if unknown.
        description: short text in front of the bar.
        unit: what a step is.
        tensorboard: also write TensorBoard scalars, one tag per metric.
        quiet: no bar, and `say` says nothing.
        resume_from_step: the last step of the checkpoint a run goes on from. Later rows, logged between that checkpoint
            and the crash, are dropped, so that no step is missing or there twice. None starts afresh.
        show: names of the metrics to show on the bar; None takes the first three known ones.
        on_log: called with each row after it is written.
    """

    def __init__(self, folder, total=None, description="", unit="update", tensorboard=True, quiet=False,
                 resume_from_step=None, show=None, on_log=None):
        self.history, self.columns, self.show, self.quiet, self.on_log = [], ["step", "seconds"], show, quiet, on_log
        self.path = None if folder is None else Path(folder) / "metrics.csv"
        self._file = self._writer = self._board = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_from_step is None:
                for events in self.path.parent.glob("events.out.tfevents.*"):
                    events.unlink()
            elif self.path.exists():
                self.history = [row for row in read_rows(self.path) if row["step"] <= resume_from_step]
                self.columns = list(dict.fromkeys([*self.columns, *(name for row in self.history for name in row)]))
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # a second to import, and only needed here

                purge = None if resume_from_step is None else resume_from_step + 1
                self._board = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)
        self._rewrite()
        self._last = resume_from_step
        self._start = time.perf_counter() - (self.history[-1]["seconds"] if self.history else 0.0)
        self._bar = tqdm(
            total=total, initial=resume_from_step or 0, desc=console_safe(description, sys.stderr) or None,
            unit=f" {unit}", disable=quiet, mininterval=0.5, dynamic_ncols=True,
            ascii=console_safe("█", sys.stderr) != "█",
        )

    def log(self, step, metrics=None, **more):
        """Record the numbers of one step.

        Args:
            step: int, larger than the step before.
            metrics, more: name -> number or 0-d tensor, as a dict or as keywords.
        Returns:
            The row that was written, a dict.
        Raises:
            ValueError: if the step is not larger than the one before.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}; steps must grow")
        numbers = {name: _number(value) for name, value in {**(metrics or {}), **more}.items()}
        row = {"step": step, "seconds": round(time.perf_counter() - self._start, 3), **numbers}
        self.history.append(row)
        self._last = step
        if new := [name for name in row if name not in self.columns]:
            self.columns += new
            self._rewrite()  # holds `row`, which is in the history by now
        elif self.path is not None:
            self._writer.writerow(row)
            self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if not self.quiet:
            names = self.show if self.show is not None else [name for name in ON_THE_BAR if name in numbers][:3]
            self._bar.set_postfix({name: f"{numbers[name]:.3g}" for name in names if name in numbers}, refresh=False)
            self._bar.update(step - self._bar.n)
        if self.on_log is not None:
            self.on_log(row)
        return row

    def say(self, text):
        """Print a line above the bar."""
        if not self.quiet:
            tqdm.write(console_safe(text))

    def close(self):
        """Finish the bar and close all files; safe to call twice."""
        for opened in (self._bar, self._file, self._board):
            if opened is not None:
                opened.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()

    def _rewrite(self):
        """Write header and history to a new file that replaces the old one, and leave it open for the rows to come."""
        if self.path is None:
            return
        if self._file:
            self._file.close()
        write_rows(self.path, self.history, self.columns)
        self._file = self.path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, self.columns, lineterminator="\n")  # floats by repr: exact


def write_rows(path, rows, columns=None):
    """Write dicts of numbers and texts as a CSV file in one step; columns: None takes the first row's keys."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns or list(rows[0] if rows else []), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _number(value) for name, value in row.items()} for row in rows)


def read_rows(path):
    """Rows of a CSV file of numbers as dicts, without empty cells and without a last line that a crash cut off."""
    def parse(cell):
        return int(cell) if cell.removeprefix("-").isdigit() else float(cell)

    text = Path(path).read_text(encoding="utf-8")
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{name: parse(cell) for name, cell in row.items() if cell} for row in rows]


def _number(value):
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, str) else int(value) if isinstance(value, int) else float(value)


def write_config(folder, settings):
    """Write folder/config.json: `settings` (a dict or dataclass) as resolved, and the `machine` that runs them."""
    record = {"settings": settings, "machine": machine()}
    text = json.dumps(record, indent=2, default=lambda value: asdict(value) if is_dataclass(value) else str(value))
    with replacing(Path(folder) / "config.json") as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def machine():
    """What numbers may depend on besides the settings: versions, processor, threads, commit. A dict of str and int."""
    packages = ("torch", "numpy", "gymnasium", "mujoco", "tiktoken")
    return {
        "minirl": minirl.__version__, "commit": _commit(), "python": platform.python_version(),
        **{name: next((found.version for found in metadata.distributions(name=name)), None) for name in packages},
        "platform": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit():
    root = Path(minirl.__file__).parent.parent
    if not (root / ".git").exists():
        return None  # installed as a package, perhaps inside somebody else's repository
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
