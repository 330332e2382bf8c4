"""Pictures of notebooks 05 to 10: estimates that scatter, bias and variance, divergences, steps and their regions."""

import numpy as np
from matplotlib.figure import Figure

from minirl.plotting import COLOURS, dress


def clouds(drawn, true, xlabel, bins=60):
    """Histograms of estimates under each other, all on one axis, with the true value and each mean.

    Args:
        drawn: dict label -> (N,) estimates.
        true: what they estimate.
        xlabel: with its unit.
        bins: of each histogram.
    """
    figure = Figure(figsize=(7, 0.85 * len(drawn) + 0.7), layout="constrained")
    axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    arrays = {label: np.asarray(values, dtype=float) for label, values in drawn.items()}
    everything = np.concatenate(list(arrays.values()))
    edges = np.linspace(*np.quantile(everything, (0.002, 0.998)), bins)
    for axis, (label, values) in zip(axes, arrays.items(), strict=True):
        axis.hist(values, edges, color=COLOURS["reinforce"], alpha=0.7)
        axis.axvline(true, color="black", linewidth=1.2)
        axis.axvline(values.mean(), color=COLOURS["dpo"], linewidth=1.6, linestyle="--")
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(f"{label}: deviation {values.std():.3g}", loc="left", fontsize=9)
    axes[-1].set_xlabel(f"{xlabel}; black: true, dashed: mean of the estimates")
    return figure


def bias_and_variance(lams, bias2, variance, xlabel="λ"):
    """Squared bias, variance and their sum against a parameter; the least sum is marked.

    Args:
        lams, bias2, variance: (N,) arrays; squares in the same unit.
        xlabel: of the parameter.
    """
    figure = Figure(figsize=(6, 3.3), layout="constrained")
    axis = figure.subplots()
    total = np.asarray(bias2) + np.asarray(variance)
    axis.plot(lams, bias2, "--", color=COLOURS["dpo"], marker="s", label="bias²")
    axis.plot(lams, variance, ":", color=COLOURS["ppo"], marker="^", label="variance")
    axis.plot(lams, total, "-", color="black", marker="o", label="sum: mean squared error")
    best = int(np.argmin(total))
    axis.annotate(f"least at {xlabel} = {lams[best]:g}", (lams[best], total[best]), xytext=(0, 18),
                  textcoords="offset points", ha="center", fontsize=9, arrowprops={"arrowstyle": "-"})  # fmt: skip
    dress(axis, "", "")
    axis.set(xlabel=xlabel, ylabel="squared reward")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=9)
    return figure


def four_regions(ratio, positive, negative, positive_slope, negative_slope, clip):
    """PPO's objective of one action against its ratio, and its slope, for an advantage of +1 and of −1.

    Args:
        ratio: (N,).
        positive, negative: (N,) the objective for A = +1 and A = −1.
        positive_slope, negative_slope: (N,) their derivatives.
        clip: ε.
    """
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    columns = (("A = +1", positive, positive_slope), ("A = −1", negative, negative_slope))
    for column, (title, value, slope) in enumerate(columns):
        for row, (line, name) in enumerate(((value, "objective"), (slope, "its gradient"))):
            axis = panels[row][column]
            axis.plot(ratio, line, color=COLOURS["ppo"], linewidth=2)
            for edge in (1 - clip, 1 + clip):
                axis.axvline(edge, color="#777777", linestyle=":", linewidth=1)
            dress(axis, "", "", title if row == 0 else "")
            axis.set(ylabel=name, xlabel="ratio π/π_old" if row else "")
    return figure


def contours_with_steps(mean, log_std, kl, steps, level):
    """KL contours around a Gaussian's parameters, and steps of several methods to the same KL.

    Args:
        mean, log_std: (N,) and (M,) grids.
        kl: (M, N) KL(old‖new) in nats.
        steps: dict label -> (mean, log_std) where the step ends; all start at (0, 0).
        level: KL that is drawn strong.
    """
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.contour(mean, log_std, kl, levels=[level / 4, level, 4 * level], colors="#777777", linewidths=(0.8, 2, 0.8))
    for (label, (x, y)), style in zip(steps.items(), ("-", "--", ":"), strict=False):
        axis.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "linestyle": style, "linewidth": 1.8})
        axis.annotate(label, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9)
    dress(axis, "", "")
    axis.set(xlabel="change of the mean", ylabel="change of the log deviation")
    return figure


def histograms(drawn, xlabel, lines=(), bins=60, log=False, share=False):
    """Histograms side by side, one panel each.

    Args:
        drawn: dict label -> (N,) values.
        xlabel: with its unit.
        lines: where dotted lines stand in every panel.
        bins: of each.
        log: counts on a logarithmic axis.
        share: the same bins and axes in all panels.
    """
    figure = Figure(figsize=(2.9 * len(drawn), 2.8), layout="constrained")
    drawn = {label: np.asarray(values, dtype=float) for label, values in drawn.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(drawn.values())), bins) if share else bins
    axes = figure.subplots(1, len(drawn), squeeze=False, sharex=share, sharey=share)[0]
    for axis, (label, values) in zip(axes, drawn.items(), strict=True):
        axis.hist(values, edges, color=COLOURS["ppo"], alpha=0.8, log=log)
        for place in lines:
            axis.axvline(place, color="black", linestyle=":", linewidth=1.2)
        dress(axis, "", "", label)
        axis.set(xlabel=xlabel, ylabel="tokens")
    return figure
