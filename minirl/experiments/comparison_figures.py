"""The figures of a comparison: the five panels of one seed and of all, evaluations, the seed lottery, variants.

Every function takes runs (dict label -> list of RunFiles) and returns a matplotlib Figure.
"""

import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from minirl.experiments.statistics import difference, mean_interval, wrong_winner_share
from minirl.plotting import (
    COMPARE_PANELS,
    RAW,
    colour_of,
    compare_figure,
    draw_curves,
    dress,
    label_ends,
    log_scale,
    smooth,
)  # fmt: skip

POINTS, STUDIES = 200, (1, 3, 5, 10)
LINES = ("-", "--", "-.", ":")  # of the variants of one algorithm, which share its colour


def one_seed(runs, seed):
    """The figure of the original comparison for one seed: raw curves grey, smoothing 0.6 on top, logarithmic axes."""
    chosen = {label: run.curves() for label, mine in runs.items() for run in mine if run.summary["seed"] == seed}
    chosen = {label: columns for label, columns in chosen.items() if set(COMPARE_PANELS) <= set(columns)}
    return compare_figure(chosen) if chosen else None


def grid_of(curves):
    """(x, (runs, POINTS) values): curves with different x on a grid over the range that all of them cover."""
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), POINTS)
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])


def band(axis, label, curves, line="-"):
    """A mean over runs with its 95 % t interval as a band, or two runs as they are; returns the mean's last point."""
    x, values = grid_of(curves)
    intervals = np.array([mean_interval(column) for column in values.T]).T
    axis.plot(x, intervals[0], line, color=colour_of(label), linewidth=2.0, label=label)
    if len(values) > 2:
        axis.fill_between(x, intervals[1], intervals[2], color=colour_of(label), alpha=0.2, linewidth=0)
    else:  # an interval of two runs is thirteen times as wide as they lie apart
        axis.plot(x, values.T, line, color=colour_of(label), linewidth=0.6, alpha=0.6)
    return x[-1], intervals[0][-1]


def lines_of(runs):
    """dict label -> line style, another for each variant of an algorithm."""
    seen, lines = {}, {}
    for label in runs:
        algorithm = label.partition(" ")[0]
        lines[label] = LINES[seen.get(algorithm, 0) % len(LINES)]
        seen[algorithm] = seen.get(algorithm, 0) + 1
    return lines


def kept(columns, x, y, weight=0.6):
    """(x, smoothed y) of the rows that have both."""
    finite = np.isfinite(columns[x]) & np.isfinite(columns[y])
    return columns[x][finite], smooth(columns[y][finite], weight)


def all_seeds(runs):
    """The same five panels over all seeds: smoothed curves, their mean, and its 95 % t interval as a band."""
    figure = Figure(figsize=(1 + 3 * len(COMPARE_PANELS), 3.4), layout="constrained")
    axes = figure.subplots(1, len(COMPARE_PANELS))
    for axis, name in zip(axes, COMPARE_PANELS, strict=True):
        for label, mine in runs.items():
            curves = [kept(run.curves(), "env_steps", name) for run in mine if name in run.curves()]
            curves = [curve for curve in curves if len(curve[0])]
            if curves:
                band(axis, label, curves, lines_of(runs)[label])
        log_scale(axis)
        dress(axis, "env_steps", name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(runs), frameon=False)
    return figure


