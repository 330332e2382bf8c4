"""What the pictures of notebooks 05 to 10 draw is what they were given."""

import numpy as np
import pytest

from minirl.figures.gradients import bias_and_variance, clouds, contours_with_steps, four_regions, histograms


def test_clouds_mark_the_truth_and_each_mean():
    drawn = {"one": np.array([0.0, 1.0, 2.0]), "two": np.array([3.0, 5.0])}
    axes = clouds(drawn, 1.5, "unit").axes
    assert [[line.get_xdata()[0] for line in axis.lines] for axis in axes] == [[1.5, 1.0], [1.5, 4.0]]
    assert "deviation 0.816" in axes[0].get_title(loc="left")  # of 0, 1, 2: sqrt(2/3)


def test_bias_and_variance_adds_up_and_names_the_least():
    axis = bias_and_variance([0.0, 0.5, 1.0], [4.0, 1.0, 0.0], [0.0, 1.0, 5.0]).axes[0]
    assert axis.lines[2].get_ydata().tolist() == [4.0, 2.0, 5.0]
    assert "least at λ = 0.5" in axis.texts[0].get_text()


def test_four_regions_puts_values_above_slopes():
    ratio, lines = np.array([0.5, 1.0]), [np.array([k, k + 1.0]) for k in range(4)]
    axes = four_regions(ratio, *lines, clip=0.2).axes
    assert [axis.lines[0].get_ydata().tolist() for axis in axes] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert [line.get_xdata()[0] for line in axes[0].lines[1:]] == [0.8, 1.2]


def test_steps_end_where_they_were_said_to():
    kl = np.add.outer(np.linspace(0, 1, 4), np.linspace(0, 1, 5))
    figure = contours_with_steps(np.linspace(0, 1, 5), np.linspace(0, 1, 4), kl, {"here": (0.25, 0.5)}, 0.5)
    assert any(text.xy == (0.25, 0.5) and text.get_text() == "here" for text in figure.axes[0].texts)


@pytest.mark.parametrize("log", [False, True])
def test_histograms_count_every_value(log):
    axes = histograms({"a": [1.0, 1.0, 2.0], "b": [0.0]}, "x", bins=2, log=log).axes
    assert [sum(bar.get_height() for bar in axis.patches) for axis in axes] == [3, 1]
