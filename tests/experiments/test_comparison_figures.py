"""The figures of a comparison show the numbers they are given."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from minirl.experiments import comparison_figures as figures
from minirl.experiments.run_files import RunFiles
from minirl.plotting import COLOURS

PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "walker2d.csv"


class Run:
    """A run with an evaluation every 10 steps."""

    final = RunFiles.final

    def __init__(self, label, seed, returns):
        self.summary, self.label = {"seed": seed}, label
        self.eval = {"env_steps": 10.0 * np.arange(len(returns)), "return_greedy": np.array(returns, float),
                     "return_sampled": np.array(returns, float) / 2}  # fmt: skip

    def curves(self):
        steps = np.arange(1.0, 6.0) * 10
        return {"env_steps": steps, **{name: steps + self.summary["seed"] for name in figures.COMPARE_PANELS}}


@pytest.fixture
def runs():
    return {name: [Run(name, seed, [base + seed * i for i in range(7)]) for seed in (1, 2, 3)]
            for name, base in (("trpo", 100), ("ppo", 50))}  # fmt: skip


def test_a_band_is_the_t_interval_of_the_curves():
    axis = Figure().subplots()
    curves = [(np.array([0.0, 10.0]), np.array([value, 2 * value])) for value in (1.0, 2.0, 6.0)]
    end = figures.band(axis, "ppo", curves)
    assert end == (10.0, 6.0)
    edge = axis.collections[0].get_paths()[0].vertices[:, 1]
    half = stats.t.ppf(0.975, 2) * np.std([2.0, 4.0, 12.0], ddof=1) / np.sqrt(3)
    assert edge.max() == pytest.approx(6 + half) and axis.lines[0].get_color() == COLOURS["ppo"]


def test_two_runs_are_drawn_as_they_are():
    axis = Figure().subplots()
    curves = [(np.array([0.0, 10.0]), np.array([value, 2 * value])) for value in (1.0, 3.0)]
    assert figures.band(axis, "ppo", curves, "--") == (10.0, 4.0) and not axis.collections
    assert sorted(line.get_ydata()[-1] for line in axis.lines) == [2.0, 4.0, 6.0]


def test_variants_of_one_algorithm_have_lines_of_their_own():
    assert figures.lines_of(["trpo", "ppo", "ppo clip=0.1", "trpo delta=1"]) == {
        "trpo": "-", "ppo": "-", "ppo clip=0.1": "--", "trpo delta=1": "--"}  # fmt: skip


def test_the_band_spans_only_what_all_curves_cover():
    grid, values = figures.grid_of([(np.array(ends), np.array(ends)) for ends in ([0.0, 8.0], [2.0, 9.0])])
    assert (grid[0], grid[-1]) == (2.0, 8.0) and np.allclose(values, grid)


def test_final_is_the_mean_of_the_last_five(runs):
    assert figures.final_returns(runs)["trpo"] == [100 + seed * (2 + 3 + 4 + 5 + 6) / 5 for seed in (1, 2, 3)]


def test_every_figure_can_be_drawn(runs, tmp_path):
    final = figures.final_returns(runs)
    drawn = [figures.one_seed(runs, 2), figures.all_seeds(runs), figures.evaluations(runs), figures.variants(runs),
             figures.lottery(final["trpo"], final["ppo"], ["trpo", "ppo"]),
             figures.overlaid(runs, {"sb3": Run("", 9, []).curves()})]  # fmt: skip
    for figure in drawn:
        figure.savefig(tmp_path / "figure.png")
    assert len(drawn[0].axes) == len(drawn[1].axes) == 5
    assert figures.one_seed({"sb3-ppo": []}, 2) is None
    single = drawn[4].axes[0]
    assert len(single.patches) >= 30 and all(bar.get_height() > 0 for bar in single.patches[:30])  # trpo leads in each


def test_published_returns_have_a_panel_of_their_own(tmp_path):
    figure = figures.published(PUBLISHED, "Walker2d-")
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert any("SB3-contrib" in text for text in labels) and not any("Bullet" in text for text in labels)
    figure.savefig(tmp_path / "figure.png")
