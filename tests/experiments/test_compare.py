"""compare: equal steps, every run accounted for, and a summary that says what episodes.csv says."""

import contextlib
import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minirl.experiments import compare
from minirl.experiments.compare import Compare, parse_seeds
from minirl.experiments.comparison_report import cell, report, summarise, time_to_threshold
from minirl.experiments.on_policy import ALGORITHMS
from minirl.experiments.run_files import RunFiles, complete_runs
from minirl.tracking import write_config

SETTINGS = Compare(env="CartPole-v1", env_steps=2_300, seeds="1-2", workers=1, eval_every=1_000, eval_episodes=2)


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """Batches of 600 and 800 steps and few passes over them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, num_envs, steps, config in (
            ("trpo", 2, 300, {"critic_epochs": 2}), ("ppo", 4, 200, {"epochs": 2, "minibatches": 8}),
        ):  # fmt: skip
            entry = ALGORITHMS[name]
            patch.setitem(ALGORITHMS, name, entry._replace(
                control=replace(entry.control, **config),
                control_world=replace(entry.control_world, num_envs=num_envs, steps=steps),
            ))
        yield


def rows_of(path):
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def first(tmp_path_factory, small_batches):
    """A comparison in which ppo seed 1 cannot write its metrics: (settings, rows, failed, printed, bar)."""
    settings = replace(SETTINGS, out=tmp_path_factory.mktemp("compare"))
    (settings.out / "ppo" / "seed-1" / "metrics.csv").mkdir(parents=True)
    printed, bar = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(bar):
        rows, failed = settings.run()
    return settings, rows, failed, printed.getvalue(), bar.getvalue()


def no_training(jobs, *_):
    assert not jobs, f"{jobs} would be trained again"
    return {}


def test_seeds():
    assert parse_seeds("1-5") == [1, 2, 3, 4, 5]
    assert parse_seeds("1,3,7") == [1, 3, 7]
    assert parse_seeds("10, 1-3,2") == [10, 1, 2, 3]
    assert parse_seeds("0") == [0]


@pytest.mark.parametrize("text", ["", "5-1", "-1", "1-", "1--2", "1,,2", "a", "1-b", "1.5", "1:3"])
def test_bad_seeds_are_named(text):
    with pytest.raises(ValueError, match="write 1-5 or 1,3,7") as caught:
        parse_seeds(text)
    assert repr(text) in str(caught.value)


def test_a_failed_run_is_named_and_the_others_finish(first):
    _, rows, failed, printed, _ = first
    assert [(row["algorithm"], row["seed"]) for row in rows] == [("ppo", 2), ("trpo", 1), ("trpo", 2)]
    assert list(failed) == ["ppo seed 1"] and "metrics.csv" in failed["ppo seed 1"]
    assert f"ppo seed 1 failed: {failed['ppo seed 1']}\n" in printed and "\n" not in failed["ppo seed 1"]
    assert "1 of 4 runs failed" in printed


def test_every_run_takes_the_same_steps(first):
    settings, rows, *_, bar = first
    assert len({row["env_steps"] for row in rows}) == 1 and rows[0]["env_steps"] >= settings.env_steps
    for row in rows:
        updates = rows_of(settings.out / row["algorithm"] / f"seed-{row['seed']}" / "updates.csv")
        assert sum(int(update["count"]) for update in updates) == row["env_steps"] == int(updates[-1]["env_steps"])
    assert "runs: 4 of 4 done  75%" in bar  # one of the four failed before its first step


def test_unequal_batches_are_rounded_up_to_a_common_multiple(tmp_path):
    jobs = replace(SETTINGS, out=tmp_path, env_steps=2_500, seeds="7").jobs()
    assert {job.settings.env_steps for job in jobs} == {4800}  # lcm(600, 800) = 2400, and 2 * 2400 >= 2500
    assert {job.size for job in jobs} == {4800} and {job.settings.seed for job in jobs} == {7}


def test_summary_says_what_the_episodes_say(first):
    settings, *_ = first
    rows = rows_of(settings.out / "summary.csv")
    assert len(rows) == 3
    for row in rows:
        folder = settings.out / row["algorithm"] / f"seed-{row['seed']}"
        episodes = rows_of(folder / "episodes.csv")
        returns = [float(episode["return"]) for episode in episodes]
        lengths = [int(episode["length"]) for episode in episodes]
        assert int(row["episodes"]) == len(episodes) > 20
        assert float(row["mean_return_all_episodes"]) == pytest.approx(sum(returns) / len(returns), rel=1e-12)
        assert float(row["mean_return_last_20"]) == pytest.approx(sum(returns[-20:]) / 20, rel=1e-12)
        assert float(row["max_return"]) == max(returns) and int(row["max_length"]) == max(lengths)
        assert float(row["mean_length"]) == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)
        last = rows_of(folder / "timing.csv")[-1]
        seconds = float(last["seconds"]) - float(last["evaluation_seconds"])
        timed = next(found for found in rows_of(settings.out / "timing.csv")
                     if (found["label"], found["seed"]) == (row["label"], row["seed"]))  # fmt: skip
        assert float(timed["seconds"]) == pytest.approx(seconds, rel=1e-12)
        assert float(timed["env_steps_per_second"]) == pytest.approx(int(row["env_steps"]) / seconds, rel=1e-12)
        assert "seconds" not in row
        evaluations = rows_of(folder / "eval.csv")
        # At 0, after the first batch that passes each 1,000 steps, and at the end; batches have 600 and 800 steps.
        steps = {"trpo": [0, 1200, 2400], "ppo": [0, 1600, 2400]}[row["algorithm"]]
        assert [int(found["env_steps"]) for found in evaluations] == steps
        returns = [float(found["return_greedy"]) for found in evaluations]
        assert float(row["final_return"]) == pytest.approx(sum(returns[1:]) / 2, rel=1e-12)
        assert float(row["max_evaluation_return"]) == max(returns[1:])


def test_what_the_columns_of_the_summary_mean(first):
    run = RunFiles(first[0].out / "trpo" / "seed-1")
    run.episodes = {"return": np.arange(1.0, 31.0), "length": 2 * np.arange(1.0, 31.0)}
    run.eval = {"env_steps": np.array([0.0, 1, 2, 4, 5, 6, 8]), "return_greedy": np.array([9.0, 8, 1, 2, 3, 4, 5]),
                "return_sampled": np.array([0.0, 0, 1, 1, 1, 1, 6])}
    row = summarise(run)
    assert row["mean_return_last_20"] == sum(range(11, 31)) / 20 == 20.5
    assert row["mean_return_all_episodes"] == 15.5 and row["max_return"] == 30 and row["max_length"] == 60
    assert row["final_return"] == 3.0 and row["final_return_sampled"] == 2.0  # the last five: 1 2 3 4 5, 1 1 1 1 6
    assert row["max_evaluation_return"] == 8 and row["evaluations"] == 7  # not the 9 from before training
    # Trapezoids: (9 + 8)/2, (8 + 1)/2, 2 (1 + 2)/2, (2 + 3)/2, (3 + 4)/2, 2 (4 + 5)/2 = 31 over 8 steps.
    assert row["area_under_curve"] == pytest.approx(31 / 8)
    run.episodes = {}
    assert math.isnan(summarise(run)["mean_return_last_20"])


def test_the_evaluation_before_training_is_no_result(first):
    run = RunFiles(first[0].out / "trpo" / "seed-1")
    run.eval = {"env_steps": np.array([0.0, 3000]), "return_greedy": np.array([221.0, 104]),
                "return_sampled": np.array([20.0, 30])}
    row = summarise(run)
    assert row["final_return"] == row["max_evaluation_return"] == 104 and row["final_return_sampled"] == 30
    assert time_to_threshold(run, 104)["steps_to_threshold"] == 3000
    assert math.isnan(time_to_threshold(run, 221)["steps_to_threshold"])


def test_evaluations_are_a_twentieth_of_the_run_apart_unless_asked():
    asked = [replace(SETTINGS, env_steps=48_000, eval_every=every).jobs()[0].settings for every in (None, 0, 7)]
    assert [settings.eval_every for settings in asked] == [2_400, None, 7]


def test_env_id_and_versions_stand_in_every_record(first):
    settings, rows, _, printed, _ = first
    records = [settings.out / "config.json", *settings.out.glob("*/seed-2/config.json")]
    assert len(records) == 3
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert "CartPole-v1" in (record["settings"].get("env_id"), record["settings"].get("task"))
        assert all(record["machine"][name] for name in ("gymnasium", "mujoco", "torch"))
    for row in rows_of(settings.out / "summary.csv"):
        assert row["env_id"] == "CartPole-v1" and row["gymnasium"] and row["mujoco"] and row["torch"]
    assert f"CartPole-v1, {rows[0]['env_steps']:,} environment steps a run (gymnasium {rows[0]['gymnasium']}" in printed


def test_a_worker_and_this_process_play_the_same_episodes(first, tmp_path):
    settings, *_ = first
    for job in replace(settings, seeds="2", out=tmp_path).jobs():
        job.run(advance=lambda steps: None)
        there, here = settings.out / job.algorithm / "seed-2", job.settings.out
        episodes = (there / "episodes.csv").read_text(encoding="utf-8")
        assert (here / "episodes.csv").read_text(encoding="utf-8") == episodes
        different = settings.out / "trpo" / "seed-1" / "episodes.csv"
        assert different.read_text(encoding="utf-8") != episodes
        for name in ("updates.csv", "eval.csv"):
            assert (here / name).read_bytes() == (there / name).read_bytes()


@pytest.mark.slow
def test_resume_trains_what_is_missing_and_nothing_else(first, tmp_path, monkeypatch):
    settings = replace(first[0], out=tmp_path / "copy", resume=True, quiet=True)
    shutil.copytree(first[0].out, settings.out)
    (settings.out / "ppo" / "seed-1" / "metrics.csv").rmdir()
    asked = []
    monkeypatch.setattr(compare, "run_jobs", lambda jobs, *_: asked.extend(jobs) or {})
    rows, failed = settings.run()
    assert len(rows) == 3 and not failed
    assert [(job.algorithm, job.settings.seed) for job in asked] == [("ppo", 1)]
    asked[0].run(advance=lambda steps: None)
    monkeypatch.setattr(compare, "run_jobs", no_training)
    rows, failed = settings.run()
    assert [row["algorithm"] for row in rows] == ["ppo", "ppo", "trpo", "trpo"] and not failed
    assert len(rows_of(settings.out / "summary.csv")) == 4


@pytest.mark.parametrize("change, named", [({"env": "Acrobot-v1"}, "task"), ({"env_steps": 9_000}, "env_steps")])
def test_resume_refuses_runs_with_other_settings(first, tmp_path, monkeypatch, change, named):
    settings = replace(first[0], out=tmp_path / "copy", resume=True, **change)
    shutil.copytree(first[0].out, settings.out)
    before = (settings.out / "config.json").read_bytes()
    monkeypatch.setattr(compare, "run_jobs", no_training)
    with pytest.raises(ValueError, match=f"another {named}; give another --out"):
        settings.run()
    assert (settings.out / "config.json").read_bytes() == before


def test_resume_takes_a_setting_that_an_older_run_did_not_have_for_its_default(first, tmp_path, monkeypatch):
    settings = replace(first[0], out=tmp_path / "copy", resume=True, quiet=True)
    shutil.copytree(first[0].out, settings.out)
    path = settings.out / "ppo" / "seed-1" / "config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["settings"]["world"]["init"]
    path.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(compare, "run_jobs", lambda *_: {})
    settings.run()
    with pytest.raises(ValueError, match="another world; give another --out"):
        replace(settings, set=("ppo.init=elsewhere",)).run()


def test_without_resume_a_comparison_starts_afresh(first, tmp_path, monkeypatch):
    settings = replace(first[0], out=tmp_path / "copy")
    shutil.copytree(first[0].out, settings.out)
    asked = []
    monkeypatch.setattr(compare, "run_jobs", lambda jobs, *_: asked.extend(jobs) or {"all": "stopped"})
    rows, failed = settings.run()
    assert len(asked) == 4 and rows == [] and rows_of(settings.out / "summary.csv") == []


def test_an_earlier_comparison_with_more_seeds_leaves_none_of_them(first, tmp_path, monkeypatch):
    settings = replace(first[0], out=tmp_path / "copy", seeds="1")
    shutil.copytree(first[0].out, settings.out)
    monkeypatch.setattr(compare, "run_jobs", lambda *_: {})
    assert settings.run() == ([], {})
    with pytest.raises(ValueError, match="no complete run of compare in"):
        complete_runs(settings.out)


def test_another_kind_of_run_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_jobs", no_training)
    write_config(tmp_path, {"algorithm": "ppo"})
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="holds another kind of run; give another --out"):
        replace(SETTINGS, out=tmp_path).run()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_variants_of_one_algorithm_get_a_reason_instead_of_verdicts(first, tmp_path, capsys):
    copy = tmp_path / "ppo" / "seed-2"
    shutil.copytree(first[0].out / "ppo" / "seed-2", copy)
    record = json.loads((copy / "summary.json").read_text(encoding="utf-8"))
    runs = complete_runs(first[0].out)
    (copy / "summary.json").write_text(json.dumps(record | {"variant": "ppo.clip=0.1"}), encoding="utf-8")
    report([*(run for run in runs if "ppo" not in str(run.parent.name)), copy], tmp_path / "one")
    assert "TRPO learns faster" in capsys.readouterr().out
    report([*runs, copy], tmp_path / "two")
    reason = "No verdict: there are several variants of ppo."
    assert reason in capsys.readouterr().out
    page = (tmp_path / "two" / "report.html").read_text(encoding="utf-8")
    assert reason in page and "Three claims" not in page


@pytest.fixture
def two_runs(first, tmp_path):
    """The same complete run twice."""
    runs = [tmp_path / name / "seed-1" for name in "ab"]
    for folder in runs:
        shutil.copytree(first[0].out / "trpo" / "seed-1", folder)
    return runs


@pytest.mark.parametrize("name, value", [("env_id", "CartPole-v0"), ("env_steps", 1)])
def test_unlike_runs_never_share_a_figure(two_runs, tmp_path, name, value):
    report(two_runs, tmp_path / "fine")
    assert (tmp_path / "fine" / "seeds.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((two_runs[1] / "summary.json").read_text(encoding="utf-8"))
    (two_runs[1] / "summary.json").write_text(json.dumps(row | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"different {name}.*{value}"):
        report(two_runs, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_runs_evaluated_more_or_less_often_are_not_compared(two_runs, tmp_path):
    table = two_runs[1] / "eval.csv"
    table.write_text("".join(table.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match="numbers of evaluations cannot be compared: 2, 3"):
        report(two_runs, tmp_path / "mixed")


def test_report_says_again_what_compare_said(first, tmp_path, capsys):
    rows = report(complete_runs(first[0].out), tmp_path, first[0].threshold)
    printed = capsys.readouterr().out
    table, _, where = printed.rpartition("with figures")
    assert table in first[3] and str(tmp_path / "report.html") in where
    assert sorted(map(str, rows)) == sorted(map(str, first[1]))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 3 and "TRPO learns faster" in page and "python -m minirl report" in page
    assert "TRPO learns faster" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert r"\begin{tabular}" in (tmp_path / "summary.tex").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="no complete run"):
        complete_runs(tmp_path / "empty")


def test_curves_hold_the_speed_of_training_alone(first):
    run = RunFiles(first[0].out / "trpo" / "seed-2")
    columns, training = run.curves(), run.timing["seconds"] - run.timing["evaluation_seconds"]
    assert columns["env_steps"][-1] == first[1][0]["env_steps"]
    rate = (columns["env_steps"][2] - columns["env_steps"][1]) / (training[2] - training[1])
    assert columns["steps_per_second"][2] == pytest.approx(rate, rel=1e-12)


def test_the_interval_is_students():
    # 1 to 5: deviation sqrt(2.5), over sqrt(5) gives sqrt(0.5) = 0.707107; t with 4 degrees of freedom is 2.776445.
    assert cell([1e6, 2e6, 3e6, 4e6, 5e6]) == "3,000,000.0 +/- 1,963,243.2"
    assert cell([5.0]) == "5.0"
    # 100 numbers 0 and 1 by turns: deviation sqrt(25/99), over sqrt(100) gives 0.0502519; t with 99 is 1.984217.
    text = cell([0.0, 1e6] * 50)
    assert float(text.split()[-1].replace(",", "")) == pytest.approx(1.984217e6 / math.sqrt(99) / 2, rel=1e-5)
    assert cell([math.nan, 1.0]) == "nan +/- nan"


@pytest.mark.parametrize("change", [
    {"algorithms": ()}, {"algorithms": ("ppo", "sarsa")}, {"env": "Nowhere-v1"}, {"set": ("ppo.clip=-1",)},
    {"set": ("clip",)}, {"set": ("sac.lr=1",)}, {"set": ("ppo.colour=1",)}, {"set": ("lr=",)},
    {"env_steps": 0}, {"seeds": "5-1"}, {"workers": -1}, {"eval_every": -1}, {"device": "quantum"},
])  # fmt: skip
def test_bad_settings_write_nothing(tmp_path, monkeypatch, change):
    monkeypatch.setattr(compare, "run_jobs", no_training)
    with pytest.raises(ValueError) as caught:
        replace(SETTINGS, out=tmp_path / "out", **change).run()
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
