"""The tour's table. The tour itself is run as a command, by the slow tests and by CI."""

import numpy as np
import pytest

from minirl.experiments import tour
from minirl.experiments.report import explanation, story
from minirl.experiments.tour import COLUMNS, Progress, Tour
from minirl.tracking import write_rows


def test_columns_that_nothing_is_in_are_left_out():
    progress, empty = Progress(Tour()), dict.fromkeys(COLUMNS, "")
    progress.rows = [
        empty | {"stage": "ppo", "accuracy_greedy_after": 0.31, "kl_to_sft": 0.421},
        empty | {"stage": "ppo Walker2d-v5", "return_after": 334.2},
    ]
    assert progress.cells() == (
        ["stage", "after", "KL to SFT (nats)", "after"],
        [["ppo", "31%", "0.42", ""], ["ppo Walker2d-v5", "", "", "334"]],
    )
    assert "pairs right" not in progress.table() and progress.table().count("\n") == 4


@pytest.mark.parametrize("start, words", [
    (0.25, "stops at 30% right)."), (0.33, "30% right: it was past that from the start)."),
])  # fmt: skip
def test_the_report_tells_of_the_stages_that_ran_and_of_no_other(tmp_path, start, words):
    write_rows(tmp_path / "metrics.csv", [{"step": step, "eval_accuracy_greedy": start} for step in (0, 2)])
    quick = dict.fromkeys(("pretrain", "sft", "ppo", "ppo Walker2d-v5"), tmp_path)
    text = story(quick, "Walker2d-v5")
    assert "for 2 steps, on right answers" in text and words in text
    assert "From there PPO learned" in text and "PPO, by the same code, learned to walk in Walker2d-v5." in text
    assert "DPO" not in text and "TRPO" not in text and "Pairs right" not in explanation(quick, Tour(), 256)
    whole = quick | dict.fromkeys(("trpo", "grpo", "sft reviews", "reward-model", "dpo", "orpo"), tmp_path)
    text = story(whole, "Walker2d-v5")
    assert "PPO, TRPO and GRPO learned" in text and "came a reward model, DPO and ORPO" in text
    assert "Pairs right" in explanation(whole, Tour(), 256)
    assert story({"pretrain": tmp_path}, "Walker2d-v5").endswith("sums of mixed quality (<i>pretrain</i>).")


def test_the_figure_says_which_seed_it_shows_and_draws_evaluations_as_measured(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tour, "save_figure", lambda figure, path: drawn.append((figure, path)))
    times, right = np.arange(3.0), np.array([0.3, 0.9, 1.0])
    run = {"step": times, "eval_accuracy_greedy": right, "eval_kl_policy_ref": times}
    walk = {"env_steps": times, "episode_return": times}
    tour.draw({"sft": run, "ppo": run, "ppo Walker2d-v5": walk}, "Walker2d-v5", 7, tmp_path / "tour.png")
    (figure, path), = drawn
    assert path == tmp_path / "tour.png" and figure.get_suptitle() == "seed 7"
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines[:2]] == [[0.3, 0.9, 1.0]] * 2
    assert figure.axes[0].lines[-1].get_ydata() == [1.0, 1.0]  # where fine-tuning ended
