"""From metrics.csv to a figure, and from a function to its source on the page of a notebook.

Figures are built with matplotlib's object interface, never through pyplot's global state: they need no display, work
inside worker processes, and leave a notebook's own settings alone. One colour per algorithm, the same in every figure.
"""

import inspect
import io
import sys
import textwrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, PercentFormatter

from minirl.checkpoint import replacing
from minirl.tracking import read_rows, say

# From the palettes of Okabe and Ito, and of Paul Tol, which colour-blind readers can tell apart. The four of the tour
# also differ in lightness (CIE L* of 71, 58, 46 and 31), so that they survive a grey printer.
COLOURS = {
    "trpo": "#E69F00", "ppo": "#0072B2", "reinforce": "#009E73", "grpo": "#882255", "sft": "#777777", "dpo": "#D55E00",
    "ppo_kl": "#56B4E9", "orpo": "#CC79A7", "reward": "#332288", "rejection": "#999933", "q_sharp": "#000000",
}
SPARES, RAW = ("#44AA99", "#AA4499", "#117733", "#661100"), "#BBBBBB"  # for algorithms of your own; for raw curves
COMPARE_PANELS = ("steps_per_second", "explained_variance", "value_loss", "episode_length", "episode_return")
LABELS = {"step": "updates", "env_steps": "environment steps", "episode_length": "episode length (steps)"}


def colour_of(label, spares=SPARES):
    """The colour of the algorithm that a label begins with ("PPO", "ppo, seed 3", "PPO-KL"); or a spare."""
    plain = label.lower().replace("-", "_").replace(" ", "_")
    known = max((name for name in COLOURS if plain.startswith(name)), key=len, default=None)
    return COLOURS[known] if known else spares and spares[sum(plain.split("_")[0].encode()) % len(spares)]


def read_metrics(path):
    """A metrics.csv as columns: dict name -> float64 array with a value per row, nan where the row has none.

    `steps_per_second` is added where the file has `env_steps` and `seconds`: between a row and the one before.
    """
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}
    if "env_steps" in columns and "seconds" in columns and "steps_per_second" not in columns:
        steps, seconds = (np.diff(columns[name], prepend=0.0) for name in ("env_steps", "seconds"))
        columns["steps_per_second"] = np.divide(steps, seconds, out=np.full_like(steps, np.nan), where=seconds > 0)
    return columns


