"""What a comparison found: statistics of each run, their table over seeds, and the figure.

A complete run has a summary.json; `report` puts any number of them together. It refuses runs of different environment
ids: Walker2d-v4 and Walker2d-v5, say, differ in physics and rewards.
"""

import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy import stats

from minirl.plotting import compare_figure, read_metrics, save_figure
from minirl.tracking import say, write_rows

VERSIONS = ("gymnasium", "mujoco", "torch")
HEADINGS = {  # columns of summary.csv that are averaged over seeds -> their heading in the printed table
    "mean_return_all_episodes": "mean return", "mean_return_last_20": "last 20", "max_return": "best return",
    "mean_length": "mean length", "max_length": "longest", "env_steps_per_second": "steps/s",
}  # fmt: skip


def summarise(episodes):
    """Statistics of a run's training episodes, dicts with raw `return` and `length`; nan where there are none."""
    returns, lengths = ([row[name] for row in episodes] or [math.nan] for name in ("return", "length"))
    return {
        "episodes": len(episodes), "mean_return_all_episodes": statistics.fmean(returns), "max_return": max(returns),
        "mean_return_last_20": statistics.fmean(returns[-20:]), "mean_length": statistics.fmean(lengths),
        "max_length": max(lengths),
    }  # fmt: skip


def report(folders, out):
    """Write OUT/summary.csv and OUT/compare.png and print the table, from the folders of any complete runs.

    Returns the rows of summary.csv, a list of dicts. Raises a ValueError, with nothing written, where environment ids
    or numbers of steps differ.
    """
    rows = [json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8")) for folder in folders]
    for name in ("env_id", "env_steps"):
        if len(found := sorted({row[name] for row in rows})) > 1:
            raise ValueError(f"runs with different {name} cannot be compared: {', '.join(map(str, found))}")
    write_rows(Path(out) / "summary.csv", rows)
    if not rows:
        return rows
    series = {}
    for row, folder in zip(rows, folders, strict=True):
        series.setdefault(row["algorithm"], []).append(read_metrics(Path(folder) / "metrics.csv"))
    used = ", ".join(f"{name} {'/'.join(sorted({str(row[name]) for row in rows}))}" for name in VERSIONS)
    title = f"{rows[0]['env_id']}, {rows[0]['env_steps']:,} environment steps a run ({used})"
    figure = compare_figure(series)
    figure.supxlabel(title, fontsize=9)
    save_figure(figure, Path(out) / "compare.png")
    say(f"{title}\nmean over the seeds +/- half the width of its 95 % t interval")
    say("algorithm  runs" + "".join(f"{heading:>18}" for heading in HEADINGS.values()))
    for algorithm in series:
        mine = [row for row in rows if row["algorithm"] == algorithm]
        cells = [mean_and_interval([row[name] for row in mine]) for name in HEADINGS]
        say(f"{algorithm:<11}{len(mine):>4}" + "".join(f"{cell:>18}" for cell in cells))
    return rows


def mean_and_interval(values):
    """Text: the mean of independent values, and from two on half the width of its 95 % t interval."""
    mean, freedom = np.mean(values), len(values) - 1
    if not freedom:
        return f"{mean:,.1f}"
    half = stats.t.ppf(0.975, freedom) * stats.sem(values)
    return f"{mean:,.1f} +/- {half:,.1f}"
