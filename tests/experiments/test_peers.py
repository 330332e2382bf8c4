"""SB3's policies behave as themselves inside our harness, and their runs leave what ours leave."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = {"sb3-ppo": {"n_steps": 128, "n_epochs": 2}, "sb3-trpo": {"n_steps": 64, "n_critic_updates": 2}}


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_without_stable_baselines_one_line_says_what_to_install():
    code = "import sys; sys.modules['sb3_contrib'] = None; import minirl.experiments.peers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError") and 'pip install -e ".[bench]"' in last
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("name", ["sb3-ppo", "sb3-trpo"])
def test_a_wrapped_policy_acts_as_its_model(name):
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sb3_contrib")
    from minirl.experiments.peers import PEERS, PeerPolicy, make_peer

    kind, num_envs, settings = PEERS[name]
    model = make_peer(kind, "Walker2d-v5", num_envs, settings | SHORT[name], seed=3)
    policy, envs = PeerPolicy(model), model.get_vec_normalize_env()
    model.learn(128)
    assert np.abs(envs.obs_rms.mean).max() > 0.1, "statistics that are still 0 and 1 would hide an error"
    obs = np.random.default_rng(0).normal(size=(50, 17)).astype(np.float32) * 3
    before = envs.obs_rms.mean.copy()
    mine = policy.mode(torch.from_numpy(obs)).detach().numpy()
    theirs = model.predict(envs.normalize_obs(obs), deterministic=True)[0]
    np.testing.assert_allclose(mine.clip(-1, 1), theirs, atol=1e-6)
    assert np.abs(theirs).max() > 0
    # The same noise gives the same sample, and the log-probability of it is the model's own.
    torch.manual_seed(0)
    sampled = policy(torch.from_numpy(obs)).sample()
    torch.manual_seed(0)
    theirs = model.predict(envs.normalize_obs(obs))[0]
    np.testing.assert_allclose(sampled.numpy().clip(-1, 1), theirs, atol=1e-6)
    logprobs = model.policy.evaluate_actions(torch.from_numpy(envs.normalize_obs(obs)), sampled)[1]
    torch.testing.assert_close(policy(torch.from_numpy(obs)).log_prob(sampled), logprobs)
    np.testing.assert_array_equal(envs.obs_rms.mean, before)


@pytest.mark.parametrize("name", ["sb3-ppo", "sb3-trpo"])
def test_a_run_leaves_its_files_and_is_the_same_with_more_evaluations(name, tmp_path):
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("sb3_contrib")
    from minirl.experiments.peers import PeerJob

    def train(folder, eval_every):
        advanced = []
        PeerJob(name, "Walker2d-v5", 256, folder, 1, eval_every, 2, SHORT[name]).run(advanced.append)
        assert sum(advanced) == 256
        return [rows_of(folder / f"{file}.csv") for file in ("episodes", "updates", "eval", "timing")]

    episodes, updates, evaluations, timing = train(tmp_path / "often", 100)
    again, updated, ends, _ = train(tmp_path / "seldom", 0)
    assert episodes == again and updates == updated and len(episodes) > 3, "an evaluation left a trace"
    assert evaluations[0] == ends[0] and evaluations[-1] == ends[-1] and len(ends) == 2
    assert [int(row["env_steps"]) for row in evaluations] == [0, 128, 256]
    for row in timing:
        assert 0 < float(row["evaluation_seconds"]) < float(row["seconds"])
    assert [int(row["env_steps"]) for row in timing] == [int(row["env_steps"]) for row in updates] == [128, 256]
    assert {row["seed"] for row in episodes} == ({"1"} if name == "sb3-ppo" else {"1", "2"})
    first = [float(row["return"]) for row in episodes if int(row["end_step"]) <= 128]
    assert float(updates[0]["episode_return"]) == pytest.approx(sum(first) / len(first))
    assert all(math.isfinite(float(row[name])) for row in updates for name in ("explained_variance", "value_loss"))
    assert list(episodes[0]) == ["end_step", "return", "length", "terminated", "truncated", "seed"]
    assert sum(int(row["length"]) for row in episodes) <= 256 and {row["terminated"] for row in episodes} == {"1"}
    config = json.loads((tmp_path / "often" / "config.json").read_text(encoding="utf-8"))
    versions = json.loads((tmp_path / "often" / "versions.json").read_text(encoding="utf-8"))
    assert config["settings"]["task"] == "Walker2d-v5" and config["settings"]["config"]["gamma"] == 0.99
    assert versions["sb3_contrib"] and versions["mujoco"]


def test_returns_are_raw_and_a_time_limit_is_told_from_a_fall(tmp_path):
    pytest.importorskip("stable_baselines3")
    from minirl.experiments.peers import PeerJob

    PeerJob("sb3-ppo", "Pendulum-v1", 512, tmp_path, 0, 0, 1, {"n_epochs": 1}).run(lambda steps: None)
    episodes = rows_of(tmp_path / "episodes.csv")
    assert [row["length"] for row in episodes] == ["200", "200"]
    assert [row["end_step"] for row in episodes] == ["200", "400"]
    assert {(row["terminated"], row["truncated"]) for row in episodes} == {("0", "1")}
    assert all(float(row["return"]) < -500 for row in episodes), "scaled rewards add up to less"


def test_an_unknown_peer_is_named(tmp_path):
    pytest.importorskip("stable_baselines3")
    from minirl.experiments.peers import PeerJob

    with pytest.raises(ValueError, match="no peer 'ppo'; there are sb3-ppo, sb3-trpo"):
        PeerJob("ppo", "Walker2d-v5", 8, tmp_path).run(lambda steps: None)


def test_evaluations_come_after_the_first_update_that_reaches_so_many_steps(tmp_path):
    pytest.importorskip("stable_baselines3")
    from minirl.experiments.peers import PeerJob

    short = {"n_steps": 100, "batch_size": 50, "n_epochs": 1}
    PeerJob("sb3-ppo", "Pendulum-v1", 650, tmp_path, 0, 300, 1, short).run(lambda steps: None)
    steps = [int(row["env_steps"]) for row in rows_of(tmp_path / "eval.csv")]
    assert steps == [0, 300, 600, 700]  # 650 are rounded up to 700, as SB3 does


def test_an_evaluation_names_what_is_greedy_and_uses_our_seed():
    pytest.importorskip("stable_baselines3")
    from minirl.experiments.on_policy import EVALUATION_SEED
    from minirl.experiments.peers import Harness

    class World:
        def evaluate(self, policy, episodes, seed, greedy):
            assert (episodes, seed) == (5, EVALUATION_SEED)
            return {"return_mean": 1.0 if greedy else 2.0, "length_mean": 3.0 if greedy else 4.0}

    harness = Harness(World(), 0, 10, 0, 5, None)
    harness.model = SimpleNamespace(policy=None, get_vec_normalize_env=lambda: None)
    harness.evaluate()
    assert harness.evaluations == [
        {"env_steps": 0, "return_greedy": 1.0, "length_greedy": 3.0, "return_sampled": 2.0, "length_sampled": 4.0}
    ]
