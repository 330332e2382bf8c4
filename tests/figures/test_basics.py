import numpy as np
import pytest

from minirl.figures import basics
from minirl.plotting import COLOURS

BEFORE = np.full((2, 2), 0.25)
AFTER = np.array([[0.1, 0.0], [0.2, 0.7]])
REWARDS = np.array([[0.0, 0.3], [0.0, 1.0]])


def rgb(artist):
    return tuple(artist.get_facecolor()[0, :3])


@pytest.fixture
def tree():
    return basics.completion_tree(BEFORE, AFTER, REWARDS, ["a", "b"])


def test_a_trees_branches_are_as_thick_as_they_are_likely(tree):
    for axis, table in zip(tree.axes, (BEFORE, AFTER), strict=True):
        thickness = [line.get_linewidth() for line in axis.lines]  # to a, its two leaves, to b, its two leaves
        shares = [share for row in table for share in (row.sum(), *row)]
        assert thickness == pytest.approx([0.3 + 9 * share for share in shares])


def test_a_trees_leaves_are_as_large_as_they_are_likely_and_grey_without_a_reward(tree):
    for axis, table in zip(tree.axes, (BEFORE, AFTER), strict=True):
        assert [leaf.get_sizes()[0] for leaf in axis.collections] == pytest.approx(list(60 + 500 * table.flatten()))
        colours = [rgb(leaf) for leaf in axis.collections]
        assert colours[1] == colours[3] != colours[0] == colours[2]
        faint, full = (axis.collections[leaf].get_alpha() for leaf in (1, 3))
        assert faint == pytest.approx(0.51) and full == 1.0  # 0.3 + 0.7 R


def test_a_trees_texts_name_token_probability_and_reward(tree):
    assert [axis.get_title(loc="left") for axis in tree.axes] == ["before", "after"]
    texts = [text.get_text() for text in tree.axes[1].texts]
    assert texts[0] == "a" and texts[3] == "b"
    assert texts[5] == "b b   p = 0.700   R = 1" and texts[2] == "a b   p = 0.000   R = 0.3"


def test_bars_have_the_heights_and_the_names_they_are_given():
    rows = {"T = 1": np.array([0.5, 0.3, 0.2]), "greedy": np.array([1.0, 0.0, 0.0])}
    figure = basics.bars_side_by_side(rows, ["x", "y", "z"], ylabel="share")
    for axis, (title, heights) in zip(figure.axes, rows.items(), strict=True):
        assert axis.get_title(loc="left") == title
        assert [bar.get_height() for bar in axis.patches] == heights.tolist()
        format_of = axis.xaxis.get_major_formatter()
        assert [format_of(place) for place in axis.get_xticks()] == ["x", "y", "z"]
    first, second = figure.axes
    assert first.get_ylabel() == "share" and first.get_ylim() == second.get_ylim()


def test_a_row_of_tokens_marks_what_counts_and_shows_rewards_there_only():
    figure = basics.token_row(["yes", "<end>", "<pad>"], ["why", "?"], [1, 1, 0], [0.0, -0.5, 9.0], "a row")
    (axis,) = figure.axes
    filled = {text.get_text(): text.get_bbox_patch().get_facecolor() for text in axis.texts if text.get_bbox_patch()}
    assert list(filled) == ["why", "?", "yes", "<end>", "<pad>"]
    assert filled["yes"] == filled["<end>"] != filled["why"] == filled["?"] == filled["<pad>"]
    numbers = {text.get_position()[0]: text.get_text() for text in axis.texts if not text.get_bbox_patch()}
    assert numbers == {2: "0", 3: "-0.5", -0.9: "reward"}  # columns count from the prompt; padding earns nothing
    assert axis.get_title(loc="left") == "a row"


def test_a_row_of_tokens_without_a_reward_shows_zeros():
    (axis,) = basics.token_row(["a", "b"], [], [1, 1], [float("nan"), 0.0]).axes
    assert [text.get_text() for text in axis.texts if not text.get_bbox_patch()] == ["0", "0", "reward"]


def test_curves_draw_what_they_are_given_in_styles_that_differ_without_colour():
    figure = basics.curves({"loss": [3.0, 2.0], "exact": ([0, 10], [1.0, 0.5])}, "steps", "nats per token",
                           styles={"exact": {"color": COLOURS["ppo"]}})  # fmt: skip
    (axis,) = figure.axes
    loss, exact = axis.lines
    assert list(loss.get_xdata()) == [0, 1] and list(loss.get_ydata()) == [3.0, 2.0]
    assert list(exact.get_xdata()) == [0, 10] and list(exact.get_ydata()) == [1.0, 0.5]
    assert loss.get_linestyle() != exact.get_linestyle() and exact.get_color() == COLOURS["ppo"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("steps", "nats per token")
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["loss", "exact"]


def test_a_single_curve_needs_no_legend():
    assert basics.curves({"J": [0.0, 1.0]}, "updates", "J").axes[0].get_legend() is None


def test_a_line_named_after_an_algorithm_has_its_colour():
    series, styles = {"GRPO on a pole": [1, 2], "loss": [2, 1], "PPO": [0, 1]}, {"PPO": {"color": "red"}}
    grpo, loss, ppo = basics.curves(series, "x", "y", styles).axes[0].lines
    assert grpo.get_color() == COLOURS["grpo"] and loss.get_color() not in COLOURS.values() and ppo.get_color() == "red"
