"""What the pictures of notebooks 12 to 18 draw is what they were given."""

import numpy as np

from minirl.figures.learning import coloured_tokens, frontier, over_optimisation, pinned_curve, sigmoid_with_choices


def test_choices_are_averaged_in_bins_of_equal_size():
    difference, chosen = np.array([-1.0, -3.0, 2.0, 4.0]), np.array([True, False, True, True])
    axis = sigmoid_with_choices(difference, chosen, "x", "y", bins=2).axes[0]
    points = axis.containers[0].lines[0]
    assert points.get_xdata().tolist() == [-2.0, 3.0] and points.get_ydata().tolist() == [0.5, 1.0]
    curve = axis.lines[0]
    assert np.allclose(curve.get_ydata(), 1 / (1 + np.exp(-curve.get_xdata())))


def test_the_bars_of_choices_are_wilsons_intervals():
    # 0 of 10, 5 of 10, 10 of 10: high = (z²/n)/(1 + z²/n) = 0.277533, 1/2 ± 0.263407, and the mirror image of the first
    chosen = np.repeat([False, True], 15)
    axis = sigmoid_with_choices(np.arange(30.0), chosen, "x", "y", bins=3).axes[0]
    bars = [segment[:, 1] for segment in axis.containers[0].lines[2][0].get_segments()]
    assert np.allclose(bars, [[0, 0.277533], [0.236593, 0.763407], [0.722467, 1]], atol=1e-6)


def test_learned_and_true_scores_stand_side_by_side():
    learned, true = over_optimisation({"PPO": ([0, 1], [0.0, 2.0], [0.0, -1.0])}, ([0.5], [1.0], [0.7])).axes
    assert [list(line.get_ydata()) for line in learned.lines] == [[0.0, 2.0], [1.0]]
    assert [list(line.get_ydata()) for line in true.lines] == [[0.0, -1.0], [0.7]]


def test_frontier_has_a_point_for_each_run():
    axis = frontier({"ppo": [(1.0, 0.9), (2.0, 0.95)], "dpo": [(0.5, 0.8)]}).axes[0]
    assert list(axis.lines[0].get_xdata()) == [1.0, 2.0] and list(axis.lines[1].get_ydata()) == [0.8]


def test_tokens_are_blue_where_pushed_up_and_red_where_down():
    axis = coloured_tokens({"GRPO": [2.0, -2.0, 0.0]}, ["a", "b", "c"]).axes[0]
    up, down, nothing = (text.get_bbox_patch().get_facecolor()[:3] for text in axis.texts[1:])
    assert up[2] > up[0] and down[0] > down[2] and nothing == (1, 1, 1)
    assert "+2.00" in axis.texts[1].get_text()


def test_pins_sit_on_the_curve():
    axis, below = pinned_curve([0, 10, 20], [0.1, 0.5, 0.9], [(10, "half way"), (20, "there")], "right").axes
    assert [(line.get_xdata(), line.get_ydata()) for line in axis.lines[1:]] == [([10], [0.5]), ([20], [0.9])]
    assert [text.get_text() for text in axis.texts] == ["1", "2"]
    assert [text.get_text() for text in below.texts] == ["1   update 10:  half way", "2   update 20:  there"]
