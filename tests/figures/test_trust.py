import numpy as np
import pytest

from minirl.figures import trust


def lines(axis):
    return {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axis.lines}


def test_a_bound_is_drawn_with_what_the_objective_is_at_the_maxima():
    steps, objective = [-1.0, 0.0, 1.0, 2.0], [0.0, 1.0, 1.5, 0.5]
    whole, near = trust.minorise(steps, objective, [0.0, 1.0, 2.0, 3.0], [-9.0, 1.0, 1.2, -9.0], zoom=1.0).axes
    assert lines(whole)["objective"] == [list(pair) for pair in zip(steps, objective, strict=True)]
    assert lines(whole)["surrogate's maximum"] == [[2.0, 3.0]] and lines(whole)["objective there"] == [[2.0, 0.5]]
    assert lines(near)["lower bound"] == [[-1.0, -9.0], [0.0, 1.0], [1.0, 1.2]]
    assert lines(near)["lower bound's maximum"] == [[1.0, 1.2]] and lines(near)["objective there"] == [[1.0, 1.5]]
    assert lines(near)["old policy"] == [[0.0, 1.0]]


def test_a_line_search_marks_the_first_step_that_is_short_and_helps():
    kls, gains = ([0.4, 0.1, 0.02], [0.9, 0.09, 0.02]), ([2.0, 1.0, 0.5], [1.0, -0.1, 0.4])
    left, right = trust.line_search([1.0, 0.5, 0.25], kls, gains, delta=0.1).axes
    assert lines(left)["measured"] == [[1.0, 0.9], [0.5, 0.09], [0.25, 0.02]]
    assert lines(right)["promised by the model"] == [[1.0, 2.0], [0.5, 1.0], [0.25, 0.5]]
    assert lines(left)["first that is accepted"] == [[0.25, 0.02]]  # the second is short enough but does not help
    assert lines(right)["first that is accepted"] == [[0.25, 0.4]]
    assert lines(left)["δ"][0][1] == pytest.approx(0.1)


def test_a_line_search_that_finds_nothing_marks_nothing():
    figure = trust.line_search([1.0, 0.5], ([1.0, 0.25], [1.0, 0.3]), ([1.0, 0.5], [-1.0, -0.5]), delta=0.5)
    assert all("first that is accepted" not in lines(axis) for axis in figure.axes)
