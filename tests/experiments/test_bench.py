"""The benchmark: everybody has a turn in every round, settings are equal, and the table says what was measured.

No test here compares speeds; one run with tiny batches shows that everything fits together.
"""

import csv
import inspect
import itertools
from dataclasses import replace

import numpy as np
import pytest

from minirl.experiments import bench
from minirl.experiments.bench import OURS, STEPS, THEIRS, Bench, as_markdown, table, take_turns
from minirl.experiments.commands import COMMANDS, Command, parse
from minirl.experiments.settings import ControlSettings

pytestmark = pytest.mark.slow


class Fake:
    """Takes the seconds it is given, one after the other."""

    def __init__(self, program, algorithm, seconds, log, num_envs=1):
        self.program, self.algorithm, self.num_envs = program, algorithm, num_envs
        self._seconds, self._log = iter(seconds), log

    def update(self):
        self._log.append(self.program)
        return list(next(self._seconds))


def test_everybody_has_a_turn_and_the_order_turns_round():
    log, noted = [], itertools.count()
    programs = [Fake(name, "", [(number,) for number in range(9, 13)], log) for name in "abc"]
    first, seconds = take_turns(programs, 3, lambda: next(noted))
    assert "".join(log) == "abc" + "abc" + "cba" + "abc" and next(noted) == 12
    assert first == [9, 9, 9] and [rows.tolist() for rows in seconds] == [[[10], [11], [12]]] * 3


def test_the_table_says_what_was_measured():
    programs = [
        Fake("simulator", "", (), []), Fake("minirl", "ppo", (), [], 8), Fake("sb3", "ppo", (), [], 8),
        Fake("sb3", "ppo", (), [], 1),
    ]  # fmt: skip
    seconds = [[[0.5], [0.5], [1.0]], [[1, 0.5, 0.5], [2, 1, 1], [2, 1, 1]], [[6], [6], [8]], [[1], [1], [1]]]
    rows = table(programs, [1, 2, 3, 4], [np.array(part, float) for part in seconds])
    mine, peer = rows[1], rows[2]
    # Updates of 2, 4, 4 s beside 6, 6, 8 s: ratios 3, 1.5, 2. The ceiling's 0.5, 0.5, 1 s: shares 1/4, 1/8, 1/4.
    assert (mine["steps_per_second"], mine["slowest"], mine["fastest"]) == (STEPS / 4, STEPS / 4, STEPS / 2)
    assert (mine["times_sb3_lowest"], mine["times_sb3"], mine["times_sb3_highest"]) == (1.5, 2.0, 3.0)
    assert mine["share_of_simulator"] == 0.25 and mine["first_update_seconds"] == 2 and mine["rounds"] == 3
    assert [mine[f"{part}_share"] for part in bench.PARTS] == [0.5, 0.25, 0.25]
    assert peer["times_sb3"] == peer["policy_share"] == "" and rows[0]["share_of_simulator"] == 1.0
    text = as_markdown(rows, "a title", {"torch": "2"})
    assert "| minirl | ppo | 8 | 512 (512 to 1,024) | 25% | 2.00 (1.50 to 3.00) | 2.0 | 50% | 25% | 25% |" in text
    assert "| sb3 | ppo | 1 | 2,048 (2,048 to 2,048) | 50% |  | 4.0 |  |  |  |" in text and text.endswith("torch 2\n")


