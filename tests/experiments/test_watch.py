"""The policy of a run comes back to the bit, and a film is a film, or one line that says why there is none."""

import os
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from minirl.experiments import watch
from minirl.experiments.on_policy import ALGORITHMS, Run
from minirl.experiments.settings import RunSettings
from minirl.experiments.watch import Watch, load_walker, record, record_best
from minirl.models.policies import GaussianPolicy
from minirl.tracking import write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(Run, its folder) of two updates of ppo on Walker2d-v5, with settings unlike the default ones."""
    folder = tmp_path_factory.mktemp("runs") / "ppo" / "seed-3"
    entry = ALGORITHMS["ppo"]
    world = replace(entry.control_world, num_envs=2, steps=64, hidden=(8, 4), warmup_steps=16)
    config = replace(entry.control, epochs=1, minibatches=2, critic_epochs=1)
    settings = RunSettings(folder, updates=2, seed=3, evaluate_episodes=1, quiet=True)
    run = Run("ppo", "Walker2d-v5", config, world, settings)
    run.start()
    return run, folder


def random_walker():
    torch.manual_seed(0)
    return GaussianPolicy(17, 6, hidden=(8,))


def test_a_loaded_walker_acts_to_the_bit_as_it_did(trained):
    run, folder = trained
    before = torch.random.get_rng_state()
    policy, env_id = load_walker(folder)
    assert env_id == "Walker2d-v5" and torch.equal(before, torch.random.get_rng_state())
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(100, 17)).astype(np.float32)) * 5
    assert int(policy.normalizer.count) > 0
    assert torch.equal(policy.mode(obs), run.policy.mode(obs))
    assert torch.equal(policy(obs).stddev, run.policy(obs).stddev)
    ours, theirs = (run.world.evaluate(one, 2, seed=5, greedy=False)["returns"] for one in (policy, run.policy))
    assert ours == theirs


def test_a_policy_for_buttons_and_without_normaliser_comes_back_too(tmp_path):
    entry = ALGORITHMS["ppo"]
    world = replace(entry.control_world, num_envs=1, steps=32, normalize_observations=False)
    config = replace(entry.control, epochs=1, minibatches=1, critic_epochs=1)
    run = Run("ppo", "CartPole-v1", config, world, RunSettings(tmp_path, updates=1, evaluate_episodes=1, quiet=True))
    run.start()
    policy, env_id = load_walker(tmp_path)
    obs = torch.randn(50, 4)
    assert env_id == "CartPole-v1" and torch.equal(policy(obs).logits, run.policy(obs).logits)


def test_another_kind_of_run_is_refused_in_one_line(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        load_walker(tmp_path)
    comparison = trained[1].parent.parent
    with pytest.raises(FileNotFoundError, match=f"is no run, but has 1 in it; name one, such as {trained[1]}"):
        load_walker(comparison)
    (tmp_path / "checkpoint.safetensors").write_bytes((trained[1] / "checkpoint.safetensors").read_bytes())
    write_config(tmp_path, {"algorithm": "ppo", "task": "arithmetic", "world": {}})
    with pytest.raises(ValueError, match="holds no run in an environment; its config.json says task arithmetic"):
        load_walker(tmp_path)


def test_a_run_starts_from_the_policy_of_another(trained, tmp_path):
    run, folder = trained
    settings = RunSettings(tmp_path, updates=1, evaluate_episodes=1, quiet=True)
    entry = ALGORITHMS["grpo"]
    world = replace(entry.control_world, num_envs=2, group_size=2, hidden=(8, 4), init=folder)
    after = Run("grpo", "Walker2d-v5", entry.control, world, settings).start()
    assert after["before"]["eval_return"] == run.evaluate(2)["eval_return"]  # the same walker, from the same states
    fresh = Run("grpo", "Walker2d-v5", entry.control, replace(world, init=None), settings)
    assert fresh.evaluate(0)["eval_return"] != after["before"]["eval_return"]
    policy, _ = load_walker(tmp_path)
    assert int(policy.normalizer.count) >= int(run.policy.normalizer.count) > 0  # it goes on from what was seen


@pytest.mark.parametrize("env_id, hidden, reason", [
    ("Hopper-v5", (8, 4), "is no run in Hopper-v5 but in Walker2d-v5"),
    ("Walker2d-v5", (8, 5), "has another policy than these settings make .*size mismatch"),
])  # fmt: skip
def test_a_policy_that_does_not_fit_is_refused_before_anything_is_written(trained, tmp_path, env_id, hidden, reason):
    entry = ALGORITHMS["reinforce"]
    world = replace(entry.control_world, hidden=hidden, init=trained[1])
    with pytest.raises(ValueError, match=reason):
        Run("reinforce", env_id, entry.control, world, RunSettings(tmp_path, updates=1, quiet=True))
    assert not list(tmp_path.iterdir())


def test_a_film_has_as_many_moving_pictures_as_seconds_need(tmp_path, capsys):
    imageio = pytest.importorskip("imageio.v3")
    policy, path = random_walker(), tmp_path / "new" / "walker.gif"
    before, chosen = torch.random.get_rng_state(), os.environ.get("MUJOCO_GL")
    made = record(policy, "Walker2d-v5", path, seed=1, seconds=0.4, size=(64, 48))
    if made is None:
        pytest.skip(capsys.readouterr().out.strip())
    film = imageio.imread(made)
    assert made == path and film.shape == (10, 48, 64, 3)  # 125 steps a second, one picture in 5
    assert imageio.immeta(path)["duration"] == 40 and imageio.immeta(path)["loop"] == 0
    assert film.std() > 10 and any((film[0] != picture).any() for picture in film)
    sampled = record(policy, "Walker2d-v5", tmp_path / "b.gif", seed=1, seconds=0.4, size=(64, 48), greedy=False)
    assert sampled.read_bytes() != path.read_bytes()
    assert torch.equal(before, torch.random.get_rng_state()) and os.environ.get("MUJOCO_GL") == chosen
    assert {file.name for file in tmp_path.rglob("*.*")} == {"walker.gif", "b.gif"}


@pytest.mark.parametrize("env_id, camera", [("Walker2d-v5", "track"), ("Reacher-v5", None)])
def test_the_camera_follows_where_the_model_has_one_that_does(env_id, camera, monkeypatch):
    asked, make_env = [], watch.make_env

    def make(env_id, **options):
        asked.append(options)
        return Drawn() if options else make_env(env_id)

    monkeypatch.setattr(watch, "make_env", make)
    watch.open_env(env_id, (64, 48))
    assert asked[1]["width"] == 64 and asked[1].get("camera_name") == camera


class Drawn:
    def reset(self, seed):
        pass

    def render(self):
        pass


class Ball:
    """An environment of 50 pictures a second that shows its step, ends after 3, and notes what it is given."""

    metadata = {"render_fps": 50}
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self):
        self.seeds, self.actions = [], []

    def reset(self, seed):
        self.seeds.append(seed)
        self.step_number = 0
        return np.array([0.0]), {}

    def step(self, action):
        self.actions.append(float(action[0]))
        self.step_number += 1
        return np.array([float(self.step_number)]), 0.0, self.step_number == 3, False, {}

    def render(self):
        return np.full((2, 2, 3), 10 * len(self.seeds) + self.step_number, np.uint8)


class Doubling:
    """Acts by twice what it sees."""

    def mode(self, obs):
        assert obs.dtype == torch.float32 and obs.shape == (1, 1)
        return 2 * obs


def test_pictures_come_at_an_even_pace_over_episodes_with_seeds_of_their_own():
    env = Ball()
    pictures = watch.play(Doubling(), env, seed=7, count=4, every=2, greedy=True)
    # Steps 0 1 2 | 0 1 2 | 0 of three episodes; every other one is drawn.
    assert [picture[0, 0, 0] for picture in pictures] == [10, 12, 21, 30]
    assert env.seeds == [7, 8, 9] and env.actions == [0, 1, 1, 0, 1, 1, 0]  # 4 is clipped to 1


def test_a_machine_that_cannot_draw_gives_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("imageio")

    def broken(env_id, size):
        raise RuntimeError("no OpenGL\nhere")

    monkeypatch.setattr(watch, "open_env", broken)
    assert record(random_walker(), "Walker2d-v5", tmp_path / "a.gif", seed=0) is None
    assert capsys.readouterr().out == "no film: this machine cannot draw Walker2d-v5 (RuntimeError: no OpenGL here)\n"
    assert not list(tmp_path.iterdir())


def test_the_film_goes_to_the_runs_folder_and_none_is_exit_code_1(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(watch, "record", lambda policy, env_id, path, *_, **more: asked.append(path) or path)
    monkeypatch.setattr(watch, "check_can_write", lambda path: None)
    assert Watch(trained[1]).run() == 0 and asked == [trained[1] / "walker.gif"]
    monkeypatch.setattr(watch, "record", lambda *_, **more: None)
    assert Watch(trained[1]).run() == 1


@pytest.mark.parametrize("platform, given, during", [
    ("linux", {}, "egl"), ("linux", {"MUJOCO_GL": "osmesa"}, "osmesa"), ("linux", {"DISPLAY": ":0"}, None),
    ("darwin", {}, None),
])  # fmt: skip
def test_without_a_display_egl_draws_and_the_variable_is_put_back(platform, given, during, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watch.sys, "platform", platform)
    with pytest.raises(ZeroDivisionError), watch.headless():
        assert os.environ.get("MUJOCO_GL") == during
        raise ZeroDivisionError
    assert os.environ.get("MUJOCO_GL") == given.get("MUJOCO_GL")


def test_missing_packages_and_unknown_kinds_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "find_spec", lambda name: None if name == "imageio_ffmpeg" else name)
    with pytest.raises(ValueError, match=r"to write a.mp4: pip install imageio-ffmpeg, or write a .gif"):
        record(random_walker(), "Walker2d-v5", tmp_path / "a.mp4", seed=0)
    monkeypatch.setattr(watch, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="to write a.gif: pip install imageio"):
        record(random_walker(), "Walker2d-v5", tmp_path / "a.gif", seed=0)
    with pytest.raises(ValueError, match="a.avi is no .gif and no .mp4"):
        record(random_walker(), "Walker2d-v5", tmp_path / "a.avi", seed=0)


def test_an_unknown_environment_is_an_error(tmp_path):
    pytest.importorskip("imageio")
    with pytest.raises(ValueError, match="cannot make environment 'Runner-v0'"):
        record(random_walker(), "Runner-v0", tmp_path / "a.gif", seed=0)


def test_the_best_run_of_each_algorithm_is_filmed_and_a_missing_one_named(trained, monkeypatch, capsys):
    out, asked = trained[1].parent.parent, []
    monkeypatch.setattr(watch, "record", lambda policy, env_id, path, seed: asked.append((env_id, path)) or path)
    rows = [{"algorithm": "ppo", "seed": 2, "final_return": 1.0}, {"algorithm": "trpo", "seed": 1, "final_return": 9.0},
            {"algorithm": "ppo", "seed": 3, "final_return": 2.0}]  # fmt: skip
    assert record_best(rows, out) == [out / "ppo.gif"] and asked == [("Walker2d-v5", out / "ppo.gif")]
    assert capsys.readouterr().out.startswith("no film of trpo: no checkpoint in")
