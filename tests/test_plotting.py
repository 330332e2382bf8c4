"""Figures hold the numbers they should: read back from the drawn curves, not from a picture."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from minirl import plotting
from minirl.plotting import (
    COLOURS,
    COMPARE_PANELS,
    RAW,
    colour_of,
    compare_figure,
    learning_curves,
    read_metrics,
    save_figure,
    show_source,
    smooth,
    source_of,
    tour_figure,
)


def test_smoothing_is_tensorboards_debiased_average():
    # w = 0.5, x = 4, 0, 8:  m = 2, 1, 4.5;  1 - w^t = 1/2, 3/4, 7/8;  m / (1 - w^t) = 4, 4/3, 36/7
    assert np.allclose(smooth([4, 0, 8], 0.5), [4, 4 / 3, 36 / 7], rtol=0, atol=1e-15)
    # the closed form: a mean of the past with weights w^age; a constant stays itself from the first point on
    values = np.random.default_rng(0).normal(size=12)
    expected = [np.average(values[: t + 1], weights=0.6 ** np.arange(t, -1, -1.0)) for t in range(12)]
    assert np.allclose(smooth(values), expected, rtol=0, atol=1e-14)
    assert np.allclose(smooth([3.0] * 5, 0.9), 3.0, rtol=0, atol=1e-14)
    assert np.array_equal(smooth(values, 0.0), values)


def test_smoothing_steps_over_holes():
    out = smooth([4, np.nan, 0, np.inf, 8], 0.5)
    assert np.isnan(out[[1, 3]]).all() and np.allclose(out[[0, 2, 4]], smooth([4, 0, 8], 0.5))
    with pytest.raises(ValueError, match="weight"):
        smooth([1.0], 1.0)


def test_read_metrics_gives_columns_and_speed(tmp_path):
    path = tmp_path / "metrics.csv"
    text = "step,seconds,env_steps,accuracy\n1,2.0,100,\n2,4.0,200,0.5\n3,5.0,400,nan\n"
    path.write_text(text, encoding="utf-8")
    columns = read_metrics(path)
    assert np.array_equal(columns["accuracy"], [np.nan, 0.5, np.nan], equal_nan=True)
    assert columns["steps_per_second"].tolist() == [50.0, 50.0, 200.0]  # 100 / 2, 100 / 2, 200 / 1
    path.write_text("step,seconds,loss\n1,0.0,3\n", encoding="utf-8")
    assert "steps_per_second" not in read_metrics(path)


def luminance(colour):
    """CIE L*, what is left of a colour on a grey printer, 0 to 100."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16


def test_colours():
    assert len(set(COLOURS.values())) == len(COLOURS)
    grey = sorted(luminance(COLOURS[name]) for name in ("reinforce", "trpo", "ppo", "grpo"))
    assert min(np.diff(grey)) > 10  # told apart without colour
    assert max(map(luminance, COLOURS.values())) < 75  # visible on white
    assert colour_of("TRPO") == COLOURS["trpo"] and colour_of("ppo, seed 3") == COLOURS["ppo"]
    assert colour_of("PPO-KL (adaptive)") == COLOURS["ppo_kl"] and colour_of("Reward model") == COLOURS["reward"]
    assert colour_of("gspo, seed 1") == colour_of("gspo") and colour_of("gspo") not in COLOURS.values()


def run_of(seed, negative=False):
    rng = np.random.default_rng(seed)
    columns = {name: rng.uniform(1, 100, 30) for name in COMPARE_PANELS}
    if negative:
        columns["episode_return"][0] = -5.0
    return {"env_steps": np.arange(30) * 2048.0, **columns}


def test_compare_figure_draws_exactly_the_five_panels():
    series = {"TRPO": run_of(0, negative=True), "PPO": run_of(1)}
    figure = compare_figure(series)
    assert len(figure.axes) == 5
    for axis, name in zip(figure.axes, COMPARE_PANELS, strict=True):
        raw_trpo, trpo, raw_ppo, ppo = axis.lines
        for raw, strong, label in ((raw_trpo, trpo, "TRPO"), (raw_ppo, ppo, "PPO")):
            assert np.array_equal(raw.get_ydata(), series[label][name]) and to_hex(raw.get_color()).upper() == RAW
            assert np.allclose(strong.get_ydata(), smooth(series[label][name], 0.6), rtol=0, atol=1e-12)
            assert np.array_equal(strong.get_xdata(), series[label]["env_steps"])
            assert to_hex(strong.get_color()).upper() == COLOURS[label.lower()]
        assert axis.get_title("right") == "pale: measured, bold: smoothed"
        assert axis.get_yscale() == ("symlog" if name == "episode_return" else "log")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["TRPO", "PPO"]


