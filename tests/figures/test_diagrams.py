from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from minirl.figures import diagrams

FULL = {stage: 0.975 for stage in ("pretrain", "sft", "reward", "rlhf", "dpo", "orpo", "verifiable")}
DRAWN = {
    "pipeline": diagrams.pipeline,
    "pipeline with all that it can hold": lambda: diagrams.pipeline(FULL, dict.fromkeys(FULL, "x" * 24)),
    "one_loop_two_worlds": diagrams.one_loop_two_worlds,
    "rlhf_and_classic_rl": diagrams.rlhf_and_classic_rl,
    "dpo_and_rlhf": diagrams.dpo_and_rlhf,
    "grpo_and_ppo": diagrams.grpo_and_ppo,
    "orpo_and_both": diagrams.orpo_and_both,
}
each_diagram = pytest.mark.parametrize("name", DRAWN)


def drawn(name):
    """(axis, renderer, boxes, texts in boxes, other texts) of a diagram; the last three as lists of (artist, Bbox)."""
    figure = DRAWN[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    (axis,) = figure.axes
    boxes = [(patch, patch.get_window_extent(renderer)) for patch in axis.patches if patch.get_gid() == "box"]
    texts = [(text, text.get_window_extent(renderer)) for text in axis.texts if text.get_text()]
    inside = [pair for pair in texts if pair[0].get_gid() == "text"]
    return axis, renderer, boxes, inside, [pair for pair in texts if pair[0].get_gid() != "text"]


def overlap(first, second):
    both = Bbox.intersection(first, second)
    return both is not None and both.width > 0.5 and both.height > 0.5


@each_diagram
def test_nothing_is_drawn_over_a_box_and_every_text_fits_its_box(name):
    axis, renderer, boxes, inside, around = drawn(name)
    assert len(boxes) >= 5
    for (_, first), (_, second) in combinations(boxes, 2):
        assert not overlap(first, second)
    for text, extent in inside:
        homes = [box for _, box in boxes if overlap(box, extent)]
        assert len(homes) == 1, text.get_text()
        home = homes[0]
        assert home.x0 <= extent.x0 and extent.x1 <= home.x1, text.get_text()
        assert home.y0 <= extent.y0 and extent.y1 <= home.y1, text.get_text()
    legend = axis.get_legend().get_window_extent(renderer)
    for text, extent in around:
        assert not any(overlap(box, extent) for _, box in boxes), text.get_text()
        assert not overlap(legend, extent), text.get_text()
    for (first, one), (second, other) in combinations(inside + around, 2):
        assert not overlap(one, other), (first.get_text(), second.get_text())


@each_diagram
def test_everything_is_on_the_page(name):
    axis, _, boxes, inside, around = drawn(name)
    page = axis.get_window_extent()
    for artist, extent in boxes + inside + around:
        assert page.x0 <= extent.x0 and extent.x1 <= page.x1, artist
        assert page.y0 <= extent.y0 and extent.y1 <= page.y1, artist


@each_diagram
def test_no_arrow_runs_through_a_box_or_a_text(name):
    axis, _, boxes, inside, around = drawn(name)
    arrows = [patch for patch in axis.patches if patch.get_gid() == "arrow"]
    assert arrows
    for arrow in arrows:
        corners = axis.transData.transform(arrow._path_original.vertices)
        for first, second in zip(corners, corners[1:], strict=False):
            shaft = Bbox([np.minimum(first, second), np.maximum(first, second)])
            for text, extent in inside + around:
                assert not Bbox.intersection(shaft, extent), text.get_text()
            for _, box in boxes:
                x = min(shaft.xmax, box.x1) - max(shaft.xmin, box.x0)
                y = min(shaft.ymax, box.y1) - max(shaft.ymin, box.y0)
                assert min(x, y) < -0.5 or max(x, y) <= 0.5 or abs(min(x, y)) <= 0.5 and touches(shaft, box)


def touches(shaft, box):
    """A piece of an arrow, level or upright, that only meets the outline of a box."""
    level = shaft.height < 0.5
    low, high, at, at_end = (
        (box.y0, box.y1, shaft.y0, (box.x0, box.x1)) if level else (box.x0, box.x1, shaft.x0, (box.y0, box.y1))
    )
    start, end = sorted((shaft.x0, shaft.x1) if level else (shaft.y0, shaft.y1))
    outside = end <= at_end[0] + 0.5 or start >= at_end[1] - 0.5
    return outside or not low + 0.5 < at < high - 0.5


def test_trained_and_frozen_models_differ_in_colour_outline_and_lightness():
    _, _, boxes, inside, _ = drawn("dpo_and_rlhf")
    kinds = {}
    for text, extent in inside:
        box = next(patch for patch, home in boxes if overlap(home, extent))
        kinds.setdefault(text.get_text(), set()).add((box.get_facecolor(), box.get_linestyle(), box.get_linewidth()))
    assert len(kinds["policy"]) == len(kinds["reference"]) == 1
    assert len(kinds["reward model"]) == 2  # trained first, then frozen
    assert kinds["reward model"] == kinds["policy"] | kinds["reference"]
    (policy,), (reference,) = kinds["policy"], kinds["reference"]
    assert all(one != other for one, other in zip(policy, reference, strict=True))
    lightness = [sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), kind[0][:3], strict=True))
                 for kind in (policy, reference)]
    assert abs(lightness[0] - lightness[1]) > 0.1


def test_the_pipeline_writes_what_it_is_given():
    figure = diagrams.pipeline({"sft": 0.316, "dpo": "true score 2.3"}, {"sft": "27+15=42"})
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "32% right\n27+15=42" in texts and "true score 2.3" in texts
