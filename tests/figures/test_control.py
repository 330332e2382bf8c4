import numpy as np
import pytest

from minirl.figures import control


def panels(figure):
    return [axis for axis in figure.axes if axis.get_visible()]


def run(steps, **metrics):
    return {"step": np.arange(1, steps + 1)} | {name: np.asarray(values, float) for name, values in metrics.items()}


def test_vital_signs_draw_every_run_that_has_the_metric_and_the_first_one_strong():
    sick = run(3, score=[1, 2, 3], kl_old_new=[0.1, 0.01, 0.001])
    healthy = run(4, score=[0, 1, 1, 2])
    score, kl = panels(control.vital_signs({"patient": sick, "healthy": healthy}, ("score", "kl_old_new")))
    assert [line.get_ydata().tolist() for line in score.lines] == [[1, 2, 3], [0, 1, 1, 2]]
    assert [line.get_color() for line in score.lines] == [control.SICK, control.HEALTHY]
    assert [line.get_ydata().tolist() for line in kl.lines] == [[0.1, 0.01, 0.001]]  # the healthy run has none
    assert kl.get_yscale() == "log" and score.get_yscale() == "linear"


def test_a_divergence_that_touches_zero_is_drawn_on_a_linear_axis_and_shares_on_a_whole_one():
    sick = run(2, kl_old_new=[0.1, 0.0], ended_fraction=[1.0, 0.99])
    kl, ended = panels(control.vital_signs({"patient": sick}, ("kl_old_new", "ended_fraction")))
    assert kl.get_yscale() == "linear"
    low, high = ended.get_ylim()
    assert low < 0 and high > 1


def test_the_alarm_table_prints_updates_and_marks_the_first_of_a_row():
    figure = control.alarm_table([[np.nan, np.nan], [7, 3]], ("a_metric", "b"), ("well", "ill"))
    texts = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert texts == {"7": control.INK, "3": control.SICK}
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["a metric", "b"]


def test_the_scatter_holds_the_rewards_and_the_least_squares_line():
    points, line = control.predicted_against_true([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]).axes[0].lines
    assert points.get_xdata().tolist() == [0, 1, 2] and points.get_ydata().tolist() == [1, 3, 5]
    assert line.get_ydata() == pytest.approx([1.0, 5.0])  # 1 + 2 x at x = 0 and x = 2


def test_reward_maps_have_a_panel_and_a_scale_each():
    values = np.arange(6.0).reshape(2, 3)
    angle, speed = np.array([-1.0, 0.0, 1.0]), np.array([0.0, 1.0])
    figure = control.reward_maps(angle, speed, {"true": values, "predicted": -values})
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[:2] == ["true", "predicted"] and len(figure.axes) == 4


def test_a_film_strip_draws_every_limb_of_every_frame():
    frame = np.zeros((7, 2, 2))
    frame[:, 1, 1] = np.arange(7)
    lines = control.film_strip([frame, frame + 1.0]).axes[0].lines
    assert len(lines) == 2 * 7 + 1  # and the floor
    assert lines[3].get_ydata().tolist() == [0, 3] and lines[10].get_ydata().tolist() == [1, 4]
    assert len({lines[0].get_color(), lines[1].get_color(), lines[4].get_color()}) == 3  # torso, right, left


def test_intervals_that_miss_the_truth_are_dashed():
    lines = control.intervals([(1.0, 0.5, 1.5), (3.0, 2.5, 3.5)], truth=1.2).axes[0].lines
    assert lines[0].get_ydata().tolist() == [0.5, 1.5] and lines[0].get_linestyle() == "-"
    assert lines[2].get_ydata().tolist() == [2.5, 3.5] and lines[2].get_linestyle() == "--"


def test_returns_of_a_seed_are_joined_across_the_arms():
    lines = control.learning_and_labels({"a": [2.0, 4.0], "b": [3.0, 5.0]}, [0.0, 1.0]).axes[0].lines
    assert [line.get_ydata().tolist() for line in lines[::2]] == [[0, 2, 3], [1, 4, 5]]