def test_several_seeds_are_averaged_where_all_have_data():
    one = {"step": np.array([0.0, 10.0]), "loss": np.array([0.0, 10.0])}  # loss = step
    two = {"step": np.array([5.0, 20.0]), "loss": np.array([7.0, 22.0])}  # loss = step + 2
    axis = learning_curves({"PPO": [one, two]}, weight=0.0).axes[0]
    strong = axis.lines[-1]
    assert axis.get_title("right") == "pale: seeds, bold: their mean"
    assert strong.get_xdata()[[0, -1]].tolist() == [5.0, 10.0]
    assert np.allclose(strong.get_ydata(), strong.get_xdata() + 1, rtol=0, atol=1e-12)
    assert len(axis.lines) == 3


def text_run(last, kl):
    accuracy = np.linspace(0.3, last, 9)
    accuracy[::2] = np.nan  # evaluated every second update
    return {"step": np.arange(9.0), "seconds": np.arange(9.0) * 2, "accuracy_greedy": accuracy,
            "kl_policy_ref": np.linspace(0, kl, 9)}


def test_tour_figure(tmp_path):
    ends = {"REINFORCE": (0.90, 2), "TRPO": (0.901, 0.5), "PPO": (0.902, 1), "GRPO": (1, 1)}  # (accuracy, nats)
    text = {label: text_run(*end) for label, end in ends.items()}
    control = {"TRPO": [run_of(0), run_of(1)], "PPO": [run_of(2), run_of(3)]}
    path = tmp_path / "new" / "tour.png"
    figure = tour_figure(text, control, path, x="seconds", sft_accuracy=0.3)
    learning, distance, walking = figure.axes
    grpo = next(line for line in learning.lines if line.get_label() == "GRPO")
    assert grpo.get_xdata().tolist() == [2, 6, 10, 14]  # only where there is a number
    assert np.array_equal(grpo.get_ydata(), text["GRPO"]["accuracy_greedy"][1::2])  # as measured
    labels = [spot for spot in learning.texts]
    assert {spot.get_text() for spot in labels} == {"REINFORCE", "TRPO", "PPO", "GRPO", "SFT"}
    heights = sorted(spot.get_position()[1] for spot in labels)
    assert min(np.diff(heights)) > 0.06 and -0.1 < heights[0] and heights[-1] < 1.1  # none covers another
    by_height = [spot.get_text() for spot in sorted(labels, key=lambda spot: spot.get_position()[1])]
    assert by_height == ["SFT", "REINFORCE", "TRPO", "PPO", "GRPO"]  # in the order of the curves' ends
    assert max(line.get_xdata()[-1] for line in distance.lines) == text["REINFORCE"]["kl_policy_ref"][7]
    assert {spot.get_text() for spot in walking.texts} == {"TRPO", "PPO"}
    assert [axis.get_title("right") for axis in figure.axes] == ["", "", "pale: seeds, bold: their mean; smoothed"]
    assert path.read_bytes().startswith(b"\x89PNG") and len(list(path.parent.iterdir())) == 1


def test_a_run_without_any_number_yet_can_be_drawn():
    empty = {"step": np.arange(3.0), "loss": np.full(3, np.nan)}
    learning_curves({"PPO": empty, "TRPO": [empty, empty]}, log=True)


def test_a_failed_save_keeps_the_old_picture(tmp_path):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    class Broken:
        def savefig(self, target, **settings):
            target.write_bytes(b"half")
            raise MemoryError

    with pytest.raises(MemoryError):
        save_figure(Broken(), path)
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_show_source_prints_what_stands_in_the_file(capsys):
    show_source(smooth, plotting._in_notebook)
    out = capsys.readouterr().out
    assert "# minirl/plotting.py, line " in out
    assert "def smooth(values, weight=0.6):" in out and "def _in_notebook" in out
    line = int(source_of(smooth).splitlines()[0].rsplit(" ", 1)[1])
    with open(plotting.__file__, encoding="utf-8") as file:
        assert file.read().splitlines()[line - 1].startswith("def smooth")
    assert source_of(plotting).startswith('# minirl/plotting.py, line 1\n"""')
