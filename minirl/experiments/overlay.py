"""Other programs' runs laid over ours: what Stable-Baselines3 and CleanRL write, as columns that draw_curves takes.

    runs, env_id = read_runs(["runs/ppo-Walker2d-v5", "Walker2d-v5__ppo_continuous_action__1__1700000000"])

Names are the same for all (env_steps, episode_return, ...), meanings nearly: a row is an episode of SB3, a number that
was logged of CleanRL, an update of ours. CleanRL's steps per second are the mean since the run began, and its value
loss is the last mini-batch's; ours are an update's. Returns are raw everywhere.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minirl.experiments.run_files import RunFiles
from minirl.plotting import read_metrics

MONITOR = "*monitor.csv"               # SB3: monitor.csv, or 0.monitor.csv, 1.monitor.csv, ... of several environments
EVENTS = "events.out.tfevents.*"       # TensorBoard
TAGS = {
    "charts/episodic_return": "episode_return", "charts/episodic_length": "episode_length",
    "charts/SPS": "steps_per_second", "losses/explained_variance": "explained_variance",
    "losses/value_loss": "value_loss",
}  # fmt: skip


class OtherRun(NamedTuple):
    """A run of any program."""

    label: str
    """Program and folder, or what the files call the run."""
    columns: dict
    """Name -> float64 array, nan where a row has no such number; sorted by `env_steps`."""
    env_id: str | None
    """Gymnasium id, None where the files do not tell."""


def overlays(paths, env_id):
    """label -> columns of runs of others; ValueError where one is known to be of another environment id."""
    others = {}
    for path in paths:
        label, columns_, found = read_run(path)
        if found not in (None, env_id):
            raise ValueError(f"{path} is a run on {found}, these are on {env_id}; they cannot share a figure")
        others[label] = columns_
    return others


def read_run(path):
    """A run of minirl, SB3 or CleanRL, recognised by the files that lie in its folder.

    Args:
        path: the folder, or a file in it.
    Returns:
        OtherRun.
    Raises:
        ValueError: one line, if nothing known lies there or a file is damaged.
    """
    folder = Path(path).parent if Path(path).is_file() else Path(path)
    if (folder / "metrics.csv").is_file() or (folder / "summary.json").is_file():
        return read_minirl(folder)
    if list(folder.glob(MONITOR)):
        return read_sb3(folder)
    if list(folder.glob(EVENTS)):
        return read_cleanrl(folder)
    raise ValueError(f"{folder} holds no run: no metrics.csv (minirl), no {MONITOR} (SB3), no {EVENTS} (CleanRL)")


def read_runs(paths, env_id=None):
    """Several runs of one environment id; Walker2d-v4 and Walker2d-v5, say, differ in physics and rewards.

    Args:
        paths: folders.
        env_id: the id that they must have. A run that does not tell is taken at this word, and refused without it.
    Returns:
        (list of columns, env_id).
    Raises:
        ValueError: as read_run, or naming the ids that differ.
    """
    runs = {path: read_run(path) for path in paths}
    if silent := [path for path, run in runs.items() if run.env_id is None and env_id is None]:
        raise ValueError(f"{silent[0]} does not say which environment it ran in; pass env_id")
    found = sorted({run.env_id or env_id for run in runs.values()} | ({env_id} if env_id else set()))
    if len(found) > 1:
        raise ValueError(f"runs in different environments cannot share a figure: {', '.join(found)}")
    return [run.columns for run in runs.values()], found[0] if found else None


def read_minirl(folder):
    """A run of ours: all columns that it has a row an update for; the id is config.json's task."""
    folder, settings = Path(folder), {}
    complete = (folder / "summary.json").is_file()
    columns = RunFiles(folder).curves() if complete else read_metrics(folder / "metrics.csv")
    if "env_steps" not in columns:
        raise ValueError(f"{folder} is a run without env_steps, so not of an environment")
    if (folder / "config.json").is_file():
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["settings"]
    return OtherRun(f"{settings.get('algorithm', 'minirl')} {folder.resolve().name}", columns, settings.get("task"))


def read_sb3(folder):
    """Episodes from one or more files of SB3's Monitor, in the order in which they ended.

    A file's first line is `#` and JSON (t_start, env_id), then come a header and rows r, l, t: return, length, and the
    second, since t_start, at which the episode ended.
    """
    episodes, ids = [], set()
    for path in sorted(Path(folder).glob(MONITOR)):
        text = path.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # without a last line that a crash cut off
        try:
            start = json.loads(lines[0].removeprefix("#"))
            place = [lines[1].split(",").index(name) for name in ("t", "l", "r")]
            rows = [[float(line.split(",")[index]) for index in place] for line in lines[2:] if line]
            episodes += [(start["t_start"] + seconds, length, total) for seconds, length, total in rows]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a monitor.csv of Stable-Baselines3 ({error})") from None
        ids.add(start.get("env_id"))
    ids -= {None, "None"}
    if len(ids) > 1:
        raise ValueError(f"{folder} holds monitors of different environments: {', '.join(sorted(ids))}")
    if not episodes:
        raise ValueError(f"{folder} holds monitors without a finished episode")
    ended, lengths, returns = np.array(sorted(episodes, key=lambda episode: episode[0])).T
    speed = np.full_like(ended, np.nan)
    np.divide(lengths[1:], np.diff(ended), out=speed[1:], where=np.diff(ended) > 0)
    columns = {"env_steps": lengths.cumsum(), "episode_return": returns, "episode_length": lengths,
               "steps_per_second": speed}  # fmt: skip
    return OtherRun(f"SB3 {Path(folder).resolve().name}", columns, ids.pop() if ids else None)


def read_cleanrl(folder):
    """Scalars from CleanRL's TensorBoard files; the id from its table of hyperparameters, or the folder's name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # a second to import

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})  # 0: all, not a sample
    events.Reload()
    known, tags = events.Tags(), list(TAGS)
    rows = [(event.step, tags.index(tag), event.value) for tag in tags if tag in known["scalars"]
            for event in events.Scalars(tag)]  # fmt: skip
    if not rows:
        raise ValueError(f"{folder} holds TensorBoard files without {', '.join(TAGS)}; CleanRL writes these")
    steps, kinds, values = np.array(sorted(rows, key=lambda row: row[0])).T
    columns = {"env_steps": steps}
    for number, name in enumerate(TAGS.values()):
        columns[name] = np.where(kinds == number, values, np.nan)
    name, table = Path(folder).resolve().name, {}
    if "hyperparameters/text_summary" in known["tensors"]:
        text = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode("utf-8")
        table = dict(line.strip("|").split("|", 1) for line in text.splitlines() if line.count("|") == 3)
    label = f"{table['exp_name']} seed {table['seed']}" if {"exp_name", "seed"} <= set(table) else name
    return OtherRun(f"CleanRL {label}", columns, table.get("env_id", name.split("__")[0] if "__" in name else None))
