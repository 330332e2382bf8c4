"""Comparisons of segments, the world with predicted rewards, and the command rlhf-2017."""

import contextlib
import csv
import io
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
import tyro

from minirl.algorithms.segment_reward import SegmentReward, SegmentRewardConfig
from minirl.algorithms.trpo import TRPOConfig
from minirl.experiments.rlhf_2017 import HumanPreferences, recovered, without_ends
from minirl.experiments.segments import Labeller, PredictedRewardWorld, draw_pairs, label_schedule
from minirl.experiments.settings import ControlSettings
from minirl.models.policies import GaussianPolicy
from minirl.worlds.batch import Batch
from minirl.worlds.control import ControlWorld


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- when


@pytest.mark.parametrize(("labels", "rollouts", "first"), [(1400, 300, 15), (700, 40, 1), (10, 100, 5), (1, 9, 2)])
def test_the_schedule_spends_the_budget_and_a_quarter_of_it_first(labels, rollouts, first):
    schedule = label_schedule(labels, rollouts, first)
    assert len(schedule) == rollouts and sum(schedule) == labels and min(schedule) >= 0
    assert sum(schedule[:first]) == round(labels / 4)
    assert max(schedule[:first]) - min(schedule[:first]) <= 1


def test_the_rate_falls_as_published():
    rollouts, first, labels = 410, 10, 4_000_000
    schedule = np.array(label_schedule(labels, rollouts, first)[first:], float)
    # Labels are whole: half of one among 3,500 at either end.
    frames = (np.arange(400) + 0.5) / 400 * 1e7  # T in the middle of each rollout of a run of the paper's length
    rate = 2e6 / (frames + 2e6)
    assert np.allclose(schedule / schedule.sum(), rate / rate.sum(), rtol=5e-4)


# ---- of what


def make_batch(ends=((2, 3), (9, 1)), rows=2, length=12):
    """A batch whose observation is (row, time) and whose action is 10 · time; true ends at (time, row), then limits."""
    row, time = torch.meshgrid(torch.arange(rows), torch.arange(length), indexing="ij")
    flags = torch.zeros(2, rows, length, dtype=torch.bool)
    for kind, (at, which) in enumerate(ends):
        flags[kind, which % rows, at] = True
    rewards = torch.randn(rows, length)
    return Batch(
        obs=torch.stack([row, time], -1).float(), actions=10.0 * time[..., None], logprobs=torch.zeros(rows, length),
        rewards=rewards, scores=rewards.sum(1), terminated=flags[0], truncated=flags[1],
        mask=torch.ones(rows, length, dtype=torch.bool),
    )  # fmt: skip


def test_segments_are_consecutive_steps_of_one_episode():
    batch = make_batch()
    pairs, sums = draw_pairs(batch, 3, 400)
    assert pairs.shape == (400, 2, 3, 3) and sums.shape == (400, 2)
    seen = set()
    for segment, total in zip(pairs.flatten(0, 1), sums.flatten(), strict=True):
        row, times = int(segment[0, 0]), segment[:, 1].int().tolist()
        assert (segment[:, 0] == row).all() and times == list(range(times[0], times[0] + 3))
        assert (segment[:, 2] == 10 * segment[:, 1]).all()
        ended = (batch.terminated | batch.truncated)[row, times[:-1]]
        assert not ended.any(), "only the last step may be an episode's last"
        assert abs(total - batch.rewards[row, times].sum()) < 1e-6
        seen.add((row, times[0]))
    # row 1: ends at 2 and 9, so the episodes are 0-2, 3-9, 10-11; row 0 is one episode
    assert seen == {(0, t) for t in range(10)} | {(1, t) for t in (0, 3, 4, 5, 6, 7)}


def test_a_segment_of_one_step_and_one_too_long():
    assert draw_pairs(make_batch(), 1, 5)[0].shape == (5, 2, 1, 3)
    for length in (13, 99):
        with pytest.raises(ValueError, match="lower --segment-steps"):
            draw_pairs(make_batch(), length, 5)


# ---- by whom


def test_the_labeller_prefers_the_larger_sum():
    assert Labeller()(torch.tensor([[2.0, 1.0], [1.0, 2.0], [-3.0, -3.0]])).tolist() == [1, 0, 0.5]


def test_a_labeller_with_known_noise():
    n = 20_000
    mu = Labeller(label_error=0.2)(torch.tensor([[1.0, 0.0]]).expand(n, 2))
    assert abs((mu == 0).double().mean() - 0.2) < 4 * (0.2 * 0.8 / n) ** 0.5
    assert set(mu.tolist()) == {0.0, 1.0}
    assert (Labeller(label_error=1.0)(torch.zeros(9, 2)) == 0.5).all(), "a tie turned round is a tie"
    with pytest.raises(ValueError, match="label_error is 1.5"):
        Labeller(label_error=1.5)


