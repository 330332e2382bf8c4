"""Figures of the notebooks 11 (Walker2d), 14 (RLHF as in 2017) and 21 (reading a run): arrays in, a Figure out."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minirl.plotting import SPARES, colour_of, dress, log_scale

HEALTHY, SICK, INK, RIGHT, LEFT = "#888888", "#B2182B", "#333333", SPARES[2], SPARES[1]
WORDS = {
    "score": "score (reward)", "truth": "truth", "response_length": "length (tokens)",
    "ended_fraction": "share that ends", "kl_policy_ref": "KL(policy‖start), nats", "kl_old_new": "KL(old‖new), nats",
    "entropy": "entropy (nats)", "grad_norm": "gradient norm", "clip_fraction": "clip fraction",
    "ratio_max": "largest ratio", "explained_variance": "explained variance", "value_loss": "value loss",
    "group_deviation": "deviation in a group", "dead_group_fraction": "dead groups (share)",
}  # fmt: skip
LOGARITHMIC = ("kl_old_new", "ratio_max", "value_loss")
SHARES = ("ended_fraction", "dead_group_fraction")


def vital_signs(runs, panels, title="", columns=4):
    """One small panel per metric: the first run strong, the others grey and dashed.

    Args:
        runs: dict label -> dict metric -> array (updates,); each has `step`. The first is the patient.
        panels: names of metrics, at most 8; one that a run lacks, or has only nan of, is left out for this run.
        title: above all panels.
        columns: panels in a row.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8, 1.6 * rows + 0.6 * (rows == 1)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for place, (axis, name) in enumerate(zip(axes, panels, strict=False)):
        for number, (label, run) in enumerate(runs.items()):
            if name not in run or not np.isfinite(run[name]).any():
                continue
            colour, style, width = (HEALTHY, "--", 1.2) if number else (SICK, "-", 1.8)
            axis.plot(run["step"], run[name], style, color=colour, linewidth=width, label=label, antialiased=not number)
        dress(axis, "step", "")
        if name in LOGARITHMIC and all((line.get_ydata() > 0).all() for line in axis.lines):
            log_scale(axis)
        elif name == "explained_variance":
            axis.set_ylim(*_robust(axis))
        elif name in SHARES:
            axis.set_ylim(-0.04, 1.04)
        if axis.get_yscale() == "linear":
            axis.yaxis.set_major_locator(MaxNLocator(3))
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_title(WORDS.get(name, name), loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("updates" if place >= columns * (rows - 1) else "", fontsize=8)
        axis.set_ylabel("")
    for axis in axes[len(panels):]:
        axis.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def _robust(axis):
    """Limits of y that hold all but the wildest values."""
    values = np.concatenate([line.get_ydata() for line in axis.lines] or [np.zeros(1)])
    low, high = np.nanpercentile(values, [4, 100])
    margin = 0.08 * max(high - low, 1e-9)
    return low - margin, high + margin


def alarm_table(first, alarms, runs):
    """When which alarm first rings in which run.

    Args:
        first: (runs, alarms) array, number of the update; nan where it never rings.
        alarms, runs: names of the columns and of the rows.
    """
    first = np.asarray(first, dtype=np.float64)
    figure = Figure(figsize=(10, 0.6 + 0.38 * len(runs)), layout="constrained")
    axis = figure.subplots()
    axis.pcolormesh(np.isfinite(first) * 1.0, cmap="Greys", vmin=0, vmax=3, edgecolors="white", linewidth=2)
    for row, column in np.argwhere(np.isfinite(first)):
        earliest = first[row, column] == np.nanmin(first[row])
        axis.text(column + 0.5, row + 0.5, f"{first[row, column]:.0f}", ha="center", va="center", fontsize=9,
                  color=SICK if earliest else INK, fontweight="bold" if earliest else "normal")  # fmt: skip
    axis.set_xticks(np.arange(len(alarms)) + 0.5, [name.replace("_", " ") for name in alarms], fontsize=8)
    axis.set_yticks(np.arange(len(runs)) + 0.5, runs, fontsize=9)
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)
    axis.set_title("first update at which an alarm rings (red: the first sign of the run)", loc="left", fontsize=10)
    return figure


