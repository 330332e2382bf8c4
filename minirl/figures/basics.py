"""Pictures of notebooks 01 to 04: trees of completions, next-token distributions, rows of tokens."""

import math

from matplotlib.figure import Figure

from minirl.plotting import COLOURS, colour_of, dress


def completion_tree(before, after, rewards, names):
    """All completions of two tokens as a tree, before and after an update: thick where likely, filled where rewarded.

    Args:
        before, after: (V, V) arrays, probability of first token i and then j.
        rewards: (V, V) array, reward of each completion in [0, 1].
        names: V texts of the tokens.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    size = len(names)
    for axis, table, title in zip(figure.subplots(1, 2), (before, after), ("before", "after"), strict=True):
        axis.axis("off")
        axis.set_title(title, loc="left")
        for i in range(size):
            middle, share = (1.0, size * (i + 0.5)), float(sum(table[i]))
            axis.plot((0, 1), (size * size / 2, middle[1]), color="#777777", linewidth=0.3 + 9 * share, zorder=1)
            axis.text(*middle, names[i], ha="center", va="center", zorder=3, fontsize=11,
                      bbox={"boxstyle": "circle", "facecolor": "white", "edgecolor": "#777777"})  # fmt: skip
            for j in range(size):
                place, share = (2.0, size * i + j + 0.5), float(table[i][j])
                axis.plot((1, 2), (middle[1], place[1]), color="#777777", linewidth=0.3 + 9 * share, zorder=1)
                good = float(rewards[i][j])
                axis.scatter(*place, s=60 + 500 * share, color=COLOURS["reinforce"] if good > 0 else "#DDDDDD",
                             alpha=0.3 + 0.7 * good if good > 0 else 1.0, edgecolor="#555555", zorder=2)  # fmt: skip
                axis.text(2.26, place[1], f"{names[i]} {names[j]}   p = {share:.3f}   R = {good:g}", va="center",
                          fontsize=8)  # fmt: skip
        axis.set(xlim=(-0.1, 3.4), ylim=(0, size * size))
    return figure


def bars_side_by_side(distributions, names, ylabel="probability"):
    """One panel of bars for each distribution.

    Args:
        distributions: dict title -> (V,) array.
        names: V labels of the bars.
        ylabel: of the first panel.
    """
    figure = Figure(figsize=(2.4 * len(distributions), 2.8), layout="constrained")
    axes = figure.subplots(1, len(distributions), squeeze=False, sharey=True)[0]
    for axis, (title, values) in zip(axes, distributions.items(), strict=True):
        axis.bar(range(len(names)), values, color=COLOURS["ppo"])
        dress(axis, "", "", title)
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.xaxis.set_major_formatter(lambda value, _: names[int(value)] if 0 <= int(value) < len(names) else "")
    axes[0].set_ylabel(ylabel)
    return figure


def token_row(tokens, states, mask, rewards, title=""):
    """A row of text as a decision process: cells in order, completion tokens filled, the reward where it lies.

    Args:
        tokens: T texts, the actions in order.
        states: unused tokens before the first action, a list of texts (the prompt).
        mask: T values, 1 where the action counts.
        rewards: T numbers.
        title: of the picture.
    """
    figure = Figure(figsize=(min(10, 1 + 0.8 * (len(tokens) + len(states))), 1.7), layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    axis.set_title(title, loc="left", fontsize=10)
    for place, text in enumerate([*states, *tokens]):
        action = place - len(states)
        counts = action >= 0 and bool(mask[action])
        axis.text(place, 0, text, ha="center", va="center", fontsize=10, bbox={
            "boxstyle": "round,pad=0.35", "facecolor": "#BBDDF2" if counts else "#EEEEEE", "edgecolor": "#555555",
        })  # fmt: skip
        if counts:
            value = float(rewards[action])
            axis.text(place, -0.9, f"{value:+g}" if value and not math.isnan(value) else "0", ha="center", fontsize=9)
    axis.text(-0.9, -0.9, "reward", fontsize=9, ha="right")
    axis.set(xlim=(-1.5, len(states) + len(tokens)), ylim=(-1.3, 0.7))
    return figure


def curves(series, xlabel, ylabel, styles=None, size=(6, 3.2)):
    """Lines with a legend; those whose label begins with an algorithm have its colour.

    Args:
        series: dict label -> (x, y), or just y.
        xlabel, ylabel: with units.
        styles: dict label -> keywords of matplotlib's plot.
        size: inches.
    """
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    for index, (label, line) in enumerate(series.items()):
        x, y = line if isinstance(line, tuple) else (range(len(line)), line)
        style = {"linestyle": ("-", "--", ":", "-.")[index % 4], "color": colour_of(label, spares=None)}
        style |= (styles or {}).get(label, {})
        axis.plot(x, y, label=label, **style)
    dress(axis, "", "")
    axis.set(xlabel=xlabel, ylabel=ylabel)
    if len(series) > 1:
        axis.legend(frameon=False, fontsize=9)
    return figure
