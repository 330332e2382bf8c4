"""What a run leaves behind: exact numbers, no gap and no repeat, readable on any console."""

import copy
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import minirl
from minirl.tracking import (
    Tracker,
    TrainingDiverged,
    check_finite,
    console_safe,
    read_rows,
    say,
    write_config,
    write_rows,
)


def quiet(folder, **settings):
    return Tracker(folder, quiet=True, tensorboard=False, **settings)


def lines_without_seconds(folder):
    text = (folder / "metrics.csv").read_text(encoding="utf-8")
    rows = [line.split(",") for line in text.splitlines()]
    return [row[:1] + row[2:] for row in rows]


def test_floats_come_back_bit_for_bit(tmp_path):
    numbers = {"third": 1 / 3, "tiny": 1e-310, "nan": math.nan, "inf": -math.inf, "count": 7, "on": True,
               "tensor": torch.tensor(0.1, dtype=torch.float64), "float32": torch.tensor(0.1), "numpy": np.float64(0.7)}
    with quiet(tmp_path) as tracker:
        tracker.log(1, numbers, extra=np.int64(3))
    row = read_rows(tmp_path / "metrics.csv")[0]
    assert math.isnan(row.pop("nan")) and row.pop("seconds") >= 0
    assert row == {"step": 1, "third": 1 / 3, "tiny": 1e-310, "inf": -math.inf, "count": 7, "on": 1, "tensor": 0.1,
                   "float32": float(np.float32(0.1)), "numpy": 0.7, "extra": 3}
    assert type(row["count"]) is int and type(row["third"]) is float


def test_every_row_is_on_disk_at_once(tmp_path):
    tracker = quiet(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, loss=float(step))
        assert [row["loss"] for row in read_rows(tmp_path / "metrics.csv")] == [1.0, 2.0, 3.0][:step]
    tracker.close()
    tracker.close()


def test_later_metrics_extend_the_header(tmp_path):
    with quiet(tmp_path) as tracker:
        tracker.log(1, loss=0.5)
        tracker.log(2, loss=0.25, accuracy=1.0)
        tracker.log(3, loss=0.125)
    assert lines_without_seconds(tmp_path) == [
        ["step", "loss", "accuracy"], ["1", "0.5", ""], ["2", "0.25", "1.0"], ["3", "0.125", ""]
    ]
    assert [sorted(row) for row in read_rows(tmp_path / "metrics.csv")] == [sorted(row) for row in tracker.history]
    assert len(list(tmp_path.iterdir())) == 1  # the rewrite leaves no temporary file


def log_run(tracker, first, last):
    for step in range(first, last + 1):
        more = {"accuracy": step / 7} if step % 3 == 0 else {}
        tracker.log(step, loss=1 / step, **more)