# ---- the world


def pendulum(reward_scaling=False):
    return ControlWorld("Pendulum-v1", 2, steps=250, seed=3, reward_scaling=reward_scaling)


def collected(world, predictor_settings=None, schedule=(6, 0, 4)):
    torch.manual_seed(5)
    policy = GaussianPolicy(3, 1, (8,))
    predictor = SegmentReward(3, 1, SegmentRewardConfig(fit_steps=2, **(predictor_settings or {})))
    predicted = PredictedRewardWorld(world, predictor, Labeller(), schedule, 20, gamma=0.9)
    torch.manual_seed(6)
    return predicted, policy, [predicted.collect(policy, lambda obs: obs[..., 0]) for _ in range(4)]


def test_predicted_rewards_reach_the_batch_and_true_returns_the_report():
    world = pendulum()
    predicted, policy, batches = collected(world)
    torch.manual_seed(6)
    plain = pendulum()
    first = plain.collect(policy, lambda obs: obs[..., 0])  # the same actions: labelling comes after acting
    assert torch.equal(batches[0].obs, first.obs) and torch.equal(batches[0].values, first.values)
    assert torch.equal(batches[0].scores, first.scores) and torch.allclose(first.scores, first.rewards.sum(1))
    assert batches[0].metrics["episode_return"] == first.metrics["episode_return"] < -100
    assert not torch.allclose(batches[0].rewards, first.rewards, atol=0.1)
    assert [batch.metrics["labels"] for batch in batches] == [6, 6, 10, 10]
    assert [batch.metrics["env_steps"] for batch in batches] == [500, 1000, 1500, 2000]
    last = batches[-1]
    steps = torch.cat([last.obs, last.actions], -1)
    with torch.no_grad():
        rewards = predicted.predictor(steps)
        shown = predicted.predictor(predicted.predictor.pairs)
    assert abs(shown.mean()) < 1e-4 and abs(shown.std(unbiased=False) - 1) < 1e-4
    ratio = last.rewards / rewards  # the scale of a rollout is one number
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3) and ratio[0, 0] > 0


def test_the_scale_is_control_worlds_own():
    policy, predictor = GaussianPolicy(3, 1, (8,)), SegmentReward(3, 1, SegmentRewardConfig(fit_steps=2))
    batch = PredictedRewardWorld(pendulum(), predictor, Labeller(), [6], 20, gamma=0.9).collect(policy)
    with torch.no_grad():
        rewards = predictor(torch.cat([batch.obs, batch.actions], -1)).double()
    running, returns, ended = np.zeros(2), [], batch.truncated.numpy()
    for t in range(250):  # the deviation of the discounted return, which the end of an episode clears
        returns.append(rewards[:, t].numpy() + 0.9 * running)
        running = np.where(ended[:, t], 0, returns[-1])
    assert ended.any() and torch.allclose(batch.rewards.double(), rewards / np.std(returns), atol=1e-5)


def test_the_labeller_sees_true_sums_of_the_chosen_pairs():
    seen = []

    class Spy(Labeller):
        def __call__(self, true_sums):
            seen.append(true_sums)
            return super().__call__(true_sums)

    policy, predictor = GaussianPolicy(3, 1, (8,)), SegmentReward(3, 1, SegmentRewardConfig(fit_steps=1))
    world = PredictedRewardWorld(pendulum(), predictor, Spy(), [5], 20, gamma=0.9)
    world.collect(policy)
    cos, sin, speed, action = predictor.pairs.double().unbind(-1)  # Pendulum-v1: −(θ² + 0.1 θ̇² + 0.001 u²)
    truth = -(torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * action.clamp(-2, 2) ** 2).sum(-1)
    assert torch.allclose(seen[0].double(), truth, atol=1e-3)
    assert predictor.mu.tolist() == (truth[:, 0] > truth[:, 1]).double().tolist()


def test_ten_candidates_for_each_label():
    asked = []
    predictor = SegmentReward(3, 1, SegmentRewardConfig(fit_steps=1))
    choose = predictor.choose
    predictor.choose = lambda pairs, count: asked.append((len(pairs), count)) or choose(pairs, count)
    PredictedRewardWorld(pendulum(), predictor, Labeller(), [7], 20, gamma=0.9).collect(GaussianPolicy(3, 1, (8,)))
    assert asked == [(70, 7)]