def evaluations(runs):
    """Return of the mean action and of the sampled policy over the steps, means with bands; final returns as points."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    greedy, sampled, final = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for axis, name, title in ((greedy, "return_greedy", "Evaluation, mean action"),
                              (sampled, "return_sampled", "Evaluation, sampled actions")):  # fmt: skip
        ends = {label: band(axis, label, [(run.eval["env_steps"], run.eval[name]) for run in mine], line)
                for (label, mine), line in zip(runs.items(), lines_of(runs).values(), strict=True)}  # fmt: skip
        dress(axis, "env_steps", "return", title)
        label_ends(axis, ends)
    final_points(final, final_returns(runs))
    dress(final, "return", "", "Final: last five evaluations")
    return figure


def final_returns(runs):
    """dict label -> mean of the last five evaluations with the mean action, a number a run."""
    return {label: [run.final() for run in mine] for label, mine in runs.items()}


def final_points(axis, values):
    """A row a label: its runs as points, the mean with its 95 % t interval above them."""
    for place, (label, mine) in enumerate(values.items()):
        mean, low, high = mean_interval(mine)
        spread = np.linspace(-0.12, 0.12, len(mine)) if len(mine) > 1 else [0.0]
        axis.plot(mine, place - np.array(spread), "o", color=colour_of(label), alpha=0.45, markersize=4)
        axis.errorbar([mean], [place - 0.27], xerr=[[mean - low], [high - mean]], fmt="D", color=colour_of(label),
                      capsize=4, markersize=6)  # fmt: skip
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.6)


def lottery(first, second, names, studies=30, seed=0):
    """What one seed is worth: thirty single-seed differences beside the interval of all, and how often a study errs.

    Args:
        first, second: final returns of the runs of two algorithms.
        names: theirs.
        studies: single-seed differences to draw.
        seed: of the drawing.
    """
    draw, (gap, low, high) = np.random.default_rng(seed), difference(first, second)
    figure = Figure(figsize=(12, 4), layout="constrained")
    single, wrong = figure.subplots(1, 2, width_ratios=(3, 2))
    gaps = np.sort(draw.choice(first, studies) - draw.choice(second, studies))
    colours = [colour_of(names[0] if value > 0 else names[1]) for value in gaps]
    single.bar(np.arange(studies), gaps, color=colours, alpha=0.6)
    single.axhline(0.0, color="#333333", linewidth=0.8)
    single.axhspan(low, high, color="#666666", alpha=0.25)
    single.axhline(gap, color="#333333", linewidth=2)
    dress(single, "study of one seed each, sorted", f"final return, {names[0]} − {names[1]}",
          f"{studies} studies of one seed; band: 95 % interval of all {len(first)} + {len(second)} runs")  # fmt: skip
    shares = [wrong_winner_share(first, second, size, seed=seed) for size in STUDIES]
    wrong.bar([str(size) for size in STUDIES], [100 * share for share in shares], color=RAW)
    for axis in (single, wrong):
        axis.set_axisbelow(True)
    for place, share in enumerate(shares):
        wrong.text(place, 100 * share, f"{share:.0%}", ha="center", va="bottom")
    dress(wrong, "seeds of each algorithm in a study", "studies that name the wrong winner (%)", "The seed lottery")
    wrong.xaxis.set_major_formatter(lambda value, place: str(STUDIES[place]) if place is not None else "")
    wrong.set_ylim(0, 55)
    return figure


def variants(runs):
    """Final returns of every variant: an ablation, or how sensitive an algorithm is to a setting."""
    values = final_returns(runs)
    figure = Figure(figsize=(10, 1 + 0.55 * len(values)), layout="constrained")
    axis = figure.subplots()
    final_points(axis, values)
    dress(axis, "return", "", "Final return (last five evaluations): runs, mean and its 95 % t interval")
    return figure


def published(path, env_name):
    """Returns that others published, a panel of its own: never beside our runs, whose versions and measures differ.

    Args:
        path: data/published/walker2d.csv.
        env_name: what its env_id has to begin with.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["env_id"].startswith(env_name) and row["env_steps"]]
    rows.sort(key=lambda row: float(row["env_steps"]))
    figure = Figure(figsize=(9, 1 + 0.28 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        colour, found = colour_of(row["algorithm"]), float(row["return"])
        axis.plot([found], [place], "o", color=colour)
        if row["spread"]:
            axis.plot([found - float(row["spread"]), found + float(row["spread"])], [place, place], color=colour)
        elif row["low"]:
            axis.plot([float(row["low"]), float(row["high"])], [place, place], color=colour)
    axis.set_yticks(range(len(rows)), [
        f"{row['algorithm']}, {float(row['env_steps']) / 1e6:g}M, {row['env_id'].rpartition('-')[2]}: {row['source']}"
        for row in rows
    ], fontsize=8)  # fmt: skip
    dress(axis, "return", "", "Published by others; lines are whatever each means by its spread")
    return figure


def overlaid(runs, others):
    """Training returns of our runs with runs of others laid over them, dotted."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    ends = draw_curves(axis, {label: [run.curves() for run in mine] for label, mine in runs.items()
                              if "episode_return" in mine[0].curves()}, "env_steps", "episode_return")  # fmt: skip
    for label, columns in others.items():
        x, y = kept(columns, "env_steps", "episode_return", weight=0.95 if len(columns["env_steps"]) > 500 else 0.6)
        axis.plot(x, y, ":", color=colour_of(label), linewidth=2)
        ends[label] = (x[-1], y[-1])
    dress(axis, "env_steps", "episode_return", "Training returns; dotted: runs of others")
    label_ends(axis, ends)
    return figure