def test_resumed_run_writes_the_same_text(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with quiet(whole) as tracker:
        log_run(tracker, 1, 9)
    with quiet(parts) as tracker:
        log_run(tracker, 1, 7)
    with (parts / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("1")  # the crash cut a row of step 18 short; as step 1 it would look like a row to keep
    with quiet(parts, resume_from_step=5) as tracker:  # the checkpoint is older than the crash
        assert [row["step"] for row in tracker.history] == [1, 2, 3, 4, 5]
        log_run(tracker, 6, 9)
    assert lines_without_seconds(parts) == lines_without_seconds(whole)
    seconds = [row["seconds"] for row in read_rows(parts / "metrics.csv")]
    assert seconds == sorted(seconds)  # the clock goes on, it does not start again


def test_a_fresh_run_replaces_the_old_one(tmp_path):
    with quiet(tmp_path) as tracker:
        tracker.log(1, loss=1.0)
    with quiet(tmp_path) as tracker:
        tracker.log(1, reward=2.0)
    assert lines_without_seconds(tmp_path) == [["step", "reward"], ["1", "2.0"]]


@pytest.mark.parametrize("resume", [None, 5])
def test_steps_must_grow(tmp_path, resume):
    with quiet(tmp_path, resume_from_step=resume) as tracker:
        if resume is None:
            tracker.log(5, loss=1.0)
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step {step} was logged after step 5"):
                tracker.log(step, loss=1.0)
        tracker.log(6, loss=1.0)
    assert read_rows(tmp_path / "metrics.csv")[-1]["step"] == 6


def test_without_folder_only_the_history_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Tracker(None, quiet=True) as tracker:
        tracker.log(1, loss=0.5)
        tracker.log(2, loss=0.5, more=1)
    assert [row["loss"] for row in tracker.history] == [0.5, 0.5] and not list(tmp_path.iterdir())


def test_tensorboard_gets_every_metric_and_random_states_stay(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    before = torch.get_rng_state()
    for resume, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        with Tracker(tmp_path, quiet=True, resume_from_step=resume) as tracker:
            for step in steps:
                tracker.log(step, kl_old_new=step / 4, entropy=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["entropy", "kl_old_new"]
    assert [(e.step, e.value) for e in events.Scalars("kl_old_new")] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    with Tracker(tmp_path, quiet=True):
        assert len(list(tmp_path.glob("events*"))) == 1  # a fresh run does not mix with the old one


def test_any_rows_of_numbers_can_be_written(tmp_path):
    rows = [{"return": 1 / 3, "terminated": True, "length": 7}, {"return": -2.5, "terminated": False, "length": 1000}]
    write_rows(tmp_path / "new" / "episodes.csv", rows)
    assert read_rows(tmp_path / "new" / "episodes.csv") == rows  # True is 1
    write_rows(tmp_path / "none.csv", [])
    assert read_rows(tmp_path / "none.csv") == []


class Console(io.TextIOWrapper):
    def __init__(self, encoding):
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict")

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_bar_and_lines_print_on_any_console(tmp_path, monkeypatch, encoding):
    out, err = Console(encoding), Console(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    show = ("kl_old_new", "x")
    with Tracker(tmp_path, total=4, description="PPO · Walker2d", tensorboard=False, show=show) as tracker:
        for step in (1, 2, 4):
            tracker.log(step, kl_old_new=0.01234, loss=2.0)
        tracker.say("β = 0.1 → π_θ")
    say("数 ≤ ½ é")
    assert "4/4" in err.text() and "kl_old_new=0.0123" in err.text() and "loss" not in err.text()
    assert ("█" in err.text()) == (encoding == "utf-8")
    plain = {"utf-8": ["β = 0.1 → π_θ", "数 ≤ ½ é"], "ascii": ["beta = 0.1 -> pi_theta", "? <= 12 e"]}
    plain["cp1252"] = ["beta = 0.1 -> pi_theta", "? <= ½ é"]
    assert out.text().replace("\r", "").split("\n")[-3:-1] == plain[encoding]


def test_quiet_says_nothing(capsys):
    with Tracker(None, total=3, quiet=True) as tracker:
        tracker.log(1, loss=1.0)
        tracker.say("hello")
    assert capsys.readouterr() == ("", "")


def test_console_safe_keeps_what_the_stream_can_print():
    assert console_safe("é→", Console("cp1252")) == "é->"
    assert console_safe("é→", io.StringIO()) == "é→"  # no encoding: everything fits


def test_check_finite():
    fine = {"loss": torch.tensor(1.0), "explained_variance": math.nan, "episode_return": math.nan, "count": 3}
    check_finite(7, fine)
    with pytest.raises(TrainingDiverged, match="step 7: explained_variance is inf"):
        check_finite(7, {**fine, "explained_variance": math.inf})
    with pytest.raises(TrainingDiverged) as error:
        check_finite(7, {**fine, "value_loss": torch.tensor(math.nan), "entropy": math.nan})
    assert (error.value.step, error.value.metric) == (7, "value_loss") and "critic" in error.value.advice
    message = str(error.value)
    assert "step 7" in message and "value_loss is nan" in message and "\n" not in message and message.isascii()
    copied = copy.copy(error.value)  # how a worker process hands it to its parent
    assert str(copied) == message and copied.metric == "value_loss"


@dataclass(frozen=True)
class Inner:
    clip: float = 0.2


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    out: Path = Path("runs")
    anneal: bool = False
    seeds: tuple = (1, 2)


AS_DICT = {"inner": Inner(), "out": Path("runs"), "anneal": False, "seeds": (1, 2)}


@pytest.mark.parametrize("settings", [Outer(), AS_DICT])
def test_config_is_saved_as_resolved(tmp_path, settings):
    write_config(tmp_path / "new", settings)
    record = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert record["settings"] == {"inner": {"clip": 0.2}, "out": "runs", "anneal": False, "seeds": [1, 2]}
    machine = record["machine"]
    assert machine["minirl"] == minirl.__version__ and machine["torch"] == torch.__version__
    assert machine["numpy"] == np.__version__ and machine["threads"] == torch.get_num_threads()
    assert {"python", "gymnasium", "mujoco", "platform", "cpu", "commit"} <= set(machine)