def test_walkers_fall_without_an_end():
    assert without_ends("Pendulum-v1") == "Pendulum-v1"
    name = without_ends("Hopper-v5")
    assert without_ends("Hopper-v5") == name, "asked twice it is registered once"
    env = gymnasium.make(name)
    env.reset(seed=0)
    rewards, ended = [], []
    for _ in range(300):
        _, reward, terminated, _, _ = env.step(np.array([1.0, -1.0, 1.0], np.float32))
        rewards.append(reward)
        ended.append(terminated)
    assert not any(ended) and not env.unwrapped.is_healthy
    assert rewards[-1] < 0.9, "on the ground it earns nothing for being healthy"
    assert env.spec.max_episode_steps == 1000
    world = ControlWorld(without_ends("Walker2d-v5"))
    assert not world.fast, "the fast path knows walkers whose episodes end"
    world.close()


# ---- the command


SMALL = HumanPreferences(
    env_steps=1_500, labels=20, segment_steps=10, seeds="1-2", workers=1, quiet=True,
    predictor=SegmentRewardConfig(fit_steps=2), trpo=TRPOConfig(gamma=0.995, gae_lambda=0.97, critic_epochs=1),
    world=ControlSettings(num_envs=2, steps=100, warmup_steps=50),
)  # fmt: skip


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_command(tmp_path):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        rows, failed = replace(SMALL, out=tmp_path).run()
    assert not failed and [(row["arm"], row["seed"]) for row in rows] == [
        ("predicted", 1), ("true", 1), ("predicted", 2), ("true", 2),
    ]  # fmt: skip
    kept = read(tmp_path / "results.csv")
    assert [row["env_steps"] for row in kept] == ["1600"] * 4, "rounded up to whole rollouts, equal for both"
    assert [row["labels"] for row in kept] == ["20", "0", "20", "0"]
    assert [float(row["labels_per_step"]) for row in kept] == [20 / 1600, 0, 20 / 1600, 0]
    metrics = read(tmp_path / "predicted" / "seed-1" / "metrics.csv")
    assert len(metrics) == 7, "one rollout of eight is the untrained policy's"
    assert [int(row["env_steps"]) for row in metrics] == list(range(400, 1601, 200))
    labels = [int(row["labels"]) for row in metrics]
    assert labels[0] > 5 and labels[-1] == 20 and labels == sorted(labels)
    assert len(read(tmp_path / "true" / "seed-1" / "metrics.csv")) == 8
    untrained = {row["seed"]: row["return_untrained"] for row in rows}
    assert all(row["return_untrained"] == untrained[row["seed"]] for row in rows), "both start from one policy"
    assert (tmp_path / "rlhf_2017.png").stat().st_size > 10_000 and (tmp_path / "config.json").is_file()
    text = printed.getvalue()
    assert "the labeller is simulated" in text and "1.25%" in text and "+/-" in text and "recovered" in text


@pytest.mark.parametrize(("change", "message"), [
    ({"segment_steps": 101}, "segment_steps is 101"), ({"env_steps": 200}, "two rollouts are needed"),
    ({"world": ControlSettings(whole_episodes=True)}, "leave it off"), ({"seeds": "x"}, "seeds are 'x'"),
    ({"env": "CartPole-v1"}, "choose one of Pendulum-v1"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, out=tmp_path / "run", **change).run()
    assert not (tmp_path / "run").exists()


def test_recovered_by_hand():
    rows = [{"arm": arm, "seed": seed, "return_untrained": -1200.0, "return_final": final}
            for arm, seed, final in (("predicted", 1, -300.0), ("true", 1, -200.0), ("predicted", 2, -100.0))]
    assert recovered(rows) == [90.0]  # 900 of 1000; seed 2 has nothing to compare with


def test_options():
    settings = tyro.cli(HumanPreferences, config=(tyro.conf.OmitArgPrefixes,), args=[
        "--env", "Hopper-v5", "--env-steps", "1000", "--labels", "9", "--segment-steps", "50", "--seeds", "4-5",
        "--workers", "1", "--out", "x", "--device", "cpu", "--quiet", "--label-error", "0.1", "--selection", "random",
        "--predictors", "5", "--gae-lambda", "0.9",
    ])  # fmt: skip
    assert settings.env == "Hopper-v5" and settings.labeller.label_error == 0.1
    assert settings.predictor.selection == "random" and settings.trpo.gae_lambda == 0.9
    assert settings.trpo.gamma == 0.995, "the paper's, unless somebody says otherwise"