def test_settings_are_equal():
    ppo, trpo = OURS["ppo"][1], OURS["trpo"][1]
    theirs = THEIRS["ppo"]
    assert theirs["batch_size"] * ppo.minibatches == theirs["batch_size"] * ppo.critic_minibatches == STEPS == 2048
    assert theirs["n_epochs"] == ppo.epochs == ppo.critic_epochs == 10 and theirs["clip_range"] == ppo.clip
    assert theirs["learning_rate"] == ppo.lr == ppo.critic_lr and theirs["max_grad_norm"] == ppo.max_grad_norm
    assert theirs["ent_coef"] == ppo.entropy_coef and ppo.target_kl is None
    theirs = THEIRS["trpo"]
    assert theirs["batch_size"] * trpo.critic_minibatches == STEPS and theirs["learning_rate"] == trpo.critic_lr
    assert theirs["n_critic_updates"] == trpo.critic_epochs == 10 and theirs["cg_max_steps"] == trpo.cg_iterations
    assert theirs["target_kl"] == trpo.delta and theirs["cg_damping"] == trpo.damping and trpo.fisher_fraction == 1
    for ours, theirs in ((ppo, THEIRS["ppo"]), (trpo, THEIRS["trpo"])):
        assert theirs["gamma"] == ours.gamma and theirs["gae_lambda"] == ours.gae_lambda
    assert ControlSettings().normalize_observations and ControlSettings().reward_scaling


def test_what_is_not_named_has_equal_defaults():
    contrib = pytest.importorskip("sb3_contrib")
    defaults = inspect.signature(contrib.TRPO).parameters
    trpo = OURS["trpo"][1]
    assert defaults["line_search_shrinking_factor"].default == trpo.backtrack
    assert defaults["line_search_max_iter"].default == trpo.max_backtracks
    assert defaults["sub_sampling_factor"].default == 1 and defaults["normalize_advantage"].default is trpo.whiten


def test_an_update_must_divide_by_the_number_of_environments():
    with pytest.raises(ValueError, match="num_envs is 3; an update's 2048 steps must divide by it"):
        Bench(num_envs=(1, 3)).run()


def test_a_tiny_run_fills_the_table(monkeypatch, tmp_path, capsys):
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sb3_contrib")
    monkeypatch.setattr(bench, "STEPS", 64)
    few = {"critic_epochs": 1, "critic_minibatches": 2}
    monkeypatch.setitem(OURS, "ppo", (OURS["ppo"][0], replace(OURS["ppo"][1], epochs=1, minibatches=2, **few)))
    monkeypatch.setitem(OURS, "trpo", (OURS["trpo"][0], replace(OURS["trpo"][1], **few)))
    monkeypatch.setitem(THEIRS, "ppo", THEIRS["ppo"] | {"n_epochs": 1, "batch_size": 32})
    monkeypatch.setitem(THEIRS, "trpo", THEIRS["trpo"] | {"n_critic_updates": 1, "batch_size": 32})
    monkeypatch.setitem(COMMANDS, "bench", Command("Compare", "bench.Bench", "Speed."))
    rows = parse("bench", ["compare", "--num-envs", "1", "2", "--rounds", "2", "--quiet", "--out", str(tmp_path)]).run()
    names = [(row["program"], row["algorithm"], row["envs"]) for row in rows]
    order = itertools.product((1, 2), ("ppo", "trpo"), ("minirl", "sb3"))
    assert names == [("simulator", "", 1), *((program, algorithm, count) for count, algorithm, program in order)]
    for row in rows:
        assert 0 < row["slowest"] <= row["steps_per_second"] <= row["fastest"] and row["rounds"] == 2
        if row["program"] == "minirl":
            assert row["times_sb3_lowest"] <= row["times_sb3"] <= row["times_sb3_highest"]
            assert all(0 < row[f"{part}_share"] < 1 for part in bench.PARTS)
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert "stable_baselines3" in text and "torch" in text and text.strip() in capsys.readouterr().out
    with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_compiled_is_timed_beside_the_plain_one(monkeypatch):
    monkeypatch.setattr(bench.torch, "compile", lambda loss: loss)
    monkeypatch.setattr(bench, "Peer", lambda algorithm, env, count, seed: ("sb3", algorithm, count))
    programs = Bench(num_envs=(2,), compile=True).programs()
    assert [program.program for program in programs if not isinstance(program, tuple)] == [
        "simulator", "minirl", "minirl", "minirl compiled",
    ]  # fmt: skip
    assert programs[-1].algorithm == "ppo" and programs[-1].num_envs == 2