def smooth(values, weight=0.6):
    """TensorBoard's smoothing: an exponential moving average, freed of its bias towards the start value 0.

        m_t = w m_{t−1} + (1 − w) x_t,   m_0 = 0,   out_t = m_t / (1 − wᵗ),   t counts the finite x

    Args:
        values: sequence of numbers; where one is nan or infinite the output is nan and the average ignores it.
        weight: w in [0, 1); 0 changes nothing.
    Returns:
        float64 array of the same length.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"weight is {weight}; smoothing needs 0 <= weight < 1")
    values = np.asarray(values, dtype=np.float64)
    out, mean, count = np.full_like(values, np.nan), 0.0, 0
    for index in np.flatnonzero(np.isfinite(values)):
        mean, count = weight * mean + (1 - weight) * values[index], count + 1
        out[index] = mean / (1 - weight**count)
    return out


def draw_curves(axis, series, x, y, weight=0.6, raw_colour=None):
    """Draw one metric of several algorithms: measured values pale, smoothed ones bold. The panel's top right says so.

    Args:
        axis: a matplotlib Axes.
        series: dict label -> columns of one run (see `read_metrics`), or a list of runs with different seeds: each of
            these is drawn smoothed and pale, and their mean bold, over the range of x that all of them cover.
        x, y: names of columns.
        weight: of `smooth`; 0 for evaluations, each of which is a mean already.
        raw_colour: of the pale curves; None: the algorithm's own.
    Returns:
        dict label -> (x, y) of its bold curve's last point.
    """
    ends, series = {}, {label: [runs] if isinstance(runs, dict) else list(runs) for label, runs in series.items()}
    one = "pale: measured, bold: smoothed" if weight else ""
    several = "pale: seeds, bold: their mean" + ("; smoothed" if weight else "")
    axis.set_title(several if any(len(runs) > 1 for runs in series.values()) else one, loc="right", fontsize=8)
    for label, runs in series.items():
        colour, curves = colour_of(label), []
        for columns in runs:
            kept = np.isfinite(columns[x]) & np.isfinite(columns[y])
            at, raw = columns[x][kept], columns[y][kept]
            curves.append((at, smooth(raw, weight)))
            pale = raw if len(runs) == 1 else curves[-1][1]
            axis.plot(at, pale, color=raw_colour or colour, alpha=0.7 if raw_colour else 0.3, linewidth=0.9, zorder=1)
        at, mean = curves[0] if len(curves) == 1 else _mean_curve(curves)
        axis.plot(at, mean, color=colour, linewidth=2.0, label=label, zorder=2, solid_capstyle="round")
        if len(at) and np.isfinite(mean[-1]):
            ends[label] = (at[-1], mean[-1])
    return ends


def _mean_curve(curves, points=200):
    """Mean over curves with different x, on a grid over the range that all of them cover."""
    curves = [curve for curve in curves if len(curve[0])] or [(np.full(1, np.nan), np.full(1, np.nan))]
    grid = np.linspace(max(at[0] for at, _ in curves), min(at[-1] for at, _ in curves), points)
    return grid, np.mean([np.interp(grid, at, values) for at, values in curves], axis=0)


def dress(axis, x, y, title=""):
    """The look of every panel: no box, a light grid, the columns' names in words, thousands with a k."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#DDDDDD", linewidth=0.6)
    axis.set(axisbelow=True, xlabel=LABELS.get(x, x.replace("_", " ")), ylabel=LABELS.get(y, y.replace("_", " ")))
    axis.set_title(title, loc="left", fontsize=11)
    axis.xaxis.set_major_formatter(FuncFormatter(_thousands))


def _thousands(value, _position):
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def label_ends(axis, ends, gap=0.065):
    """Write each curve's label right of the axis at the height where the curve ends, spread so that none overlap.

    Args:
        axis: an Axes with everything drawn; its limits stay fixed from here on.
        ends: dict label -> (x, y) in data units, as `draw_curves` returns it.
        gap: least distance of two labels, as a fraction of the axis's height.
    """
    axis.set_ylim(axis.get_ylim())  # matplotlib scales lazily; this settles it
    labels, to_fraction = sorted(ends, key=lambda label: ends[label][1]), axis.transData + axis.transAxes.inverted()
    heights = [float(to_fraction.transform(ends[label])[1]) for label in labels]
    for _ in range(100):  # neighbours that are too close push each other away, half the overlap each
        for low in range(len(heights) - 1):
            push = max(0.0, gap - (heights[low + 1] - heights[low])) / 2
            heights[low], heights[low + 1] = heights[low] - push, min(1.0, heights[low + 1] + push)
    for height, label in zip(heights, labels, strict=True):
        axis.text(1.02, height, label, transform=axis.transAxes, color=colour_of(label), va="center", fontsize=10)


def log_scale(axis):
    """A logarithmic y axis; where a drawn value is 0 or less a symmetric one, linear between -1 and 1."""
    if all((line.get_ydata() > 0).all() for line in axis.lines):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    else:
        axis.set_yscale("symlog", linthresh=1.0)
    axis.yaxis.set_major_formatter(FuncFormatter(_thousands))