def predicted_against_true(true, predicted, title=""):
    """Scatter of a predicted reward over the true one, with the best straight line.

    Args:
        true, predicted: (N,) rewards of the same steps, in their own units.
        title: of the panel.
    """
    true, predicted = np.asarray(true), np.asarray(predicted)
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(true, predicted, ".", color=colour_of("reward"), alpha=0.25, markersize=3)
    slope, shift = np.polyfit(true, predicted, 1)
    ends = np.array([true.min(), true.max()])
    axis.plot(ends, slope * ends + shift, "--", color=INK, linewidth=1.4)
    dress(axis, "true reward of a step", "predicted reward of a step", title)
    return figure


def reward_maps(angle, speed, maps):
    """Rewards over the states of a pendulum, a panel each, with a colour scale each: their units differ.

    Args:
        angle: (A,) rad, 0 upright.
        speed: (S,) rad/s.
        maps: dict title -> (S, A) rewards.
    """
    figure = Figure(figsize=(3.4 * len(maps), 3.0), layout="constrained")
    for axis, (title, values) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        shown = axis.contourf(angle, speed, values, levels=12, cmap="cividis")
        figure.colorbar(shown, ax=axis, shrink=0.85)
        dress(axis, "angle (rad, 0 is upright)", "angular speed (rad/s)", title)
        axis.grid(False)
    return figure


def film_strip(frames, title=""):
    """Stick figures of a walker, one after the other, as in a chronophotograph.

    Args:
        frames: list of (7, 2, 2) arrays: ends (x, z), metres, of the torso, the right leg (3), the left leg (3).
        title: above the strip.
    """
    figure = Figure(figsize=(10, 1.8), layout="constrained")
    axis = figure.subplots()
    for place, limbs in enumerate(frames):
        shade = 0.25 + 0.75 * (place + 1) / len(frames)
        for number, limb in enumerate(limbs):
            colour = INK if number == 0 else RIGHT if number <= 3 else LEFT
            axis.plot(limb[:, 0], limb[:, 1], color=colour, linewidth=2.2, alpha=shade, solid_capstyle="round")
    axis.axhline(0.0, color=HEALTHY, linewidth=1)
    axis.set_aspect("equal")
    dress(axis, "", "height (metres)", title)
    axis.set_xlabel("time, figures set side by side")
    axis.set_xticks([])
    axis.grid(False)
    return figure


def intervals(estimates, truth, title=""):
    """Many intervals over one truth: those that miss it red and dashed.

    Args:
        estimates: (studies, 3) mean, low, high, in units of the measured quantity.
        truth: the value that each interval should hold.
        title: of the panel.
    """
    estimates = np.asarray(estimates, dtype=np.float64)
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axis = figure.subplots()
    for place, (mean, low, high) in enumerate(estimates):
        missed = not low <= truth <= high
        line, point, colour = ("--", "x", SICK) if missed else ("-", "o", HEALTHY)
        axis.plot([place, place], [low, high], line, color=colour, linewidth=1.8)
        axis.plot([place], [mean], point, color=SICK if missed else INK, markersize=4)
    axis.axhline(truth, color=INK, linewidth=1)
    dress(axis, "study", "return", title)
    return figure


def learning_and_labels(arms, untrained):
    """Final returns of the arms of an experiment, a point a seed, joined where the seed is the same.

    Args:
        arms: dict label -> (seeds,) returns.
        untrained: (seeds,) returns before training.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    stages = {"untrained": np.asarray(untrained)} | {label: np.asarray(values) for label, values in arms.items()}
    table = np.stack(list(stages.values()))  # (stages, seeds)
    markers = "osD^v"
    for seed in range(table.shape[1]):
        axis.plot(range(len(stages)), table[:, seed], ":", color=HEALTHY, linewidth=1)
        axis.plot(range(len(stages)), table[:, seed], markers[seed % len(markers)], color=colour_of("trpo"))
    dress(axis, "", "return of an episode")
    axis.set_xticks(range(len(stages)), list(stages))
    return figure
