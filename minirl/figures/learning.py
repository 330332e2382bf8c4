"""Pictures of notebooks 12 to 18: choices, over-optimisation, frontiers, coloured completions, pinned curves."""

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import binomtest

from minirl.plotting import colour_of, dress


def sigmoid_with_choices(difference, chosen, xlabel, ylabel, bins=9):
    """Share of choices for the first of two, in bins of a score difference, on the logistic curve.

    The bars are Wilson's 95 % intervals, which stay inside 0 to 1 and keep a width where all choices agree.

    Args:
        difference: (N,) score of the first minus score of the second.
        chosen: (N,) bool, the first was preferred.
        xlabel, ylabel: what they are.
        bins: of about equally many pairs.
    """
    difference, chosen = np.asarray(difference, dtype=float), np.asarray(chosen, dtype=float)
    order = np.argsort(difference)
    parts = [part for part in np.array_split(order, bins) if len(part)]
    at = np.array([difference[part].mean() for part in parts])
    share = np.array([chosen[part].mean() for part in parts])
    tests = (binomtest(int(chosen[part].sum()), len(part)) for part in parts)
    low, high = np.transpose([test.proportion_ci(method="wilson") for test in tests])
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axis = figure.subplots()
    grid = np.linspace(difference.min(), difference.max(), 200)
    axis.plot(grid, 1 / (1 + np.exp(-grid)), color="black", linewidth=1, label="σ(Δs)")
    axis.errorbar(at, share, (share - low, high - share), fmt="o", color=colour_of("reward"),
                  label=f"choices, {bins} bins, 95 % intervals")  # fmt: skip
    dress(axis, "", "")
    axis.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.03))
    axis.legend(frameon=False, fontsize=9)
    return figure


def over_optimisation(runs, best_of_n=None):
    """Learned and true score against the KL travelled, side by side.

    Args:
        runs: dict label -> (kl in nats, learned score, true score), arrays in order of training.
        best_of_n: the same three arrays for best of n, drawn as squares.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True)
    styles = ("-", "--", ":", "-.")
    for index, (label, (kl, learned, true)) in enumerate(runs.items()):
        for axis, values in zip(axes, (learned, true), strict=True):
            axis.plot(kl, values, styles[index % 4], color=colour_of(label) if index == 0 else f"C{index}", label=label,
                      marker=".")  # fmt: skip
    if best_of_n is not None:
        for axis, values in zip(axes, best_of_n[1:], strict=True):
            axis.plot(best_of_n[0], values, "s", color="black", markersize=4, label="best of n")
    for axis, title in zip(axes, ("learned score", "true score"), strict=True):
        dress(axis, "", "", title)
        axis.set(xlabel="KL(policy‖SFT), nats per completion", ylabel=title)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def frontier(points):
    """Share of wins against the SFT model and the KL it cost, a point for each method and seed.

    Args:
        points: dict method -> list of (kl in nats, share of wins).
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for index, (name, places) in enumerate(points.items()):
        kl, wins = zip(*places, strict=True)
        axis.plot(kl, wins, "os^Dv<>PX*"[index % 10], color=colour_of(name), label=name, markersize=6, alpha=0.85)
    dress(axis, "", "")
    axis.set_xscale("log")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}")
    axis.set(xlabel="KL(policy‖SFT), nats per completion", ylabel="share of wins against SFT")
    axis.axhline(0.5, color="#777777", linestyle=":")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def coloured_tokens(rows, tokens):
    """A completion under several algorithms, its tokens coloured by their advantage: blue up, red down.

    Args:
        rows: dict label -> (T,) advantages; each row has its own scale, its largest absolute value.
        tokens: T texts.
    """
    figure = Figure(figsize=(min(10, 2.5 + 0.75 * len(tokens)), 0.5 + 0.55 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    for line, (label, values) in enumerate(rows.items()):
        largest = max(1e-12, float(np.abs(np.asarray(values, dtype=float)).max()))
        axis.text(-0.7, -line, label, ha="right", va="center", fontsize=9)
        for place, (text, value) in enumerate(zip(tokens, values, strict=True)):
            strength = float(value) / largest
            shade = (1 - 0.75 * max(strength, 0), 1 - 0.4 * abs(strength), 1 - 0.75 * max(-strength, 0))
            axis.text(place, -line, f"{text}\n{float(value):+.2f}", ha="center", va="center", fontsize=8,
                      bbox={"boxstyle": "round,pad=0.25", "facecolor": shade, "edgecolor": "#999999"})  # fmt: skip
    axis.set(xlim=(-3, len(tokens)), ylim=(-len(rows) + 0.4, 0.6))
    return figure


def pinned_curve(steps, values, pins, ylabel):
    """A curve with numbered points, and what was written there in lines below it.

    Args:
        steps, values: (N,) arrays.
        pins: list of (step, text).
        ylabel: of the values.
    """
    figure = Figure(figsize=(9, 3.4 + 0.3 * len(pins)), layout="constrained")
    axis, below = figure.subplots(2, height_ratios=(3.4, 0.3 * len(pins)))
    axis.plot(steps, values, color=colour_of("grpo"), linewidth=2)
    below.set_axis_off()
    for number, (step, text) in enumerate(pins, 1):
        height = values[int(np.argmin(np.abs(np.asarray(steps) - step)))]
        axis.plot([step], [height], "o", color="white", markeredgecolor="black", markersize=13, clip_on=False)
        axis.text(step, height, str(number), ha="center", va="center", fontsize=8)
        below.text(0, 1 - (number - 0.5) / len(pins), f"{number}   update {step}:  {text}", va="center", fontsize=9)
    dress(axis, "", "")
    axis.set(xlabel="updates", ylabel=ylabel)
    return figure