def learning_curves(series, x="step", panels=("loss",), path=None, weight=0.6, raw_colour=None, log=False):
    """One panel per metric, side by side, under one legend; returns the Figure.

    Args:
        series, x, weight, raw_colour: as in `draw_curves`.
        panels: names of columns.
        path: also save it there as PNG.
        log: logarithmic y axes, symmetric-logarithmic where a value is 0 or less.
    """
    figure = Figure(figsize=(1 + 3 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, name in zip(axes, panels, strict=True):
        draw_curves(axis, series, x, name, weight, raw_colour)
        if log:
            log_scale(axis)
        dress(axis, x, name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(series), frameon=False)
    return save_figure(figure, path)


def compare_figure(series, path=None, x="env_steps"):
    """Speed, critic and episodes of several algorithms: COMPARE_PANELS, smoothing 0.6, raw values grey, log y axes."""
    return learning_curves(series, x, COMPARE_PANELS, path, weight=0.6, raw_colour=RAW, log=True)


def tour_figure(text, control, path=None, x="step", accuracy="accuracy_greedy", kl="kl_policy_ref", sft_accuracy=None):
    """The package in one picture: the same algorithms learn sums, drift from the SFT model, and learn to walk.

    Args:
        text: dict label -> columns of a run, or a list of runs.
        control: the same; with `env_steps` and `episode_return`.
        path: also save it there as PNG.
        x: text's column for the first panel: "step" or "seconds".
        accuracy, kl: text's columns: share of right answers; nats per answer. Only rows that have both are drawn.
        sft_accuracy: where the text runs started; drawn as a dotted line and as the point at 0 nats.
    """
    figure = Figure(figsize=(14, 4), layout="constrained")
    learning, distance, walking = figure.subplots(1, 3)
    ends = draw_curves(learning, text, x, accuracy, weight=0.0)
    for label, runs in text.items():
        for run in [runs] if isinstance(runs, dict) else runs:
            kept = np.isfinite(run[kl]) & np.isfinite(run[accuracy])
            nats, right, colour = run[kl][kept], run[accuracy][kept], colour_of(label)
            distance.plot(nats, right, color=colour, linewidth=1.2, marker="o", markersize=2.5, alpha=0.7)
            distance.plot(nats[-1:], right[-1:], color=colour, marker="o", markersize=8)
    if sft_accuracy is not None:
        learning.axhline(sft_accuracy, color=COLOURS["sft"], linestyle=":")
        ends["SFT"] = (0.0, sft_accuracy)
        distance.plot([0.0], [sft_accuracy], color=COLOURS["sft"], marker="s", markersize=7)
    dress(learning, x, "held-out sums right", "Sums: learning")
    dress(distance, "KL(policy ‖ SFT model), nats per answer", "held-out sums right", "Sums: distance travelled")
    for axis in (learning, distance):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_ylim(0.0, 1.02)
    label_ends(learning, ends)
    dress(walking, "env_steps", "return in training, actions sampled", "Walker2d: learning")
    label_ends(walking, draw_curves(walking, control, "env_steps", "episode_return"))
    return save_figure(figure, path)


def save_figure(figure, path=None):
    """Save as PNG with 150 dpi, or as SVG where the path says so, in one step; None saves nothing. Returns it."""
    if path is not None:
        with replacing(path) as temporary:
            figure.savefig(temporary, format="svg" if str(path).endswith("svg") else "png", dpi=150)
    return figure


def show(figure, alt=""):
    """Show a figure in a notebook, with a text for those who cannot see it; elsewhere do nothing."""
    if _in_notebook():
        from IPython.display import Image, display

        figure.savefig(png := io.BytesIO(), format="png", dpi=100)
        display(Image(png.getvalue(), alt=alt or None))


def source_of(thing):
    """The source of a function, class or module as it stands in the file, with a comment that says where."""
    lines, first = inspect.getsourcelines(thing)
    module = thing.__name__ if inspect.ismodule(thing) else thing.__module__
    return f"# {module.replace('.', '/')}.py, line {max(first, 1)}\n{textwrap.dedent(''.join(lines))}"


def show_source(*things):
    """Show the source of functions, classes or modules: coloured in a notebook, printed elsewhere."""
    text = "\n\n".join(map(source_of, things))
    if not _in_notebook():
        return say(text)
    from IPython.display import Code, display

    return display(Code(text, language="python"))


def _in_notebook():
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
