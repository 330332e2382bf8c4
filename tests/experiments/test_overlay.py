"""Runs of other programs: every number at its step, and never two environments in one figure."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from minirl.experiments.overlay import read_run, read_runs
from minirl.experiments.run_files import write_run
from minirl.plotting import COMPARE_PANELS, draw_curves
from minirl.tracking import write_rows


def monitor(folder, rows, name="monitor.csv", env_id="Walker2d-v5", t_start=100.0):
    folder.mkdir(exist_ok=True)
    head = "#" + json.dumps({"t_start": t_start, "env_id": env_id})
    lines = [head, "r,l,t", *(f"{r},{length},{t}" for r, length, t in rows)]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def cleanrl(folder, env_id="Walker2d-v5", table=True):
    """Episodes that end at steps 30, 30 (two environments) and 70, and numbers of an update after 64."""
    with SummaryWriter(str(folder)) as board:
        if table:
            board.add_text("hyperparameters", f"|param|value|\n|-|-|\n|exp_name|ppo|\n|env_id|{env_id}|\n|seed|1|")
        for step, total, length in ((30, 1.5, 30), (30, -2.0, 25), (70, 4.0, 40)):
            board.add_scalar("charts/episodic_return", total, step)
            board.add_scalar("charts/episodic_length", length, step)
        board.add_scalar("charts/SPS", 1000, 64)
        board.add_scalar("losses/explained_variance", 0.25, 64)
        board.add_scalar("losses/value_loss", 0.5, 64)
        board.add_scalar("charts/learning_rate", 3e-4, 64)
    return folder


def ours(folder, task="Walker2d-v5"):
    write_rows(folder / "metrics.csv", [{"step": 1, "seconds": 2.0, "env_steps": 100, "episode_return": 3.0}])
    (folder / "config.json").write_text(json.dumps({"settings": {"task": task}}), encoding="utf-8")
    return folder


def known(columns, name):
    """Pairs of step and value, where there is a value."""
    kept = np.isfinite(columns[name])
    return list(zip(columns["env_steps"][kept].tolist(), columns[name][kept].tolist(), strict=True))


def test_a_monitor_file(tmp_path):
    folder = monitor(tmp_path / "a", [(5.5, 20, 2.0), (-1.25, 30, 4.0), (7.0, 10, 4.0)])
    with (folder / "monitor.csv").open("a", encoding="utf-8") as file:
        file.write("3.25,17")  # the run was killed in the middle of a line
    label, columns, env_id = read_run(folder)
    assert label == "SB3 a" and read_run(folder / "monitor.csv").label == label
    assert env_id == "Walker2d-v5"
    assert columns["env_steps"].tolist() == [20, 50, 60] and columns["episode_length"].tolist() == [20, 30, 10]
    assert columns["episode_return"].tolist() == [5.5, -1.25, 7.0]
    np.testing.assert_array_equal(columns["steps_per_second"], [np.nan, 15, np.nan])  # 30 in 2 s, 10 in no time


def test_several_monitor_files_are_merged_in_time(tmp_path):
    monitor(tmp_path, [(1, 10, 1.0), (3, 10, 3.0)], "0.monitor.csv", t_start=100.0)
    _, columns, _ = read_run(monitor(tmp_path, [(2, 5, 1.0), (4, 5, 9.0)], "1.monitor.csv", t_start=101.0))
    assert columns["episode_return"].tolist() == [1, 2, 3, 4]  # they end at 101, 102, 103 and 110
    assert columns["env_steps"].tolist() == [10, 15, 25, 30]
    assert columns["steps_per_second"].tolist()[1:] == [5.0, 10.0, 5 / 7]


def test_cleanrls_numbers_keep_their_steps(tmp_path):
    label, columns, env_id = read_run(cleanrl(tmp_path / "run"))
    assert env_id == "Walker2d-v5" and label == "CleanRL ppo seed 1"
    assert known(columns, "episode_return") == [(30, 1.5), (30, -2.0), (70, 4.0)]
    assert known(columns, "episode_length") == [(30, 30), (30, 25), (70, 40)]
    assert known(columns, "steps_per_second") == [(64, 1000)]
    assert known(columns, "explained_variance") == [(64, 0.25)] and known(columns, "value_loss") == [(64, 0.5)]
    assert set(columns) == {"env_steps", *COMPARE_PANELS} and (np.diff(columns["env_steps"]) >= 0).all()


def test_no_number_of_a_long_run_is_left_out(tmp_path):
    with SummaryWriter(str(tmp_path)) as board:  # TensorBoard's reader keeps a sample of 10,000 by default
        for step in range(10_500):
            board.add_scalar("charts/episodic_return", step, step)
    _, columns, env_id = read_run(tmp_path)
    assert columns["episode_return"].tolist() == list(range(10_500)) and env_id is None


def test_cleanrls_folder_name_tells_the_environment_too(tmp_path):
    assert read_run(cleanrl(tmp_path / "Hopper-v4__ppo__1__17", table=False)).env_id == "Hopper-v4"
    assert read_run(cleanrl(tmp_path / "Hopper-v4__ppo__2__17")).env_id == "Walker2d-v5"  # the table knows better
    assert read_run(cleanrl(tmp_path / "mine", table=False))[::2] == ("CleanRL mine", None)


def test_all_of_them_can_be_drawn_together(tmp_path):
    paths = [monitor(tmp_path / "a", [(1, 10, 1.0), (2, 9, 2.0)]), cleanrl(tmp_path / "b"), ours(tmp_path / "c")]
    runs, env_id = read_runs(paths)
    ends = draw_curves(Figure().subplots(), dict(zip("abc", runs, strict=True)), "env_steps", "episode_return")
    assert env_id == "Walker2d-v5" and [ends[name][0] for name in "abc"] == [19, 70, 100]


def test_a_complete_run_of_a_comparison(tmp_path):
    history = [{"step": 0, "seconds": 0.0, "eval_return": 1.0}] + [
        {"step": step, "seconds": 2.0 * step, "env_steps": 100 * step, "episode_return": float(step)} for step in (1, 2)
    ]  # fmt: skip
    for row in history:
        row |= {"eval_length": 1.0, "eval_return_sampled": 1.0, "eval_length_sampled": 1.0, "evaluation_seconds": 1.0}
    ours(tmp_path / "seed-3")
    write_run(tmp_path / "seed-3", {"algorithm": "ppo", "seed": 3, "env_id": "Walker2d-v5"}, history)
    label, columns, env_id = read_run(tmp_path / "seed-3")
    assert label == "minirl seed-3" and env_id == "Walker2d-v5"
    assert known(columns, "episode_return") == [(100, 1), (200, 2)]
    assert known(columns, "steps_per_second") == [(100, 100), (200, 50)]


def test_different_environments_never_meet(tmp_path):
    old, new = monitor(tmp_path / "a", [(1, 1, 1)], env_id="Walker2d-v4"), ours(tmp_path / "b")
    silent = monitor(tmp_path / "c", [(1, 1, 1)], env_id="None")
    with pytest.raises(ValueError, match="cannot share a figure: Walker2d-v4, Walker2d-v5"):
        read_runs([old, new])
    with pytest.raises(ValueError, match="cannot share a figure: Walker2d-v4, Walker2d-v5"):
        read_runs([new], env_id="Walker2d-v4")
    with pytest.raises(ValueError, match="c does not say which environment"):
        read_runs([new, silent])
    assert read_runs([new, silent], env_id="Walker2d-v5")[1] == "Walker2d-v5"
    monitor(tmp_path / "a", [(1, 1, 1)], "1.monitor.csv")
    with pytest.raises(ValueError, match="monitors of different environments: Walker2d-v4, Walker2d-v5"):
        read_run(tmp_path / "a")


@pytest.mark.parametrize("text", [
    "", "r,l,t\n1,2,3\n", '#{"t_start": 1}\nr,l\n1,2\n', '#{"t_start": 1}\nr,l,t\n1,x,3\n',
    '#{"env_id": "a"}\nr,l,t\n1,2,3\n',
])  # fmt: skip
def test_a_damaged_monitor_is_one_line(text, tmp_path):
    (tmp_path / "monitor.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="monitor.csv is not a monitor.csv of Stable-Baselines3") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_holds_no_run_is_said_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="holds no run: no metrics.csv"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="without a finished episode"):
        read_run(monitor(tmp_path / "empty", []))
    with SummaryWriter(str(tmp_path / "other")) as board:
        board.add_scalar("loss", 1.0, 1)
    with pytest.raises(ValueError, match="TensorBoard files without charts/episodic_return"):
        read_run(tmp_path / "other")
    write_rows(tmp_path / "text" / "metrics.csv", [{"step": 1, "loss": 1.0}])
    with pytest.raises(ValueError, match="not of an environment"):
        read_run(tmp_path / "text")
