"""compare: equal steps, every run accounted for, and a summary that says what episodes.csv says."""

import contextlib
import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from minirl.experiments import compare, summary
from minirl.experiments.compare import Compare, parse_seeds
from minirl.experiments.on_policy import ALGORITHMS
from minirl.experiments.summary import mean_and_interval, report, summarise
from minirl.plotting import compare_figure

SETTINGS = Compare(env="CartPole-v1", env_steps=2_300, seeds="1-2", workers=1)


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
    assert [(row["algorithm"], row["seed"]) for row in rows] == [("trpo", 1), ("trpo", 2), ("ppo", 2)]
    assert list(failed) == ["ppo seed 1"] and "metrics.csv" in failed["ppo seed 1"]
    assert f"ppo seed 1 failed: {failed['ppo seed 1']}\n" in printed and "\n" not in failed["ppo seed 1"]
    assert "1 of 4 runs failed" in printed


def test_every_run_takes_the_same_steps(first):
    settings, rows, *_, bar = first
    assert len({row["env_steps"] for row in rows}) == 1 and rows[0]["env_steps"] >= settings.env_steps
    for row in rows:
        metrics = rows_of(settings.out / row["algorithm"] / f"seed-{row['seed']}" / "metrics.csv")
        assert sum(int(update["count"] or 0) for update in metrics) == row["env_steps"]
    done, total = 3 * rows[0]["env_steps"], 4 * rows[0]["env_steps"]
    assert f"{done / 1000:.2f}k/{total / 1000:.2f}k" in bar


def test_unequal_batches_are_rounded_up_to_a_common_multiple(tmp_path):
    jobs = replace(SETTINGS, out=tmp_path, env_steps=2_500, seeds="7").jobs()
    updates = {job.algorithm: job.settings.updates for job in jobs}
    assert updates == {"trpo": 4800 // 600, "ppo": 4800 // 800}  # lcm(600, 800) = 2400, and 2 * 2400 >= 2500
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
        seconds = float(rows_of(folder / "metrics.csv")[-1]["seconds"])
        assert float(row["seconds"]) == seconds
        assert float(row["env_steps_per_second"]) == pytest.approx(int(row["env_steps"]) / seconds, rel=1e-12)


def test_last_20_means_the_last_20():
    episodes = [{"return": float(i), "length": 2 * i} for i in range(1, 31)]
    found = summarise(episodes)
    assert found["mean_return_last_20"] == sum(range(11, 31)) / 20 == 20.5
    assert found["mean_return_all_episodes"] == 15.5 and found["max_return"] == 30 and found["max_length"] == 60
    assert summarise(episodes[:4])["mean_return_last_20"] == 2.5
    empty = summarise([])
    assert empty["episodes"] == 0 and math.isnan(empty["mean_return_last_20"])


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
        updates = [rows_of(folder / "metrics.csv") for folder in (there, here)]
        for row in updates[0] + updates[1]:
            del row["seconds"]
        assert updates[0] == updates[1]


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
    assert [row["algorithm"] for row in rows] == ["trpo", "ppo"] * 2 and not failed
    assert len(rows_of(settings.out / "summary.csv")) == 4


@pytest.mark.parametrize("change, named", [({"env": "Acrobot-v1"}, "task"), ({"env_steps": 9_000}, "updates")])
def test_resume_refuses_runs_with_other_settings(first, tmp_path, monkeypatch, change, named):
    settings = replace(first[0], out=tmp_path / "copy", resume=True, **change)
    shutil.copytree(first[0].out, settings.out)
    before = (settings.out / "config.json").read_bytes()
    monkeypatch.setattr(compare, "run_jobs", no_training)
    with pytest.raises(ValueError, match=f"another {named}; give another --out"):
        settings.run()
    assert (settings.out / "config.json").read_bytes() == before


def test_without_resume_a_comparison_starts_afresh(first, tmp_path, monkeypatch):
    settings = replace(first[0], out=tmp_path / "copy")
    shutil.copytree(first[0].out, settings.out)
    asked = []
    monkeypatch.setattr(compare, "run_jobs", lambda jobs, *_: asked.extend(jobs) or {"all": "stopped"})
    rows, failed = settings.run()
    assert len(asked) == 4 and rows == [] and rows_of(settings.out / "summary.csv") == []


@pytest.mark.parametrize("name, value", [("env_id", "CartPole-v0"), ("env_steps", 1)])
def test_unlike_runs_never_share_a_figure(first, tmp_path, name, value):
    runs = [tmp_path / "a", tmp_path / "b"]
    for folder in runs:
        shutil.copytree(first[0].out / "trpo" / "seed-1", folder)
    report(runs, tmp_path / "fine")
    assert (tmp_path / "fine" / "compare.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((runs[1] / "summary.json").read_text(encoding="utf-8"))
    (runs[1] / "summary.json").write_text(json.dumps(row | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"different {name}.*{value}"):
        report(runs, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_the_figure_shows_all_runs_over_their_steps(first, tmp_path, monkeypatch):
    shown = {}
    monkeypatch.setattr(summary, "compare_figure", lambda series: shown.update(series) or compare_figure(series))
    report([first[0].out / name / "seed-2" for name in ("trpo", "ppo")], tmp_path)
    assert list(shown) == ["trpo", "ppo"]
    for (columns,) in shown.values():
        assert columns["env_steps"][-1] == first[1][0]["env_steps"]
        rate = (columns["env_steps"][2] - columns["env_steps"][1]) / (columns["seconds"][2] - columns["seconds"][1])
        assert columns["steps_per_second"][2] == pytest.approx(rate, rel=1e-12)


def test_the_interval_is_students():
    # 1 to 5: deviation sqrt(2.5), over sqrt(5) gives sqrt(0.5) = 0.707107; t with 4 degrees of freedom is 2.776445.
    assert mean_and_interval([1e6, 2e6, 3e6, 4e6, 5e6]) == "3,000,000.0 +/- 1,963,243.2"
    assert mean_and_interval([5.0]) == "5.0"
    # 100 numbers 0 and 1 by turns: deviation sqrt(25/99), over sqrt(100) gives 0.0502519; t with 99 is 1.984217.
    text = mean_and_interval([0.0, 1e6] * 50)
    assert float(text.split()[-1].replace(",", "")) == pytest.approx(1.984217e6 / math.sqrt(99) / 2, rel=1e-5)
    assert mean_and_interval([math.nan, 1.0]) == "nan +/- nan"


@pytest.mark.parametrize("change", [
    {"algorithms": ()}, {"algorithms": ("ppo", "sarsa")}, {"algorithms": ("ppo", "grpo")}, {"env": "Nowhere-v1"},
    {"env_steps": 0}, {"seeds": "5-1"}, {"workers": -1}, {"evaluate_every": -1}, {"device": "quantum"},
])  # fmt: skip
def test_bad_settings_write_nothing(tmp_path, monkeypatch, change):
    monkeypatch.setattr(compare, "run_jobs", no_training)
    with pytest.raises(ValueError) as caught:
        replace(SETTINGS, out=tmp_path / "out", **change).run()
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
