"""Pictures of notebooks 08 and 09: a surrogate and its lower bound along a line, and TRPO's line search."""

import numpy as np
from matplotlib.figure import Figure

from minirl.plotting import COLOURS, dress

INK = "#222222"


def minorise(steps, objective, surrogate, bound, zoom):
    """Objective, surrogate and lower bound along a line that starts at the old policy, at step 0.

    Left the whole line, with the surrogate's maximum and what the objective is there; right the neighbourhood of 0,
    with the bound's maximum and what the objective is there. Both panels cut the bound off where it leaves them.

    Args:
        steps: (N,) along the line; contains 0.
        objective, surrogate, bound: (N,) expected discounted return.
        zoom: half the width of the right panel, in steps.
    """
    steps, objective, surrogate, bound = (np.asarray(values, float) for values in (steps, objective, surrogate, bound))
    figure = Figure(figsize=(10, 3.7), layout="constrained")
    panels = (
        ("the whole line", np.full(len(steps), True), surrogate, "surrogate"),
        ("near the old policy", np.abs(steps) <= zoom, bound, "lower bound"),
    )
    for axis, (title, kept, promise, name) in zip(figure.subplots(1, 2), panels, strict=True):
        lowest, highest = objective[kept].min(), max(objective[kept].max(), promise[kept].max())
        margin = 0.25 * (highest - lowest)
        axis.plot(steps[kept], objective[kept], "-", color=INK, linewidth=2, label="objective")
        axis.plot(steps[kept], surrogate[kept], "--", color=COLOURS["ppo"], label="surrogate")
        axis.plot(steps[kept], bound[kept], ":", color=COLOURS["dpo"], linewidth=2, label="lower bound")
        best = int(np.flatnonzero(kept)[np.argmax(promise[kept])])
        axis.plot(0, objective[np.argmin(np.abs(steps))], "o", color=INK, label="old policy")
        axis.plot(steps[best], promise[best], "^", color=INK, fillstyle="none", label=f"{name}'s maximum")
        axis.plot(steps[best], objective[best], "s", color=INK, fillstyle="none", label="objective there")
        axis.set_ylim(lowest - margin, highest + margin)
        dress(axis, "", "", title)
        axis.set(xlabel="step along the line", ylabel="expected discounted return")
        axis.legend(frameon=False, fontsize=8)
    return figure


def line_search(shares, kls, gains, delta):
    """What a quadratic and a linear model promise along a direction, and what is measured there.

    Left the KL, on logarithmic axes, with the limit δ; right the gain of the surrogate. The first step within the limit
    whose measured gain is positive, as a line search tries them, is marked in both.

    Args:
        shares: (N,) the step as a share of the full one, falling.
        kls: (promised, measured), (N,) each, KL(old‖new) in nats per action.
        gains: (promised, measured), (N,) each, in units of the advantage.
        delta: the limit, nats per action.
    """
    shares, kls, gains = np.asarray(shares, float), np.asarray(kls, float), np.asarray(gains, float)
    fine = np.flatnonzero((kls[1] <= delta) & (gains[1] > 0))
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    for axis, values, title in zip(figure.subplots(1, 2), (kls, gains), ("KL", "gain"), strict=True):
        axis.plot(shares, values[0], "--", color=COLOURS["ppo"], label="promised by the model")
        axis.plot(shares, values[1], "-", color=COLOURS["trpo"], marker="o", markersize=4, label="measured")
        if len(fine):
            axis.plot(shares[fine[0]], values[1][fine[0]], "s", color=INK, fillstyle="none", markersize=11,
                      label="first that is accepted")  # fmt: skip
        dress(axis, "", "", title)
        axis.set_xlabel("share of the full step")
    left, right = figure.axes
    left.axhline(delta, color="#777777", linestyle=":", label="δ")
    left.set(xscale="log", yscale="log", ylabel="KL(old‖new), nats per action")
    left.set_xticks(ticks := [1.0, 0.5, 0.2, 0.1], [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set_ylabel("gain of the surrogate")
    left.legend(frameon=False, fontsize=9)
    return figure
