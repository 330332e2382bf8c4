"""What is archived of three tours, and two_worlds.png.

    python data/tour/figures.py                     draws it anew from the files beside it
    python data/tour/figures.py TOUR0 TOUR1 TOUR2   first takes the files from the folders of three tours, seeds 0, 1, 2
"""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from minirl.plotting import colour_of, dress, read_metrics, save_figure, smooth

HERE, SEEDS = Path(__file__).parent, (0, 1, 2)
KEPT = {  # name -> run of the tour, columns
    "sums": ("ppo", ("step", "eval_accuracy_greedy", "eval_accuracy_sampled")),
    "walker": ("ppo-Walker2d-v5", ("env_steps", "episode_return")),
}


def take(folder, seed):
    """Copy the table, PPO's two curves, and of seed 0 the figure."""
    shutil.copyfile(folder / "results.csv", HERE / f"results-seed-{seed}.csv")
    for name, (run, columns) in KEPT.items():
        with open(folder / run / "metrics.csv", encoding="utf-8") as file:
            rows = [[row[column] for column in columns] for row in csv.DictReader(file) if row[columns[1]]]
        with open(HERE / f"ppo-{name}-seed-{seed}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    if seed == 0:
        shutil.copyfile(folder / "tour.png", HERE / "tour.png")


def draw():
    """PPO in both worlds: a pale line a seed, their mean, the walker's smoothed."""
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    panels = (("sums", "step", "eval_accuracy_greedy", "held-out sums right", "ppo.py on a tiny GPT"),
              ("walker", "env_steps", "episode_return", "return of an episode", "the same ppo.py on a walker"))
    for axis, (name, x, y, label, title) in zip(figure.subplots(1, 2), panels, strict=True):
        curves = [read_metrics(HERE / f"ppo-{name}-seed-{seed}.csv") for seed in SEEDS]
        lines = [smooth(curve[y]) if name == "walker" else curve[y] for curve in curves]
        for line in lines:
            axis.plot(curves[0][x], line, color=colour_of("ppo"), alpha=0.3, linewidth=0.9)
        axis.plot(curves[0][x], np.mean(lines, axis=0), color=colour_of("ppo"), linewidth=2.2)
        dress(axis, x, y, title)
        axis.set_ylabel(label)
        if name == "sums":
            axis.set_ylim(0, 1.02)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    save_figure(figure, HERE / "two_worlds.png")


if __name__ == "__main__":
    for seed, folder in zip(SEEDS, sys.argv[1:], strict=False):
        take(Path(folder), seed)
    draw()
