"""What is archived of three tours, and the two figures.

    python data/tour/figures.py                     draws them anew from the files beside it
    python data/tour/figures.py TOUR0 TOUR1 TOUR2   first takes the files from the folders of three tours, seeds 0, 1, 2
"""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from minirl.experiments.tour import draw
from minirl.plotting import draw_curves, dress, read_metrics, save_figure

HERE, SEEDS, ENV = Path(__file__).parent, (0, 1, 2), "Walker2d-v5"
KEPT = {  # name -> run of the tour, columns
    "sums": ("ppo", ("step", "eval_accuracy_greedy", "eval_accuracy_sampled")),
    "walker": (f"ppo-{ENV}", ("env_steps", "episode_return")),
}
DRAWN = ("step", "env_steps", "eval_accuracy_greedy", "eval_kl_policy_ref", "episode_return")  # in tour.png


def take(folder, seed):
    """Copy the table, PPO's two curves, and of seed 0 the curves of all stages after pretraining."""
    shutil.copyfile(folder / "results.csv", HERE / f"results-seed-{seed}.csv")
    for name, (run, columns) in KEPT.items():
        with open(folder / run / "metrics.csv", encoding="utf-8") as file:
            keep(f"ppo-{name}-seed-{seed}.csv", columns, [row for row in csv.DictReader(file) if row[columns[1]]])
    if seed == 0:
        take_curves(folder)


def take_curves(folder):
    """Copy what tour.png shows: evaluations on sums, returns on the walker."""
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["stage"].startswith(("pretrain", "sft reviews"))]
    keep("curves-seed-0.csv", ("stage", *DRAWN), [row for row in rows if row[DRAWN[2]] or row[DRAWN[4]]])


def keep(name, columns, rows):
    """Write some columns of rows to a file beside this one."""
    with open(HERE / name, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *([row[column] for column in columns] for row in rows)])


def draw_tour():
    """tour.png: every algorithm in both worlds, seed 0."""
    with open(HERE / "curves-seed-0.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curves = {
        stage: {name: np.array([float(row[name] or "nan") for row in rows if row["stage"] == stage]) for name in DRAWN}
        for stage in dict.fromkeys(row["stage"] for row in rows)
    }
    draw(curves, ENV, 0, HERE / "tour.png")


def draw_two_worlds():
    """two_worlds.png: PPO in both worlds over all seeds."""
    figure = Figure(figsize=(9.5, 3.2), layout="constrained")
    panels = (("sums", "step", "eval_accuracy_greedy", "held-out sums right", "ppo.py on a tiny GPT", 0.0),
              ("walker", "env_steps", "episode_return", "return of an episode", "and on a walker", 0.6))
    for axis, (name, x, y, label, title, weight) in zip(figure.subplots(1, 2), panels, strict=True):
        curves = [read_metrics(HERE / f"ppo-{name}-seed-{seed}.csv") for seed in SEEDS]
        draw_curves(axis, {"PPO": curves}, x, y, weight)
        dress(axis, x, y, title)
        axis.set_ylabel(label)
        if name == "sums":
            axis.set_ylim(0, 1.02)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    save_figure(figure, HERE / "two_worlds.png")


if __name__ == "__main__":
    for seed, folder in zip(SEEDS, sys.argv[1:], strict=False):
        take(Path(folder), seed)
    draw_tour()
    draw_two_worlds()
